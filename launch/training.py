"""Start `train/nugget_ft.py` on one or several processes and end as it ends.

One process is the script itself; several are torchrun's, as under `accelerate launch` on GPUs.
`accelerate launch` would do less: on a CPU its `--num_processes 2` starts one process, any failure
becomes status 1 with a traceback of its own, and a stop signal ends it before the script has saved.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from recipes.exit import OK, STATUS_FILE_VARIABLE, Ending

SCRIPT = Path(__file__).resolve().parent.parent / "train" / "nugget_ft.py"
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_training(
    arguments: Sequence[str],
    processes: int = 1,
    *,
    script: Path = SCRIPT,
    output: IO[str] | None = None,
) -> Ending:
    """Run the training script on `processes` ranks of this machine and wait for its end.

    SIGINT, SIGTERM and SIGHUP are handed to the script, which may save before it stops. `output`
    takes the script's stdout (default: this process's). Nothing is raised for a failed script: the
    result has its exit status, 128 + n when signal n ended it.
    """
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "launch.ranks", "--standalone", f"--nproc-per-node={processes}"]
    command += [str(script), *arguments]
    with tempfile.TemporaryDirectory(prefix="coinrag-") as folder:
        status_file = Path(folder) / "status.json"
        environment = _environment(processes) | {STATUS_FILE_VARIABLE: str(status_file)}
        status = _run(command, environment, output)
        left = json.loads(status_file.read_text("utf-8")) if status_file.exists() else None
    if status == OK:
        return Ending(OK)
    return Ending(**left) if left else Ending(status, f"training ended with status {status}")


def _environment(processes: int) -> dict[str, str]:
    root = str(SCRIPT.parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    if processes > 1:
        # torchrun would give every rank a single thread.
        threads = max(1, len(os.sched_getaffinity(0)) // processes)
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        import torch

        if not torch.cuda.is_available():
            # Without it Accelerate takes each rank on a CPU for a run of its own.
            environment["ACCELERATE_USE_CPU"] = "true"
    return environment


def _run(command: Sequence[str], environment: dict[str, str], output: IO[str] | None) -> int:
    received: list[int] = []
    child: subprocess.Popen[str] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if child is not None:
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        # A session of its own: the terminal's Ctrl-C comes once, through this process.
        child = subprocess.Popen(
            command, env=environment, stdout=output, start_new_session=True, text=True
        )
        for number in received:
            child.send_signal(number)
        status = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if status and received:
        return 128 + received[-1]
    return 128 - status if status < 0 else status
