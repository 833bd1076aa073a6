"""Backwards that the user wrote (torch.autograd.Function), which a captured graph loses.

Export looks through such a function to the operators of its forward, and the graph differentiates those. So a user's
own function is refused by its name. One that an installed library brings along is captured if its backward is what
autograd makes of its forward (a memory-saving activation, for instance): this is tried out on random numbers, on small
and large gradients and on gradients that are not finite.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction, _SingleLevelFunction
from torch.utils._pytree import tree_map_only

from strategies.core.errors import StrategyError

LIBRARY = "GeneratedBackwardFor_"
"""The name that autograd gives to the backward of a torch.library operator, which stays one node of the graph."""
TOLERANCE = 1e-8
"""Relative to the largest element of a gradient, in double precision."""
ELEMENTS, LENGTH = 1 << 16, 6
"""Functions of more elements are tried on tensors of which no dim is longer."""
SCALES = (1e-4, 1.0, 1e4)

Calls = dict[type, list[tuple[Any, ...]]]


@contextmanager
def calls_noted() -> Iterator[Calls]:
    """Note with what every torch.autograd.Function is called, however the user holds on to its `apply`."""
    found: Calls = {}

    def apply(cls: type, *args: Any) -> Any:
        found.setdefault(cls, []).append(args)
        return super(_SingleLevelFunction, cls).apply(*args)  # type: ignore[misc]

    level: Any = _SingleLevelFunction  # between Function, which calls it, and the class whose method it stands for
    level.apply = classmethod(apply)
    try:
        yield found
    finally:
        del level.apply


def functions_behind(loss: Tensor) -> list[type]:
    """The torch.autograd.Functions whose backwards lead to `loss`."""
    nodes = [node for node in _backward_nodes(loss) if isinstance(node, BackwardCFunction)]
    own = [node for node in nodes if not type(node).__name__.startswith(LIBRARY)]
    return list(dict.fromkeys(type(node)._forward_cls for node in own))  # type: ignore[attr-defined]


def check_backwards(functions: Sequence[type], calls: Calls) -> None:
    """Raises StrategyError for a function whose backward a graph of its forward would get wrong."""
    for function in functions:
        name = function.__name__
        if name == "CheckpointFunction":
            raise StrategyError(
                "MW904",
                "The model calls torch.utils.checkpoint with use_reentrant=True, whose backward is lost when a model "
                "is captured; call it with use_reentrant=False.",
            )
        different = {_kind(args): args for args in calls.get(function, [()])}
        if not _installed(function) or not all(_as_autograd(function, args) for args in different.values()):
            raise StrategyError(
                "MW904",
                f"The model uses the torch.autograd.Function {name}, whose own backward is lost when a model is "
                "captured (only its forward is seen, of which autograd makes another backward); write it with "
                "differentiable torch operators.",
            )


def _installed(function: type) -> bool:
    """Whether a class belongs to an installed library."""
    return "-packages" in (getattr(sys.modules.get(function.__module__), "__file__", None) or "")


def _backward_nodes(loss: Tensor) -> Iterator[Any]:
    waiting, seen = [loss.grad_fn], {loss.grad_fn}
    while waiting:
        node = waiting.pop()
        if node is not None:
            yield node
            fresh = {before for before, _ in node.next_functions} - seen
            seen |= fresh
            waiting += fresh


class _Context:
    """What a forward may do with its context, without effect."""

    def __init__(self, count: int) -> None:
        self.needs_input_grad = (True,) * count

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def _kind(args: Sequence[Any]) -> str:
    """Shapes, dtypes and constants of a call."""
    return repr([(arg.dtype, tuple(arg.shape)) if isinstance(arg, Tensor) else arg for arg in args])


def _as_autograd(function: type, args: Sequence[Any]) -> bool:
    """Whether the backward of `function` is that of its forward, on tensors of the shapes of `args`."""
    if not any(isinstance(arg, Tensor) for arg in args):
        return False
    generator = torch.Generator().manual_seed(0)
    longest = LENGTH if any(isinstance(arg, Tensor) and arg.numel() > ELEMENTS for arg in args) else ELEMENTS
    with torch.random.fork_rng([]), torch.enable_grad():
        for scale in SCALES:
            given = [_random(arg, generator, min(scale, 3.0), longest) for arg in args]
            try:
                ours = _gradients(function.apply, given, scale)  # type: ignore[attr-defined]
                plain = _gradients(_forward(function, len(given)), given, scale)
            except Exception:  # whatever user code raises on numbers that it did not expect
                return False
            if len(ours) != len(plain) or not all(map(_equal, ours, plain)):
                return False
    return True


def _forward(function: Any, count: int) -> Any:
    if function.setup_context is not Function.setup_context:
        return function.forward
    return lambda *args: function.forward(_Context(count), *args)


def _random(arg: Any, generator: torch.Generator, scale: float, longest: int) -> Any:
    if not isinstance(arg, Tensor):
        return arg
    shape = [min(int(size), longest) for size in arg.shape]
    if arg.is_floating_point():
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    return torch.randint(0, 2, shape, generator=generator).to(arg.dtype)


def _gradients(function: Any, args: Sequence[Any], scale: float) -> list[Tensor]:
    """The gradients of floating-point arguments for fixed gradients of the results, of which some are not finite."""
    leaves = tree_map_only(Tensor, lambda t: t.clone().requires_grad_(t.is_floating_point()), list(args))
    copies = tree_map_only(Tensor, lambda t: t.clone(), leaves)  # which the forward may write
    results = function(*copies)
    results = [r for r in (results if isinstance(results, tuple) else (results,)) if isinstance(r, Tensor)]
    results = [result for result in results if result.requires_grad]
    fixed = torch.Generator().manual_seed(1)
    upstream = [torch.randn(r.shape, generator=fixed, dtype=r.dtype) * scale for r in results]
    for gradient in upstream:
        gradient.view(-1)[:2] = torch.tensor([torch.inf, torch.nan], dtype=gradient.dtype)[: gradient.numel()]
    wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    found = torch.autograd.grad(results, wanted, upstream, allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(wanted, found, strict=True)]


def _equal(one: Tensor, other: Tensor) -> bool:
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return False
    size = float(other[finite].abs().max()) if finite.any() else 0.0
    return torch.allclose(one[finite], other[finite], rtol=TOLERANCE, atol=TOLERANCE * size)
