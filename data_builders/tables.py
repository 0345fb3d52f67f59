"""The two built tables, *chunks* and *samples*, and how they are stored and read.

Token spans are half-open and in the chunk's own tokens. Lists of one row that describe the same
things (a chunk's nuggets, a sample's retrieved chunks) have the same length and order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from recipes.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

CHUNKS_FILE = "chunks.arrow"
SAMPLES_FILE = "samples.arrow"
_ROWS_A_BATCH = 1000

CHUNK_COLUMNS = {
    "chunk_id": "string",
    "title": "string",
    "text": "string",
    "token_ids": ["int32"],
    "nugget_starts": ["int32"],
    "nugget_ends": ["int32"],
    "nugget_texts": ["string"],
}
SAMPLE_COLUMNS = {
    "question_id": "string",
    "dataset": "string",
    "question": "string",
    "answers": ["string"],
    # The top k_c chunks in rank order, and a score for each nugget of each.
    "chunk_ids": ["string"],
    "chunk_scores": ["float32"],
    "nugget_scores": [["float32"]],
    # The top k nuggets, best first: an index into chunk_ids and a token span.
    "span_chunks": ["int32"],
    "span_starts": ["int32"],
    "span_ends": ["int32"],
    "gold_chunk_ids": ["string"],
    "noised": "bool",
    "answer_in_contexts": "bool",
    "answer_in_spans": "bool",
}
# Of a chunk whose nuggets take neighbouring sentences along: the text of each slice.
WIDENED_COLUMNS = {"widened_texts": ["string"]}
Columns = Mapping[str, Any]


@dataclass(frozen=True)
class Chunk:
    """One chunk with its nuggets' token spans and texts, in the order of the chunk.

    Where a nugget takes neighbouring sentences along, its span covers them and its text does not.
    """

    chunk_id: str
    title: str
    text: str
    token_ids: list[int]
    nuggets: list[tuple[int, int]]
    nugget_texts: list[str]
    widened_texts: list[str] | None = None

    @property
    def slice_texts(self) -> list[str]:
        """The text under each nugget's span, which is what a model sees of it."""
        return self.nugget_texts if self.widened_texts is None else self.widened_texts


class Tables:
    """Built data of one split, memory-mapped."""

    def __init__(self, chunks: "Dataset", samples: "Dataset") -> None:
        self.chunks = chunks
        self.samples = samples
        self._rows = {name: row for row, name in enumerate(chunks["chunk_id"][:])}

    def chunk(self, chunk_id: str) -> Chunk:
        """The chunk of that id; KeyError if there is none."""
        return chunk_from_row(self.chunks[self.row(chunk_id)])

    def row(self, chunk_id: str) -> int:
        """The row of the chunk of that id; KeyError if there is none."""
        return self._rows[chunk_id]

    def count(self) -> int:
        """Rows of the chunks table."""
        return len(self._rows)

    def at(self, rows: Sequence[int]) -> list[Chunk]:
        """The chunks in those rows of the table."""
        columns = self.chunks[list(rows)]
        values = zip(*columns.values(), strict=True)
        return [chunk_from_row(dict(zip(columns, row, strict=True))) for row in values]


def chunk_from_row(row: Mapping[str, Any]) -> Chunk:
    """A row of the chunks table as a `Chunk`."""
    nuggets = list(zip(row["nugget_starts"], row["nugget_ends"], strict=True))
    return Chunk(
        row["chunk_id"],
        row["title"],
        row["text"],
        row["token_ids"],
        nuggets,
        row["nugget_texts"],
        row.get("widened_texts"),
    )


def load_tables(folder: str | Path) -> Tables:
    """Opens the tables of a built folder.

    Raises:
        UserError: the folder holds no built tables.
    """
    folder = Path(folder)
    if not (folder / "key.json").is_file():
        raise UserError(f"{folder}: no built tables here; run `coinrag build`")
    return Tables(read_table(folder / CHUNKS_FILE), read_table(folder / SAMPLES_FILE))


class TableWriter:
    """Writes rows to one Arrow file as they come. The same rows give the same bytes."""

    def __init__(self, path: Path, columns: Columns) -> None:
        features = _datasets().Features({name: _feature(kind) for name, kind in columns.items()})
        self._schema = features.arrow_schema
        self._path = path
        self._rows: list[Mapping[str, Any]] = []

    def __enter__(self) -> Self:
        self._writer = pa.ipc.new_stream(self._path, self._schema)
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        self._writer.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends a row; what is no column of the table is left out."""
        self._rows.append(row)
        if len(self._rows) == _ROWS_A_BATCH:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            values = {name: [row[name] for row in self._rows] for name in self._schema.names}
            self._writer.write_batch(pa.RecordBatch.from_pydict(values, schema=self._schema))
            self._rows = []


def read_table(path: Path) -> "Dataset":
    """A stored table, memory-mapped."""
    return _datasets().Dataset.from_file(str(path))


def _datasets() -> Any:
    """The library, imported when needed, without progress bars: it draws them outside terminals."""
    import datasets

    datasets.disable_progress_bars()
    return datasets


def _feature(kind: Any) -> Any:
    from datasets import List, Value

    return List(_feature(kind[0])) if isinstance(kind, list) else Value(kind)
