"""An operator's arguments by the names that torch's schema gives them, whether a call wrote them or left them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strategies.rules.registry import resolve


def named(target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> value of every argument of torch operator `target`, in the schema's order; defaults where the call has
    none."""
    schema: Any = resolve(target)._schema  # type: ignore[attr-defined]
    found = {argument.name: argument.default_value for argument in schema.arguments}
    found.update(zip(found, args, strict=False))
    found.update(kwargs)
    return found


def changed(
    target: str, args: Sequence[Any], kwargs: Mapping[str, Any], **changes: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of `target`, positional and by keyword, with `changes` by name."""
    schema: Any = resolve(target)._schema  # type: ignore[attr-defined]
    values = named(target, args, kwargs) | changes
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    given = max([len(args), *(positional.index(name) + 1 for name in changes if name in positional)])
    rest = {name: values[name] for name in values if name not in positional[:given]}
    keep = {*kwargs, *changes}
    return tuple(values[name] for name in positional[:given]), {n: v for n, v in rest.items() if n in keep}
