"""From recipe names and `section.key=value` to one checked `Recipe`.

Order: defaults < YAML files from left to right < command line. Every mistake is reported in one
`UserError`, with its dotted path, where it was written and the nearest valid name.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from recipes import files, yaml_source
from recipes.fields import leaves, nearest, nearest_option, options, sections, takes_text
from recipes.mistakes import DEFAULT, NOT_SET, describe, raise_all
from recipes.schema import Recipe

COMMAND_LINE = "command line"
SHIPPED = Path(__file__).parent

_logger = logging.getLogger(__name__)


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
    layers = _Layers()
    for argument in arguments:
        if not _is_override(argument):
            layers.add_file(argument)
    if layers.files == 0:
        layers.unread = True
        layers.mistakes.append(f"no recipe given; shipped: {', '.join(shipped_recipes())}")
    for argument in arguments:
        if _is_override(argument):
            layers.add_override(argument)

    try:
        config = Recipe.model_validate(layers.values)
    except ValidationError as error:
        found = describe(error, layers.origins)
        if layers.unread:
            # What an unread file would have set is not missing.
            found = [line for line in found if NOT_SET not in line]
        raise_all(layers.mistakes + found)
        raise AssertionError("a recipe that does not validate has a mistake to tell") from error
    raise_all(layers.mistakes)

    paths = [path for path, _ in leaves(config.model_dump())]
    origins = {path: layers.origins.get(path, DEFAULT) for path in paths}
    if config.train.tuning != "lora":
        for path, origin in origins.items():
            if path.startswith("train.lora.") and origin == COMMAND_LINE:
                _logger.warning("%s has no effect: train.tuning is %s", path, config.train.tuning)
    return Resolved(config, origins)


def shipped_recipes() -> list[str]:
    """The names of the recipes in this package, such as `smollm2_135m/coinrag`, sorted."""
    found = (path.relative_to(SHIPPED).with_suffix("") for path in SHIPPED.rglob("*.yaml"))
    return sorted(name.as_posix() for name in found)


class _Layers:
    """Values merged so far, where each was set, and the mistakes met on the way."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.mistakes: list[str] = []
        self.files = 0
        self.unread = False

    def add_file(self, argument: str) -> None:
        self.files += 1
        path = _find(argument)
        if path is None:
            shipped = shipped_recipes()
            close = nearest(argument, shipped)
            hint = f"did you mean {close}?" if close else f"shipped: {', '.join(shipped)}"
            self._fail(f"{argument or '(empty argument)'}: no such file or shipped recipe; {hint}")
            return
        shown = _shown(path)
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
        known = dict(options())
        if path not in known and path not in dict(sections()):
            close = nearest_option(path)
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


def _find(argument: str) -> Path | None:
    if _is_file(argument):
        return Path(argument)
    name = argument.removesuffix(".yaml")
    return SHIPPED / f"{name}.yaml" if name in shipped_recipes() else None


def _shown(path: Path) -> str:
    if path.is_relative_to(SHIPPED):
        return (Path(SHIPPED.name) / path.relative_to(SHIPPED)).as_posix()
    return path.as_posix()
