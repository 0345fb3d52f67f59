"""A configuration's options by dotted path: which exist, which take text, which is nearest."""

import difflib
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from recipes.schema import Recipe


def options(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """(dotted path, field) of every option that holds a value, in the schema's order."""
    for name, field in model.model_fields.items():
        section = section_of(field)
        if section is None:
            yield f"{prefix}{name}", field
        else:
            yield from options(section, f"{prefix}{name}.")


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that `field` holds, also if it may be null; None for a plain option."""
    for kind in _alternatives(field.annotation):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def sections(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """(dotted path, field) of every section below `model`."""
    for name, field in model.model_fields.items():
        section = section_of(field)
        if section is not None:
            yield f"{prefix}{name}", field
            yield from sections(section, f"{prefix}{name}.")


def takes_text(field: FieldInfo) -> bool:
    """Whether `field` holds free text, so that a command-line value is to be taken literally."""
    return str in _alternatives(field.annotation)


def takes_null(path: str, model: type[BaseModel] = Recipe) -> bool:
    """Whether the option at the dotted `path` may be null."""
    field = dict(options(model)).get(path)
    return field is not None and type(None) in _alternatives(field.annotation)


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every value in a nested mapping; lists and {} are values."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice most like `word`, or None when none is alike."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return found[0] if found else None


def nearest_option(path: str, model: type[BaseModel] = Recipe) -> str | None:
    """The option or section that a wrong dotted path most likely meant."""
    *parents, last = path.split(".")
    parent = _model_at(parents, model)
    close = nearest(last, parent.model_fields) if parent is not None else None
    if close is not None:
        return ".".join([*parents, close])
    if any(part.isdigit() for part in parents):
        return None
    # A right name in a wrong or missing section says more than a similar spelling.
    known = [name for name, _ in (*options(model), *sections(model))]
    same = [name for name in known if name.rpartition(".")[2] == last]
    return same[0] if same else nearest(path, known)


def required_options(path: str, model: type[BaseModel] = Recipe) -> list[str]:
    """The options without a default at or below the dotted `path`, but for sections with one."""
    optional = [
        f"{name}."
        for name, field in sections(model)
        if name.startswith(f"{path}.") and not field.is_required()
    ]
    return [
        name
        for name, field in options(model)
        if field.is_required()
        and (name == path or name.startswith(f"{path}."))
        and not name.startswith(tuple(optional))
    ] or [path]


def _model_at(parts: Iterable[str], model: type[BaseModel]) -> type[BaseModel] | None:
    for part in parts:
        if part.isdigit():
            continue
        field = model.model_fields.get(part)
        kinds = _alternatives(field.annotation) if field is not None else ()
        # A list of sections counts by what it holds.
        kinds += tuple(inner for kind in kinds for inner in get_args(kind))
        found = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not found:
            return None
        model = found[0]
    return model


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(kind for part in get_args(annotation) for kind in _alternatives(part))
    return (annotation,)
