"""What a user reads when a recipe is wrong: one line a mistake, all mistakes together."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from recipes.errors import UserError
from recipes.fields import nearest, nearest_option, required_options, takes_null
from recipes.schema import Recipe

DEFAULT = "default"
NOT_SET = "(not set)"
_SHOWN_CHARACTERS = 60


def describe(
    error: ValidationError, origins: Mapping[str, str], model: type[BaseModel] = Recipe
) -> list[str]:
    """One line for each mistake pydantic found: dotted path, origin, what was expected."""
    return [
        line for found in error.errors(include_url=False) for line in _lines(found, origins, model)
    ]


def raise_all(mistakes: Sequence[str], noun: str = "recipe") -> None:
    """Raise one UserError that lists all `mistakes` in the `noun`; do nothing without any."""
    if not mistakes:
        return
    count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
    raise UserError(f"{count} in the {noun}:\n" + "\n".join(f"  {line}" for line in mistakes))


def origin_of(path: str, origins: Mapping[str, str]) -> str:
    """Where the value at `path` was set; an entry of a list was set where the list was."""
    while path not in origins and any(part.isdigit() for part in path.split(".")):
        path = path.rpartition(".")[0]
    return origins.get(path, DEFAULT)


def _lines(details: ErrorDetails, origins: Mapping[str, str], model: type[BaseModel]) -> list[str]:
    path = ".".join(str(part) for part in details["loc"])
    if details["type"] == "missing" and not any(isinstance(part, int) for part in details["loc"]):
        return [
            f"{name} {NOT_SET}: required; set it in a YAML file or as {name}=VALUE"
            for name in required_options(path, model)
        ]
    return [_line(path, details, origins, model)]


def _line(
    path: str, details: ErrorDetails, origins: Mapping[str, str], model: type[BaseModel]
) -> str:
    context: dict[str, Any] = details.get("ctx", {})
    origin = origin_of(path, origins)
    match details["type"]:
        case "missing":
            return f"{path} ({origin}): required"
        case "extra_forbidden":
            return f"{path} ({origin}): unknown key{_suggest(nearest_option(path, model))}"
        case "cross_check":
            path = context["at"] or path
            origin = origin_of(path, origins)
            # A default is not the user's: point at the value that was written.
            if origin == DEFAULT and context["involves"]:
                origin = origin_of(context["involves"], origins)
            return f"{path} ({origin}): {context['text']}"
        case "literal_error":
            expected = f"one of {context['expected']}"
            given = details["input"]
            choices = [choice.strip("'") for choice in _split(context["expected"])]
            hint = _suggest(nearest(given, choices) if isinstance(given, str) else None)
        case "model_type" | "model_attributes_type" | "dict_type":
            expected, hint = "a section of key: value lines", ""
        case "string_too_short":
            expected, hint = "some text", ""
        case "string_unicode":
            expected, hint = "Unicode text", ""
        case "too_short":
            expected, hint = "at least one entry", ""
        case _:
            expected = details["msg"].removeprefix("Input should be ").removeprefix("a valid ")
            expected = expected.replace("greater than or equal to", "at least")
            expected = expected.replace("less than or equal to", "at most")
            hint = ""
    expected += " or null" if takes_null(path, model) else ""
    return f"{path} ({origin}): expected {expected}, got {_shown(details['input'])}{hint}"


def _split(expected: str) -> list[str]:
    # Pydantic writes choices as: 'a', 'b' or 'c'.
    return expected.replace(" or ", ", ").split(", ")


def _suggest(name: str | None) -> str:
    return f"; did you mean {name}?" if name else ""


def _shown(value: object) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"
