"""Built dev data in memory, for comparisons."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import eval.compare
import eval.questions
from data_builders.tables import Chunk


@dataclass
class BuiltTables:
    """What `load_built` gives, as far as a comparison looks at it."""

    samples: list[dict[str, Any]]
    chunks: Sequence[Chunk]

    def chunk(self, chunk_id: str) -> Chunk:
        """The chunk of that id."""
        return next(chunk for chunk in self.chunks if chunk.chunk_id == chunk_id)


def patch_built(
    chunks: Sequence[Chunk], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> BuiltTables:
    """Five questions of two data sets, each with all chunks, in place of what is built."""
    built = BuiltTables(
        [
            {
                "question_id": f"q{number}",
                "dataset": ("hotpotqa", "musique")[number % 2],
                "question": f"Who wrote {number} plays?",
                "answers": ["Ines Varga", "she"],
                "chunk_ids": [chunk.chunk_id for chunk in chunks],
                "gold_chunk_ids": [chunks[0].chunk_id],
                "nugget_scores": [
                    [((number + n) * 37 % 11) / 11 for n in range(len(chunk.nuggets))]
                    for chunk in chunks
                ],
            }
            for number in range(5)
        ],
        chunks,
    )
    monkeypatch.setattr(
        eval.compare,
        "built_folder",
        lambda config, split: folder / f"{config.retrieval.selection}-{config.data.chunk_tokens}",
    )
    monkeypatch.setattr(eval.questions, "load_built", lambda config, split: built)
    return built
