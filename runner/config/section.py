"""Building blocks of all config sections: frozen values, keys with a default and a description, and common types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from runner.errors import allowed

Count = Annotated[int, Field(strict=True, ge=1)]


def dotted(name: str) -> str:
    """`name`, validated as a dotted name such as package.module.Name. Raises ValueError."""
    words = name.split(".")
    if len(words) < 2 or not all(word.isidentifier() for word in words):
        raise ValueError("is not a dotted name; write package.module.Name")
    return name


Dotted = Annotated[str, AfterValidator(dotted)]
Glob = Annotated[str, Field(min_length=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


REQUIRED: Any = ...
"""The default of a key that somebody must set."""


def setting(default: Any, description: str, *, unit: str = "", **constraints: Any) -> Any:
    """A config key: its default, meaning and unit, which the files in `conf/`, the reference and `--help` repeat.

    Args:
        default: The value where nothing sets the key, or REQUIRED.
        description: What the key means, in a phrase without a period.
        unit: The unit of the value, such as "seconds".
        constraints: Limits as pydantic's `Field` takes them.
    """
    return Field(default, description=description, json_schema_extra={"unit": unit} if unit else None, **constraints)


class Section(BaseModel):
    """A part of the config: no unknown keys, no change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def refusal(text: str, *keys: str, code: str = "MW205") -> PydanticCustomError:
    """A validation error with the paragraph `text`; `keys` are the dotted keys whose origin is named."""
    return PydanticCustomError("refusal", "{text}", {"text": text, "keys": keys, "code": code})


def by_path(value: Any, key: str) -> Any:
    """A mapping of dotted paths whose keys may be nested, as `parallel.place.layers.0=host` builds them on the command
    line, with one flat key per path; other values are returned unchanged. `key` is that of the mapping."""
    if not isinstance(value, Mapping):
        return value
    found: dict[str, Any] = {}
    for path, leaf in _leaves("", value):
        if not removed(found, path, leaf, key):
            found[path] = leaf
    return found


def removed(found: dict[str, Any], path: str, leaf: Any, key: str) -> bool:
    """Whether an entry takes `path`, or all below it, out of what was `found` before: with null as its value, or a
    minus before its path, for which the command line's `~` stands. The latter is refused where nothing is there."""
    if leaf is not None:
        return False
    name = path.removeprefix("-")
    gone = [other for other in found if other == name or other.startswith(f"{name}.")]
    if not gone and name != path:
        raise refusal(f"{key}.{name} cannot be removed: it is not there.{allowed(name, found)}", f"{key}.{name}")
    for other in gone:
        del found[other]
    return True


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, inner in value.items():
        yield from _leaves(f"{path}.{key}" if path else str(key), inner)
