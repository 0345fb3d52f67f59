"""From names of recipes and `section.key=value` to one checked `Recipe`, or another kind.

Order: defaults < YAML files from left to right < command line. Every mistake is reported in one
`UserError`, with its dotted path, where it was written and the nearest valid name.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from recipes import files, yaml_source
from recipes.fields import leaves, nearest, nearest_option, options, sections, takes_text
from recipes.mistakes import DEFAULT, NOT_SET, describe, raise_all
from recipes.schema import Recipe

COMMAND_LINE = "command line"
SHIPPED = Path(__file__).parent

_logger = logging.getLogger(__name__)

Config = TypeVar("Config", bound=BaseModel)


@dataclass(frozen=True)
class Kind(Generic[Config]):
    """A kind of configuration: its name, its checked model, and where those of this package lie."""

    noun: str
    model: type[Config]
    shipped: Path

    def names(self) -> list[str]:
        """The names of those in this package, such as `smollm2_135m/coinrag`, sorted."""
        found = (path.relative_to(self.shipped) for path in self.shipped.rglob("*.yaml"))
        return sorted(path.with_suffix("").as_posix() for path in found)


RECIPE = Kind("recipe", Recipe, SHIPPED)


@dataclass(frozen=True)
class Resolved:
    """A checked recipe, and for each option by dotted path where its value came from.

    An origin is "default", "file.yaml:line" or "command line".
    """

    config: Recipe
    origins: dict[str, str]

    def write(self, folder: Path | str) -> None:
        """Write `recipe.yaml`, which resolves to the same recipe again, and `origins.json`."""
        text = yaml_source.dump(self.config.model_dump(mode="json"))
        files.write_text(Path(folder) / "recipe.yaml", text)
        origins = json.dumps(self.origins, indent=2, ensure_ascii=False)
        files.write_text(Path(folder) / "origins.json", origins + "\n")


def resolve(arguments: Sequence[str]) -> Resolved:
    """The recipe that `arguments` (recipe names or YAML paths, then `section.key=value`) say.

    Raises:
        UserError: lists every mistake in names, files and values together.
    """
    config, origins = resolve_kind(arguments, RECIPE)
    if config.train.tuning != "lora":
        for path, origin in origins.items():
            if path.startswith("train.lora.") and origin == COMMAND_LINE:
                _logger.warning("%s has no effect: train.tuning is %s", path, config.train.tuning)
    return Resolved(config, origins)


def resolve_kind(arguments: Sequence[str], kind: Kind[Config]) -> tuple[Config, dict[str, str]]:
    """What `arguments` say as a configuration of a `kind`, and each option's origin (`Resolved`).

    Raises:
        UserError: lists every mistake in names, files and values together.
    """
    layers = _Layers(kind)
    for argument in arguments:
        if not _is_override(argument):
            layers.add_file(argument)
    if layers.files == 0:
        layers.unread = True
        layers.mistakes.append(f"no {kind.noun} given; shipped: {', '.join(kind.names())}")
    for argument in arguments:
        if _is_override(argument):
            layers.add_override(argument)

    try:
        config = kind.model.model_validate(layers.values)
    except ValidationError as error:
        found = describe(error, layers.origins, kind.model)
        if layers.unread:
            # What an unread file would have set is not missing.
            found = [line for line in found if NOT_SET not in line]
        raise_all(layers.mistakes + found, kind.noun)
        raise AssertionError("what does not validate has a mistake to tell") from error
    raise_all(layers.mistakes, kind.noun)

    paths = [path for path, _ in leaves(config.model_dump())]
    return config, {path: layers.origins.get(path, DEFAULT) for path in paths}


def with_changes(config: Recipe, changes: Sequence[str]) -> Recipe:
    """The recipe with some `section.key=value` changed; `config` stays.

    Raises:
        UserError: lists every mistake in the changes together.
    """
    layers = _Layers(RECIPE)
    layers.values = config.model_dump(mode="json")
    for change in changes:
        layers.add_override(change)
    try:
        changed = Recipe.model_validate(layers.values)
    except ValidationError as error:
        raise_all(layers.mistakes + describe(error, layers.origins))
        raise AssertionError("a recipe that does not validate has a mistake to tell") from error
    raise_all(layers.mistakes)
    return changed


def shipped_recipes() -> list[str]:
    """The names of the recipes in this package, sorted."""
    return RECIPE.names()


class _Layers:
    """Values merged so far, where each was set, and the mistakes met on the way."""

    def __init__(self, kind: Kind[Any]) -> None:
        self.kind = kind
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.mistakes: list[str] = []
        self.files = 0
        self.unread = False

    def add_file(self, argument: str) -> None:
        self.files += 1
        shipped = self.kind.names()
        path = _find(argument, self.kind)
        if path is None:
            close = nearest(argument, shipped)
            hint = f"did you mean {close}?" if close else f"shipped: {', '.join(shipped)}"
            asked = argument or "(empty argument)"
            self._fail(f"{asked}: no such file or shipped {self.kind.noun}; {hint}")
            return
        shown = _shown(path, self.kind.shipped)
        try:
            values, lines = yaml_source.read_mapping(path.read_text(encoding="utf-8"))
        except yaml_source.YamlSourceError as error:
            for line, message in error.mistakes:
                self._fail(f"{shown}{'' if line is None else f':{line}'}: {message}")
        except UnicodeDecodeError as error:
            self._fail(f"{shown}: not UTF-8 text at byte {error.start}")
        except OSError as error:
            self._fail(f"{shown}: cannot be read: {error.strerror}")
        else:
            self._merge(values, {key: f"{shown}:{line}" for key, line in lines.items()})

    def add_override(self, argument: str) -> None:
        path, _, text = argument.partition("=")
        known = dict(options(self.kind.model))
        if path not in known and path not in dict(sections(self.kind.model)):
            close = nearest_option(path, self.kind.model)
            hint = f"; did you mean {close}?" if close else ""
            shown = path or f"={text}"
            self.mistakes.append(f"{shown} ({COMMAND_LINE}): unknown key{hint}")
            return
        try:
            literal = path in known and takes_text(known[path])
            value = _literal(text) if literal else yaml_source.read_value(text)
        except yaml_source.YamlSourceError as error:
            self.mistakes.append(f"{path} ({COMMAND_LINE}): {error}, got {text!r}")
            return
        nested: Any = value
        for key in reversed(path.split(".")):
            nested = {key: nested}
        self._merge(nested, dict.fromkeys(_inner_paths(value, path), COMMAND_LINE))

    def _fail(self, message: str) -> None:
        self.unread = True
        self.mistakes.append(message)

    def _merge(self, new: dict[str, Any], origins: dict[str, str]) -> None:
        _merge_into(self.values, new, "", self.origins)
        self.origins.update(origins)


def _merge_into(
    base: dict[str, Any], new: dict[str, Any], prefix: str, origins: dict[str, str]
) -> None:
    for key, value in new.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge_into(base[key], value, f"{path}.", origins)
            continue
        # The old value is replaced whole, so what was known of its parts goes.
        for stale in [known for known in origins if known.startswith(f"{path}.")]:
            del origins[stale]
        base[key] = value


def _inner_paths(value: Any, path: str) -> Iterator[str]:
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _inner_paths(inner, f"{path}.{key}")


def _is_override(argument: str) -> bool:
    return "=" in argument and not _is_file(argument)


def _literal(text: str) -> str | None:
    # Free text is taken as it stands; quotes give YAML's escapes, such as a real newline by "\n".
    if text == "null":
        return None
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return str(yaml_source.read_value(text))
    return text


def _is_file(argument: str) -> bool:
    try:
        return Path(argument).is_file()
    except OSError:
        # A long override is no possible file name.
        return False


def _find(argument: str, kind: Kind[Any]) -> Path | None:
    if _is_file(argument):
        return Path(argument)
    name = argument.removesuffix(".yaml")
    return kind.shipped / f"{name}.yaml" if name in kind.names() else None


def _shown(path: Path, shipped: Path) -> str:
    if path.is_relative_to(shipped):
        return (Path(shipped.name) / path.relative_to(shipped)).as_posix()
    return path.as_posix()
