"""What the teacher of a distillation needs before the first step."""

import shutil
from collections.abc import Collection

from transformers import PreTrainedConfig

from data_builders.prompt import PromptTemplate
from data_builders.tables import Tables
from launch.commands import Result
from launch.needs import available
from recipes.progress import track
from recipes.schema import Recipe
from train.model_shape import ModelShape, RowShape
from train.planner import Setting, teacher_memory
from train.run_folder import nearest_folder
from train.teacher import teacher_builder
from train.teacher_files import TeacherFiles
from train.teacher_passes import PASS_TOKENS

_GIB = 2**30


def teacher_needs(
    config: Recipe,
    model: PreTrainedConfig,
    template: PromptTemplate,
    tables: Tables,
    files: TeacherFiles,
    needed: Collection[int],
    setting: Setting,
    gpu_gib: float | None,
    seconds_a_flop: float,
) -> Result:
    """The teacher's time, memory and disk, roughly; of one that was asked before no `tokens`.

    Args:
        config: the recipe; `train.distillation` is set.
        model: the config of its model.
        template: its prompt.
        tables: its train split.
        files: where what the teacher says is kept.
        needed: the samples that the run will see.
        setting: how the run trains.
        gpu_gib: memory of a rank's device; None: that of this machine.
        seconds_a_flop: as the training's time is counted.
    """
    missing = [part for part in files.parts(needed) if not files.is_there(part)]
    free = shutil.disk_usage(nearest_folder(files.folder)).free
    if not missing:
        nothing = dict.fromkeys(("hours", "gib", "disk_gib"), 0.0)
        return {"tokens": 0, **nothing, "free_gib": free / _GIB, "fits": True}
    distillation = config.train.distillation
    assert distillation is not None, "a recipe with a teacher"
    builder = teacher_builder(config, model, template, tables)
    samples = [sample for part in missing for sample in files.samples(part)]
    lengths = [builder.lengths(sample) for sample in track(samples, "teacher's texts")]
    texts = [length.tokens for length in lengths]
    answers = sum(length.answer_tokens for length in lengths)
    shape = ModelShape.of(model)
    pairs = sum(tokens * (tokens + 1) // 2 for tokens in texts)
    flops = shape.forward_flops(RowShape(sum(texts), 0, 0, answers, 0, pairs))
    memory = teacher_memory(shape, setting, max(PASS_TOKENS, *texts))
    disk = 8 * answers * (distillation.top_k or shape.vocabulary)
    return {
        "tokens": sum(texts),
        "hours": flops * seconds_a_flop / 3600,
        "gib": memory / _GIB,
        "disk_gib": disk / _GIB,
        "free_gib": free / _GIB,
        "fits": memory <= available(setting.ranks, gpu_gib)[0] and disk <= free,
    }
