"""The table from torch operator names to sharding rules, and the table of local functions that rules' programs call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    found: Callable[..., Any] = getattr(
        getattr(getattr(torch.ops, space), name), overload[0] if overload else "default"
    )
    return found
