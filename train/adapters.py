"""Low-rank adapters through peft: LoRA, DoRA, rsLoRA, and activated LoRA.

An activated adapter acts from the query on, so everything before keeps the base model's keys and
values (https://arxiv.org/abs/2504.12397). Frozen context is that very thing: the packed row then
holds queries and answers alone, over the base model's slices. Such an adapter is therefore trained
and merged as plain LoRA is, and only its saved config says where it begins to act: at the tokens
with which every query begins.
"""

import json
import string
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

from torch.nn import Linear
from transformers import PreTrainedConfig, PreTrainedModel

from data_builders.prompt import PromptTemplate
from recipes.errors import UserError
from recipes.files import write_text
from recipes.training import LoraConfig

# Beginnings of questions, each of which a tokenizer may join to the text before it in its own way.
_QUESTIONS = (
    *string.printable,
    *("é", "ß", "日", "И", "ع", "“", "¿", "…", "😀", "\u00a0", "\u200b"),
    *("The", "What", "1999", "ing", "  two spaces", "\n\nlines", "...", "://", "'s"),
)


def with_adapter(model: PreTrainedModel, lora: LoraConfig) -> PreTrainedModel:
    """Puts a new adapter on a model, whose own weights stay as they are; it changes nothing yet.

    Raises:
        UserError: targets that the model does not have.
    """
    import peft

    modules = model.named_modules()
    linear = {name.rpartition(".")[2] for name, module in modules if isinstance(module, Linear)}
    if unknown := sorted(set(lora.target_modules) - linear):
        raise UserError(
            f"train.lora.target_modules: {', '.join(unknown)} not in the model; "
            f"it has {', '.join(sorted(linear))}"
        )
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        use_dora=lora.dora,
        use_rslora=lora.rank_stabilized,
    )
    return cast(PreTrainedModel, peft.get_peft_model(model, config))


def invocation_ids(template: PromptTemplate) -> list[int]:
    """The tokens with which the query begins, whatever the question: an activated adapter's cue.

    peft looks for their last occurrence in a prompt, and the adapter acts from the first of them
    on. Prompts are to be joined from token ids, as here: in a text tokenized as one, white space at
    a passage's end may be joined to the first of them, and the adapter would then never act.

    Raises:
        UserError: the query begins with the question itself, or with text that is tokenized
            together with it.
    """
    queries = [template.query_ids(question) for question in _QUESTIONS]
    same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*queries, strict=False))
    if not (shared := [tokens[0] for tokens in same]):
        raise UserError(
            "train.lora.activated acts from the query's first words on, and prompt.after_passages "
            f"{template.query_parts[0]!r} has none that are the same for every question: put some "
            "before {question}, 'Question: ' say"
        )
    return shared


def mark_activated(folder: Path, invocation: Sequence[int]) -> None:
    """Makes the adapter saved in a folder an activated one: it acts from `invocation` on."""
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["alora_invocation_tokens"] = list(invocation)
    write_text(path, json.dumps(config, indent=2, sort_keys=True) + "\n")


def merge(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its adapter's change added to its weights, which are overwritten.

    Raises:
        UserError: see `refuse_quantized`.
        ValueError: the change is not finite.
    """
    refuse_quantized(model.config)
    adapted: Any = model
    return cast(PreTrainedModel, adapted.merge_and_unload(safe_merge=True))


def refuse_quantized(config: PreTrainedConfig) -> None:
    """Passes models whose weights are floating-point numbers.

    Raises:
        UserError: quantized ones can neither be trained nor take a merged adapter without loss.
    """
    if settings := getattr(config, "quantization_config", None):
        read = settings if isinstance(settings, dict) else settings.to_dict()
        raise UserError(
            f"the model's weights are quantized ({read.get('quant_method', 'unknown method')}): an "
            "adapter cannot be merged into them without loss; set model.path to the model in "
            "bfloat16 or float32"
        )
