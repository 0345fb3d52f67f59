"""YAML with line numbers, read and written by the YAML 1.2 rules a recipe's author expects.

PyYAML follows YAML 1.1, where `1e-5` is a string, `no` is false, `010` is eight, and the second of
two equal keys wins. Here numbers are numbers, only `true` and `false` are booleans, and an equal
key is an error. Only plain data is built: tags and anchors are refused.
"""

import re
from collections.abc import Mapping
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_NUMBER_START = list("-+.0123456789")
# (type, pattern, first characters) of the plain scalars that are not text.
_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", _NUMBER_START),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        _NUMBER_START,
    ),
)


class _Loader(yaml.SafeLoader):
    # A table of its own: the class attribute is shared with yaml.SafeLoader otherwise.
    yaml_implicit_resolvers: dict[str, Any] = {}


class _Dumper(yaml.SafeDumper):
    # On top of YAML 1.1's table, so that text is quoted when either version would misread it.
    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern, _first in _SCALARS:
    for _side in (_Loader, _Dumper):
        _side.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_pattern})$"), _first)


class YamlSourceError(ValueError):
    """Mistakes in one YAML text, each as (line or None, message)."""

    def __init__(self, mistakes: list[tuple[int | None, str]]) -> None:
        super().__init__("; ".join(message for _, message in mistakes))
        self.mistakes = mistakes


def read_value(text: str) -> Any:
    """The plain value of a one-line YAML text such as `1e-5` or `[{k_c: 5, k: 10}]`."""
    value, _ = _read(text)
    return value


def read_mapping(text: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping in `text`, and the line of each of its keys by dotted path.

    Raises:
        YamlSourceError: bad syntax, equal keys, keys that are not text, tags, anchors, no mapping.
    """
    value, lines = _read(text)
    if value is None:
        return {}, {}
    if not isinstance(value, dict):
        raise YamlSourceError([(1, f"expected a mapping of sections, got {_kind(value)}")])
    return value, lines


def dump(value: Mapping[str, Any]) -> str:
    """YAML text that `read_mapping` reads back to an equal mapping."""
    return yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _read(text: str) -> tuple[Any, dict[str, int]]:
    try:
        # The event pass comes first: a composed alias could be recursive.
        for event in yaml.parse(text, Loader=_Loader):
            line = event.start_mark.line + 1 if event.start_mark else None
            if getattr(event, "anchor", None):
                raise YamlSourceError([(line, "anchors and aliases (& and *) are not supported")])
            if getattr(event, "tag", None):
                raise YamlSourceError([(line, "tags (!) are not supported")])
        loader = _Loader(text)
        node = loader.get_single_node()
        lines: dict[str, int] = {}
        mistakes: list[tuple[int | None, str]] = []
        value = None if node is None else _build(loader, node, "", lines, mistakes)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "cannot be read"
        raise YamlSourceError(
            [(mark.line + 1 if mark else None, f"not YAML: {problem}")]
        ) from error
    except YamlSourceError:
        raise
    except (yaml.YAMLError, OverflowError, ValueError) as error:
        # Python's own: an integer with too many digits, an escape beyond Unicode.
        raise YamlSourceError([(None, f"not YAML: {error}")]) from error
    except RecursionError as error:
        raise YamlSourceError([(None, "nested too deeply")]) from error
    if mistakes:
        raise YamlSourceError(mistakes)
    return value, lines


def _build(
    loader: _Loader,
    node: yaml.Node,
    path: str,
    lines: dict[str, int],
    mistakes: list[tuple[int | None, str]],
) -> Any:
    if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
        return [
            _build(loader, item, f"{path}.{index}", lines, mistakes)
            for index, item in enumerate(node.value)
        ]
    if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
                mistakes.append((line, f"expected text as a key under {path or 'the top'}"))
                continue
            inner = f"{path}.{key}" if path else key
            if key in result:
                first = lines[inner]
                mistakes.append((line, f"{inner} is set twice, first on line {first}"))
                continue
            lines[inner] = line
            result[key] = _build(loader, value_node, inner, lines, mistakes)
        return result
    return loader.construct_object(node, deep=True)


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else f"{value!r}"
