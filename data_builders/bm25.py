"""Lexical ranking with BM25, by bm25s: the second voice of hybrid retrieval.

Scores are Lucene's variant of BM25 with k1 = 1.5 and b = 0.75, bm25s's defaults.
"""

import logging
import shutil
import unicodedata
import warnings
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import regex

from data_builders.answers import UNSPACED
from data_builders.retrieval import top
from recipes.errors import UserError

if TYPE_CHECKING:
    import bm25s

_RUN = regex.compile(rf"(?P<unspaced>[\w&&[{UNSPACED}]]+)|[\w--[{UNSPACED}]]+", regex.V1)


def words(text: str) -> list[str]:
    """The terms of a text: its words in lower case, without stemming or stop words.

    Compatible forms of a character count as one (NFKC). Runs in scripts without spaces become
    overlapping pairs of characters, and a lone character stays one.
    """
    terms = []
    for run in _RUN.finditer(unicodedata.normalize("NFKC", text).lower()):
        characters = run[0]
        if run["unspaced"] and len(characters) > 2:
            terms += [characters[at : at + 2] for at in range(len(characters) - 1)]
        else:
            terms.append(characters)
    return terms


def index_texts(texts: Iterable[str]) -> "bm25s.BM25":
    """A BM25 index of texts, which are read once and not kept.

    Building takes about 4 bytes a word of the corpus, 40 a distinct word of each text and 100 a
    distinct word of the corpus.

    Raises:
        UserError: bm25s is not installed.
    """
    vocabulary: dict[str, int] = {}
    documents = [
        array("i", (vocabulary.setdefault(word, len(vocabulary)) for word in words(text)))
        for text in texts
    ]
    index = _bm25s().BM25()
    # Without a single word there is no mean length; the index is then empty and finds nothing.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        index.index((documents, vocabulary), create_empty_token=False, show_progress=False)
    return index


def write_index(folder: Path, texts: Iterable[str]) -> None:
    """Puts the index of texts into a folder, which appears when it is whole."""
    index = index_texts(texts)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    index.save(partial, show_progress=False)
    partial.replace(folder)


def read_index(folder: Path) -> "bm25s.BM25":
    """An index by `write_index`; its scores stay on disk, its vocabulary is in memory.

    The vocabulary takes about 280 bytes a distinct word of the corpus.
    """
    return _bm25s().BM25.load(folder, mmap=True, show_progress=False)


def rank(index: "bm25s.BM25", query: str, count: int) -> list[int]:
    """The `count` best texts that share a word with the query, best first.

    Ties go to the earlier text. Texts that share no word are left out rather than ranked by their
    place. Takes 4 bytes a text of the index.
    """
    known = index.get_tokens_ids(words(query))
    scores = index.get_scores_from_ids(known) if known else np.empty(0)
    found = np.flatnonzero(scores)
    return [int(found[at]) for at in top(scores[found], count)]


def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise UserError(
            "retrieval.bm25 needs the package bm25s: pip install 'coinrag[bm25]'"
        ) from error
    # It sets itself to tell every step.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s
