"""What the sections of a configuration are made of: the common model, field types, mistakes."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]


def mistake(message: str, *, at: str = "", involves: str = "") -> PydanticCustomError:
    """A cross-check's error.

    `at` is the dotted path of the option at fault when it is not the validated field itself, and
    `involves` that of another option which may be at fault in its place.
    """
    # The message travels as a value, so braces in it are not taken for placeholders.
    context = {"text": message, "at": at, "involves": involves}
    return PydanticCustomError("cross_check", "{text}", context)


def _written(text: str) -> str:
    # No file name, tokenizer or UTF-8 file takes these.
    if wrong := re.search("[\0\ud800-\udfff]", text):
        raise mistake(f"expected Unicode text without NUL, found {wrong[0]!a}")
    return text


# Free text, possibly empty; and text that names something.
Prose = Annotated[str, AfterValidator(_written)]
Text = Annotated[str, Field(min_length=1), AfterValidator(_written)]


def refuse_repeats(values: Sequence[str]) -> None:
    """Refuses a list that has an entry twice."""
    repeated = [value for value, count in Counter(values).items() if count > 1]
    if repeated:
        raise mistake(f"expected each entry once, got {repeated[0]!r} again")


class Section(BaseModel):
    """What all sections share: immutable, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False
    )


def _known_device(device: str) -> str:
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", device):
        raise mistake(f"expected cpu, mps, cuda or cuda:N, got {device!r}")
    return device


Device = Annotated[str, AfterValidator(_known_device)]
