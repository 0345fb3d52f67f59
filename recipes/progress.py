"""One way to show progress: a bar on a terminal, a plain line every ten seconds elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from types import TracebackType
from typing import Self, TypeVar

from tqdm import tqdm

Item = TypeVar("Item")
SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts done items of `total` (None: unknown) on stderr, with rate and time left.

    `start` items were done before, by a run that this one continues.

    Use as a context manager and call `advance`. On a terminal it is a tqdm bar. Elsewhere lines
    come every `SECONDS_BETWEEN_LINES` and once at the end. Either way `note` stands behind them.
    """

    def __init__(
        self, description: str, total: int | None = None, unit: str = "items", start: int = 0
    ) -> None:
        self.description, self.total, self.unit = description, total, unit
        self.done = self._start = start
        self.note = ""
        self._last_line = -1
        self._started = self._printed = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=total,
                initial=start,
                desc=description,
                unit=f" {unit}",
                file=sys.stderr,
                dynamic_ncols=True,
            )

    def advance(self, count: int = 1) -> None:
        """Count `count` more items as done."""
        self.done += count
        if self._bar is not None:
            self._bar.set_postfix_str(self.note, refresh=False)
            self._bar.update(count)
        elif time.monotonic() - self._printed >= SECONDS_BETWEEN_LINES:
            self._print()

    def _print(self) -> None:
        self._printed = time.monotonic()
        self._last_line = self.done
        seconds = self._printed - self._started
        rate = (self.done - self._start) / seconds if seconds > 0 else 0.0
        of = "" if self.total is None else f"/{self.total}"
        parts = [f"{self.done}{of} {self.unit}", self._pace(rate)]
        if self.total is not None and rate > 0 and self.done < self.total:
            parts.append(f"{tqdm.format_interval((self.total - self.done) / rate)} left")
        else:
            parts.append(f"{tqdm.format_interval(seconds)} taken")
        parts += [self.note] if self.note else []
        print(f"{self.description}: {', '.join(parts)}", file=sys.stderr, flush=True)

    def _pace(self, rate: float) -> str:
        if 0 < rate < 1:
            return f"{1 / rate:.1f} s a {self.unit.removesuffix('s')}"
        return f"{rate:.2f} {self.unit}/s"

    def close(self) -> None:
        """End the display; where it is lines, with a last one."""
        if self._bar is not None:
            self._bar.close()
        elif self._last_line != self.done:
            self._print()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def track(
    items: Iterable[Item], description: str, total: int | None = None, unit: str = "items"
) -> Iterator[Item]:
    """Yield each of `items`, counting it as done when the next one is asked for."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with Progress(description, total, unit) as progress:
        for item in items:
            yield item
            progress.advance()
