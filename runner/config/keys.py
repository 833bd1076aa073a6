"""Every config key with its schema, for the command line, messages and generated files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from runner.config.parallel import SHORT
from runner.config.schema import Config
from runner.config.section import Section
from runner.errors import allowed


@dataclass(frozen=True)
class Key:
    """A key of the config, by its dotted path, with the section that it holds, or None for a value."""

    path: str
    info: FieldInfo
    section: type[Section] | None

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def meaning(self) -> str:
        """The description, with the unit and the values of an enumeration that it does not name."""
        options = [] if self.section or bool in _types(self.info.annotation) else enumerated(self.path)
        text = self.info.description or ""
        listed = "" if all(option in text for option in options) else f" ({', '.join(options)})"
        return f"{text}{listed}{f' [{self.unit}]' if self.unit else ''}"

    @property
    def unit(self) -> str:
        extra = self.info.json_schema_extra
        return str(extra["unit"]) if isinstance(extra, dict) else ""


def walk(section: type[Section] = Config, prefix: str = "") -> Iterator[Key]:
    """All keys in order, each section before its keys."""
    for name, info in section.model_fields.items():
        kind: Any = info.annotation
        inner = kind if isinstance(kind, type) and issubclass(kind, Section) else None
        yield Key(prefix + name, info, inner)
        if inner is not None:
            yield from walk(inner, f"{prefix}{name}.")


def find(path: str) -> Key | None:
    """The key with a dotted path, or None."""
    return next((key for key in walk() if key.path == path), None)


def children(parent: str) -> list[str]:
    """The names of the keys directly below a dotted path ("" is the top), none if it is not a section."""
    section = Config if not parent else (key := find(parent)) and key.section
    return list(section.model_fields) if section else []


def enumerated(path: str) -> tuple[str, ...]:
    """The enumerated values of a key in YAML; none for a key without an enumeration."""
    key = find(path)
    if key is not None and key.section is not None and path in {f"parallel.{name}" for name in SHORT}:
        key = find(f"{path}.{SHORT[key.name]}")
    if key is None or key.section is not None:
        return ()
    options = dict.fromkeys(map(_word, _literals(key.info.annotation)))
    return tuple(options) if options.keys() - {"null"} else ()


def open_mappings() -> dict[str, bool]:
    """The dotted keys whose own keys the user chooses, such as `model.args` and `parallel.strategies`, and whether each
    may be null."""
    types = {key.path: _types(key.info.annotation) for key in walk() if key.section is None}
    return {path: type(None) in kinds for path, kinds in types.items() if dict in kinds}


def unknown(path: str) -> str:
    """The error paragraph for an unknown key."""
    parent, _, name = path.rpartition(".")
    if parent and parent.partition(".")[0] != "hydra" and all(key.path != parent for key in walk()):
        return unknown(parent)
    known = children(parent) if parent else ["recipe", *children("")]
    if name in known:
        return f"{path} has no place, because {parent} was given as one value; give the keys of {parent} one by one."
    return f"{path} is not a config key.{allowed(name, known)}"


def table(prefixes: Sequence[str]) -> str:
    """The lines of `--help` for the keys that are, or are below, one of `prefixes`: default and meaning."""
    rows = [
        (f"{path}={value}", meaning)
        for prefix in prefixes
        for key in walk()
        for path, value, meaning in _rows(key)
        if f"{path}.".startswith(f"{prefix}.")
    ]
    width = min(max((len(row) for row, _ in rows), default=0), 44)
    return "\n".join(f"  {row:<{width}}  {meaning}".rstrip() for row, meaning in rows)


def flow(value: object) -> str:
    """A value in the flow style of YAML, on one line."""
    if value is ...:
        return "???"
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def default(key: Key) -> Any:
    """The default of a key as YAML holds it; Ellipsis where it has none."""
    value = ... if key.info.is_required() else key.info.get_default(call_default_factory=True)
    return list(value) if isinstance(value, tuple) else value


def _rows(key: Key) -> Iterator[tuple[str, str, str]]:
    """Path, default and meaning of a key, or of the keys in a mapping that is its default."""
    if key.section is not None:
        return
    value = default(key)
    if isinstance(value, dict) and value:
        yield from ((f"{key.path}.{name}", flow(inner), key.meaning) for name, inner in value.items())
    else:
        yield key.path, flow(value), key.meaning


def _word(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _literals(annotation: Any) -> Iterator[object]:
    """The values of an enumeration, or of one among alternatives; small ranges of integers belong to it."""
    for kind in _alternatives(annotation):
        if get_origin(kind) is Literal:
            yield from get_args(kind)
        elif kind is bool:
            yield from (True, False)
        elif kind is type(None):
            yield None
        elif get_origin(kind) is Annotated:
            marks = [mark for limit in get_args(kind)[1:] for mark in getattr(limit, "metadata", [])]
            low = next((mark.ge for mark in marks if hasattr(mark, "ge")), None)
            high = next((mark.le for mark in marks if hasattr(mark, "le")), None)
            yield from range(low, high + 1) if low is not None and high is not None and high - low < 10 else ()


def _types(annotation: Any) -> set[Any]:
    """The alternatives of a type without their parameters: dict and NoneType of `dict[str, int] | None`."""
    return {get_origin(kind) or kind for kind in _alternatives(annotation)}


def _alternatives(annotation: Any) -> Iterator[Any]:
    """The types in a union; integers with their limits."""
    inner = get_args(annotation)
    if get_origin(annotation) is Annotated and inner[0] is not int:
        yield from _alternatives(inner[0])
    elif get_origin(annotation) in (Union, UnionType):
        for kind in inner:
            yield from _alternatives(kind)
    else:
        yield annotation
