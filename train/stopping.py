"""A stop signal ends a run after the step at hand, with its state saved."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_NOTICE = b"asked to stop: what is under way will be finished and saved first\n"


class StopRequest:
    """Whether this process was asked to stop; ranks agree on it by `train.ranks.any_rank`."""

    def __init__(self) -> None:
        self.asked = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """Signal handler.

        Raises:
            KeyboardInterrupt: Ctrl-C for the second time.
        """
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.asked and os.environ.get("RANK", "0") == "0":
            # Not by way of a stream, which the signal may have interrupted.
            os.write(2, _NOTICE)
        self.asked = True


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Takes SIGTERM, SIGINT and SIGHUP as requests to stop while the context is open.

    A signal that the process was started to ignore, as by nohup, stays ignored.
    """
    request = StopRequest()
    before = {
        number: signal.signal(number, request.note)
        for number in SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
