"""What a run trains beside the model's own weights, and the files in which it lies beside them."""

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel

from cache_ops.contextualizer import (
    CONTEXTUALIZER_FILE,
    ContextualizerSpec,
    contextualizer_saved_in,
    load_contextualizer,
    new_contextualizer,
    put_contextualizer,
    save_contextualizer,
    take_contextualizer,
)
from cache_ops.soft_tokens import (
    SOFT_TOKENS_FILE,
    SoftTokens,
    add_soft_tokens,
    load_soft_tokens,
    save_soft_tokens,
    soft_tokens_saved_in,
    take_soft_tokens,
)
from recipes.context import CONTEXTUALIZED, ContextualizerConfig
from recipes.errors import UserError
from recipes.schema import Recipe
from recipes.soft_tokens import GROUPS, soft_tokens_for

BESIDE_FILES = frozenset({SOFT_TOKENS_FILE, CONTEXTUALIZER_FILE})


def contextualizer_for(config: Recipe, model: PreTrainedConfig) -> ContextualizerSpec | None:
    """The contextualizer that a recipe asks for beside a model of a config."""
    if (options := config.context.contextualizer) is None:
        return None
    return ContextualizerSpec.of(model, config.train.system, **options.model_dump())


def put_beside(model: PreTrainedModel, config: Recipe, start: Path) -> dict[str, SoftTokens]:
    """Gives a model what its system trains beside the weights; its groups of soft tokens.

    Args:
        model: to be trained, with its adapter if it gets one.
        config: the recipe.
        start: the folder of the weights: what is saved beside them goes on, the rest is new.

    Raises:
        SoftTokensError, ContextualizerError: what is saved there is of another model.
    """
    if (spec := contextualizer_for(config, model.config)) is not None:
        if contextualizer_saved_in(start) == spec:
            put_contextualizer(model, load_contextualizer(start, model.config))
        else:
            put_contextualizer(model, new_contextualizer(spec, config.seed))
    wanted = soft_tokens_for(config, config.train.system)
    saved = wanted.keys() & soft_tokens_saved_in(start).keys()
    there = [name for name in wanted if name in saved]
    new = {name: shape for name, shape in wanted.items() if name not in saved}
    groups = load_soft_tokens(model, start, there) if there else {}
    return groups | add_soft_tokens(model, new, config.seed)


def take_beside(model: PreTrainedModel) -> Callable[[Path], None]:
    """Takes it out again, so that the model is a plain one; gives what writes it into a folder."""
    tables_GND = take_soft_tokens(model)
    contextualizer = take_contextualizer(model)

    def write(folder: Path) -> None:
        if tables_GND:
            save_soft_tokens(folder, tables_GND)
        if contextualizer is not None:
            save_contextualizer(folder, contextualizer)

    return write


def check_beside(config: Recipe, start: Path, named: str) -> None:
    """Passes weights that a recipe can go on from with what its system trains beside them.

    Args:
        config: the recipe.
        start: the folder of the weights.
        named: what the recipe calls them.

    Raises:
        UserError: there are other numbers of soft tokens, or another contextualizer, than the
            recipe asks for.
        SoftTokensError, ContextualizerError: what is saved there is damaged.
    """
    spec, asked = contextualizer_saved_in(start), config.context.contextualizer
    if spec is not None and spec.system == config.train.system:
        trained = ContextualizerConfig(**spec.options)
        if trained != asked:
            raise UserError(
                f"{named} was trained with a context.contextualizer of {trained}, this recipe asks "
                f"for {asked or 'none'}: set it to that one"
            )
    saved = soft_tokens_saved_in(start)
    for name, (_, wanted) in soft_tokens_for(config, config.train.system).items():
        there = saved[name][1] if name in saved else wanted
        if there != wanted:
            group = GROUPS[name]
            raise UserError(
                f"{named} has {there} {group.label}, {group.option} asks for {wanted}: set it to "
                f"{there}"
            )


def refuse_nothing_to_train(config: Recipe) -> None:
    """Passes a recipe that trains something.

    Raises:
        UserError: the weights stay as they are, and nothing is trained beside them.
    """
    system = config.train.system
    beside_weights = soft_tokens_for(config, system) or config.context.contextualizer
    if config.train.tuning == "none" and not beside_weights:
        options = [group.option for group in GROUPS.values() if group.system == system]
        options += ["context.contextualizer"] * (system in CONTEXTUALIZED)
        beside = f"set {' or '.join(options)}" if options else f"{system} has nothing beside them"
        raise UserError(
            "train.tuning=none leaves the weights as they are and trains what lies beside them, "
            f"of which there is nothing: {beside}, or use train.tuning=lora or full"
        )
