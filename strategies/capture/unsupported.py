"""Reject, with its line, what a forward graph cannot express, before export misreads it.

Hooks change or watch gradients from outside of the operators: export drops them silently, and the graph would train to
other numbers. Derivatives within a forward, packed sequences and sparse gradients end in torch errors that do not name
the cause.

Export looks through a torch.autograd.Function to the operators of its forward, and the graph differentiates those. So a
user's own function is refused by its name. One that an installed library brings along is captured if its backward is
what autograd makes of its forward (a memory-saving activation, for instance): this is tried out on random numbers, on
small and large gradients and on gradients that are not finite.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction, _SingleLevelFunction
from torch.nn.utils import rnn
from torch.utils._pytree import tree_map_only

from strategies.capture.nodes import at, in_library, op_of, replaced, short
from strategies.core.errors import StrategyError
from strategies.rules.registry import named

FUNCTIONAL = ("torch._functorch", "torch._C._functorch")
"""Where what torch.func does lives."""
HOOK = (
    "which would never be called: the ranks run operators of their own, not this module. Remove it, or write what it "
    "does as operators of the forward, e.g. h = h / 2 + (h / 2).detach() to halve a gradient."
)
DERIVATIVE = (
    "which is not captured: only derivatives of the loss are made. Write it as operators, or train with "
    "parallel.mode=stand_alone."
)
PACKED = (
    "whose shape depends on the values of lengths, so it is not one graph. Give the network the padded sequences, and "
    "let the loss ignore the padding."
)

LIBRARY = "GeneratedBackwardFor_"
"""The name that autograd gives to the backward of a torch.library operator, which stays one node of the graph."""
TOLERANCE = 1e-8
"""Relative to the largest element of a gradient, in double precision."""
ELEMENTS, LENGTH = 1 << 16, 6
"""Functions of more elements are tried on tensors of which no dim is longer."""
SCALES = (1e-4, 1.0, 1e4)

Calls = dict[type, list[tuple[Any, ...]]]


def check_hooks(objective: nn.Module) -> None:
    """Raises StrategyError for a parameter or module with a hook on its gradients."""
    for name, parameter in objective.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise StrategyError("MW904", f"Parameter {name.removeprefix('model.')} has a hook on its gradient, {HOOK}")
    for name, module in objective.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            called = name.removeprefix("model").removeprefix(".") or type(module).__name__
            raise StrategyError("MW904", f"Module {called} has a backward hook, {HOOK}")


@contextmanager
def refusing_unseen(training: bool) -> Iterator[None]:
    """Around an export: raises StrategyError, with the user's line, where the forward does what a graph cannot hold."""
    with ExitStack() as stack:
        if training:
            stack.enter_context(_refused(Tensor, "register_hook", "registers a hook on a gradient", HOOK))
        stack.enter_context(_refused(torch.autograd, "_engine_run_backward", "computes a derivative", DERIVATIVE))
        stack.enter_context(_refused(rnn, "_packed_sequence_init", "packs sequences", PACKED))
        yield


def check_nodes(graph: fx.Graph, training: bool) -> None:
    """Raises StrategyError for vmap, and in training for lookups whose gradients are sparse."""
    for node in graph.nodes:
        if str(getattr(node.target, "__module__", "")).startswith(FUNCTIONAL):
            raise StrategyError(
                "MW906",
                f"The model's forward calls torch.vmap or torch.func{at(node)}, which is not captured; write it with "
                "operators on the global batch.",
            )
        if not training or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if named(str(node.target), node.args, dict(node.kwargs)).get("sparse"):
            raise StrategyError(
                "MW906",
                f"{op_of(node)}{at(node)} has sparse=True, but gradients are dense here; leave it out (and take a "
                "dense optimizer).",
            )


def _refused(owner: Any, name: str, what: str, why: str) -> AbstractContextManager[None]:
    """Let the function `name` of `owner` raise meanwhile."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise StrategyError("MW906", f"The model's forward {what}{_users_line()}, {why}")

    return replaced(owner, name, refuse)


def _users_line() -> str:
    """` at file:line` of the innermost frame of the user's, or nothing."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        if not in_library(frame.f_code.co_filename):
            return f" at {short(frame.f_code.co_filename)}:{line}"
    return ""


@contextmanager
def calls_noted() -> Iterator[Calls]:
    """Note with what every torch.autograd.Function is called, however the user holds on to its `apply`."""
    noted: Calls = {}

    def apply(cls: type, *args: Any) -> Any:
        noted.setdefault(cls, []).append(args)
        return super(_SingleLevelFunction, cls).apply(*args)  # type: ignore[misc]

    level: Any = _SingleLevelFunction  # between Function, which calls it, and the class whose method it stands for
    level.apply = classmethod(apply)
    try:
        yield noted
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
    gradients = torch.autograd.grad(results, wanted, upstream, allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(wanted, gradients, strict=True)]


def _equal(one: Tensor, other: Tensor) -> bool:
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return False
    size = float(other[finite].abs().max()) if finite.any() else 0.0
    return torch.allclose(one[finite], other[finite], rtol=TOLERANCE, atol=TOLERANCE * size)
