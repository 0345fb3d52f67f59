"""What the training refuses of a recipe, asked of its own functions before it is started."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase

from data_builders.prompt import PromptTemplate
from eval.questions import dev_questions
from recipes.resolve import Resolved
from recipes.sharding import Sharding
from train.adapters import invocation_ids, refuse_quantized, with_adapter
from train.attention import attention_kernel
from train.context import computes_slices, refuse_storeless
from train.lineage import check_lineage
from train.optim import check_optimizer
from train.run_folder import refuse_unwritable, refuse_used
from train.sharding import refuse_unsharable
from train.teacher import check_distillation
from train.trackers import refuse_missing_trackers


def refuse_untrainable(
    resolved: Resolved,
    model: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    template: PromptTemplate,
    sharding: Sharding,
    *,
    here: bool,
) -> None:
    """Passes a recipe that the training takes, as far as that shows without the model's weights.

    Args:
        resolved: the recipe.
        model, tokenizer, template: its model's config and tokenizer, and its prompt.
        sharding: how ranks will share the model.
        here: this machine will train, so its device must have the kernel of `train.attention`.

    Raises:
        UserError: see the functions called.
        ModelNotFoundError, UnsupportedModelError: see `train.lineage.check_lineage`.
    """
    config, train = resolved.config, resolved.config.train
    refuse_unwritable(Path(train.run_folder))
    refuse_missing_trackers(train)
    refuse_unsharable(config, sharding)
    refuse_used(resolved)
    check_lineage(resolved, tokenizer, report=False)
    check_optimizer(config)
    refuse_quantized(model)
    check_distillation(config, model)
    if train.tuning == "lora":
        with torch.device("meta"):
            with_adapter(AutoModelForCausalLM.from_config(model), train.lora)
        if train.lora.activated:
            invocation_ids(template)
    split = sharding not in ("ddp", "zero2")
    if config.context.gradient == "frozen" and not computes_slices(config, split=split):
        refuse_storeless(config)
    if here:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        attention_kernel(config, model, device)
    if train.evaluate is not None:
        dev_questions(config)
