"""torchrun, ending with the exit status of the rank that failed first and without a traceback.

Run as `python -m launch.ranks`, with torchrun's arguments.
"""

import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> int:
    """Run the ranks of this machine; 0, the first failure's status, or 128 + n for signal n."""
    try:
        run.main()
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        # Negative: ended by a signal.
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
