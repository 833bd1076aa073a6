"""`parallel.memory_limit`: a number of bytes, or a string such as 80GB."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from runner.config.section import refusal

UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
KEY = "parallel.memory_limit"


def _bytes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*", value)
    if matched is None or matched[2] not in UNITS:
        raise refusal(
            f"{KEY} = {value!r} is no number of bytes; write one such as 80GB, 512MiB or 1000000 (units "
            f"{', '.join(UNITS)}), or null for no limit.",
            KEY,
        )
    return int(float(matched[1]) * UNITS[matched[2]])


WRITTEN = WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]})
Bytes = Annotated[int, Field(strict=True, ge=1), BeforeValidator(_bytes), WRITTEN]
