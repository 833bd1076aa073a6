"""Modules whose forward decides by values, such as a loop over the experts that the tokens of a batch choose or a loss
that looks for pairs, in a captured graph: one node for each call.

All ranks compute it for the complete batch, so it is the loss or within the model, never the model itself.

A module can be one node where ranks that call it can do nothing but compute: it takes tensors and plain values, all
its tensors are parameters and buffers, no module in it has hooks, and on random numbers it draws none, writes into no
tensor, changes no attribute, and returns new tensors alone, since a number might be another one for other values.
Invariant: the graph holds for all values, those that decide in the module included.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import _get_dispatch_mode_pre_dispatch
from torch.fx.experimental.proxy_tensor import track_tensor_tree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from strategies.capture.nodes import MODULE_CALL, beneath_tracing, forwards_wrapped
from strategies.capture.repeated_modules import TABLES
from strategies.rules.module_calls import ModuleCall, Results, Slot, as_text, autocast_dtype, called_module, slotted
from strategies.rules.registry import PLAIN

INTEGERS = (0, 1, 2, -1, None)
"""What tensors of integers hold in trials, to see whether the shapes of results follow values: -1 and 0 often stand for
nothing, None for 0 and 1 in turn."""
ELIGIBLE = ("loss", "model.")
"""How paths in an objective begin of what may be one node: the loss, and what is within the model."""


class NotOpaque(Exception):
    """A module of this class cannot be one node. `does_more` says that it draws, or changes what it has."""

    def __init__(self, owner: type, *, does_more: bool = False) -> None:
        super().__init__(owner)
        self.owner, self.does_more = owner, does_more


class Varies(NotOpaque):
    """What it returns has other shapes for other values."""


class OpaqueModules:
    """The modules in `root` that are to be one node, of the classes in `chosen`."""

    def __init__(self, root: nn.Module) -> None:
        self.root, self.chosen, self.refused = root, set[type](), set[type]()
        self.known = {id(vars(module)): (path, type(module)) for path, module in root.named_modules()}
        """By what the exporter's stand-ins for a module share with it."""

    def choose(self, modules: Sequence[nn.Module]) -> bool:
        """Choose the class of the first of these, which are around one another, that may be one node."""
        for module in modules:
            path, owner = self.known.get(id(vars(module)), ("", nn.Module))
            if path.startswith(ELIGIBLE) and owner not in self.chosen | self.refused:
                self.chosen.add(owner)
                return True
        return False

    def refuse(self, owner: type) -> None:
        self.chosen.discard(owner)
        self.refused.add(owner)

    @contextmanager
    def as_nodes(self) -> Iterator[None]:
        """Export within this context."""
        skeletons = dict[int, nn.Module]()
        for module in self.root.modules():
            if type(module) in self.chosen:
                check_parts(module)
                skeletons[id(vars(module))] = skeleton_of(module)
        with forwards_wrapped(self.chosen, lambda forward: _watched(forward, skeletons)):
            yield


def check_parts(module: nn.Module) -> None:
    """Raises NotOpaque where modules in a module have hooks, or attributes hold tensors or modules that are not
    registered."""
    parts = list(module.modules())
    hooked = any(one._forward_hooks or one._forward_pre_hooks for one in parts[1:])
    if hooked or any(isinstance(leaf, (Tensor, nn.Module)) for leaf in tree_leaves(_attributes(module))):
        raise NotOpaque(type(module))


def skeleton_of(module: nn.Module) -> nn.Module:
    """A copy on the meta device, without hooks of its own, which are called around its forward."""
    tensors = [*module.parameters(), *module.buffers()]
    made: nn.Module = copy.deepcopy(module, {id(one): _on_meta(one) for one in tensors})
    for name, value in vars(made).items():
        if name.endswith("_hooks") and value:
            setattr(made, name, type(value)())
    return made


def _attributes(module: nn.Module) -> list[dict[str, Any]]:
    """What a module and those in it have beside parameters, buffers, modules and hooks."""
    return [
        {name: value for name, value in vars(one).items() if name not in TABLES and not name.endswith("_hooks")}
        for one in module.modules()
    ]


def _on_meta(tensor: Tensor) -> Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _watched(forward: Callable[..., Any], skeletons: dict[int, nn.Module]) -> Callable[..., Any]:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tracing = _get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY)  # type: ignore[no-untyped-call]
        skeleton = skeletons.get(id(vars(module)))
        if tracing is None or skeleton is None:
            return forward(module, *args, **kwargs)
        state = dict(module.named_parameters()) | dict(module.named_buffers())
        return recorded(type(module).__name__.lower(), forward, skeleton, state, (args, kwargs), tracing.tracer)

    return call


def recorded(
    name: str,
    forward: Callable[..., Any],
    skeleton: nn.Module,
    state: dict[str, Tensor],
    given: Any,
    tracer: Any,
    *,
    on_trial: bool = False,
) -> Any:
    """What the forward of a module returns for `given`, as results of one node. `state` are the tensors of the module
    that `skeleton` is a copy of. Raises NotOpaque where it cannot be one; `on_trial` no node is made."""
    if not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in tree_leaves(given)):
        raise NotOpaque(type(skeleton))
    tensors, arguments = slotted(given)
    operands = [*tensors, *state.values()]
    proxies = [tracer.unwrap_proxy(one) for one in operands]
    dense = all(one.layout is torch.strided for one in operands)
    if not dense or not all(isinstance(proxy, fx.Proxy) for proxy in proxies):
        raise NotOpaque(type(skeleton))
    call = ModuleCall(skeleton, tuple(state), arguments, autocast_dtype(operands[0].device))
    with _disable_current_modes(), torch.device("cpu"):
        returned = [one for number in INTEGERS for one in _tried(call, forward, tensors, number)]
        found, structure = tree_flatten(returned[0] if returned else NotOpaque)
        results = _looks(found)
        if not returned:
            raise NotOpaque(type(skeleton))
        if any(tree_flatten(one)[1] != structure or _looks(one) != results for one in returned):
            raise Varies(type(skeleton))
        try:
            text = as_text(replace(call, results=results))
        except (AttributeError, TypeError, pickle.PicklingError) as error:  # as pickle says that it cannot
            raise NotOpaque(type(skeleton)) from error
    if on_trial:
        return None
    with beneath_tracing():
        made = called_module(text, *operands)
    node = tracer.create_proxy("call_function", MODULE_CALL, (text, *proxies), {}, name)
    tracked = iter(track_tensor_tree(made, node, constant=None, tracer=tracer))
    return tree_unflatten([next(tracked) if isinstance(one, Tensor) else one for one in found], structure)


def _looks(returned: Any) -> Results:
    """Shapes and dtypes of the tensors that a module returns."""
    return tuple((tuple(one.shape), one.dtype) for one in tree_leaves(returned) if isinstance(one, Tensor))


def _tried(
    call: ModuleCall, forward: Callable[..., Any], tensors: Sequence[Tensor], integer: int | None
) -> Iterator[Any]:
    """What a module returns for random numbers, and one integer; nothing where it fails, as of an integer that is no
    valid index. Raises NotOpaque where it does more than to compute."""
    generator = torch.Generator().manual_seed(0)
    module = copy.deepcopy(call.module).to_empty(device="cpu")
    for one in (*module.parameters(), *module.buffers()):
        one.data = _random(one, generator)
    leaves = [_random(tensor, generator, integer).requires_grad_(tensor.requires_grad) for tensor in tensors]
    given = [leaf.clone() for leaf in leaves]  # which may be written
    args, kwargs = tree_map_only(Slot, lambda slot: given[slot.index], call.given)
    operands = [*given, *module.parameters(), *module.buffers()]
    before, versions = _state(module), [one._version for one in given]
    try:
        with torch.random.fork_rng([]), torch._C.DisableTorchFunction():  # modes record calls of torch.func and no_grad
            generator_before = torch.get_rng_state()
            returned = forward(module, *args, **kwargs)
            draws = not torch.equal(torch.get_rng_state(), generator_before)
    except Exception:  # whatever it raises on numbers that it did not expect
        return
    accumulates = any(one.grad is not None for one in (*leaves, *module.parameters()))
    if draws or accumulates or _state(module) != before:
        raise NotOpaque(type(call.module), does_more=True)
    results = tree_leaves(returned)
    plain = all(isinstance(one, (Tensor, type(None))) for one in results)
    memory = [_memory(one) for one in results if isinstance(one, Tensor)]
    shared = len({*memory}) < len(memory) or not {*memory}.isdisjoint(map(_memory, operands))
    if versions != [one._version for one in given] or not plain or shared:
        raise NotOpaque(type(call.module))
    yield returned


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _random(tensor: Tensor, generator: torch.Generator, integer: int | None = 0) -> Tensor:
    """Real numbers of the shape of a traced tensor, of the sign of `integer`; that, of which 0 is a valid index, where
    it holds integers, or 0 and 1 in turn."""
    shape = tuple(map(int, tensor.shape))
    if not tensor.is_floating_point() and not tensor.is_complex():
        made = torch.arange(tensor.numel()).reshape(shape) % 2 if integer is None else torch.full(shape, integer)
        return made.to(tensor.dtype)
    made = torch.rand(shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
    return -made if integer is not None and integer < 0 else made


def _state(module: nn.Module) -> object:
    """What a forward could change of a module."""
    try:
        attributes = pickle.dumps(_attributes(module))
    except (AttributeError, TypeError, pickle.PicklingError) as error:  # as pickle says that it cannot
        raise NotOpaque(type(module)) from error
    return attributes, [(id(one), one._version) for one in (*module.parameters(), *module.buffers())]
