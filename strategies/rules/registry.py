"""The table from torch operator names to sharding rules, the table of local functions that rules' programs call, and
an operator's arguments by the names that torch's schema gives them, whether a call wrote them or left them out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from strategies.core.graph import Operator, TensorSpec
from strategies.rules.sharding import Sharding

Rule = Callable[[Operator, Sequence[TensorSpec]], Sharding | None]
RULES: dict[str, Rule] = {}
LOCAL_FUNCTIONS: dict[str, Callable[..., Any]] = {}

R = TypeVar("R", bound=Rule)
F = TypeVar("F", bound=Callable[..., Any])


def rule(*operators: str) -> Callable[[R], R]:
    """Register a rule for torch operators, by name without overload. A rule returns None for calls it cannot cover."""

    def register(function: R) -> R:
        for name in operators:
            if name in RULES:
                raise ValueError(f"Operator {name} has two rules.")
            RULES[name] = function
        return function

    return register


def local_function(function: F) -> F:
    """Register a function that local programs call by the target `local.<name>`."""
    LOCAL_FUNCTIONS[function.__name__] = function
    return function


def resolve(target: str) -> Callable[..., Any]:
    """The callable behind a target: `aten.relu.default`, or `local.<name>`."""
    space, name, *overload = target.split(".")
    if space == "local":
        return LOCAL_FUNCTIONS[name]
    packet = getattr(getattr(torch.ops, space), name)
    function: Callable[..., Any] = getattr(packet, overload[0] if overload else "default")
    return function


def named(target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> value of every argument of torch operator `target`, in the schema's order; defaults where the call has
    none."""
    schema: Any = resolve(target)._schema  # type: ignore[attr-defined]
    values = {argument.name: argument.default_value for argument in schema.arguments}
    return values | dict(zip(values, args, strict=False)) | dict(kwargs)


def arguments(operator: Operator) -> dict[str, Any]:
    """Name -> value of every argument of a call, with `Ref`s in place of tensors."""
    return named(operator.target, operator.args, operator.keywords)


def dim_of(operator: Operator, rank: int) -> int:
    """The argument `dim` of a call on a tensor of `rank` dims, counted from the left."""
    return int(arguments(operator)["dim"]) % rank


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
