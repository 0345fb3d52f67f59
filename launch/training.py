"""Start `train/nugget_ft.py` on one or several processes and end as it ends.

One process is the script itself; several are torchrun's, as under `accelerate launch`, and share
the model as a config in `launch/accelerate` says. `accelerate launch` itself would do less: on a
CPU its `--num_processes 2` starts one process, any failure becomes status 1 with a traceback of its
own, and a stop signal ends it before the script has saved.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import IO, Any

import yaml

from recipes.errors import UserError
from recipes.exit import OK, STATUS_FILE_VARIABLE, Ending
from recipes.sharding import Sharding

SCRIPT = Path(__file__).resolve().parent.parent / "train" / "nugget_ft.py"
CONFIGS = Path(__file__).resolve().parent / "accelerate"
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, each of which runs this command with its own `rank`."""

    count: int = 1
    rank: int = 0
    head: str | None = None
    """HOST:PORT, on the machine of rank 0, where the ranks meet; None: on this machine alone."""


ONE_NODE = Nodes()


def run_training(
    arguments: Sequence[str],
    processes: int = 1,
    *,
    sharding: Sharding = "ddp",
    nodes: Nodes = ONE_NODE,
    script: Path = SCRIPT,
    output: IO[str] | None = None,
) -> Ending:
    """Run the training script on `processes` ranks of this machine and wait for its end.

    SIGINT, SIGTERM and SIGHUP are handed to the script, which may save before it stops. `output`
    takes the script's stdout (default: this process's). Nothing is raised for a failed script: the
    result has its exit status, 128 + n when signal n ended it.

    Raises:
        UserError: a way of sharing the model that needs several ranks or what is not installed;
            several machines that are not told where to meet.
    """
    ranks = processes * nodes.count
    refuse_sharding(sharding, ranks)
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "launch.ranks", f"--nproc-per-node={processes}"]
        command += _meeting(nodes)
    command += [str(script), *arguments]
    with tempfile.TemporaryDirectory(prefix="coinrag-") as folder:
        status_file = Path(folder) / "status.json"
        environment = _environment(processes, ranks, sharding)
        environment |= {STATUS_FILE_VARIABLE: str(status_file)}
        status = _run(command, environment, output)
        left = json.loads(status_file.read_text("utf-8")) if status_file.exists() else None
    if status == OK:
        return Ending(OK)
    return Ending(**left) if left else Ending(status, f"training ended with status {status}")


def refuse_sharding(sharding: Sharding, ranks: int) -> None:
    """Passes a way of sharing a model that so many ranks can have on this machine.

    Raises:
        UserError
    """
    if sharding == "ddp":
        return
    if ranks == 1:
        raise UserError(
            f"--sharding {sharding} shares a model between ranks, and there is one: set --processes"
        )
    if sharding.startswith("zero") and find_spec("deepspeed") is None:
        raise UserError(
            f"--sharding {sharding} is DeepSpeed's, which is not installed: "
            "pip install 'coinrag[deepspeed]' (or use fsdp2, which is torch's own)"
        )


def sharding_environment(sharding: Sharding) -> dict[str, str]:
    """What `accelerate launch` would tell its ranks of `launch/accelerate/<sharding>.yaml`."""
    config: dict[str, Any] = yaml.safe_load((CONFIGS / f"{sharding}.yaml").read_text("utf-8"))
    environment = {}
    for kind in ("deepspeed", "fsdp"):
        if section := config.get(f"{kind}_config"):
            environment[f"ACCELERATE_USE_{kind.upper()}"] = "true"
            # FSDP's names bring their prefix.
            prefix = "ACCELERATE_DEEPSPEED_" if kind == "deepspeed" else ""
            for key, value in section.items():
                if key != "deepspeed_multinode_launcher":
                    name = prefix + key.removesuffix("_flag").upper()
                    environment[name] = str(value).lower() if value in (True, False) else str(value)
    return environment


def _meeting(nodes: Nodes) -> list[str]:
    """torchrun's arguments for where the ranks meet.

    Raises:
        UserError: it is not said where that is, or which machine this is.
    """
    if nodes.count == 1:
        return ["--standalone"]
    host, _, port = (nodes.head or "").rpartition(":")
    if not (host and port.isdigit()):
        raise UserError(
            "--nodes above 1 needs --head HOST:PORT, a free port of the machine with "
            f"--node-rank 0; got {nodes.head}"
        )
    if not 0 <= nodes.rank < nodes.count:
        raise UserError(
            f"--node-rank must be from 0 to {nodes.count - 1} (--nodes {nodes.count}), got "
            f"{nodes.rank}"
        )
    return [
        f"--nnodes={nodes.count}",
        f"--node-rank={nodes.rank}",
        f"--master-addr={host}",
        f"--master-port={port}",
    ]


def _environment(processes: int, ranks: int, sharding: Sharding) -> dict[str, str]:
    root = str(SCRIPT.parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    if ranks > 1:
        # torchrun would give every rank a single thread.
        threads = max(1, len(os.sched_getaffinity(0)) // processes)
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        environment |= sharding_environment(sharding)
        import torch

        if not torch.cuda.is_available() and not sharding.startswith("zero"):
            # Without it accelerate takes each rank on a CPU for a run of its own; with it, it takes
            # no notice of DeepSpeed.
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
