"""torch.autograd.Functions in a captured graph: one opaque operator with the author's own forward and backward.

Export looks through a function to the operators of its forward, of which autograd would make another backward. So a
call of a function is recorded as one node, and ranks call the function itself: both directions are the author's. It
runs replicated, or sliced where its author declared a rule (`strategies.sharding_rule`).

Two kinds are looked through, as nothing is lost: where no gradient flows (as in evaluation), and a function of an
installed library whose backward is what autograd makes of its forward (a memory-saving activation, for instance),
because its operators have rules. The latter is tried out on random numbers, on small and large gradients and on
gradients that are not finite.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.autograd import Function
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import Node as Backward
from torch.autograd.graph import _engine_run_backward, get_gradient_edge
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import track_tensor_tree
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from strategies.capture import derivatives
from strategies.capture.constants import behind, traced
from strategies.capture.nodes import AUTOGRAD_FUNCTION, beneath_tracing, draws, fakes, file_of, proxy_mode, replaced
from strategies.core.errors import StrategyError
from strategies.rules.declared import function_name, lines_of
from strategies.rules.registry import PLAIN, function_class

LIBRARY = "GeneratedBackwardFor_"
"""The name that autograd gives to the backward of a torch.library operator, which stays one node of the graph."""
CALL_OUTSIDE = "call it outside of that, or write its derivative as operators (x + (value - x).detach())"
TOLERANCE = 1e-8
"""Relative to the largest element of a gradient, in double precision."""
ELEMENTS, LENGTH = 1 << 16, 6
"""Functions of more elements are tried on tensors of which no dim is longer."""
SCALES = (1e-4, 1.0, 1e4)
Edge: TypeAlias = tuple[Backward, int]
"""A node of autograd's graph and the number of its result."""


@contextmanager
def functions_as_operators(training: bool) -> Iterator[None]:
    """Record calls of torch.autograd.Functions in the exports within this context, however the user holds on to their
    `apply`. Raises StrategyError, within the call, for a function that ranks could not call."""
    tried: dict[tuple[type, str], bool] = {}
    drawing: dict[tuple[type, str], bool] = {}
    written: list[_Written] = []

    def apply(cls: Any, *args: Any) -> Any:
        run = super(_SingleLevelFunction, cls).apply
        tracing = proxy_mode()
        if tracing is None and derivatives.RECORDING:
            if not cls.__name__.startswith(LIBRARY):
                raise _refusal(cls, "is called in a function that torch.func or torch.vmap transforms", CALL_OUTSIDE)
            with replaced(derivatives.RECORDING[-1], "in_library", True):
                return run(*args)
        if tracing is None or cls.__name__.startswith(LIBRARY):
            return run(*args)
        learns = training and _learns(args)
        if learns and cls.__name__ == "CheckpointFunction":
            return _checkpointed(cls, args, tracing.tracer)
        if lines_of(function_name(cls)) or (learns and _opaque(cls, args, tried)):
            results = _recorded(cls, args, run, tracing.tracer, written)
            if learns:
                _check_backward(cls, args, drawing)
            return results
        flows = torch.is_grad_enabled() and (learns or not training)
        with torch.set_grad_enabled(flows):  # which ends what forward itself switches, in the graph too
            return run(*args)

    def without_reentry(*args: Any, **kwargs: Any) -> Iterator[None]:
        tracing = proxy_mode()
        recomputes = tracing is not None and training and torch.is_grad_enabled()
        with _written_once(tracing.tracer.graph) if tracing is not None and recomputes else nullcontext():
            yield from generator(*args, **kwargs)

    generator = checkpoint._checkpoint_without_reentrant_generator
    level: Any = _SingleLevelFunction  # between Function, which calls it, and the class whose method it stands for
    level.apply = classmethod(apply)
    try:
        with replaced(checkpoint, "_checkpoint_without_reentrant_generator", without_reentry):
            yield
        for call in written:
            call.check_unused()
    finally:
        del level.apply


def _opaque(function: Any, args: Sequence[Any], tried: dict[tuple[type, str], bool]) -> bool:
    """Whether the backward of a function is lost if its operators are seen."""
    if not _installed(function):
        return True
    key = function, _kind(args)
    if key not in tried:
        with _outside():
            tried[key] = _as_autograd(function, args)
    return not tried[key]


def _check_backward(function: type, args: Sequence[Any], drawing: dict[tuple[type, str], bool]) -> None:
    """Raises StrategyError for a function whose backward draws random numbers, other ones on every rank."""
    key = function, _kind(args)
    if key not in drawing:
        with _outside():
            drawing[key] = _draws_in_backward(function, args)
    if drawing[key]:
        raise _refusal(
            function, "draws random numbers in backward", "draw them outside (torch.rand_like) and pass them to it"
        )


@contextmanager
def _outside() -> Iterator[None]:
    """Outside of the export, with torch's own backward and random numbers that leave no trace."""
    derivatives = replaced(torch.autograd, "_engine_run_backward", _engine_run_backward)
    with _disable_current_modes(), torch._C.DisableTorchFunction(), derivatives:
        with torch.random.fork_rng([]), torch.enable_grad():
            yield


def _checkpointed(function: Any, args: Sequence[Any], tracer: Any) -> Any:
    """The results of a call of torch's own `CheckpointFunction(run_function, preserve_rng_state, *args)`, or of
    `CheckpointFunction(run_function, length, *args)` of improved-diffusion and its descendants: those of the
    function that backward would recompute, whose gradients are the same. `parallel.recompute` decides what ranks do.

    The latter makes gradients for its arguments alone, of which the first `length` are those of the function, and draws
    random numbers anew in backward, of which no gradient is right.
    """
    own = function is checkpoint.CheckpointFunction
    copied = list(inspect.signature(function.forward).parameters) == ["ctx", "run_function", "length", "args"]
    tensors = [leaf for leaf in tree_leaves(args[2:]) if isinstance(leaf, Tensor)]
    known = (own and args[1]) or (copied and type(args[1]) is int)
    if not known or len(tensors) != sum(isinstance(arg, Tensor) for arg in args[2:]):
        raise StrategyError(
            "MW904",
            f"The model recomputes a part by {function_name(function)}, which makes gradients that capture cannot "
            "see; call torch.utils.checkpoint.checkpoint with use_reentrant=False instead.",
        )
    with _written_once(tracer.graph) as recorded:
        results = args[0](*args[2 : None if own else 2 + args[1]])
    if own:
        return results
    if any(map(draws, recorded)):
        raise _refusal(function, "draws other random numbers in backward", "call torch.utils.checkpoint.checkpoint")
    edges = {_edge(tensor) for tensor in tensors if tensor.requires_grad}
    if not edges.issuperset(_ends(results, edges)):
        raise StrategyError(
            "MW904",
            f"The model calls {function_name(function)} with a function that uses parameters or activations for which "
            "it makes no gradient, as they are not among its arguments; pass all of them.",
        )
    return results


@contextmanager
def _written_once(graph: fx.Graph) -> Iterator[list[Node]]:
    """The nodes of a checkpointed part, which is traced within this context. Raises StrategyError where they write to
    buffers, or a buffer is replaced by what is computed from it."""
    before, recorded, replacing = len(graph.nodes), list[Node](), list[tuple[Tensor, Tensor]]()

    def assigned(module: nn.Module, name: str, value: Tensor | None) -> None:
        old = module._buffers.get(name)
        if old is not None and value is not None and value is not old:
            replacing.append((old, value))

    hook = register_module_buffer_registration_hook(assigned)
    try:
        yield recorded
    finally:
        hook.remove()
    nodes = list(graph.nodes)
    recorded += nodes[before:]
    if any(map(_writes_outside, recorded)) or any(_follows(old, value, nodes) for old, value in replacing):
        raise StrategyError(
            "MW904",
            "The model calls torch.utils.checkpoint with a part that writes to buffers, as batch norm does, and "
            "backward would write once more; call the part itself and set parallel.recompute, which writes once.",
        )


def _writes_outside(node: Node) -> bool:
    """Whether a node writes to what the graph does not compute."""
    written = _aliased(node) if getattr(_schema(node), "is_mutable", False) else None
    while written is not None and _aliased(written) is not None:
        written = _aliased(written)  # what a view is of
    return written is not None and written.op != "call_function"


def _follows(old: Tensor, value: Tensor, nodes: Sequence[Node]) -> bool:
    """Whether a value is computed from an old one."""
    first, last = traced(old)[0], traced(value)[0]
    return first is not None and last is not None and first.node in behind(last.node, nodes)


def _schema(node: Node) -> Any:
    return getattr(node.target, "_schema", None)


def _aliased(node: Node) -> Node | None:
    """The operand whose storage the result of a view or of a write in place has."""
    schema = _schema(node)
    if schema is None or not schema.returns or schema.returns[0].alias_info is None:
        return None
    given = [node.kwargs[one.name] for one in schema.arguments if one.is_out and one.name in node.kwargs]
    return next((operand for operand in (*given, *node.args) if isinstance(operand, Node)), None)


def _edge(tensor: Tensor) -> Edge:
    return get_gradient_edge(tensor)[:2]


def _ends(results: Any, known: Set[Edge]) -> Iterator[Edge]:
    """Where gradients of `results` end: at `known` edges or at leaves."""
    left = [_edge(leaf) for leaf in tree_leaves(results) if isinstance(leaf, Tensor) and leaf.requires_grad]
    seen: set[Edge] = set()
    while left:
        edge = left.pop()
        if edge in seen:
            continue
        seen.add(edge)
        further = [(node, number) for node, number in edge[0].next_functions if node is not None]
        if edge in known or not further:
            yield edge
        else:
            left += further


def _learns(args: Sequence[Any]) -> bool:
    """Whether autograd makes gradients for arguments of a function: for tensors that are arguments themselves."""
    return torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)


def _installed(function: type) -> bool:
    """Whether a class belongs to an installed library."""
    return "-packages" in file_of(function.__module__)


class _Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether a random generator advances."""

    draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Written:
    """A call of a function that writes into its arguments. Ranks give it copies, so nothing else may read them."""

    function: type
    node: Node
    storages: Set[StorageWeakRef]
    """Of the arguments that it writes."""

    def check_unused(self) -> None:
        """Raises StrategyError where memory that the function wrote is read after the call, other than through its
        results, or was not made within forward."""
        nodes = list(self.node.graph.nodes)
        at = nodes.index(self.node)
        aliases = {node for node in nodes[:at] if self._holds(node)}
        readers = {user for alias in aliases for user in alias.users}
        if any(alias.op != "call_function" for alias in aliases) or not readers.isdisjoint(nodes[at + 1 :]):
            raise _refusal(self.function, "writes into an argument that is used elsewhere, too", "write into a clone")

    def _holds(self, node: Node) -> bool:
        return any(_storage(fake) in self.storages for fake in fakes(node.meta.get("val")))


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _recorded(function: Any, args: Sequence[Any], run: Callable[..., Any], tracer: Any, written: list[_Written]) -> Any:
    """What `run` returns for `args`, as results of one node."""
    name = function_name(function)
    _check_found(function, name)
    for position, arg in enumerate(args):
        if isinstance(arg, Tensor):
            continue
        for odd in (leaf for leaf in tree_leaves(arg) if not isinstance(leaf, PLAIN)):
            tensor = isinstance(odd, Tensor)
            what = "tensors in a list, for which autograd makes no gradient" if tensor else f"a {type(odd).__name__}"
            raise _refusal(function, f"takes {what} (argument {position})", "pass tensors and numbers one by one")
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    versions = [tensor._version for tensor in tensors]
    watched = _Watched()  # type: ignore[no-untyped-call]
    with beneath_tracing(), watched:
        results = run(*args)
    if watched.draws:
        raise _refusal(function, "draws random numbers", "draw them outside (torch.rand_like) and pass them to it")
    if not all(isinstance(result, Tensor) for result in (results if isinstance(results, tuple) else (results,))):
        raise _refusal(function, "returns something that is no tensor", "return tensors alone")
    changed = {id(arg): arg for arg, version in zip(tensors, versions, strict=True) if arg._version != version}
    given = [torch.ops.aten.alias.default(arg) if _unseen(arg, tracer) else arg for arg in args]
    given = [torch.ops.aten.clone.default(arg) if id(arg) in changed else arg for arg in given]
    proxies = [tracer.unwrap_proxy(arg) if isinstance(arg, Tensor) else arg for arg in given]
    node = tracer.create_proxy(
        "call_function", AUTOGRAD_FUNCTION, (name, _autocast(tensors), *proxies), {}, function.__name__.lower()
    )
    if changed:
        written.append(_Written(function, node.node, {_storage(arg) for arg in changed.values()}))
    return track_tensor_tree(results, node, constant=None, tracer=tracer)


def _unseen(arg: Any, tracer: Any) -> bool:
    """Whether the graph does not know a tensor yet, such as an attribute of a module that is no buffer."""
    return isinstance(arg, Tensor) and isinstance(tracer.unwrap_proxy(arg), Tensor)


def _autocast(tensors: Sequence[Tensor]) -> str | None:
    """The dtype of the autocast around a call, if there is one."""
    device = next((tensor.device.type for tensor in tensors), "cpu")
    if not torch.is_autocast_enabled(device):
        return None
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def _check_found(function: Any, name: str) -> None:
    """Raises StrategyError for a function that other processes do not find by its name."""
    module, _, path = name.partition("::")
    try:
        found = function_class(path, module)
    except (ImportError, AttributeError):
        found = None
    if found is not function:
        raise _refusal(function, f"is not found as {module}.{path}", "define it at the top of a module")


def _refusal(function: type, what: str, remedy: str) -> StrategyError:
    name = function.__name__.removeprefix("Vmapped").removesuffix("Generated")  # as torch.func names its own
    return StrategyError(
        "MW904",
        f"The torch.autograd.Function {name} {what}, so the ranks could not call it as one operator; {remedy}.",
    )


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


def _draws_in_backward(function: Any, args: Sequence[Any]) -> bool:
    """Whether the gradients of `function` follow the state of torch's generator, on small tensors."""
    found = []
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(0)
        given = [_random(arg, generator, 1.0, LENGTH) for arg in args]
        torch.manual_seed(seed)
        try:
            found.append(_gradients(function.apply, given, 1.0))
        except Exception:  # whatever user code raises on numbers that it did not expect
            return False
    return not all(map(_equal, *found))


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
