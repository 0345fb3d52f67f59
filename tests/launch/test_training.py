"""Training processes: arguments, exit statuses and signals are passed on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import launch
from launch import training
from launch.training import (
    CONFIGS,
    Nodes,
    refuse_sharding,
    run_training,
    sharding_environment,
)
from recipes.errors import UserError
from recipes.sharding import SHARDINGS

ROOT = Path(launch.__file__).resolve().parent.parent


def _script(folder: Path, body: str) -> Path:
    path = folder / "script.py"
    path.write_text(f"import os, sys, time\n{body}\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("assert sys.argv[1:] == ['a', 'k=v']; import recipes", 0, ""),
        ("sys.exit(2)", 2, "training ended with status 2"),
        ("raise RuntimeError", 1, "training ended with status 1"),
        ("os.kill(os.getpid(), 9)", 137, "training ended with status 137"),
        (
            "from recipes.exit import run_main\nfrom recipes.errors import UserError\n"
            "def main(): raise UserError('used folder')\nsys.exit(run_main(main))",
            2,
            "used folder",
        ),
    ],
)
def test_exit_status_of_one_process(tmp_path: Path, body: str, status: int, message: str) -> None:
    assert run_training(["a", "k=v"], script=_script(tmp_path, body)) == (status, message)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_signal_reaches_the_script_once_and_waits_for_it(tmp_path: Path, number: int) -> None:
    script = _script(
        tmp_path,
        "import signal\nfrom pathlib import Path\nseen = []\n"
        f"signal.signal({int(number)}, lambda n, f: seen.append(n))\n"
        f"Path({str(tmp_path / 'ready')!r}).touch()\n"
        "while not seen: time.sleep(0.01)\n"
        "time.sleep(0.5)\n"
        f"Path({str(tmp_path / 'saved')!r}).write_text(str(len(seen)))",
    )
    code = (
        "import sys; from pathlib import Path; from launch.training import run_training\n"
        f"sys.exit(run_training([], script=Path({str(script)!r})).status)"
    )
    # The signal goes to the whole group, as from a terminal.
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
    deadline = time.monotonic() + 30
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(parent.pid, number)
    assert parent.wait(timeout=30) == 0
    assert (tmp_path / "saved").read_text(encoding="utf-8") == "1"


@pytest.mark.slow
def test_several_processes_are_ranks_of_one_run_and_tell_why_they_failed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = (
        "from recipes.exit import run_main\nfrom recipes.errors import UserError\n"
        "def main():\n"
        "    if 'fail' in sys.argv: raise UserError('used folder')\n"
        "    from accelerate import Accelerator\n"
        "    state = Accelerator().state\n"
        f"    os.chdir({str(tmp_path)!r})\n"
        "    open(f'{state.process_index}of{state.num_processes}', 'w').close()\n"
        "sys.exit(run_main(main))"
    )
    script = _script(tmp_path, body)
    assert run_training([], 2, script=script) == (0, "")
    assert {path.name for path in tmp_path.glob("*of*")} == {"0of2", "1of2"}
    assert run_training(["fail"], 2, script=script) == (2, "used folder")
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_stop_signal_gives_every_rank_the_time_it_needs(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        "import signal\nfrom pathlib import Path\nseen = []\n"
        "for number in (signal.SIGTERM, signal.SIGINT):\n"
        "    signal.signal(number, lambda n, f: seen.append(n))\n"
        f"here = Path({str(tmp_path)!r})\nrank = os.environ['RANK']\n"
        "(here / f'ready{rank}').touch()\n"
        "while not seen: time.sleep(0.01)\n"
        "time.sleep(1)\n"
        "(here / f'saved{rank}').write_text(str(len(seen)))",
    )
    code = (
        "import sys; from pathlib import Path; from launch.training import run_training\n"
        f"sys.exit(run_training([], 2, script=Path({str(script)!r})).status)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("ready*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(timeout=60) == 0
    assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == ["1", "1"]


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_ranks_are_told_what_accelerate_launch_would_tell_them(sharding: str) -> None:
    from accelerate.commands import launch as accelerate_launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    config = str(CONFIGS / f"{sharding}.yaml")
    arguments = accelerate_launch.launch_command_parser().parse_args(
        ["--config_file", config, "--num_processes", "8", "train/nugget_ft.py"]
    )
    arguments, _, _ = accelerate_launch._validate_launch_command(arguments)
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ""
        _, told = prepare_deepspeed_cmd_env(arguments)
    else:
        told = prepare_multi_gpu_env(arguments)
    ours = sharding_environment(sharding)
    assert ours == {name: told.get(name) for name in ours}
    asked = {"ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_DEEPSPEED_ZERO_STAGE"}
    assert asked & told.keys() == asked & ours.keys()


def test_what_cannot_be_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"--sharding fsdp2 .* set --processes"):
        run_training([], sharding="fsdp2")
    with pytest.raises(UserError, match="--head HOST:PORT"):
        run_training([], nodes=Nodes(2, 0, "host"))
    with pytest.raises(UserError, match=r"--node-rank must be from 0 to 1 .* got 2"):
        run_training([], nodes=Nodes(2, 2, "host:29500"))
    monkeypatch.setattr(training, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"coinrag\[deepspeed\]"):
        refuse_sharding("zero3", 2)
    refuse_sharding("fsdp2", 2)
