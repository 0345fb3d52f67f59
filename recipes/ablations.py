"""The paper's ablations and its readings, each as changes to a recipe."""

ABLATIONS: dict[str, list[str]] = {
    # A nugget is encoded alone, without the chunk around it.
    "isolated": ["context.encoding=isolated"],
    # Nuggets are searched among all candidates, without choosing chunks first.
    "one_stage": ["retrieval.selection=one_stage"],
    # Keys keep the positions that they had in their chunks.
    "no_rotation": ["context.positions=original"],
    # Slices lie in the order of their scores, not of ranks and documents.
    "score_order": ["retrieval.order=score"],
    # Tokens that two nuggets share stand twice.
    "overlaps_kept": ["retrieval.overlap=keep"],
}
"""Training-free runs, the paper's fifth, are the checkpoint `base`."""


def changes_of(name: str) -> list[str]:
    """The changes of an ablation, or of several joined by `+`; KeyError for an unknown one."""
    return [change for part in name.split("+") for change in ABLATIONS[part]]
