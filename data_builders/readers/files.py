"""The rows of a data file, one at a time: JSON Lines or one JSON list, plain or gzipped.

However large the file, memory holds one row, or about a mebibyte of a list.
"""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, cast

from data_builders.readers.rows import RowError, found
from recipes.errors import UserError

READ_BYTES = 1 << 20
_NOT_JSON = (".parquet", ".arrow", ".csv", ".tsv", ".zip", ".tar", ".tgz", ".bz2", ".xz", ".zst")
_SPACE = re.compile(r"[ \t\r\n]*")
# What Python's decoder raises; a ValueError beside bad syntax is an integer of too many digits.
_MALFORMED = (ValueError, RecursionError)


def file_rows(path: Path) -> Iterator[tuple[str, dict[str, Any] | RowError]]:
    """(place, row) of every row in order; one that is no JSON object comes as its `RowError`.

    A place is `path:line`, followed in a JSON list by the number of the row. After a syntax error
    in a list no row follows, as it cannot be known where the next one begins.

    Raises:
        UserError: the file cannot be read, or is not UTF-8.
    """
    if path.suffix.lower() in _NOT_JSON:
        raise UserError(
            f"{path}: {path.suffix} files are not read; expected JSON Lines or a JSON list, plain "
            "or as .gz"
        )
    try:
        with _open(path) as file:
            # The first sign decides; a byte order mark may stand before it.
            head = file.peek(64).removeprefix(codecs.BOM_UTF8).lstrip()  # type: ignore[attr-defined]
            read = _list_rows if head.startswith(b"[") else _line_rows
            for place, row in read(path, file):
                if isinstance(row, dict | RowError):
                    yield place, row
                else:
                    yield place, RowError(f"expected a JSON object, found {found(row)}")
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot read data file: {reason}") from error


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix.lower() == ".gz" else path.open("rb")


def _line_rows(path: Path, file: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Rows of the lines that are not blank, decoded one by one so that an error has its line."""
    for number, raw in enumerate(file, start=1):
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}:{number}: expected UTF-8, found byte 0x{error.object[error.start]:02x} "
                f"at byte {error.start} of the line"
            ) from error
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except _MALFORMED as error:
            at = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            row = _malformed(error, at)
        yield f"{path}:{number}", row


def _list_rows(path: Path, file: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Rows of a file that is one JSON list."""
    text = _Text(path, file)
    text.take("[")
    for number in count(1):
        sign = text.next_sign()
        if number == 1 and text.take("]"):
            break
        place = f"{path}:{text.line} (row {number})"
        if not sign:
            yield place, RowError("expected a row, found the end of the file inside the list")
            return
        try:
            row = text.take_value()
        except _MALFORMED as error:
            after = ""
            if isinstance(error, json.JSONDecodeError):
                after = f" at character {error.pos - text.start + 1} of the row"
            yield place, _malformed(error, after)
            return
        yield place, row
        if text.take("]"):
            break
        if not text.take(","):
            sign = text.next_sign()
            wrong = found(sign) if sign else "the end of the file"
            yield place, RowError(f"expected a comma or ] after the row, found {wrong}")
            return
    if sign := text.next_sign():
        wrong = f"expected the end of the file after the list, found {found(sign)}"
        yield f"{path}:{text.line}", RowError(wrong)


def _malformed(error: Exception, at: str) -> RowError:
    reason = error.msg if isinstance(error, json.JSONDecodeError) else error
    return RowError(f"expected a JSON object, found malformed JSON{at}: {reason}")


class _Text:
    """The part of a file that is being parsed: from `start` in `window`, in line `line`."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self._bytes_read = 0
        self.window, self.start, self.line = "", 0, 1

    def next_sign(self) -> str:
        """The next character that is no white space, or "" at the end of the file."""
        while True:
            match = _SPACE.match(self.window, self.start)
            assert match is not None
            self._advance(match.end())
            if self.start < len(self.window):
                return self.window[self.start]
            if not self._grow():
                return ""

    def take(self, sign: str) -> bool:
        """Steps over `sign` if it is the next one."""
        if self.next_sign() != sign:
            return False
        self._advance(self.start + 1)
        return True

    def take_value(self) -> Any:
        """Steps over one JSON value; the errors of `json` for a malformed one."""
        while True:
            try:
                value, end = self._json.raw_decode(self.window, self.start)
            except json.JSONDecodeError as error:
                # A value that the window cuts off fails at its last few signs or in a string.
                cut = error.pos + 16 >= len(self.window) or error.msg.startswith("Unterminated")
                if not (cut and self._grow()):
                    raise
            else:
                # A number may go on after the window.
                if end == len(self.window) and self._grow():
                    continue
                self._advance(end)
                return value

    def _advance(self, end: int) -> None:
        self.line += self.window.count("\n", self.start, end)
        self.start = end

    def _grow(self) -> bool:
        """Reads on, at least as much as is still to parse; False at the end of the file."""
        raw = self._file.read(max(READ_BYTES, len(self.window) - self.start))
        self._bytes_read += len(raw)
        try:
            more = self._utf8.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            wrong = error.object[error.start]
            before = self.window.count("\n", self.start) + error.object.count(b"\n", 0, error.start)
            at = self._bytes_read - len(error.object) + error.start
            raise UserError(
                f"{self._path}:{self.line + before}: expected UTF-8, found byte 0x{wrong:02x} at "
                f"byte {at} of the file"
            ) from error
        if not raw:
            return False
        self.window = self.window[self.start :] + more
        self.start = 0
        return True
