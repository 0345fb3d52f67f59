"""What a system needs to serve a recipe's questions with some weights, opened once."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from data_builders.nuggets.online import open_online_extractor
from data_builders.prompt import PromptTemplate
from eval.checkpoints import Served
from eval.systems import SYSTEMS, Serving
from recipes.schema import Recipe


def open_serving(
    config: Recipe,
    served: Served,
    tokenizer: PreTrainedTokenizerBase,
    systems: Sequence[str],
) -> Serving:
    """Opens what the named systems share for a recipe.

    Raises:
        UserError: the weights' link tokens, or the extractor, are not as the recipe says.
    """
    links = served.links(config, config.retrieval.k_c) if "kvlink" in systems else None
    extractor = None
    if any(SYSTEMS[name].extracts for name in systems):
        extractor = open_online_extractor(config)
    template = PromptTemplate(tokenizer, config.prompt)
    max_positions = served.model.config.max_position_embeddings
    return Serving(
        config, template, tokenizer, links=links, extractor=extractor, max_positions=max_positions
    )
