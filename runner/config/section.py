"""Building blocks of all config sections: frozen values, keys with a default and a description, and common types.

Keyword arguments hold any YAML value. JSON has no infinities, no keys but strings and no bytes, so such values are
written as an object with one key that starts with `$`. Invariant: `decoded(encoded(value))` equals `value` in every
type.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationInfo
from pydantic_core import PydanticCustomError

from runner.errors import allowed

Count = Annotated[int, Field(strict=True, ge=1)]
MOST_RANKS = 131_072
"""Of a plan: more than any machine has, and planned in seconds."""
Ranks = Annotated[int, Field(strict=True, ge=1, le=MOST_RANKS)]


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
    """Declare a config key, which the files in `conf/`, the reference and `--help` repeat.

    Args:
        default: The value where nothing sets the key, or REQUIRED.
        description: A phrase without a period.
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
    flat: dict[str, Any] = {}
    for path, leaf in leaves("", value):
        if not removed(flat, path, leaf, key):
            flat[path] = leaf
    return flat


def removed(entries: dict[str, Any], path: str, leaf: Any, key: str) -> bool:
    """Whether an entry removes `path`, or all below it, from earlier `entries`: with null as its value, or a minus
    before its path, for which the command line's `~` stands. The latter is refused where nothing is there."""
    if leaf is not None:
        return False
    name = path.removeprefix("-")
    gone = [other for other in entries if f"{other}.".startswith(f"{name}.")]
    if not gone and name != path:
        raise refusal(f"{key}.{name} cannot be removed: it is not there.{allowed(name, entries)}", f"{key}.{name}")
    for other in gone:
        del entries[other]
    return True


def leaves(path: str, value: Any, is_leaf: Callable[[Any], bool] = lambda _: False) -> Iterator[tuple[str, Any]]:
    """The values below `path` in nested mappings, each with its dotted path."""
    if not isinstance(value, Mapping) or is_leaf(value):
        yield path, value
        return
    for key, inner in value.items():
        yield from leaves(f"{path}.{key}" if path else str(key), inner, is_leaf)


def encoded(value: Any) -> Any:
    """`value` in terms of JSON: {"$float": "inf"}, {"$map": [[1, "a"]]}, {"$bytes": base64}, {"$text": base64 of UTF-8
    with lone surrogates}."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") and _is_unicode(key) for key in value):
            return {key: encoded(inner) for key, inner in value.items()}
        return {"$map": [[encoded(key), encoded(inner)] for key, inner in value.items()]}
    if isinstance(value, (list, tuple)):
        return [encoded(inner) for inner in value]
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, str) and not _is_unicode(value):
        return {"$text": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()}
    return value


def decoded(value: Any) -> Any:
    """The value that `encoded` was given. Raises ValueError for an object that it does not write."""
    if isinstance(value, list):
        return [decoded(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    match list(value.items()):
        case [("$float", inner)]:
            return float(inner)
        case [("$map", pairs)]:
            return {decoded(key): decoded(inner) for key, inner in pairs}
        case [("$bytes", inner)]:
            return base64.b64decode(inner, validate=True)
        case [("$text", inner)]:
            return base64.b64decode(inner, validate=True).decode("utf-8", "surrogatepass")
    return {key: decoded(inner) for key, inner in value.items()}


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)  # lone surrogates


def _read(value: Any, info: ValidationInfo) -> Any:
    if info.mode != "json":  # what YAML holds, which may look like what `encoded` writes
        return value
    try:
        return decoded(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"is not what a config.json holds: {error}") from None


Arguments = Annotated[dict[str, Any], BeforeValidator(_read), PlainSerializer(encoded, when_used="json")]
