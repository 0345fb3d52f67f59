"""What a run writes down: its metrics, its picture, and what trackers are given."""

import json
import logging
import socket
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from logged import read_steps
from transformers import AutoConfig

import train.trackers
from cache_ops.packing import Example, pack
from cache_ops.plan import PROMPT, Span, plan_prefix
from cache_ops.rope import Rope
from recipes.errors import UserError
from recipes.resolve import resolve
from train.history import outcome, read_metrics
from train.model_shape import ModelShape, RowShape
from train.recorder import Recorder
from train.throughput import bf16_peak, flops_of, peak_of, used
from train.trackers import (
    end_trackers,
    log_evaluation,
    log_numbers,
    refuse_missing_trackers,
    start_trackers,
    tracker_state,
)

STEP = {
    "loss": 2.0, "gradient_norm": 1.0, "learning_rate": 1e-3, "seconds": 2.0,
    "seconds_forward": 0.5, "seconds_backward": 1.0, "seconds_optimizer": 0.3,
    "packed_tokens": 1000, "filler_tokens": 100, "flops": 10**12,
}  # fmt: skip
FOUND = {
    "f1": 40.0, "f1_by_dataset": {"a": 30.0, "b": 50.0}, "em": 20.0, "stop_rate": 0.75,
    "questions": 4, "seconds": 1.0,
    "answers": [{"question": "Who?", "answer": "she\u2028", "gold": ["Ines"]}],
}  # fmt: skip


def steps_of(recorder: Recorder, steps: range) -> None:
    for step in steps:
        recorder.record({**STEP, "step": step})


def config_of(workplace, *overrides: str) -> Any:
    return resolve(workplace.arguments("unused", *overrides))


def test_a_resumed_run_repeats_no_line(workplace, tmp_path, caplog) -> None:
    options = config_of(workplace, "train.log_every_steps=2").config.train
    caplog.set_level(logging.INFO)
    recorder = Recorder(tmp_path, options, 0, 7)
    steps_of(recorder, range(1, 5))
    recorder.spike(4, {"loss": {"value": 2.0, "median": 0.4}}, ["q1", "q2"])
    recorder.evaluation(4, FOUND, best=True)
    before = read_metrics(tmp_path)
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    steps_of(recorder, range(5, 7))
    recorder.evaluation(6, FOUND, best=False)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        # It ends like a whole line.
        file.write('{"step": 7, "evaluation": {"f1_by_dataset": {"a": 1.0}')
    assert len(read_metrics(tmp_path)) == len(before) + 2
    resumed = Recorder(tmp_path, options, 4, 7)
    assert read_metrics(tmp_path) == before
    steps_of(resumed, range(5, 8))
    resumed.close()
    assert [line["step"] for line in read_steps(tmp_path)] == [2, 4, 6, 7], "the last one always"
    assert not list(tmp_path.glob(".*")), "no temporary file is left"
    assert "step 4: loss 2 is 5.0 times the usual 0.4; questions q1, q2" in caplog.messages
    expected = "step 4: F1 40.0 (the best so far), EM 20.0 over 4 dev questions; 75% of the "
    assert any(message.startswith(expected) for message in caplog.messages)


def test_what_cannot_be_read_or_written_is_told(workplace, tmp_path, caplog, monkeypatch) -> None:
    options = config_of(workplace).config.train
    recorder = Recorder(tmp_path, options, 0, 3)
    steps_of(recorder, range(1, 3))

    def full(lines, path):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("train.recorder.draw_curves", full)
        recorder.close()
    assert "training.png is not drawn: [Errno 28] No space left" in caplog.text
    metrics = tmp_path / "metrics.jsonl"
    recorder._path = Path("/dev/full")
    with pytest.raises(UserError, match=r"/dev/full cannot be written: .*No space left"):
        steps_of(recorder, range(3, 4))
    assert outcome(tmp_path) == {"finished": False, "step": 2}
    first, second = metrics.read_text().splitlines()
    for garbage in ("\0garbage", "3", '{"loss": 1.0}'):
        metrics.write_text(f"{first}\n{garbage}\n{second}\n")
        with pytest.raises(UserError, match=r"metrics.jsonl, line 2, is not a line of metrics"):
            Recorder(tmp_path, options, 2, 3)


def test_shares_of_a_step() -> None:
    assert used(STEP, 10**12) == {"padding_share": 0.1, "outside_share": 0.1, "mfu": 0.5}
    assert "mfu" not in used(STEP, None), "nothing is said of an unknown device"


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989), ("NVIDIA H20", 148), ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362), ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA GB200", 2450),
    ],
)  # fmt: skip
def test_peaks_of_devices(name: str, tflops: float) -> None:
    assert bf16_peak(name) == pytest.approx(tflops * 1e12)


def test_unknown_devices_have_no_peak(workplace) -> None:
    assert bf16_peak("NVIDIA H1000") is None
    config = config_of(workplace, "train.mixed_precision=bf16").config
    assert peak_of(torch.device("cpu"), config) is None


def test_operations_follow_what_has_gradients(workplace) -> None:
    model = AutoConfig.from_pretrained(workplace.folder / "model")
    shape = ModelShape.of(model)
    plan = plan_prefix([Span("a", 3, 9)], prompt_length=2, chunk_ranks=["a"])
    segments = {PROMPT: [1, 2], "a": list(range(20))}
    batch = pack([Example(plan, [5, 6], [7, 8, 9])], segments, Rope.from_config(model))
    whole = shape.forward_flops(RowShape.of(batch))
    own = shape.forward_flops(RowShape.of(batch, frozen=True))
    assert own < whole

    def counted(*overrides: str) -> int:
        return flops_of(shape, config_of(workplace, *overrides).config)(batch)

    lora, frozen = "train.tuning=lora", "context.gradient=frozen"
    assert counted() == 3 * whole
    assert counted(lora) == 2 * whole
    assert counted("context.gradient=detach") == whole + 2 * own
    assert counted(lora, frozen) == 2 * own
    # Where only what lies beside the weights learns, no encoding has a gradient.
    assert counted("train.tuning=none") == whole + own


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Addresses outside of this machine that something has tried to reach."""
    tried: list[Any] = []
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def guarded(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            tried.append(address)
            raise OSError("no network")
        connect(self, address)

    def resolved(host: Any, *rest: Any, **named: Any) -> Any:
        if host not in (None, "127.0.0.1", "::1", "localhost"):
            tried.append(host)
            raise OSError("no network")
        return look_up(host, *rest, **named)

    monkeypatch.setattr(socket.socket, "connect", guarded)
    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    return tried


def test_trackers_go_on_with_their_runs_without_network(
    workplace, tmp_path, monkeypatch, no_network, capsys
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("OPENAI_API_KEY", "a-secret-of-mine")
    run = tmp_path / "run"
    run.mkdir()
    resolved = resolve(
        [
            str(workplace.folder / "recipe.yaml"), f"train.run_folder={run}",
            "train.wandb.project=own", "train.tensorboard=true", "train.trackio.project=tried",
        ]
    )  # fmt: skip

    def part(previous: dict[str, str], first: int, steps: range) -> dict[str, str]:
        accelerator = Accelerator(cpu=True)
        try:
            start_trackers(accelerator, resolved, previous, first)
            for step in steps:
                log_numbers(accelerator, {"loss": float(step), "ids": ["q"], "text": "t"}, step)
            log_evaluation(accelerator, FOUND, steps[-1])
            state = tracker_state(accelerator)
            end_trackers(accelerator)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
        return state

    # Killed after step 3, with a state of step 2.
    state = part({}, 0, range(1, 4))
    assert state.keys() == {"wandb", "trackio"}
    assert part(json.loads(json.dumps(state)), 2, range(3, 5)) == state

    assert {path.name.rpartition("-")[2] for path in run.glob("wandb/offline-run-*")} == {
        state["wandb"]
    }
    assert scalars(run / "tensorboard", "loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert scalars(run / "tensorboard", "evaluation_f1_b") == [(4, 50.0)]
    (database,) = (tmp_path / "trackio").glob("tried*.db")
    with sqlite3.connect(database) as opened:
        rows = opened.execute("select run_name, step from metrics").fetchall()
    assert {step for name, step in rows if name == state["trackio"]} == {1, 2, 3, 4}
    assert {name for name, _ in rows} == {state["trackio"]}
    assert no_network == []
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"a-secret-of-mine" in path.read_bytes() for path in written)
    assert capsys.readouterr().out == "", "stdout belongs to the command"


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("wandb", ["train.wandb.project=p"]),
        ("tensorboard", ["train.tensorboard=true"]),
        ("trackio", ["train.trackio.project=p"]),
    ],
)
def test_a_missing_tracker_names_its_extra(workplace, monkeypatch, name, options) -> None:
    monkeypatch.setattr(train.trackers, f"is_{name}_available", lambda: False)
    asked = config_of(workplace, *options).config.train
    with pytest.raises(UserError, match=rf"train\.{name} .* pip install 'coinrag\[{name}\]'"):
        refuse_missing_trackers(asked)
    refuse_missing_trackers(config_of(workplace).config.train)


def test_trackio_is_not_sent_elsewhere(workplace, monkeypatch) -> None:
    monkeypatch.setenv("TRACKIO_SPACE_ID", "someone/space")
    refuse_missing_trackers(config_of(workplace).config.train)
    with pytest.raises(UserError, match="TRACKIO_SPACE_ID"):
        refuse_missing_trackers(config_of(workplace, "train.trackio.project=p").config.train)
