"""Samples that share chunks, brought together so that one packed pass encodes a chunk once."""

from collections import Counter, defaultdict
from collections.abc import Sequence


def group_by_chunks(
    order: Sequence[int],
    chunks: Sequence[Sequence[str]],
    tokens: Sequence[int],
    *,
    most: int,
    most_tokens: float,
) -> list[list[int]]:
    """Groups of samples, in the order of their first members.

    Each sample that has no group yet takes in those that share the most chunks with it, earlier in
    `order` first among equals.

    Args:
        order: all samples, shuffled.
        chunks: the chunks of each sample.
        tokens: the row length of each sample.
        most: samples of a group.
        most_tokens: tokens of a group of more than one sample, each counted in full.
    """
    place = {sample: at for at, sample in enumerate(order)}
    holders: defaultdict[str, list[int]] = defaultdict(list)
    for sample in order:
        for chunk in set(chunks[sample]):
            holders[chunk].append(sample)
    grouped: set[int] = set()
    groups = []
    for first in order:
        if first in grouped:
            continue
        shared = Counter(
            other for chunk in set(chunks[first]) for other in holders[chunk] if other != first
        )
        group, length = [first], tokens[first]
        for other in sorted(shared, key=lambda one: (-shared[one], place[one])):
            if len(group) == most:
                break
            if other not in grouped and length + tokens[other] <= most_tokens:
                group.append(other)
                length += tokens[other]
        grouped.update(group)
        groups.append(group)
    return groups
