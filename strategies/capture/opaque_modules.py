"""Modules whose forward decides by values, such as a loop over the experts that the tokens of a batch choose or a loss
that looks for pairs, in a captured graph: one node for each call.

All ranks compute it for the complete batch, so it is the loss or within the model, never the model itself.

A module can be one node where ranks that call it can do nothing but compute: it takes tensors and plain values, all
its tensors are parameters and buffers, no module in it has hooks, and on random numbers it draws none, writes into no
tensor, and returns new tensors alone, since a number might be another one for other values; so it may give its
attributes new tensors (the loss that balances experts), which the node returns as well, and plain values (how many
pairs it has found) where they follow from its operands alone and nothing else in the forward reads them.
Invariant: the graph holds for all values, those that decide in the module included.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import track_tensor_tree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from strategies.capture.duplicate import leaves_of
from strategies.capture.nodes import MODULE_CALL, beneath_tracing, forwards_wrapped, proxy_mode
from strategies.rules.module_calls import (
    INTERNAL,
    UNSET,
    Attribute,
    ModuleCall,
    Results,
    Slot,
    Unknown,
    as_text,
    attributes_of,
    autocast_dtype,
    called_module,
    restore,
    slotted,
    state_of,
)
from strategies.rules.registry import PLAIN

MOST_CONSTANT = 2**20
"""Bytes of constants in attributes of a module, which the operator's text holds."""
INTEGERS: tuple[int, ...] = (0,)
OTHER_INTEGERS = ((1,), (-1,), (0, 1))
"""What else is tried, in turn along a tensor, to see whether the shapes of results follow values: -1 and 0 often stand
for nothing, and a loss finds no pairs among equal labels."""
ELIGIBLE = ("loss", "model.")
"""How paths in an objective begin of modules that may be one node: the loss, and those within the model."""


class NotOpaque(Exception):
    """A module of this class cannot be one node."""

    def __init__(self, owner: type) -> None:
        super().__init__(owner)
        self.owner = owner


class _Failed(NotOpaque):
    """A trial has raised an error."""


class OpaqueModules:
    """The modules in `root` that are to be one node, of the classes in `chosen`."""

    def __init__(self, root: nn.Module) -> None:
        self.root, self.chosen, self.refused = root, set[type](), set[type]()
        self.noted = list[tuple[nn.Module, dict[Attribute, Any]]]()
        """The attributes of traced modules that stand for unknown values, and their values before."""
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
        skeletons = {
            id(vars(module)): _skeleton(module) for module in self.root.modules() if type(module) in self.chosen
        }
        try:
            with forwards_wrapped(self.chosen, lambda forward: _watched(forward, skeletons, self.noted)):
                yield
        finally:
            while self.noted:
                restore(*self.noted.pop())


def _skeleton(module: nn.Module) -> nn.Module:
    """A copy on the meta device, without hooks of its own, which are called around its forward. Raises NotOpaque where
    modules in it have hooks, or attributes hold modules that are not registered, or such tensors that are no small
    constants on the host: those go with the copy."""
    parts = list(module.modules())
    hooked = any(one._forward_hooks or one._forward_pre_hooks for one in parts[1:])
    registered = set(parts)
    unregistered = [
        leaf
        for leaf in leaves_of(attributes_of(module))
        if isinstance(leaf, (Tensor, nn.Module)) and leaf not in registered
    ]
    constants = [leaf for leaf in unregistered if type(leaf) is Tensor and not leaf.requires_grad and leaf.is_cpu]
    if hooked or len(constants) < len(unregistered) or sum(one.nbytes for one in constants) > MOST_CONSTANT:
        raise NotOpaque(type(module))
    tensors = [*module.parameters(), *module.buffers()]
    made: nn.Module = copy.deepcopy(module, {id(one): _on_meta(one) for one in tensors})
    for name, value in vars(made).items():
        if name.endswith("_hooks") and value:
            setattr(made, name, type(value)())
    return made


def _on_meta(tensor: Tensor) -> Tensor:
    made = torch.empty_like(tensor, device="meta")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _watched(
    forward: Callable[..., Any], skeletons: dict[int, nn.Module], noted: list[tuple[nn.Module, dict[Attribute, Any]]]
) -> Callable[..., Any]:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tracing = proxy_mode()
        skeleton = skeletons.get(id(vars(module)))
        if tracing is None or skeleton is None:
            return forward(module, *args, **kwargs)
        returned, unknown = _recorded(module, forward, skeleton, (args, kwargs), tracing.tracer)
        before = _attributes(module)
        noted.append((module, {place: before.get(place, UNSET) for place in unknown}))
        restore(module, dict.fromkeys(unknown, Unknown(NotOpaque(type(skeleton)))))
        return returned

    return call


def _recorded(
    module: nn.Module, forward: Callable[..., Any], skeleton: nn.Module, given: Any, tracer: Any
) -> tuple[Any, set[Attribute]]:
    """What the forward of `module` returns for `given`, as results of one node, and the attributes to which it gives
    plain values."""
    if not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in tree_leaves(given)):
        raise NotOpaque(type(skeleton))
    tensors, arguments = slotted(given)
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    operands = [*tensors, *state.values()]
    proxies = [tracer.unwrap_proxy(one) for one in operands]
    if not all(isinstance(proxy, fx.Proxy) for proxy in proxies):
        raise NotOpaque(type(skeleton))
    call = ModuleCall(skeleton, tuple(state), arguments, autocast_dtype(operands[0].device))
    with _disable_current_modes(), torch.device("cpu"):
        returned, kept, noted = _tried(call, forward, tensors, INTEGERS)
        call = replace(call, assigned=tuple(kept))
        found, structure = tree_flatten((returned, [*kept.values()]))
        results, tried = _looks(found), {INTEGERS: found}
        integers: tuple[int, ...]
        for integers in OTHER_INTEGERS:
            try:
                other, others_kept, others_noted = _tried(call, forward, tensors, integers)
            except _Failed:  # where it is no valid index
                continue
            tried[integers] = tree_leaves((other, [*others_kept.values()]))
            if _looks(tried[integers]) != results or [*others_kept] != [*kept]:
                raise NotOpaque(type(skeleton))
            noted |= others_noted
        for integers, leaves in tried.items() if noted else ():
            other, others_kept, _ = _tried(call, forward, tensors, integers, noted)
            if not _same(leaves, tree_leaves((other, [*others_kept.values()]))):
                raise NotOpaque(type(skeleton))
        try:
            text = as_text(replace(call, results=results, noted=tuple(sorted(noted))))
        except (AttributeError, TypeError, pickle.PicklingError) as error:  # as pickle says that it cannot
            raise NotOpaque(type(skeleton)) from error
    with beneath_tracing():
        made = called_module(text, *operands)
    node = tracer.create_proxy("call_function", MODULE_CALL, (text, *proxies), {}, type(module).__name__.lower())
    tracked = iter(track_tensor_tree(made, node, constant=None, tracer=tracer))
    returned, values = tree_unflatten([next(tracked) if isinstance(one, Tensor) else one for one in found], structure)
    for (path, name), value in zip(call.assigned, values, strict=True):
        setattr(module.get_submodule(path), name, value)
    return returned, noted


def _looks(returned: Any) -> Results:
    """Shapes and dtypes of the tensors that a module returns."""
    return tuple((tuple(one.shape), one.dtype) for one in tree_leaves(returned) if isinstance(one, Tensor))


def _tried(
    call: ModuleCall,
    forward: Callable[..., Any],
    tensors: Sequence[Tensor],
    integers: Sequence[int],
    noted: Collection[Attribute] = (),
) -> tuple[Any, dict[Attribute, Tensor], set[Attribute]]:
    """What a module returns for random numbers, and integers, the new tensors that its attributes are then, and those
    that have other plain values. Raises NotOpaque where it does more than to compute, fails, or reads `noted` ones
    before it sets them."""
    generator = torch.Generator().manual_seed(0)
    module = copy.deepcopy(call.module).to_empty(device="cpu")
    for one in (*module.parameters(), *module.buffers()):
        one.data = _random(one, generator)
    given = [_random(tensor, generator, integers) for tensor in tensors]
    args, kwargs = tree_map_only(Slot, lambda slot: given[slot.index], call.given)
    operands = [*given, *module.parameters(), *module.buffers()]
    restore(module, dict.fromkeys(noted, Unknown(NotOpaque(type(call.module)))))
    before, state, versions = _attributes(module), state_of(module, noted), [one._version for one in operands]
    try:
        with torch.random.fork_rng([]):
            generator_before = torch.get_rng_state()
            returned = forward(module, *args, **kwargs)
            draws = not torch.equal(torch.get_rng_state(), generator_before)
    except NotOpaque:
        raise
    except Exception as error:  # whatever it raises on numbers that it did not expect
        raise _Failed(type(call.module)) from error
    changed = {place: value for place, value in _attributes(module).items() if value is not before.get(place)}
    kept = {place: value for place, value in changed.items() if type(value) is Tensor}
    plain_values = {place for place, value in changed.items() if isinstance(value, PLAIN)}
    restore(module, {place: before.get(place, UNSET) for place in (*kept, *plain_values)})
    writes = [one._version for one in operands] != versions or state_of(module, noted) != state
    plain = all(isinstance(leaf, (Tensor, type(None))) for leaf in tree_leaves(returned))
    if draws or writes or not plain or _memory((returned, [*kept.values()])) & _memory(operands):
        raise NotOpaque(type(call.module))
    return returned, kept, plain_values


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two trials have returned the same tensors."""
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs if isinstance(a, Tensor))


def _attributes(module: nn.Module) -> dict[Attribute, Any]:
    """The attributes of a module and of those in it, but for what every module has."""
    parts = module.named_modules()
    return {(path, name): value for path, part in parts for name, value in vars(part).items() if name not in INTERNAL}


def _memory(nested: Any) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)}


def _random(tensor: Tensor, generator: torch.Generator, integers: Sequence[int] = (0,)) -> Tensor:
    """Real numbers of the shape of a traced tensor, of the sign of the first of `integers`; those in turn, of which 0
    is a valid index, where it holds integers."""
    shape = tuple(map(int, tensor.shape))
    if not tensor.is_floating_point():
        size = math.prod(shape)
        return torch.tensor(integers).repeat(size // len(integers) + 1)[:size].reshape(shape).to(tensor.dtype)
    made = torch.rand(shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
    return -made if integers[0] < 0 else made
