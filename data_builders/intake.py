"""The questions and distinct passages of one split, on disk: memory does not grow with them.

What depends on all of the input at once (numbering, deduplication, distractor pools) and what was
retrieved for each question are tables of one SQLite file, which lives as long as the build does.
"""

import json
import sqlite3
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, overload

from data_builders.assets import content_key
from data_builders.records import Passage, Question
from recipes.errors import UserError

_TABLES = (
    "passages (number INTEGER PRIMARY KEY, digest BLOB UNIQUE, title TEXT, text TEXT, chunks BLOB)",
    "corpus_ids (id TEXT PRIMARY KEY, passage INTEGER)",
    "questions (number INTEGER PRIMARY KEY, record TEXT)",
    "pools (dataset TEXT, passage INTEGER, PRIMARY KEY (dataset, passage)) WITHOUT ROWID",
    "chunks (row INTEGER PRIMARY KEY, id TEXT UNIQUE, passage INTEGER, position INTEGER)",
    "retrieved (question INTEGER PRIMARY KEY, record TEXT)",
    "searched (digest TEXT)",
)
_PAGE = 1000


class Intake:
    """One split's input. Passages, questions and chunks are numbered from 0 in input order."""

    def __init__(self, path: Path) -> None:
        self.db = sqlite3.connect(path)
        # A build that loses the file reads its input again: no need to wait for the disk.
        self.db.execute("PRAGMA synchronous = OFF")
        self.db.execute("PRAGMA temp_store = FILE")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.db.close()

    def fill(self, corpus: Iterable[Passage], questions: Iterable[Question]) -> None:
        """Takes in corpus and questions, all or nothing, unless that was done before.

        Raises:
            UserError: malformed input, a question names a supporting passage that is not there, or
                there is no passage at all.
        """
        if self.db.execute("PRAGMA user_version").fetchone()[0]:
            return
        with self.db:
            self.db.execute("BEGIN")
            for table in _TABLES:
                self.db.execute(f"CREATE TABLE {table}")
            for passage in corpus:
                number = self._add(passage)
                if passage.id:
                    self.db.execute("INSERT INTO corpus_ids VALUES (?, ?)", (passage.id, number))
            for number, question in enumerate(questions):
                self._add_question(number, question)
            if not self.count("passages"):
                raise UserError("data.corpus: no passage to search; the questions have none either")
            self.db.execute("PRAGMA user_version = 1")

    def _add(self, passage: Passage) -> int:
        """The number of the passage, old or new."""
        digest = content_key(passage.full_text)
        find = "SELECT number FROM passages WHERE digest = ?"
        found = self.db.execute(find, (digest,)).fetchone()
        if found is None:
            self.db.execute(
                "INSERT INTO passages SELECT coalesce(max(number), -1) + 1, ?, ?, ?, NULL "
                "FROM passages",
                (digest, passage.title, passage.text),
            )
            found = self.db.execute(find, (digest,)).fetchone()
        return int(found[0])

    def _add_question(self, number: int, question: Question) -> None:
        contexts = [self._add(passage) for passage in question.passages]
        self.db.executemany(
            "INSERT OR IGNORE INTO pools VALUES (?, ?)",
            [(question.dataset, passage) for passage in contexts],
        )
        # Of a passage that a question has twice, one mark counts for both.
        marked = zip(contexts, question.passages, strict=True)
        supporting = {number for number, passage in marked if passage.is_supporting}
        for name in question.supporting_ids:
            found = self.db.execute(
                "SELECT passage FROM corpus_ids WHERE id = ?", (name,)
            ).fetchone()
            if found is None:
                raise UserError(
                    f"{question.place}: supporting_ids: no passage of data.corpus has the id "
                    f"{name!r}"
                )
            supporting.add(found[0])
            if found[0] not in contexts:
                contexts.append(found[0])
        record = {
            "id": question.id,
            "dataset": question.dataset,
            "text": question.text,
            "answers": question.answers,
            "place": question.place,
            "passages": [(passage, passage in supporting) for passage in contexts],
        }
        self.db.execute("INSERT INTO questions VALUES (?, ?)", (number, json.dumps(record)))

    def count(self, table: str) -> int:
        """Rows of one of the tables."""
        return int(self.db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])

    def passages(self) -> Iterator[tuple[int, Passage]]:
        """All passages with their numbers."""
        for number, title, text in self._pages("passages", "number", "title, text"):
            yield number, Passage(title, text)

    def passage(self, number: int) -> Passage:
        """The passage of that number."""
        row = self.db.execute("SELECT title, text FROM passages WHERE number = ?", (number,))
        return Passage(*row.fetchone())

    def questions(self) -> Iterator[tuple[int, Question]]:
        """All questions with their numbers; supporting passages of the corpus are among theirs."""
        for number, text in self._pages("questions", "number", "record"):
            record = json.loads(text)
            passages = [
                replace(self.passage(passage), is_supporting=is_supporting)
                for passage, is_supporting in record["passages"]
            ]
            yield (
                number,
                Question(
                    record["id"],
                    record["dataset"],
                    record["text"],
                    tuple(record["answers"]),
                    tuple(passages),
                    place=record["place"],
                ),
            )

    def pools(self) -> dict[str, Sequence[Passage]]:
        """The distinct contexts of each dataset, in an order that only their text decides."""
        names = self.db.execute("SELECT DISTINCT dataset FROM pools").fetchall()
        return {name: _Pool(self, name) for (name,) in names}

    def set_chunks(self, keys: Iterable[tuple[bytes, int]]) -> None:
        """Notes under which asset key the chunks of each passage lie: (key, number) pairs."""
        with self.db:
            self.db.executemany("UPDATE passages SET chunks = ? WHERE number = ?", keys)

    def chunks_keys(self) -> Iterator[tuple[int, bytes]]:
        """Each passage's number and the asset key of its chunks."""
        yield from self._pages("passages", "number", "chunks")

    def chunks_key(self, passage: Passage) -> bytes:
        """The asset key of a passage's chunks."""
        row = self.db.execute(
            "SELECT chunks FROM passages WHERE digest = ?", (content_key(passage.full_text),)
        )
        return bytes(row.fetchone()[0])

    def add_chunk(self, chunk_id: str, passage: int, position: int) -> bool:
        """Gives a chunk the next row, unless the same chunk has one; whether it is new."""
        done = self.db.execute(
            "INSERT OR IGNORE INTO chunks SELECT coalesce(max(row), -1) + 1, ?, ?, ? FROM chunks",
            (chunk_id, passage, position),
        )
        return done.rowcount == 1

    def chunk_row(self, chunk_id: str) -> int:
        """The row of a chunk in the chunks table."""
        row = self.db.execute("SELECT row FROM chunks WHERE id = ?", (chunk_id,))
        return int(row.fetchone()[0])

    def chunk_place(self, row: int) -> tuple[bytes, int]:
        """The asset key of the passage whose chunk is in that row, and which chunk it is."""
        found = self.db.execute(
            "SELECT passages.chunks, position FROM chunks JOIN passages ON number = passage "
            "WHERE row = ?",
            (row,),
        )
        key, position = found.fetchone()
        return key, position

    def distinct(self, texts: Iterable[str]) -> Iterator[str]:
        """Each text once; what was seen is kept on disk."""
        self.db.execute("DROP TABLE IF EXISTS temp.seen")
        self.db.execute("CREATE TEMP TABLE seen (digest BLOB PRIMARY KEY) WITHOUT ROWID")
        for text in texts:
            added = self.db.execute("INSERT OR IGNORE INTO seen VALUES (?)", (content_key(text),))
            if added.rowcount == 1:
                yield text
        self.db.commit()

    def put_retrieved(self, found: Iterable[tuple[int, list[int], list[float]]]) -> None:
        """Keeps what was retrieved: question number, chunk rows best first, their scores."""
        with self.db:
            self.db.executemany(
                "INSERT INTO retrieved VALUES (?, ?)",
                [(number, json.dumps([rows, scores])) for number, rows, scores in found],
            )

    def searched(self) -> str | None:
        """The digest of the chunks table that `retrieved` is about; None before the first."""
        found = self.db.execute("SELECT digest FROM searched").fetchone()
        return None if found is None else str(found[0])

    def search_anew(self, digest: str) -> None:
        """Forgets what was retrieved; from now on it is about the chunks table of that digest."""
        with self.db:
            self.db.execute("DELETE FROM retrieved")
            self.db.execute("DELETE FROM searched")
            self.db.execute("INSERT INTO searched VALUES (?)", (digest,))

    def is_retrieved(self, question: int) -> bool:
        """Whether `retrieved` knows the question."""
        found = self.db.execute("SELECT 1 FROM retrieved WHERE question = ?", (question,))
        return found.fetchone() is not None

    def retrieved(self, question: int) -> tuple[list[int], list[float]]:
        """The chunk rows retrieved for a question, best first, and their scores."""
        found = self.db.execute("SELECT record FROM retrieved WHERE question = ?", (question,))
        rows, scores = json.loads(found.fetchone()[0])
        return rows, scores

    def retrieved_rows(self) -> Iterator[int]:
        """All chunk rows that were retrieved for some question, each once."""
        rows = self.db.execute(
            "SELECT DISTINCT value FROM retrieved, json_each(record, '$[0]') ORDER BY value"
        )
        return (row for (row,) in rows)

    def _pages(self, table: str, key: str, columns: str) -> Iterator[tuple[Any, ...]]:
        """Rows in the order of their integer key, so that the table may be written to meanwhile."""
        after = -1
        while page := self.db.execute(
            f"SELECT {key}, {columns} FROM {table} WHERE {key} > ? ORDER BY {key} LIMIT {_PAGE}",
            (after,),
        ).fetchall():
            after = page[-1][0]
            yield from page


class _Pool(Sequence[Passage]):
    """Passages read one by one from an intake."""

    def __init__(self, intake: Intake, dataset: str) -> None:
        rows = intake.db.execute(
            "SELECT passage FROM pools JOIN passages ON number = passage WHERE dataset = ? "
            "ORDER BY digest",
            (dataset,),
        )
        self._numbers = array("q", (number for (number,) in rows))
        self._intake = intake

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Passage: ...
    @overload
    def __getitem__(self, index: slice) -> list[Passage]: ...
    def __getitem__(self, index: int | slice) -> Passage | list[Passage]:
        if isinstance(index, slice):
            return [self._intake.passage(number) for number in self._numbers[index]]
        return self._intake.passage(self._numbers[index])
