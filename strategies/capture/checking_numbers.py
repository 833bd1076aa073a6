"""What Python asks of numbers that a tensor holds, and computes with them, while a forward is traced: whether one is
NaN, whether tensors are equal, whether a check raises; exponentials, roots and the like.

torch's symbols for such numbers follow algebra, in which x is x; NaN is not. `math` and numpy take no symbols. So these
questions are asked of tensors: constants answer them, checks that only raise are passed (`constants`), branches have
both sides; computing is done with tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from strategies.capture.constants import goes_on
from strategies.capture.nodes import asked_by_user, proxy_mode, replaced

SYMBOLS = (torch.SymFloat, torch.SymInt)
ASKING: dict[str, Callable[[Tensor], Tensor]] = {
    "isnan": torch.isnan,
    "isinf": torch.isinf,
    "isfinite": torch.isfinite,
}
COMPUTING = {
    name: getattr(torch, name)
    for name in "exp expm1 exp2 log log2 log10 log1p sqrt sin cos tan sinh cosh tanh".split()
    if hasattr(math, name)
}
"""Functions of one number, in double precision."""


@contextmanager
def asked_of_tensors() -> Iterator[None]:
    """Export within this context."""
    with ExitStack() as stack:
        for name, question in ASKING.items():
            for module in (math, np):
                stack.enter_context(replaced(module, name, _of_symbols(getattr(module, name), question, bool)))
        for name, function in COMPUTING.items():
            for module in (math, np):
                stack.enter_context(replaced(module, name, _of_symbols(getattr(module, name), function, Tensor.item)))
        for owner in (torch, Tensor):
            stack.enter_context(replaced(owner, "equal", _equal(owner.equal)))
            stack.enter_context(replaced(owner, "allclose", _close(owner.allclose)))
        for name, is_same in (("__eq__", True), ("__ne__", False)):
            compare = getattr(torch.SymFloat, name)
            stack.enter_context(replaced(torch.SymFloat, name, _with_itself(compare, is_same)))
        stack.enter_context(replaced(torch.SymBool, "__bool__", _passing(torch.SymBool.__bool__)))
        for kind in (*SYMBOLS, torch.SymBool):
            stack.enter_context(replaced(kind, "__format__", _format))
        yield


def _tensor(number: Any) -> Tensor:
    return torch.full((), number, dtype=torch.float64)


def _of_symbols(
    function: Callable[..., Any], of_tensors: Callable[[Tensor], Tensor], result: Callable[[Tensor], Any]
) -> Callable[..., Any]:
    def call(value: Any, *args: Any, **kwargs: Any) -> Any:
        return result(of_tensors(_tensor(value))) if isinstance(value, SYMBOLS) else function(value, *args, **kwargs)

    return call


def _equal(equal: Callable[..., bool]) -> Callable[..., bool]:
    def call(one: Tensor, other: Tensor) -> bool:
        if not (proxy_mode() is not None):
            return equal(one, other)
        return one.shape == other.shape and bool((one == other).all())

    return call


def _close(close: Callable[..., bool]) -> Callable[..., bool]:
    def call(input: Tensor, other: Tensor, *args: Any, **kwargs: Any) -> bool:
        if not (proxy_mode() is not None):
            return close(input, other, *args, **kwargs)
        return bool(torch.isclose(input, other, *args, **kwargs).all())

    return call


def _with_itself(compare: Callable[..., Any], is_same: bool) -> Callable[..., Any]:
    """A comparison by which a number that is compared with itself is asked whether it is NaN."""

    def call(one: torch.SymFloat, other: Any) -> Any:
        if isinstance(other, torch.SymFloat) and one.node.expr == other.node.expr:
            return bool(torch.isnan(_tensor(one))) is not is_same
        return compare(one, other)

    return call


def _passing(truth: Callable[[torch.SymBool], bool]) -> Callable[[torch.SymBool], bool]:
    """The truth of a number that a forward asks for, which may be that of a check."""

    def call(symbol: torch.SymBool) -> bool:
        try:
            return truth(symbol)
        except GuardOnDataDependentSymNode:
            answer = goes_on() if asked_by_user() else None
            if answer is None:
                raise
            return answer

    return call


def _format(symbol: Any, form: str) -> str:
    """A number that is not known, as a forward prints it while it is traced."""
    return "?" if form else str(symbol)
