"""In-place operators and the operators that return what they write, paired by their schemas."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

OTHERWISE = {"normal_": "normal_functional"}
"""In-place operators whose functional overload has another name."""


def written_argument(target: OpOverload) -> str | None:
    """The name of the one argument that an operator writes; None if it writes several, or a list."""
    written = [
        argument for argument in target._schema.arguments if argument.alias_info and argument.alias_info.is_write
    ]
    return str(written[0].name) if len(written) == 1 and str(written[0].type) == "Tensor" else None


@cache
def functional_overload(target: OpOverload) -> OpOverload | None:
    """The operator that returns a new tensor with what `target` writes in place (or to `out`), or None."""
    space, _, name = target._schema.name.partition("::")
    if name.startswith("__i") and name.endswith("__"):
        name = f"__{name[3:]}"
    packet = getattr(getattr(torch.ops, space), OTHERWISE.get(name, name.removesuffix("_")), None)
    if packet is None:
        return None
    wanted = _arguments(target)
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    fitting = [found for found in overloads if not found._schema.is_mutable and _arguments(found) == wanted]
    fitting.sort(key=lambda found: found._overloadname != target._overloadname)
    return fitting[0] if fitting else None


def _arguments(target: OpOverload) -> list[tuple[str, str]]:
    """Types, and names of those that are given by name, without `out`."""
    return [
        (str(argument.type), argument.name if argument.kwarg_only else "")
        for argument in target._schema.arguments
        if not (argument.is_out)
    ]


def left_out(target: OpOverload, other: OpOverload, given: int) -> list[Any]:
    """The defaults of `target` for arguments after the first `given` for which its functional overload has none."""
    pairs = zip(target._schema.arguments[given:], other._schema.arguments[given:], strict=False)
    return [own.default_value for own, same in pairs if not same.kwarg_only and not same.has_default_value()]
