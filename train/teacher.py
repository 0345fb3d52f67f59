"""The teacher of a distillation: the model that a run starts from, reading whole chunks.

It reads a sample as Standard RAG is trained on it, prompt and retrieved chunks as one text, and
says what it expects in the place of each answer token. All of it is made once, before the training,
and kept (see `train.teacher_files`). So a step costs no pass of the teacher, however ranks share
the model, and full fine-tuning keeps no second copy of the weights.

A text may be longer than a training row: it takes as many tokens as the model has positions, or
`train.max_length_tokens` if these are more. Beyond that the chunks ranked last are left out.
"""

import logging
from collections.abc import Collection, Sequence
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from transformers import PreTrainedConfig, PreTrainedModel

from cache_ops.cached import enable_cached
from cache_ops.rope import Rope
from data_builders.prompt import PromptTemplate
from data_builders.tables import Tables
from recipes.errors import UserError
from recipes.progress import Progress
from recipes.schema import Recipe
from train.examples import ExampleBuilder
from train.ranks import any_rank
from train.run_folder import alone_in, remove_leftovers
from train.stopping import StopRequest
from train.teacher_files import Said, TeacherFiles, teacher_key
from train.teacher_passes import as_it_began, give_answers, groups_of, read_answers

logger = logging.getLogger(__name__)


def check_distillation(config: Recipe, model: PreTrainedConfig) -> None:
    """Passes a recipe whose teacher, if it has one, can tell so many tokens apart.

    Raises:
        UserError
    """
    distillation = config.train.distillation
    if distillation and distillation.top_k and distillation.top_k > model.vocab_size:
        raise UserError(
            f"train.distillation.top_k={distillation.top_k} is more than the model's vocabulary of "
            f"{model.vocab_size} tokens: lower it, or set it to null for the whole vocabulary"
        )


def teacher_builder(
    config: Recipe, model: PreTrainedConfig, template: PromptTemplate, tables: Tables
) -> ExampleBuilder:
    """Builds the teacher's texts; for answers of its own with room for the longest."""
    train = config.train.model_copy(
        update={"system": "standard_rag", "max_length_tokens": most_tokens(config, model)}
    )
    reading = config.model_copy(update={"train": train})
    return ExampleBuilder(tables, template, Rope.from_config(model), reading)


def teacher_files(
    config: Recipe, model: PreTrainedConfig, template: PromptTemplate, tables: Tables
) -> TeacherFiles:
    """Where what the teacher says is kept, whether it is there or not.

    Raises:
        UserError: see `teacher_key`.
    """
    key = teacher_key(config, template, most_tokens(config, model))
    return TeacherFiles.of(config, key, len(tables.samples))


def learned_answers(config: Recipe, files: TeacherFiles) -> dict[int, list[int]] | None:
    """The teacher's answers that are there, by sample, where a recipe learns these."""
    distillation = config.train.distillation
    return files.answers() if distillation and distillation.answers == "teacher" else None


def most_tokens(config: Recipe, model: PreTrainedConfig) -> int:
    """The most tokens of a teacher's text, its answer among them."""
    return max(model.max_position_embeddings, config.train.max_length_tokens)


def teach(
    config: Recipe,
    accelerator: Accelerator,
    model: PreTrainedModel,
    template: PromptTemplate,
    tables: Tables,
    needed: Collection[int],
    stop: StopRequest,
) -> TeacherFiles | None:
    """Has the teacher say what is not there yet; collective, each rank makes its share of parts.

    Asked to stop, it ends after the part at hand.

    Args:
        config: the recipe; `train.distillation` is set and has passed `check_distillation`.
        accelerator: of the run; the model is not prepared yet.
        model: whole on every rank, untrained, and made to take packed batches. It moves to the
            rank's device and back.
        template: the prompt.
        tables: the train split.
        needed: the samples that the run will see.
        stop: says when to stop.

    Returns:
        What the teacher has said of all these; None if a rank was asked to stop.

    Raises:
        UserError: see `ExampleBuilder.sample`; another process is making the same, it cannot be
            written, or this rank does not see what others have written.
    """
    builder = teacher_builder(config, model.config, template, tables)
    files = teacher_files(config, model.config, template, tables)
    mine = files.parts(needed)[accelerator.process_index :: accelerator.num_processes]
    missing = [part for part in mine if not files.is_whole(part)]
    if accelerator.is_main_process:
        logger.info("what the teacher says is kept in %s", files.folder)
    if not any_rank(accelerator, bool(missing)):
        _refuse_apart(files, needed)
        return files
    with alone_in(files.folder, accelerator, "data.built_root"):
        if accelerator.is_main_process:
            remove_leftovers(files.folder)
            files.describe()
        accelerator.wait_for_everyone()
        _make(config, accelerator, model, template, builder, files, missing, stop)
        # No rank goes on before all parts are there.
        if any_rank(accelerator, stop.asked):
            return None
    _refuse_apart(files, needed)
    return files


def _make(
    config: Recipe,
    accelerator: Accelerator,
    model: PreTrainedModel,
    template: PromptTemplate,
    builder: ExampleBuilder,
    files: TeacherFiles,
    missing: Sequence[int],
    stop: StopRequest,
) -> None:
    """Makes a rank's missing parts, with the main rank's progress shown."""
    distillation = config.train.distillation
    assert distillation is not None, "a recipe with a teacher"
    longest = config.eval.max_new_tokens
    left_out = 0
    shown = accelerator.is_main_process
    total = sum(len(files.samples(part)) for part in missing)
    progress = Progress("teacher", total, "samples") if shown else None
    bf16 = config.train.mixed_precision == "bf16"
    with (
        as_it_began(model, accelerator.device) as teacher,
        torch.autocast(accelerator.device.type, torch.bfloat16, enabled=bf16),
        torch.inference_mode(),
        progress or nullcontext(),
    ):
        if distillation.answers == "teacher":
            enable_cached(teacher)
        for part in missing:
            if stop.asked:
                break
            said: list[tuple[int, Said]] = []
            indices = files.samples(part)
            samples = [builder.sample(index) for index in indices]
            left_out += sum(sample.dropped > 0 for sample in samples)
            examples = [sample.examples[0] for sample in samples]
            for group in groups_of(examples):
                texts = [examples[at] for at in group]
                if distillation.answers == "teacher":
                    stop_ids = template.stop_ids
                    answered = give_answers(teacher, texts, stop_ids, longest, distillation)
                else:
                    answered = read_answers(teacher, texts, distillation)
                said += zip((indices[at] for at in group), answered, strict=True)
                if progress is not None:
                    progress.advance(len(group))
            files.write(part, said)
    if left_out and shown:
        logger.warning(
            "the teacher read %d samples without the chunks ranked last, beyond %d tokens",
            left_out, most_tokens(config, model.config),
        )  # fmt: skip


def _refuse_apart(files: TeacherFiles, needed: Collection[int]) -> None:
    """Passes files that this rank finds, whichever rank has written them.

    Raises:
        UserError
    """
    if not all(map(files.is_there, files.parts(needed))):
        raise UserError(
            f"data.built_root: {files.folder} lacks what other ranks have written there: put it on "
            "a file system that all machines of the run share"
        )
