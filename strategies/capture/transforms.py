"""Transforms of functions in a forward (torch.vmap; grad, vjp, jvp, jacrev, jacfwd and hessian of torch.func) as the
operators on complete tensors that they come to.

The exporter records what a forward calls above a transform: operators on single rows, and none for derivatives. From
the outermost transform to its end, what arrives below all of them is recorded instead, in the same graph, so that
tensors from outside are known. Formulas of backward are decomposed into operators of which all derivatives exist.
Invariant: outer derivatives are those of eager torch. What autograd detaches of what it saves is not detached; what the
user detaches, or computes under no_grad, is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
import torch.autograd.functional
from torch import Tensor, _vmap_internals, fx
from torch._functorch import eager_transforms, vmap
from torch._ops import OpOverload, _set_mode_pre_dispatch, unset_mode_pre_dispatch
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode, ProxyTorchDispatchMode
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves, tree_map_only

from strategies.capture import derivatives
from strategies.capture.derivatives import formulas, known_by_rules
from strategies.capture.nodes import proxy_mode, replaced, users_line
from strategies.capture.tracing import StandIns
from strategies.core.errors import StrategyError

aten = torch.ops.aten
PROXY = torch._C._TorchDispatchModeKey.PROXY
DETACHES = (Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
QUERIES = frozenset(
    {
        aten.is_same_size.default,
        aten._has_same_storage_numel.default,
        aten._linalg_check_errors.default,
        torch.ops.prim.device.default,
    }
)
"""Calls that return no tensor, made by forward-mode derivatives and torch.linalg."""
UNKNOWN = frozenset({"_func_increment_nesting", "lazy_dynamo_disallow", "lazy_dynamo_disable"})
"""Called by torch.func.functionalize and, in several versions of torch, by linearize."""
DENSE = {aten._efficientzerotensor.default: aten.zeros.default}
"""Zero tangents have no memory, which fake tensors do not support."""
NESTINGS = (
    (eager_transforms, "grad_increment_nesting"),
    (eager_transforms, "jvp_increment_nesting"),
    (vmap, "vmap_increment_nesting"),
)
"""The context managers that transforms enter, where they look them up."""
ENTRIES = ((eager_transforms, "_wrap_tensor_for_grad"), (vmap, "_add_batch_dim"))
"""The functions that wrap the tensors given to a transformed function."""


@contextmanager
def transforms_as_operators(stand_ins: StandIns) -> Iterator[None]:
    """Export within this context. Raises StrategyError, with the user's line, for what a transform cannot hold."""

    def nesting(enter: Callable[..., AbstractContextManager[int]]) -> Callable[..., AbstractContextManager[int]]:
        @contextmanager
        def call(*args: Any) -> Iterator[int]:
            stand_ins.transforms.add(users_line().removeprefix(" at "))
            with _beneath(), enter(*args) as level:
                yield level

        return call

    def entering(wrap: Callable[..., Any]) -> Callable[..., Any]:
        """Parameters from a dict that the model keeps are the traced ones in a transform, too."""
        return lambda tensor, *args, **options: wrap(stand_ins(tensor), *args, **options)

    vmap.lazy_load_decompositions()  # type: ignore[attr-defined]
    with ExitStack() as stack:
        stack.enter_context(replaced(vmap, "lazy_load_decompositions", lambda: None))  # or the exporter would record it
        for owner, name in NESTINGS:
            stack.enter_context(replaced(owner, name, nesting(getattr(owner, name))))
        for owner, name in ENTRIES:
            stack.enter_context(replaced(owner, name, entering(getattr(owner, name))))
        for name in UNKNOWN & vars(eager_transforms).keys():
            stack.enter_context(replaced(eager_transforms, name, _refused))
        # functionalize decrements in a finally clause
        stack.enter_context(replaced(eager_transforms, "_func_decrement_nesting", lambda: None))
        # the function of torch.func.vjp is called when its transform has ended
        derivative = partial(_called_beneath, eager_transforms._autograd_grad)
        stack.enter_context(replaced(eager_transforms, "_autograd_grad", derivative))
        for module in (_vmap_internals, torch.autograd.functional):  # used for batches of gradients
            stack.enter_context(replaced(module, "_vmap", partial(_made_beneath, module._vmap)))
        yield


def _called_beneath(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with _beneath():
        return function(*args, **options)


def _made_beneath(transform: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
    return partial(_called_beneath, transform(*args, **options))


@contextmanager
def _beneath() -> Iterator[None]:
    """Record operators below all transforms, not above; nothing where no graph is traced, or where that is done."""
    above = proxy_mode()
    if above is None:
        yield
        return
    detaches = _Detaches()
    below = _Below(above, detaches)
    functions = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]  # type: ignore[no-untyped-call]
    unset_mode_pre_dispatch(PROXY)  # type: ignore[no-untyped-call]
    kept = [mode for mode in reversed(functions) if not isinstance(mode, PreDispatchTorchFunctionMode)]
    for mode in kept:
        _push_mode(mode)  # type: ignore[no-untyped-call]
    try:
        with replaced(derivatives, "RECORDING", [below]), sdpa_kernel(SDPBackend.MATH), detaches, below:
            yield
    finally:
        for _ in kept:
            _pop_mode()  # type: ignore[no-untyped-call]
        _set_mode_pre_dispatch(above)  # type: ignore[no-untyped-call]
        for mode in reversed(functions):
            _push_mode(mode)  # type: ignore[no-untyped-call]
    below.as_called()


class _Detaches(TorchFunctionMode):
    """Notes when a user detaches a tensor."""

    active = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.cosine_similarity:
            return self._cosine(*args, **(kwargs or {}))
        if function not in DETACHES:
            return function(*args, **(kwargs or {}))
        with replaced(self, "active", True):
            return function(*args, **(kwargs or {}))

    def _cosine(self, x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
        """torch clamps norms in place under no_grad, so their gradients pass the clamp."""

        def bounded(x: Tensor) -> Tensor:
            norm = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
            with replaced(self, "active", True):
                more = (norm.clamp_min(eps) - norm).detach()
            bound: Tensor = x / (norm + more)
            return bound

        found: Tensor = (bounded(x1) * bounded(x2)).sum(dim)
        return found


class _Below(ProxyTorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators below autograd in the graph that `above` traces.

    Attributes:
        in_library: whether an operator of torch.library runs, whose derivative is its own.
    """

    in_library = False

    def __init__(self, above: ProxyTorchDispatchMode, detaches: _Detaches) -> None:
        super().__init__(above.tracer, above.tracing_mode, _allow_fake_constant=above._allow_fake_constant)
        self._detaches, self._differentiable = detaches, torch.is_grad_enabled()
        self._formulas: dict[Any, Callable[..., Any]] = {**formulas(), **DENSE}
        self._nodes: list[fx.Node] = []
        self._constants: set[fx.Node] = set()
        """Values that were computed without gradients."""

    def __torch_dispatch__(self, function: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in QUERIES:  # first: torch calls some of them where it cannot pass on an exception
            return function(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in function.tags:
            raise _refusal("draws random numbers; draw them in front of it and pass them on")
        if torch.is_grad_enabled() > self._differentiable:
            raise _refusal("switches gradients on under torch.no_grad; call it outside of no_grad")
        if function in self._formulas:
            with self:
                result = self._formulas[function](*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        constant = not (self._detaches.active or self.in_library) and torch.is_grad_enabled() < self._differentiable
        if constant and function._schema.is_mutable:
            if not self._constants.issuperset(self._nodes_of(args[0])):
                raise _refusal("writes in place under torch.no_grad; write out of place")
            args, kwargs = (args[0], *self._detached(args[1:])), self._detached(kwargs or {})
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if not self._detaches.active:  # an operator may return its operand, which a user has detached
            self._nodes += [node for node in self._nodes_of(result) if node.target is function]
        if constant:
            result = result if function._schema.is_mutable else self._detached(result)
            self._constants.update(self._nodes_of(result))
        return result

    def _nodes_of(self, value: Any) -> list[fx.Node]:
        tracer: Any = self.tracer
        proxies = [tracer.unwrap_proxy(leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        return [proxy.node for proxy in proxies if isinstance(proxy, fx.Proxy)]

    def _detached(self, value: Any) -> Any:
        with replaced(self._detaches, "active", True), self:
            return tree_map_only(Tensor, aten.detach.default, value)

    def as_called(self) -> None:
        """Make what was recorded what a model would call above autograd; what autograd detached is not detached."""
        for node in self._nodes:
            operands = [getattr(one.meta.get("val"), "ndim", 0) for one in node.all_input_nodes[:1]]
            node.target, node.args = known_by_rules(node.target, node.args, *operands)


def _refused(*_: Any, **__: Any) -> NoReturn:
    raise _refusal("is functionalized or linearized; call it, or torch.func.jvp of it")


def _refusal(what: str) -> StrategyError:
    where = users_line()
    return StrategyError("MW906", f"A function that forward gives to torch.func or torch.vmap{where} {what}.")
