"""Sharding rules that authors declare for operators of their own: torch.autograd.Functions, torch.library operators and
Triton kernels.

Capture copies the lines into the graph, so ranks need not import the declaration, and a changed line is another graph
to the cache of plans. Without a declaration such an operator runs replicated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch

from strategies.core.graph import Operator, TensorSpec
from strategies.rules.notation import Term, notation, parse
from strategies.rules.registry import Rule
from strategies.rules.sharding import Sharding

T = TypeVar("T")
WORD = re.compile(r"!?[A-Za-z_]\w*|[A-Za-z_]*\.\.\.|!\.\.\.|!\d+")
_lines: dict[str, tuple[str, ...]] = {}


def sharding_rule(*lines: str) -> Callable[[T], T]:
    """Declare how an operator may be sliced, in factor notation (`strategies.rules.notation`).

    A slice of a factor is computed by the operator itself, so a line promises that the operator, on slices along the
    dims that carry a factor, returns the slices of its results; for a factor that no result carries, summands of them.
    Its backward must do the same: the gradient of an operand's slice follows from the results' slices. `run verify`
    compares with one device.

    Args:
        lines: such as `"b s d, !d -> b s d"`; the first one that fits the shapes of a call is taken, and a call that
            fits none runs replicated. Dims with one letter have one size (an operand may have 1, which is broadcast),
            every letter of a result stands in an operand, and all results have the same letters.

    Returns:
        A decorator for a torch.autograd.Function, for what `torch.library.custom_op` or `triton_op` returns, and for an
        operator such as `torch.ops.mylib.scan` or its name `"mylib::scan"`. It returns what it decorates.

    Raises:
        ValueError: a line that is not in this notation, or an operator of torch's own.
        TypeError: the decorated object is no operator.

    Examples:
        >>> @sharding_rule("b s d -> b s d")
        ... class Doubled(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return 2 * x
        ...
        ...     @staticmethod
        ...     def backward(ctx, gradient):
        ...         return 2 * gradient
    """
    if not lines:
        raise ValueError('sharding_rule needs a line such as "b s d -> b s d".')
    for line in lines:
        _check(line)

    def declare(operator: T) -> T:
        name = _name(operator)
        if name.startswith("aten::"):
            raise ValueError(f"sharding_rule is for operators of your own; {name} is torch's.")
        _lines[name] = lines
        return operator

    return declare


def lines_of(op: str) -> tuple[str, ...]:
    """What was declared for the operator `op`, `library::name` or `module::Class`."""
    return _lines.get(op, ())


@cache
def rule_of_lines(lines: tuple[str, ...]) -> Rule:
    """The rule that `lines` are."""

    def first_that_fits(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
        read = (notation(line, operator, specs, strict=True) for line in lines)
        return next((sharding for sharding in read if sharding is not None), None)

    return first_that_fits


def function_name(function: type) -> str:
    """The name of a torch.autograd.Function as an operator."""
    return f"{function.__module__}::{function.__qualname__}"


def _name(operator: Any) -> str:
    if isinstance(operator, str) and re.fullmatch(r"\w+::\w+", operator):
        return operator
    if isinstance(operator, type) and issubclass(operator, torch.autograd.Function):
        return function_name(operator)
    if isinstance(operator, torch._ops.OpOverloadPacket):
        return str(operator._qualified_op_name)
    overload = getattr(operator, "_opoverload", operator)  # of what torch.library.custom_op returns
    if isinstance(overload, torch._ops.OpOverload):
        return str(overload._schema.name)
    raise TypeError(
        "sharding_rule decorates a torch.autograd.Function, a torch.library operator or its name 'library::operator'; "
        f"this is {operator!r}."
    )


def _check(line: str) -> None:
    """Raises ValueError for a line that is not in factor notation, or with a result that comes from nowhere."""
    wrong = f"sharding_rule({line!r}): "
    if not isinstance(line, str) or line.count("->") != 1:
        raise ValueError(wrong + 'write operands -> results, such as "b s d, !d -> b s d".')
    read = parse(line)

    def words(terms: Sequence[Term]) -> set[str]:
        return {word for term in terms for word in term.words}

    if odd := sorted(word for word in words((*read.operands, *read.results)) if not WORD.fullmatch(word)):
        raise ValueError(f"{wrong}{odd[0]!r} is no dim; write a letter or word, ! before it if it must be replicated.")
    for term in (*read.operands, *read.results):
        if sum(word.endswith("...") for word in term.words) > 1:
            raise ValueError(f"{wrong}one ... stands for any number of dims; a tensor has at most one.")
        letters = [word for word in term.words if not word.startswith("!")]
        if twice := sorted(word for word in letters if letters.count(word) > 1):
            raise ValueError(f"{wrong}{twice[0]} stands twice in one tensor, whose dims would be sliced by one axis.")
    used = words((*read.operands, *read.results))
    if both := sorted(word for word in used if f"!{word}" in used):
        raise ValueError(f"{wrong}{both[0]} is sliced in one place and replicated in another; take two letters.")
    carried = {word for word in words(read.results) if not word.startswith("!")}
    if lacking := sorted(carried - words(read.operands)):
        raise ValueError(f"{wrong}no operand carries {lacking[0]}; write !{lacking[0]} where the result has it.")
    for number, term in enumerate(read.results, 1):
        if lacking := sorted(carried - {*term.words}):
            raise ValueError(
                f"{wrong}result {number} lacks {lacking[0]}, which another result carries, so a slice of {lacking[0]} "
                f"would have a part of result {number} or all of it; write !{lacking[0]} in operands and results."
            )
