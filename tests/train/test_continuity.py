"""A run that was killed, stopped or damaged goes on as if nothing had been; and init_from."""

import fcntl
import json
import logging
import os
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import psutil
import pytest
import torch
from accelerate.state import AcceleratorState
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from small import tiny_tokenizer
from tiny import tiny_model

from cache_ops.soft_tokens import SOFT_TOKENS_FILE, soft_tokens_saved_in
from launch.training import run_training
from recipes.errors import UserError
from recipes.resolve import resolve
from train import checkpoint, loop, recorder, run_folder, tensor_files, trainer
from train.history import outcome
from train.stopping import stop_signals
from train.tensor_files import DamagedError, TensorFiles, write_tensors
from train.trainer import train

# Dropout draws random numbers, and every second step has a state.
DROPOUT = (
    "train.tuning=lora", "train.lora.rank=4", "train.lora.dropout=0.2", "train.learning_rate=1e-2",
    "train.epochs=3", "train.save_every_steps=2", "train.keep_states=2",
    "train.evaluate.every_steps=3",
)  # fmt: skip
SHORT = ("train.max_steps=3", "train.save_every_steps=2")
RESUME = "train.resume=true"
EXACT = ("step", "epoch", "loss", "gradient_norm", "learning_rate", "packed_tokens", "evaluation")


def open_scores(config, accelerator, model, *_):
    """Stands in for an evaluation: an F1 of all weights, best after two of three."""

    def evaluate():
        weights = [one.detach().double() for one in model.parameters() if one.requires_grad]
        size = sum(float(weight.abs().sum()) for weight in weights)
        found = {"f1": 100 - abs(size - 322), "em": 0.0, "stop_rate": 1.0, "questions": 0}
        return found | {"answers": [], "f1_by_dataset": {}}

    return evaluate


@pytest.fixture(autouse=True, scope="module")
def _undrawn() -> Iterator[None]:
    """Drawing takes longer than training here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "draw_curves", lambda lines, path: None)
        yield


def run_here(workplace, name, *overrides):
    """Trains in this process, which a signal stops as it stops the script."""
    try:
        with stop_signals() as stop:
            train(resolve(workplace.arguments(name, *overrides)), open_scores, stop)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def curve(workplace, name):
    """What does not depend on the clock, of every line of the metrics."""
    return [{key: line[key] for key in EXACT if key in line} for line in workplace.metrics(name)]


def assert_same_run(workplace, one, other):
    assert curve(workplace, one) == curve(workplace, other)
    for part in ("checkpoint/model", "adapter/adapter_model"):
        path = workplace.folder / one / f"{part}.safetensors"
        if part.startswith("checkpoint") or path.exists():
            mine, others = (
                load_file(path),
                load_file(workplace.folder / other / f"{part}.safetensors"),
            )
            assert mine.keys() == others.keys()
            assert all(torch.equal(mine[key], others[key]) for key in mine)


def states(workplace, name):
    return sorted(path.name for path in (workplace.folder / name / "state").iterdir())


def unfinished_copy(workplace, name, copy):
    """A finished run as it was before its end, moved to another folder."""
    folder = workplace.folder / copy
    shutil.copytree(workplace.folder / name, folder)
    for finished in ("checkpoint", "adapter"):
        shutil.rmtree(folder / finished)


@pytest.fixture(scope="module")
def whole(workplace):
    """A run with dropout, evaluations and states that nothing has stopped."""
    run_here(workplace, "whole", *DROPOUT)
    return "whole"


@pytest.fixture(scope="module")
def short(workplace):
    run_here(workplace, "short_whole", *SHORT)
    return "short_whole"


@contextmanager
def signal_at(owner, name: str, number: int, calls: int = 1) -> Iterator[list[int]]:
    """Sends this process a signal when a function is called for the n-th time."""
    real, seen = getattr(owner, name), []

    def called(*arguments, **options):
        seen.append(1)
        if len(seen) == calls:
            os.kill(os.getpid(), number)
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, called)
        yield seen


def die_at(workplace, name, moment, *overrides) -> None:
    """Trains in a child that is killed when a function is called for the n-th time."""
    owner, function, calls = moment
    child = os.fork()
    if child == 0:
        try:
            with signal_at(owner, function, signal.SIGKILL, calls):
                run_here(workplace, name, *overrides)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"{function} was not called {calls} times"


def test_a_run_killed_anywhere_goes_on_bit_by_bit(workplace, whole) -> None:
    folder = workplace.folder / "killed_often"
    moments = [
        # While the first state is written, and before it has its name.
        ((tensor_files, "save_file", 1), []),
        ((Path, "rename", 2), ["step-00000002"]),
        ((loop.Stepper, "step", 4), ["step-00000002", "step-00000004"]),
        # The newest state is there and the oldest not yet removed.
        ((checkpoint, "_remove", 3), ["step-00000002", "step-00000004", "step-00000006"]),
        # The adapter has its name, the checkpoint not.
        ((checkpoint, "merge", 1), ["step-00000006", "step-00000008"]),
        ((run_folder, "_flush", 3), ["step-00000006", "step-00000008"]),
    ]
    litter = 0
    for life, (moment, kept) in enumerate(moments):
        die_at(workplace, folder.name, moment, *DROPOUT, *([RESUME] if life else []))
        assert [path.name for path in sorted((folder / "state").glob("step-*"))] == kept
        assert not (folder / "checkpoint").exists()
        litter += len(list(folder.rglob(".writing-*")))
    assert litter >= 3
    run_here(workplace, folder.name, *DROPOUT, RESUME)
    assert_same_run(workplace, folder.name, whole)
    assert states(workplace, folder.name) == states(workplace, whole)
    assert not list(folder.rglob(".writing-*"))


def test_only_the_newest_states_and_the_best_weights_are_kept(workplace, whole) -> None:
    scores = [line for line in workplace.metrics(whole) if "evaluation" in line]
    assert [line["step"] for line in scores] == [3, 6, 9]
    best = max(scores, key=lambda line: line["evaluation"]["f1"])["step"]
    assert best == 6, "a test of the best weights needs worse ones at the end"
    kept = [name for name in states(workplace, whole) if name.startswith("step-")]
    assert kept == ["step-00000006", "step-00000008"]
    assert f"best-{best:08d}" in states(workplace, whole)
    kept_weights = TensorFiles.open(workplace.folder / whole / "state" / f"best-{best:08d}")
    adapter = load_file(workplace.folder / whole / "adapter" / "adapter_model.safetensors")
    for name in kept_weights.files:
        saved = adapter[name.removeprefix("weight.").replace(".default.", ".")]
        assert torch.equal(kept_weights.read(name), saved)


def test_damaged_states_are_passed_over_by_name(workplace, whole, caplog) -> None:
    name = "damaged"
    unfinished_copy(workplace, whole, name)
    state = workplace.folder / name / "state"
    with (state / "step-00000008" / "tensors-00001.safetensors").open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\x7f")
    (state / "step-00000009").mkdir()
    with caplog.at_level(logging.INFO, "train"), warnings.catch_warnings():
        warnings.filterwarnings("error", ".*optimizer.step")
        run_here(workplace, name, *DROPOUT, RESUME)
    assert "with the weights of step 6, is in" in caplog.text
    assert "step-00000009: complete.json, which is written last, cannot be read" in caplog.text
    assert "step-00000008: tensors-00001.safetensors: " in caplog.text
    assert "goes on after step 6" in caplog.text
    assert_same_run(workplace, name, whole)
    kept = [name for name in states(workplace, "damaged") if name.startswith("step-")]
    assert kept == ["step-00000006", "step-00000008"]


def test_a_run_whose_states_are_all_damaged_does_not_begin_again(workplace, whole) -> None:
    unfinished_copy(workplace, whole, "lost")
    folder = workplace.folder / "lost"
    for state in (folder / "state").glob("step-*"):
        (state / "complete.json").unlink()
    metrics = workplace.metrics("lost")
    with pytest.raises(UserError) as raised:
        run_here(workplace, "lost", *DROPOUT, RESUME)
    for part in (
        "step-00000006: complete",
        "step-00000008: complete",
        f"delete {folder / 'state'}",
    ):
        assert part in str(raised.value)
    assert workplace.metrics("lost") == metrics


def test_folders_that_are_no_place_for_a_run_are_refused(workplace, short) -> None:
    run = workplace.folder / short
    for name in (f"{short}/checkpoint", f"{short}/state/deeper/run"):
        with pytest.raises(UserError, match=rf"train.run_folder: .*{short} has written"):
            run_here(workplace, name, *SHORT)
    with pytest.raises(UserError, match=r"train.run_folder /proc/\S+ cannot be made"):
        run_here(workplace, "/proc/run", *SHORT)
    exported = workplace.folder / "exported"
    shutil.copytree(run / "checkpoint", exported)
    for name in ("recipe.yaml", "origins.json"):
        shutil.copy(run / name, exported)
    (exported / "serving.json").write_text("{}")
    with pytest.raises(UserError, match=r"run_folder \S+ is an export"):
        run_here(workplace, "exported", *SHORT, RESUME)
    with pytest.raises(UserError, match=r"train.init_from: \S+ is an export"):
        run_here(workplace, "none", *SHORT, f"train.init_from={exported}")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_changed_byte_is_taken_for_a_whole_state(tmp_path_factory, data) -> None:
    folder = tmp_path_factory.mktemp("tensors")
    written = {
        "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "b": torch.tensor(3, dtype=torch.int64),
        "c": torch.ones(5, dtype=torch.bfloat16),
    }
    (folder / "progress.json").write_text('{"step": 7}')
    write_tensors(folder, written.items(), file_bytes=32)
    assert len(list(folder.glob("*.safetensors"))) == 2
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans(), label="truncated"):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        files = TensorFiles.open(folder)
        files.verify()
    except DamagedError:
        return
    # The change was of no account, as a space in the marker is.
    assert path.name == tensor_files.MARKER
    assert files.files.keys() == written.keys()
    assert all(torch.equal(files.read(name), tensor) for name, tensor in written.items())


@pytest.mark.parametrize(
    ("moment", "number", "steps"),
    [
        pytest.param((trainer, "trainable_model"), signal.SIGTERM, 0, id="loading"),
        pytest.param((trainer.ExampleBuilder, "lengths"), signal.SIGINT, 0, id="lengths"),
        pytest.param((trainer, "optimizer_and_schedule"), signal.SIGTERM, 0, id="before-step-1"),
        pytest.param((loop.Stepper, "probe"), signal.SIGHUP, 1, id="probe"),
        pytest.param((loop.Stepper, "step", 2), signal.SIGINT, 2, id="step"),
        pytest.param((checkpoint, "write_tensors"), signal.SIGTERM, 2, id="state"),
        pytest.param((trainer, "save_model"), signal.SIGTERM, 3, id="checkpoint"),
    ],
)
def test_a_signal_at_any_moment_ends_well(
    workplace, short, request, caplog, capfd, moment, number, steps
) -> None:
    name = f"signal-{request.node.callspec.id}"
    owner, function, *calls = moment
    with caplog.at_level(logging.INFO, "train"), signal_at(owner, function, number, *calls) as seen:
        run_here(workplace, name, *SHORT)
    assert seen
    assert "asked to stop" in capfd.readouterr().err
    folder = workplace.folder / name
    assert outcome(folder) == {"finished": steps == 3, "step": steps}
    if steps < 3:
        when = f"after step {steps}" if steps else "before the first step"
        assert f"stopped {when}; train.resume=true goes on" in caplog.text
        assert len(workplace.metrics(name)) == steps if steps else True
        run_here(workplace, name, *SHORT, RESUME)
    assert_same_run(workplace, name, short)


def test_a_second_ctrl_c_interrupts() -> None:
    with stop_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_second_training_is_kept_out_while_the_first_one_runs(workplace, short) -> None:
    folder = workplace.folder / "busy"
    folder.mkdir()
    with (folder / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for resume in ("true", "false"):
            with pytest.raises(UserError, match=r"another process is training in .*busy"):
                run_here(workplace, "busy", *SHORT, f"train.resume={resume}")
        assert [path.name for path in folder.iterdir()] == ["lock"]
    # The lock of a process that has died is free, and its file is no sign of use.
    run_here(workplace, "busy", *SHORT)
    assert_same_run(workplace, "busy", short)
    assert not (folder / "lock").exists()


def test_a_disk_without_room_leaves_what_there_was(workplace) -> None:
    with pytest.MonkeyPatch.context() as patch:
        save_file = tensor_files.save_file

        def full(tensors, path):
            if "step-00000002" in str(path):
                raise OSError(28, "No space left on device")
            save_file(tensors, path)

        patch.setattr(tensor_files, "save_file", full)
        with pytest.raises(UserError, match=r"step-00000002 cannot be written: .*No space left"):
            run_here(workplace, "full", "train.max_steps=3", "train.save_every_steps=1")
    assert states(workplace, "full") == ["step-00000001"]


def test_init_from_starts_a_new_run_on_the_weights_of_a_finished_one(
    workplace, short, caplog
) -> None:
    start = f"train.init_from={workplace.folder / short}"
    options = ("train.max_steps=1", "train.learning_rate=1e-4")
    with caplog.at_level(logging.INFO, "train"):
        run_here(workplace, "continued", start, *options)
    assert "train.learning_rate: 0.001 -> 0.0001" in caplog.text
    assert "run_folder" not in caplog.text.partition("settings there -> here")[2]
    path = f"model.path={workplace.folder / short / 'checkpoint'}"
    run_here(workplace, "on_path", path, *options)
    assert_same_run(workplace, "continued", "on_path")
    recorded = resolve([str(workplace.folder / "continued" / "recipe.yaml")]).config
    assert recorded.train.init_from == str(workplace.folder / short)
    assert recorded.model.path == str(workplace.folder / "model")


def test_init_from_takes_link_tokens_over(workplace) -> None:
    links = ("train.system=kvlink", "systems.kvlink.link_tokens=2", "train.max_steps=1")
    run_here(workplace, "linked", *links)
    start = f"train.init_from={workplace.folder / 'linked'}"
    run_here(workplace, "linked_on", *links, start, "train.learning_rate=1e-9")
    first, second = (
        load_file(workplace.folder / name / "checkpoint" / SOFT_TOKENS_FILE)["links"]
        for name in ("linked", "linked_on")
    )
    assert torch.allclose(first, second, atol=1e-7)
    assert soft_tokens_saved_in(workplace.folder / "linked_on" / "checkpoint") == {"links": (3, 2)}
    with pytest.raises(UserError, match=r"has 2 link tokens a document.*asks for 3: set it to 2"):
        run_here(workplace, "none", links[0], "systems.kvlink.link_tokens=3", start)


def test_init_from_refuses_what_it_cannot_start_from(workplace, short) -> None:
    def refused(run, *overrides):
        with pytest.raises(UserError) as caught:
            run_here(workplace, "none", f"train.init_from={run}", *overrides)
        assert not (workplace.folder / "none").exists()
        return str(caught.value)

    run = workplace.folder / short
    assert f"did you mean {run}?" in refused(run / "checkpoint")
    assert "it has no recipe.yaml" in refused(workplace.folder / "nowhere")
    unfinished = workplace.folder / "unfinished"
    unfinished.mkdir()
    shutil.copy(run / "recipe.yaml", unfinished)
    assert "is not finished, it has no checkpoint" in refused(unfinished)
    frozen = ("context.gradient=frozen", "train.tuning=lora")
    assert "train.init_from starts from others" in refused(run, *frozen)
    other = workplace.folder / "other_model"
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(other)
    tiny_model("llama", vocabulary=len(tokenizer), layers=1).save_pretrained(other)
    message = refused(run, f"model.path={other}")
    assert "another architecture" in message
    assert "num_hidden_layers 1 there 2" in message
    tiny_model("llama", vocabulary=len(tokenizer)).save_pretrained(other)
    pieces = json.loads((other / "tokenizer.json").read_text())
    pieces["model"]["merges"] = pieces["model"]["merges"][:-1]
    (other / "tokenizer.json").write_text(json.dumps(pieces))
    assert "another tokenizer" in refused(run, f"model.path={other}")


def test_ranks_stop_when_one_is_asked_and_another_number_goes_on(workplace, caplog) -> None:
    options = ("train.max_steps=24", "train.epochs=8")
    run_here(workplace, "one_rank", *options)
    metrics = workplace.folder / "two_ranks" / "metrics.jsonl"

    def ask_one_rank() -> None:
        while not metrics.exists() or metrics.read_text().count("\n") < 2:
            time.sleep(0.01)
        children = psutil.Process().children(recursive=True)
        (second,) = (child for child in children if child.environ().get("RANK") == "1")
        second.terminate()

    asking = Thread(target=ask_one_rank, daemon=True)
    asking.start()
    ending = run_training(workplace.arguments("two_ranks", *options), processes=2)
    asking.join()
    assert ending.status == 0, ending.message
    assert not (workplace.folder / "two_ranks" / "checkpoint").exists()
    done = workplace.metrics("two_ranks")[-1]["step"]
    assert states(workplace, "two_ranks") == [f"step-{done:08d}"]
    run_here(workplace, "two_ranks", *options, RESUME)
    assert "resumed with ranks 2 -> 1, sharding MULTI_CPU -> NO: the same steps" in caplog.text
    losses = [line["loss"] for line in workplace.metrics("two_ranks")]
    alone = [line["loss"] for line in workplace.metrics("one_rank")]
    assert losses == pytest.approx(alone, abs=1e-5)


def test_dropout_binds_a_run_to_its_number_of_ranks(workplace, whole, monkeypatch) -> None:
    unfinished_copy(workplace, whole, "of_two_ranks")
    monkeypatch.setattr(TensorFiles, "verify", lambda files: None)
    state = workplace.folder / "of_two_ranks" / "state" / "step-00000008" / "progress.json"
    state.write_text(state.read_text().replace('"ranks": 1', '"ranks": 2'))
    with pytest.raises(UserError, match=r"is of 2 ranks, now there are 1; train.lora.dropout=0.2"):
        run_here(workplace, "of_two_ranks", *DROPOUT, RESUME)
