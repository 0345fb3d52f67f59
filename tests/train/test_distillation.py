"""Distillation: its objective against plain forward passes, and what the teacher says and keeps."""

import copy
import errno
import fcntl
import json
import shutil

import pytest
import torch
from alive import Alive
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import answer_logits
from small import data_row, encode_words, tiny_tokenizer, write_rows
from transformers import AutoModelForCausalLM, LlamaConfig

from cache_ops.hf import load_config, load_tokenizer
from data_builders import workers
from data_builders.build import build, load_built
from data_builders.prompt import PromptTemplate
from recipes.errors import UserError
from recipes.resolve import resolve
from recipes.training import DistillationConfig, TrainConfig
from train import teacher, teacher_files, teacher_passes, trainer
from train.distillation import Target, divergence
from train.examples import ExampleBuilder
from train.model_shape import ModelShape, RowShape
from train.planner import Setting, peak_memory
from train.step import Stepper, answer_loss
from train.stopping import StopRequest
from train.teacher_files import TeacherFiles

KL = "train.distillation.weight=0.3"
WHOLE = "train.distillation.top_k=null"
OWN = "train.distillation.answers=teacher"
LORA = ("train.tuning=lora", "train.lora.rank=4")
ONE_STEP = "train.max_steps=1"


def opened(workplace, *overrides):
    """Config, template, tables and files of a recipe, as the training opens them."""
    config = resolve(workplace.arguments("unused", *overrides)).config
    template = PromptTemplate(load_tokenizer(config.model.path), config.prompt)
    tables = load_built(config, "train")
    model = load_config(config.model.path)
    return config, template, tables, teacher.teacher_files(config, model, template, tables)


@pytest.fixture
def unsaid(workplace):
    """Forgets what teachers have said."""
    for folder in (workplace.folder / "built").glob("teacher-*"):
        shutil.rmtree(folder)


@pytest.fixture
def asked(monkeypatch):
    """How many answers teachers were asked for, pass by pass."""
    counts = []

    def counted(run):
        def ask(model, examples, *rest):
            counts.append(len(examples))
            return run(model, examples, *rest)

        return ask

    for name in ("read_answers", "give_answers"):
        monkeypatch.setattr(teacher, name, counted(getattr(teacher, name)))
    return counts


def plain_text(config, template, tables, index):
    """A sample as Standard RAG's text, put together here."""
    row = tables.samples[index]
    chunks = [token for name in row["chunk_ids"] for token in tables.chunk(name).token_ids]
    return [*template.prompt_ids, *chunks, *template.query_ids(row["question"])]


@pytest.mark.parametrize(("tuning", "temperature"), [((), 2.0), (LORA, 1.0)], ids=["full", "lora"])
def test_loss_and_gradient_are_those_of_two_plain_passes(
    workplace, monkeypatch, tuning, temperature
) -> None:
    options = [*tuning, KL, WHOLE, ONE_STEP, f"train.distillation.temperature={temperature}"]
    options += ["train.effective_batch_samples=3", "train.micro_batch_samples=1"]
    update, caught = Stepper._update, {}

    def catching(self):
        caught["model"] = copy.deepcopy(self.model)
        caught["samples"] = self.order.step_samples(0)
        trained = [one for one in self.model.named_parameters() if one[1].requires_grad]
        caught["gradients"] = {name: weight.grad.clone() for name, weight in trained}
        return update(self)

    monkeypatch.setattr(Stepper, "_update", catching)
    (line,) = workplace.train_here(f"reference-{temperature}", *options)

    config, template, tables, _ = opened(workplace, *options)
    base = AutoModelForCausalLM.from_pretrained(config.model.path).double()
    student = caught["model"].double()
    student.set_attn_implementation("sdpa")
    plain = student.get_base_model() if tuning else student
    builder = ExampleBuilder(tables, template, None, config)
    cross_entropy = kl = torch.zeros((), dtype=torch.float64)
    tokens = 0
    for index in caught["samples"]:
        sample = builder.sample(index)
        (example,) = sample.examples
        text, answer = plain_text(config, template, tables, index), list(example.answer_ids)
        with torch.no_grad():
            all_logits = base(input_ids=torch.tensor([text + answer])).logits[0]
        expected = (all_logits[len(text) - 1 : -1] / temperature).log_softmax(-1)
        logits = answer_logits(plain, example, sample.segments)
        given = (logits / temperature).log_softmax(-1)
        kl = kl + (expected.exp() * (expected - given)).sum() * temperature**2
        rows = torch.arange(len(answer))
        cross_entropy = cross_entropy - logits.log_softmax(-1)[rows, torch.tensor(answer)].sum()
        tokens += len(answer)
    kl, cross_entropy = kl / tokens, cross_entropy / tokens
    loss = 0.7 * cross_entropy + 0.3 * kl
    assert line["answer_tokens"] == tokens
    for name, value in {"loss": loss, "cross_entropy": cross_entropy, "kl": kl}.items():
        assert line[name] == pytest.approx(value.item(), rel=1e-5)
    assert line["kl"] > 0.01

    student.zero_grad()
    loss.backward()
    weights = dict(student.named_parameters())
    for name, gradient in caught["gradients"].items():
        expected_gradient = weights[name].grad.float()
        assert torch.allclose(gradient, expected_gradient, rtol=1e-3, atol=1e-5), name


logits_of = st.integers(0, 2**32 - 1).map(
    lambda seed: torch.randn(2, 4, 11, generator=torch.Generator().manual_seed(seed)) * 6
)


@settings(max_examples=60, deadline=None)
@given(logits_of, st.integers(1, 11), st.sampled_from([0.5, 1.0, 3.0]))
def test_telling_fewer_tokens_apart_is_a_lower_bound(logits, top_k, temperature) -> None:
    of_teacher, of_student = logits
    p = (of_teacher.double() / temperature).log_softmax(-1)
    q = (of_student.double() / temperature).log_softmax(-1)
    full = float((p.exp() * (p - q)).sum()) * temperature**2
    most, fewer = (
        float(divergence(of_student, Target.of(of_teacher, temperature, top), temperature))
        for top in (11, top_k)
    )
    assert most == pytest.approx(full, rel=1e-4, abs=1e-5)
    assert -1e-5 <= fewer <= full * (1 + 1e-4) + 1e-5
    same = divergence(of_teacher, Target.of(of_teacher, temperature, top_k), temperature)
    assert float(same) == pytest.approx(0, abs=1e-4)


def test_a_gradient_is_finite_however_sure_the_teacher_is() -> None:
    sure = torch.zeros(1, 9)
    sure[0, 3] = 200.0
    student = torch.zeros(1, 9, requires_grad=True)
    for top_k in (1, 4, 9):
        loss = divergence(student, Target.of(sure, 1, top_k), 1)
        (gradient,) = torch.autograd.grad(loss, student)
        expected = torch.full((1, 9), 1 / 9)
        expected[0, 3] -= 1
        assert torch.allclose(gradient, expected, atol=1e-6)


@pytest.mark.parametrize("top_k", [8, None])
def test_the_planner_counts_what_the_loss_makes_of_logits(top_k) -> None:
    answers, vocabulary = 32, 3000
    hidden, head = torch.randn(answers, 8, requires_grad=True), torch.randn(8, vocabulary)
    labels = torch.arange(answers)
    peaks = []
    for distillation in (None, DistillationConfig(top_k=top_k)):
        target = Target.of(torch.randn(answers, vocabulary), 1.0, top_k)
        given = [hidden, head, labels]
        with Alive(given if distillation is None else [*given, *target]) as alive:
            logits = hidden @ head
            loss = answer_loss(logits, labels)
            if distillation is not None:
                loss = 0.5 * loss + 0.5 * divergence(logits, target, 1.0)
            loss.backward()
        peaks.append(alive.peak)
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=vocabulary, num_attention_heads=1, **small)
    row = RowShape(answers, 0, 0, answers, 0, 0)
    # The rest of a model is small beside these logits.
    planned = [
        peak_memory(ModelShape.of(config), row, Setting(train, "float32")).device["temporaries"]
        for train in (
            TrainConfig(run_folder="x"),
            TrainConfig(run_folder="x", distillation=DistillationConfig(top_k=top_k)),
        )
    ]
    assert planned[1] - planned[0] == pytest.approx(peaks[1] - peaks[0], rel=0.2)


def test_of_no_weight_it_changes_nothing(workplace) -> None:
    options = [*LORA, "train.lora.dropout=0.2", "train.max_steps=2"]
    without = workplace.train_here("without", *options)
    weightless = workplace.train_here("weightless", *options, "train.distillation.weight=0.0")
    for key in ("loss", "gradient_norm"):
        assert [line[key] for line in weightless] == [line[key] for line in without]
    assert "kl" not in without[0]
    assert weightless[0]["cross_entropy"] == pytest.approx(without[0]["loss"])


def test_micro_batches_change_nothing(workplace) -> None:
    options = [KL, "train.system=block_attention", "train.effective_batch_samples=4", ONE_STEP]
    runs = [
        workplace.train_here(f"micro-{micro}", *options, f"train.micro_batch_samples={micro}")
        for micro in (1, 4)
    ]
    for key in ("loss", "cross_entropy", "kl"):
        one, four = ([line[key] for line in run] for run in runs)
        assert one == pytest.approx(four, abs=1e-5)
    assert runs[0][0]["loss"] == pytest.approx(
        0.7 * runs[0][0]["cross_entropy"] + 0.3 * runs[0][0]["kl"]
    )


def test_a_teachers_own_answers_are_learned_whatever_the_datas_are(workplace, monkeypatch) -> None:
    rows = [data_row(number) for number in range(8)]
    for row in rows:
        row["answers_objects"][0]["spans"] = ["unknown"]
    file = write_rows(workplace.folder / "unanswered.jsonl", rows)
    monkeypatch.setattr(workers, "load_encoder", lambda config, threads: encode_words)
    options = [f"data.train=[{file}]", "eval.max_new_tokens=5", "train.learning_rate=1e-2"]
    build(resolve(workplace.arguments("unused", *options)).config, "train")
    options += [OWN, "train.distillation.weight=0.2", "train.epochs=12"]
    lines = workplace.train_here("own", *options)
    assert lines[-1]["cross_entropy"] < 0.2 * lines[0]["cross_entropy"]

    config, template, tables, files = opened(workplace, *options)
    base, trained = (
        AutoModelForCausalLM.from_pretrained(folder)
        for folder in (config.model.path, workplace.folder / "own" / "checkpoint")
    )
    answers = files.answers()
    builder = ExampleBuilder(tables, template, None, config, answers=answers)
    ends = sorted(template.stop_ids)
    agreed = 0
    assert len(answers) == 8
    for index, answer in answers.items():
        ids = torch.tensor([plain_text(config, template, tables, index)])
        generated = base.generate(
            ids, max_new_tokens=5, do_sample=False, eos_token_id=ends, pad_token_id=ends[0]
        )
        assert generated[0, ids.shape[1] :].tolist() == answer
        sample = builder.sample(index)
        assert list(sample.examples[0].answer_ids) == answer
        logits = answer_logits(trained, sample.examples[0], sample.segments)
        agreed += int((logits.argmax(-1) == torch.tensor(answer)).sum())
    assert agreed > 0.8 * sum(map(len, answers.values()))


def test_an_answer_ends_with_the_token_that_ended_it(workplace, unsaid, monkeypatch) -> None:
    said = []
    forward = teacher_passes.forward_cached
    end = load_tokenizer(str(workplace.folder / "model")).convert_tokens_to_ids("<|im_end|>")

    def ending(model, inputs):
        """The second token of every other text ends its answer."""
        logits_BV = forward(model, inputs)
        for row, (cache, ids) in enumerate(inputs):
            if len(ids) == 1 and cache.positions(0).numel() % 2:
                logits_BV[row, end] = 1e4
        return logits_BV

    monkeypatch.setattr(teacher_passes, "forward_cached", ending)
    lines = workplace.train_here("ending", OWN, "eval.max_new_tokens=4", ONE_STEP)
    files = opened(workplace, OWN, "eval.max_new_tokens=4")[-1]
    for answer in files.answers().values():
        assert 2 <= len(answer) <= 4
        assert end not in answer[:-1]
        said.append(answer[-1] == end)
    assert True in said
    assert lines[0]["answer_tokens"] < 8 * 4


@pytest.mark.parametrize("answers", [(), (OWN,)], ids=["gold", "teacher"])
def test_a_killed_teacher_goes_on_and_a_finished_one_is_not_asked_again(
    workplace, unsaid, asked, monkeypatch, answers
) -> None:
    options = [KL, *answers, "eval.max_new_tokens=3"]
    monkeypatch.setattr(teacher_files, "PART_SAMPLES", 8)
    whole = workplace.train_here(f"whole-{len(answers)}", *options)
    assert sum(asked) == 22
    files = opened(workplace, *options)[-1]
    kept = {path.name: path.read_bytes() for path in files.folder.glob("*/*.safetensors")}
    shutil.rmtree(files.folder)

    write, written = TeacherFiles.write, []

    def killed(self, part, said):
        if written:
            (self.folder / ".writing-dead").mkdir()
            raise SystemExit(137)
        written.append(part)
        write(self, part, said)

    asked.clear()
    with monkeypatch.context() as patch:
        patch.setattr(TeacherFiles, "write", killed)
        with pytest.raises(SystemExit):
            workplace.train_here(f"killed-{len(answers)}", *options)
    assert sum(asked) == 16
    assert not (workplace.folder / f"killed-{len(answers)}").exists()
    asked.clear()
    resumed = workplace.train_here(f"killed-{len(answers)}", *options)
    assert sum(asked) == 14
    assert not (files.folder / ".writing-dead").exists()
    for key in ("loss", "kl", "gradient_norm"):
        assert [line[key] for line in resumed] == [line[key] for line in whole]
    assert kept == {path.name: path.read_bytes() for path in files.folder.glob("*/*.safetensors")}

    # Another run with the same teacher, a part of which is damaged meanwhile.
    damaged = files.folder / "part-000002" / "tensors-00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    asked.clear()
    workplace.train_here(
        f"damaged-{len(answers)}", *options, *LORA, "train.distillation.weight=0.9"
    )
    assert sum(asked) == 6


def test_a_short_run_asks_for_what_it_sees(workplace, unsaid, asked, monkeypatch) -> None:
    monkeypatch.setattr(teacher_files, "PART_SAMPLES", 4)
    options = [OWN, "eval.max_new_tokens=2"]
    (short,) = workplace.train_here("short", *options, ONE_STEP)
    assert sum(asked) == 8
    asked.clear()
    full = workplace.train_here("full", *options)
    assert sum(asked) == 14
    assert full[0]["loss"] == short["loss"]
    # What it does not see may be damaged.
    (opened(workplace, *options)[-1].folder / "part-000005" / "complete.json").unlink()
    asked.clear()
    (again,) = workplace.train_here("short_again", *options, ONE_STEP)
    assert not asked
    assert again["loss"] == short["loss"]


def test_a_stop_signal_leaves_what_was_said(workplace, unsaid, asked, monkeypatch) -> None:
    monkeypatch.setattr(teacher_files, "PART_SAMPLES", 8)
    stop, write = StopRequest(), TeacherFiles.write

    def stopping(self, part, said):
        stop.asked = True
        write(self, part, said)

    with monkeypatch.context() as patch:
        patch.setattr(TeacherFiles, "write", stopping)
        patch.setattr(trainer, "StopRequest", lambda: stop)
        with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):
            workplace.train_here("stopped", KL)
    assert sum(asked) == 8
    assert not (workplace.folder / "stopped").exists()
    asked.clear()
    workplace.train_here("stopped", KL)
    assert sum(asked) == 14


def test_what_was_said_is_used_where_nothing_has_changed(workplace, tmp_path) -> None:
    model = AutoModelForCausalLM.from_pretrained(workplace.folder / "model")
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    tiny_tokenizer().save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)

    def folder(*overrides):
        """Also over tables that are not built."""
        config = resolve(workplace.arguments("unused", KL, *overrides)).config
        template = PromptTemplate(load_tokenizer(config.model.path), config.prompt)
        most = teacher.most_tokens(config, load_config(config.model.path))
        return TeacherFiles.of(config, teacher_files.teacher_key(config, template, most), 1).folder

    same = folder()
    for change in (
        "train.distillation.weight=0.9", "train.learning_rate=1", "train.tuning=lora",
        "eval.max_new_tokens=5", "train.max_length_tokens=100", "context.gradient=detach",
    ):  # fmt: skip
        assert folder(change) == same, change
    others = [
        (OWN,), (OWN, "eval.max_new_tokens=5"), ("train.distillation.temperature=2.0",),
        ("train.distillation.top_k=8",), ("prompt.before_passages=Read.",),
        (f"model.path={tmp_path}",), ("train.mixed_precision=bf16",), ("seed=1",),
        ("train.max_length_tokens=5000",),
    ]  # fmt: skip
    assert len({same, *(folder(*change) for change in others)}) == 1 + len(others)


def test_the_teacher_reads_whole_chunks_as_long_as_it_has_positions(workplace) -> None:
    config, template, tables, _ = opened(workplace, KL, "train.max_length_tokens=110")
    model = load_config(config.model.path)
    reading = teacher.teacher_builder(config, model, template, tables)
    assert ExampleBuilder(tables, template, None, config).sample(0).dropped
    (example,) = reading.sample(0).examples
    assert example.query_ids == plain_text(config, template, tables, 0)
    model.max_position_embeddings = len(example.query_ids) + len(example.answer_ids) - 1
    sample = teacher.teacher_builder(config, model, template, tables).sample(0)
    assert sample.dropped == 1
    last = tables.chunk(tables.samples[0]["chunk_ids"][-1]).token_ids
    assert len(sample.examples[0].query_ids) == len(example.query_ids) - len(last)


def test_a_prefix_does_not_depend_on_the_teachers_answer(workplace) -> None:
    config, template, tables, _ = opened(workplace, OWN, "train.max_length_tokens=110")
    before = ExampleBuilder(tables, template, None, config)
    answers = {index: [7] for index in range(len(tables.samples))}
    after = ExampleBuilder(tables, template, None, config, answers=answers)
    for index in range(3):
        one, other = before.sample(index).examples[0], after.sample(index).examples[0]
        assert one.plan == other.plan
        assert len(one.answer_ids) == config.eval.max_new_tokens
        assert other.answer_ids == [7]
    assert before.lengths(0).tokens <= 110


def test_mistakes_are_told_before_the_teacher_is_asked(workplace, unsaid, asked) -> None:
    def refused(*overrides):
        with pytest.raises(UserError) as caught:
            workplace.train_here("refused", ONE_STEP, *overrides)
        return str(caught.value)

    for override, said in (
        ("train.distillation.top_k=100000", "is more than the model's vocabulary of"),
        ("train.distillation.weight=1.5", "train.distillation.weight"),
        ("train.distillation.temperature=0.0", "train.distillation.temperature"),
        ("train.distillation.answers=gould", "train.distillation.answers"),
        ("train.distillation.wieght=0.5", "did you mean train.distillation.weight"),
    ):
        assert said in refused(override)
    files = opened(workplace, KL)[-1]
    files.folder.mkdir()
    with (files.folder / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert f"another process is training in data.built_root {files.folder}" in refused(KL)
    assert not asked
    assert not (workplace.folder / "refused").exists()


def test_a_resumed_run_goes_on_with_the_same_teacher(workplace, unsaid, asked) -> None:
    options = [OWN, "eval.max_new_tokens=3", *LORA, "train.save_every_steps=2"]
    whole = workplace.train_here("resumed", *options)
    for product in ("checkpoint", "adapter"):
        shutil.rmtree(workplace.folder / "resumed" / product)
    asked.clear()
    resumed = workplace.train_here("resumed", *options, "train.resume=true")
    assert not asked
    for key in ("loss", "cross_entropy", "kl", "gradient_norm"):
        assert [line[key] for line in resumed] == [line[key] for line in whole]
    shutil.rmtree(workplace.folder / "resumed" / "checkpoint")
    longer = [*options, "eval.max_new_tokens=4", "train.resume=true"]
    with pytest.raises(UserError, match=r"eval\.max_new_tokens: 3 -> 4"):
        workplace.train_here("resumed", *longer)


def test_ranks_that_do_not_see_each_others_parts_are_told(workplace, unsaid, monkeypatch) -> None:
    monkeypatch.setattr(TeacherFiles, "write", lambda self, part, said: None)
    with pytest.raises(UserError, match=r"data\.built_root: .* all machines of the run share"):
        workplace.train_here("apart", KL, ONE_STEP)


@pytest.mark.parametrize("writing", ["write_text", "write_tensors"])
def test_a_full_disk_is_told(workplace, unsaid, monkeypatch, writing) -> None:
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(teacher_files, writing, full)
    message = r"data\.built_root: .* cannot be written: .* No space .* goes on from there"
    with pytest.raises(UserError, match=message):
        workplace.train_here("no_space", KL, ONE_STEP)
    assert not (workplace.folder / "no_space").exists()


def test_the_key_is_written_down(workplace) -> None:
    workplace.train_here("keyed", KL, ONE_STEP)
    config, _, _, files = opened(workplace, KL)
    assert json.loads((files.folder / "key.json").read_text("utf-8")) == files.key
    recipe = resolve([str(workplace.folder / "keyed" / "recipe.yaml")]).config
    assert recipe.train.distillation == config.train.distillation
