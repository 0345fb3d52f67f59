"""torchrun, ending with the exit status of the rank that failed first and without a traceback.

Run as `python -m launch.ranks`, with torchrun's arguments. A stop signal is handed to the ranks,
which are given the time that they need to save; torchrun would end them after half a minute.
"""

import signal
import sys
from types import FrameType

import psutil
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> int:
    """Run the ranks of this machine; 0, the first failure's status, or 128 + n for signal n."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _forward)
    try:
        run.main(["--signals-to-handle=SIGQUIT", *sys.argv[1:]])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        # Negative: ended by a signal.
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


def _forward(number: int, frame: FrameType | None) -> None:
    ranks = psutil.Process().children()
    if not ranks:
        sys.exit(128 + number)
    for rank in ranks:
        rank.send_signal(number)


if __name__ == "__main__":
    sys.exit(main())
