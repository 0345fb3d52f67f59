"""What a teacher has said of the samples of a built split, kept by content beside the tables.

A folder holds parts of `PART_SAMPLES` samples. Each part is there whole or not at all, so making
them may stop and go on at any point, and several ranks may make them.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from data_builders.build import built_folder
from data_builders.key import digest
from data_builders.models import folder_identity, model_folder
from data_builders.prompt import PromptTemplate
from recipes.errors import UserError
from recipes.files import write_text
from recipes.schema import Recipe
from train.batches import shuffled
from train.lineage import starting_weights
from train.run_folder import replace_folder
from train.tensor_files import DamagedError, TensorFiles, write_tensors

PART_SAMPLES = 32
# To be raised whenever the same key would give other numbers.
_FORMAT = 1
ANSWER = "answer_ids_A"
"""The tokens of a sample's answer."""

Said = dict[str, Tensor]
"""Of one sample, by name: its target and, as `ANSWER`, the tokens of its answer."""


def teacher_key(config: Recipe, template: PromptTemplate, most_tokens: int) -> dict[str, Any]:
    """Everything that decides what the teacher of a recipe says of the train split.

    `most_tokens` are those of its longest text.

    Raises:
        UserError: the model is not there; see also `data_builders.key.build_key`.
    """
    distillation = config.train.distillation
    assert distillation is not None, "a recipe with a teacher"
    option = "model.path" if config.train.init_from is None else "train.init_from"
    key: dict[str, Any] = {
        "format": _FORMAT,
        "tables": built_folder(config, "train").name,
        "model_sha256": folder_identity(model_folder(starting_weights(config), option)),
        "dtype": config.model.dtype,
        "mixed_precision": config.train.mixed_precision,
        "prompt_sha256": template.digest,
        "seed": config.seed,
        "most_tokens": most_tokens,
        **distillation.model_dump(mode="json", exclude={"weight"}),
    }
    if distillation.answers == "teacher":
        key["max_new_tokens"] = config.eval.max_new_tokens
    return key


@dataclass(frozen=True)
class TeacherFiles:
    """The parts in a folder, over all samples of a split."""

    folder: Path
    key: Mapping[str, Any]
    """What all parts depend on."""
    order: Sequence[int]
    """The samples, in the order in which parts take them: that in which a training sees them, so
    that a short one needs few parts."""

    @classmethod
    def of(cls, config: Recipe, key: dict[str, Any], samples: int) -> "TeacherFiles":
        """Where the parts of a key lie or would lie."""
        folder = Path(config.data.built_root) / f"teacher-{digest(key)}"
        return cls(folder, key, shuffled(samples, config.seed))

    @cached_property
    def _part_of(self) -> dict[int, int]:
        return {sample: place // PART_SAMPLES for place, sample in enumerate(self.order)}

    def parts(self, samples: Collection[int]) -> list[int]:
        """Numbers of the parts that have these samples."""
        return sorted({self._part_of[sample] for sample in samples})

    def samples(self, part: int) -> Sequence[int]:
        """The samples of a part."""
        return self.order[part * PART_SAMPLES : (part + 1) * PART_SAMPLES]

    def is_there(self, part: int) -> bool:
        """Whether a part was written, and every file of it still has its size."""
        try:
            TensorFiles.open(self._place(part))
        except DamagedError:
            return False
        return True

    def is_whole(self, part: int) -> bool:
        """Whether a part is there, every byte as it was written."""
        try:
            TensorFiles.open(self._place(part)).verify()
        except DamagedError:
            return False
        return True

    def describe(self) -> None:
        """Writes the key down; the same errors as `write`."""
        path = self.folder / "key.json"
        with _told_unwritable(path):
            write_text(path, json.dumps(self.key, indent=2) + "\n")

    def write(self, part: int, said: Iterable[tuple[int, Said]]) -> None:
        """Keeps a part: of each of its samples what was said.

        Raises:
            UserError: it cannot be written (no room, no right).
        """
        tensors = (
            (f"{sample}.{name}", tensor) for sample, one in said for name, tensor in one.items()
        )
        target = self._place(part)
        with _told_unwritable(target):
            replace_folder(target, lambda folder: write_tensors(folder, tensors))

    def read(self, sample: int, names: Sequence[str]) -> list[Tensor]:
        """Tensors of one sample.

        Raises:
            DamagedError: its part is not there.
        """
        files = TensorFiles.open(self._place(self._part_of[sample]))
        return [files.read(f"{sample}.{name}") for name in names]

    def answers(self) -> dict[int, list[int]]:
        """The tokens of every answer that is there, by sample."""
        found: dict[int, list[int]] = {}
        for part in filter(self.is_there, self.parts(self.order)):
            files = TensorFiles.open(self._place(part))
            for sample in self.samples(part):
                found[sample] = files.read(f"{sample}.{ANSWER}").tolist()
        return found

    def _place(self, part: int) -> Path:
        return self.folder / f"part-{part:06d}"


@contextmanager
def _told_unwritable(target: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"data.built_root: {target} cannot be written: {error}. What the teacher has said so "
            "far stays; the same command goes on from there"
        ) from error
