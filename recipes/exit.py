"""How every command ends: 0, 2 (the user's mistake), 130 (interrupted) or 1 (ours)."""

import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from recipes.errors import UserError

OK, OURS, USERS, INTERRUPTED = 0, 1, 2, 130
# A launcher of several processes hides their exit status; they leave it in this file.
STATUS_FILE_VARIABLE = "COINRAG_STATUS_FILE"


class Ending(NamedTuple):
    """How a command ended: its exit status and, unless it went well, why."""

    status: int
    message: str = ""


def is_users(error: BaseException) -> bool:
    """Whether the user can fix `error`: a UserError, or any with `is_user_error = True`."""
    return isinstance(error, UserError) or getattr(error, "is_user_error", False) is True


def run(function: Callable[[], object]) -> Ending:
    """Call `function`; report what it raises on stderr and say how it ended.

    The user's mistake is one message without a traceback, an interruption one line, anything else
    a traceback. `SystemExit` passes through.
    """
    try:
        function()
    except KeyboardInterrupt:
        ending = Ending(INTERRUPTED, "interrupted")
        print("interrupted", file=sys.stderr)
        _leave(ending)
    except Exception as error:
        ending = Ending(USERS if is_users(error) else OURS, str(error) or type(error).__name__)
        first = _leave(ending)
        if ending.status == OURS:
            traceback.print_exc()
        elif first:
            # All ranks may meet the same mistake; one of each machine tells it.
            print(f"error: {error}", file=sys.stderr)
    else:
        ending = Ending(OK)
    return ending


def _leave(ending: Ending) -> bool:
    """Leaves it in the status file, unless another rank has; whether this process comes first.

    Ranks that lose their connection to the first one that failed come after it.
    """
    status_file = os.environ.get(STATUS_FILE_VARIABLE)
    if not status_file:
        return os.environ.get("LOCAL_RANK", "0") == "0"
    with suppress(FileExistsError), Path(status_file).open("x", encoding="utf-8") as file:
        file.write(json.dumps(ending._asdict()))
        return True
    return False


def run_main(function: Callable[[], object]) -> int:
    """`run` for a script: `sys.exit(run_main(main))`."""
    return run(function).status
