"""Cuts text into chunks on token ids; nothing is tokenized again after this.

A text is tokenized once, without special tokens, with the characters each token covers.
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TextChunk:
    """Consecutive tokens of a text.

    `offsets[i]` is the half-open character range of token i in `text`. Ranges never step back, but
    they may be empty, and tokens that share one character share its range.
    """

    chunk_id: str
    text: str
    token_ids: list[int]
    offsets: list[tuple[int, int]]


def chunk_text(tokenizer: PreTrainedTokenizerBase, text: str, chunk_tokens: int) -> list[TextChunk]:
    """Chunks of at most `chunk_tokens` tokens that together hold every token and character once.

    Text that spells a special token is tokenized as ordinary text. A character whose bytes are
    split over tokens is not cut, unless it has more tokens than a chunk may.
    """
    encoded = tokenizer(
        text,
        add_special_tokens=False,
        return_offsets_mapping=True,
        split_special_tokens=True,
        verbose=False,
    )
    token_ids: list[int] = encoded["input_ids"]
    offsets: list[tuple[int, int]] = encoded["offset_mapping"]
    if not token_ids:
        return []
    firsts = _first_tokens(offsets, chunk_tokens)
    begins = [0, *(offsets[first][0] for first in firsts[1:])]
    chunks = []
    for first, last, begin, end in zip(
        firsts, [*firsts[1:], len(token_ids)], begins, [*begins[1:], len(text)], strict=True
    ):
        ids = token_ids[first:last]
        part = text[begin:end]
        local = [
            (min(max(start - begin, 0), len(part)), min(max(stop - begin, 0), len(part)))
            for start, stop in offsets[first:last]
        ]
        chunks.append(TextChunk(chunk_id(ids, part), part, ids, local))
    return chunks


def _first_tokens(offsets: Sequence[tuple[int, int]], chunk_tokens: int) -> list[int]:
    """Each chunk's first token: as many tokens as fit, less those of a character cut at the end."""
    firsts = [0]
    while firsts[-1] + chunk_tokens < len(offsets):
        full = firsts[-1] + chunk_tokens
        cut = full
        while cut > firsts[-1] and offsets[cut - 1][1] > offsets[cut][0]:
            cut -= 1
        firsts.append(cut if cut > firsts[-1] else full)
    return firsts


def chunk_id(token_ids: Sequence[int], text: str) -> str:
    """Content address of a chunk: SHA-256, in hex, of its token ids and text."""
    digest = hashlib.sha256(np.asarray(token_ids, dtype="<i4").tobytes())
    digest.update(b"\0")
    digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def covering_tokens(
    offsets: Sequence[tuple[int, int]], start: int, end: int
) -> tuple[int, int] | None:
    """The token span `[first, last)` whose characters cover `[start, end)`; None if no token does.

    All tokens that share a covered character are inside, also when byte-level tokens split it.
    """
    # Both ends of the ranges never step back, so bisection finds the first and last that overlap.
    first = bisect_right(offsets, start, key=lambda offset: offset[1])
    last = bisect_left(offsets, end, key=lambda offset: offset[0])
    while first < last and offsets[first][0] == offsets[first][1]:
        first += 1
    while first < last and offsets[last - 1][0] == offsets[last - 1][1]:
        last -= 1
    return (first, last) if first < last else None
