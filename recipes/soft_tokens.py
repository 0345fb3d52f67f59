"""Which soft tokens the systems of a recipe have; `cache_ops.soft_tokens` says what these are."""

from typing import NamedTuple

from recipes.schema import Recipe


class Group(NamedTuple):
    """A group of soft tokens: whose it is, and what is said of it."""

    system: str
    option: str
    label: str


GROUPS = {
    "links": Group("kvlink", "systems.kvlink.link_tokens", "link tokens a document"),
    "packets_before": Group(
        "coinrag", "context.packets.before_tokens", "packet tokens before each slice"
    ),
    "packets_after": Group(
        "coinrag", "context.packets.after_tokens", "packet tokens after each slice"
    ),
}


def soft_tokens_for(config: Recipe, system: str) -> dict[str, tuple[int, int]]:
    """The groups that a system has in a recipe: places in a prompt, and tokens at each."""
    wanted = {}
    if system == "kvlink":
        wanted["links"] = (config.retrieval.k_c, config.systems.kvlink.link_tokens)
    if system == "coinrag" and (packets := config.context.packets) is not None:
        wanted["packets_before"] = (1, packets.before_tokens)
        wanted["packets_after"] = (1, packets.after_tokens)
    return {name: shape for name, shape in wanted.items() if shape[1]}
