"""What a system needs to serve a recipe's questions with some weights, opened once."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from data_builders.nuggets.online import open_online_extractor
from data_builders.prompt import PromptTemplate
from eval.checkpoints import Served, check_contextualizer
from eval.systems import SYSTEMS, Serving
from eval.systems.coinrag import check_repair
from recipes.schema import Recipe


def open_serving(
    config: Recipe,
    served: Served,
    tokenizer: PreTrainedTokenizerBase,
    systems: Sequence[str],
) -> Serving:
    """Opens what the named systems share for a recipe.

    Raises:
        UserError: the weights' soft tokens, contextualizer or layers, or the extractor, are not as
            the recipe says.
        ContextualizerError: see `check_contextualizer`.
    """
    soft_tokens = served.soft_tokens(config, systems)
    for system in systems:
        check_contextualizer(config, served.weights, system)
    if "coinrag" in systems:
        check_repair(config, served.model.config.num_hidden_layers)
    extractor = None
    if any(SYSTEMS[name].extracts for name in systems):
        extractor = open_online_extractor(config)
    template = PromptTemplate(tokenizer, config.prompt)
    max_positions = served.model.config.max_position_embeddings
    return Serving(
        config,
        template,
        tokenizer,
        soft_tokens=soft_tokens,
        extractor=extractor,
        contextualizer=served.contextualizer,
        max_positions=max_positions,
    )
