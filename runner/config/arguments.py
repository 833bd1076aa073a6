"""Keyword arguments with any YAML values, and their encoding as JSON.

JSON has no infinities, no keys but strings and no bytes, so such values are written as an object with one key that
starts with `$`; all others are written as they are. Invariant: `decoded(encoded(value))` equals `value` in every type.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, ValidationInfo

FLOAT, MAP, BYTES, TEXT = "$float", "$map", "$bytes", "$text"


def encoded(value: Any) -> Any:
    """`value` in terms of JSON: {"$float": "inf"}, {"$map": [[1, "a"]]}, {"$bytes": base64}, {"$text": base64 of UTF-8
    with lone surrogates}."""
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: repr(value)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") and _is_unicode(key) for key in value):
            return {key: encoded(inner) for key, inner in value.items()}
        return {MAP: [[encoded(key), encoded(inner)] for key, inner in value.items()]}
    if isinstance(value, (list, tuple)):
        return [encoded(inner) for inner in value]
    if isinstance(value, bytes):
        return {BYTES: base64.b64encode(value).decode()}
    if isinstance(value, str) and not _is_unicode(value):
        return {TEXT: base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()}
    return value


def decoded(value: Any) -> Any:
    """The value that `encoded` was given. Raises ValueError for an object that it does not write."""
    if isinstance(value, list):
        return [decoded(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    for mark, inner in value.items() if len(value) == 1 else ():
        if mark == FLOAT:
            return float(inner)
        if mark == MAP:
            return {decoded(key): decoded(one) for key, one in inner}
        if mark == BYTES:
            return base64.b64decode(inner, validate=True)
        if mark == TEXT:
            return base64.b64decode(inner, validate=True).decode("utf-8", "surrogatepass")
    return {key: decoded(inner) for key, inner in value.items()}


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _read(value: Any, info: ValidationInfo) -> Any:
    if info.mode != "json":  # what YAML holds, which may look like what `encoded` writes
        return value
    try:
        return decoded(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"is not what a config.json holds: {error}") from None


Arguments = Annotated[dict[str, Any], BeforeValidator(_read), PlainSerializer(encoded, when_used="json")]
