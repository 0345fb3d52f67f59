"""The scripts that start a training on several machines, with stand-ins for what they call."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import launch
from launch.cli import parse

LAUNCH = Path(launch.__file__).resolve().parent
SHOW = 'printf "%s\\n" "$@" > "$SHOWN/$(date +%N)"'


@pytest.fixture
def stand_ins(tmp_path):
    """A function from names and bodies of commands to the environment in which they are found."""

    def make(**bodies):
        (tmp_path / "bin").mkdir()
        for name, body in bodies.items():
            path = tmp_path / "bin" / name
            path.write_text(f"#!/usr/bin/env bash\n{body}\n")
            path.chmod(0o755)
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        return os.environ | {"PATH": path, "COINRAG_ENV": str(tmp_path), "SHOWN": str(tmp_path)}

    return make


def shown(folder):
    """The command lines that stand-ins were called with, parsed by the real parser."""
    files = [path for path in folder.iterdir() if path.is_file() and path.name.isdigit()]
    calls = [parse(path.read_text().splitlines()) for path in files]
    return sorted(calls, key=lambda call: call.node_rank)


@pytest.mark.parametrize("restarts", [0, 1])
def test_slurm_starts_our_command_on_every_node(tmp_path, stand_ins, restarts) -> None:
    each_node = 'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done'
    environment = stand_ins(
        scontrol="printf 'node1\\nnode2\\n'",
        srun=f'while [[ "$1" == --* ]]; do shift; done; {each_node}',
        coinrag=SHOW,
    )
    slurm = {"JOB_NODELIST": "node[1-2]", "JOB_ID": "34567", "JOB_NUM_NODES": "2"}
    slurm |= {"GPUS_ON_NODE": "8", "RESTART_COUNT": str(restarts)}
    subprocess.run(
        ["bash", str(LAUNCH / "slurm" / "train.sbatch"), "zero3", "qwen2_7b/coinrag", "seed=1"],
        env=environment | {f"SLURM_{name}": value for name, value in slurm.items()},
        check=True,
    )
    calls = shown(tmp_path)
    assert [call.node_rank for call in calls] == [0, 1]
    for call in calls:
        resumed = ["train.resume=true"] * restarts
        assert call.arguments == ["qwen2_7b/coinrag", "seed=1", *resumed]
        assert (call.command, call.processes, call.sharding) == ("train", 8, "zero3")
        assert (call.nodes, call.head) == (2, "node1:24567")


def multinode(environment, *arguments):
    command = [str(LAUNCH / "multinode.sh"), "host0 host1", "4", "fsdp2", *arguments]
    return subprocess.Popen(command, env=environment, cwd=LAUNCH.parent)


def test_ssh_starts_our_command_on_every_host(tmp_path, stand_ins) -> None:
    # As ssh, it gives one text to a shell.
    environment = stand_ins(ssh='shift 2; exec bash -c "$*"', coinrag=SHOW)
    script = multinode(environment, "qwen2_7b/coinrag", "prompt.before_passages=two words")
    assert script.wait(timeout=60) == 0
    calls = shown(tmp_path)
    assert [call.node_rank for call in calls] == [0, 1]
    for call in calls:
        assert call.arguments == ["qwen2_7b/coinrag", "prompt.before_passages=two words"]
        assert (call.processes, call.sharding, call.nodes) == (4, "fsdp2", 2)
        assert call.head == "host0:29500"


def test_a_host_that_fails_makes_the_script_fail(stand_ins) -> None:
    environment = stand_ins(ssh='[[ "$2" == host0 ]] && exit 3; exit 0')
    assert multinode(environment, "quickstart").wait(timeout=60) == 3


def test_a_stopped_script_stops_every_host(tmp_path, stand_ins) -> None:
    environment = stand_ins(
        ssh='trap "touch $SHOWN/stopped-$2; exit 0" TERM; touch "$SHOWN/ready-$2"\n'
        "while true; do sleep 0.05; done"
    )
    script = multinode(environment, "quickstart")
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("ready-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    script.send_signal(signal.SIGTERM)
    script.wait(timeout=60)
    assert {path.name for path in tmp_path.glob("stopped-*")} == {"stopped-host0", "stopped-host1"}
