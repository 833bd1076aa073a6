"""A module whose forward decides by values, as one opaque operator: ranks call the module itself, replicated.

Where such a forward goes is not known when a graph is made, but what it returns for all the values of its tensors is.
So the operator carries the module, without its tensors, and takes them as operands; autograd sees what happens inside.
Tensors without values (meta tensors, fake ones) get results of the known shapes.
"""

from __future__ import annotations

import base64
import io
import pickle
import threading
import zlib
from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from strategies.rules.drawing_calls import states
from strategies.rules.registry import PLAIN, local_function

INTERNAL = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has: of its parameters, buffers, modules and hooks."""
Attribute = tuple[str, str]
"""The path of a module within another one, and a name."""
UNSET = object()
"""Of an attribute that a module does not have."""
Results = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shapes and dtypes."""


@dataclass(frozen=True)
class Slot:
    """The position of an operand among the arguments of a call."""

    index: int


def slotted(given: Any) -> tuple[list[Tensor], Any]:
    """The tensors among the arguments of a call, and the arguments with a `Slot` in place of each."""
    tensors: list[Tensor] = []

    def slot(tensor: Tensor) -> Slot:
        tensors.append(tensor)
        return Slot(len(tensors) - 1)

    return tensors, tree_map_only(Tensor, slot, given)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype to which torch.autocast casts on a device now; None where it does not."""
    casts = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if casts else None


@dataclass(frozen=True)
class ModuleCall:
    """A call of `module`, on the meta device, with the arguments `given`, whose tensors are `Slot`s. Operands are those
    tensors, then the tensors `names` of the module. Results are tensors of these shapes and dtypes."""

    module: nn.Module
    names: tuple[str, ...]
    given: Any
    autocast: torch.dtype | None = None
    """Of the torch.autocast around the call."""
    results: Results = ()
    assigned: tuple[Attribute, ...] = ()
    """The attributes that a call gives new tensors, which are its last results."""
    noted: tuple[Attribute, ...] = ()
    """Those that it gives numbers and other plain values, which follow from the operands and are read nowhere else."""

    def __call__(self, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        args, kwargs = tree_map_only(Slot, lambda slot: operands[slot.index], self.given)
        own = dict(zip(self.names, operands[len(operands) - len(self.names) :], strict=True))
        casts = nullcontext() if self.autocast is None else torch.autocast(operands[0].device.type, self.autocast)
        changed = *self.assigned, *self.noted
        unset = {(path, name): vars(self.module.get_submodule(path)).get(name, UNSET) for path, name in changed}
        reading = RuntimeError(
            f"{type(self.module).__name__}, which ranks call as one operator because it decides by values, reads what "
            "an earlier call has left in an attribute, which it did not when it was captured"
        )
        restore(self.module, dict.fromkeys(self.noted, Unknown(reading)))
        before, during = (changeable(operands, operands[0].device), states()), list[object]()
        hooks = (
            self.module.register_forward_pre_hook(lambda module, _: during.append(state_of(module, changed))),
            self.module.register_forward_hook(lambda module, *_: during.append(state_of(module, changed))),
        )
        try:
            with casts:
                returned = functional_call(self.module, own, args, kwargs)
            kept = [vars(self.module.get_submodule(path)).get(name) for path, name in self.assigned]
        finally:
            restore(self.module, unset)  # a tensor has the graph of its gradient
            for hook in hooks:
                hook.remove()
        if (changeable(operands, operands[0].device), states()) != before or during[0] != during[1]:
            raise RuntimeError(
                f"{type(self.module).__name__}, which ranks call as one operator because it decides by values, drew "
                "random numbers, wrote into a tensor or changed an attribute, which it did not when it was captured"
            )
        results = tuple(leaf for leaf in tree_leaves((returned, kept)) if isinstance(leaf, Tensor))
        made = tuple((tuple(result.shape), result.dtype) for result in results)
        if made != self.results:
            raise RuntimeError(f"{type(self.module).__name__} returned {made}, but the plan is made for {self.results}")
        return results


class Unknown:
    """Stands for a plain value that a call leaves in an attribute. Raises an error where it is used."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def _refuse(self, *_: Any) -> NoReturn:
        raise self._error

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = _refuse
    __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __abs__ = __round__ = __divmod__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __bool__ = __int__ = __float__ = _refuse
    __index__ = __complex__ = __iter__ = __len__ = __array__ = __str__ = __format__ = __getattr__ = _refuse


def attributes_of(module: nn.Module) -> list[dict[str, Any]]:
    """What a module and those in it have beside parameters, buffers, modules and hooks."""
    return [{name: value for name, value in vars(one).items() if name not in INTERNAL} for one in module.modules()]


def restore(module: nn.Module, values: Mapping[Attribute, Any]) -> None:
    """Give attributes of a module these values, or delete those that are UNSET."""
    for (path, name), value in values.items():
        attributes = vars(module.get_submodule(path))
        if value is not UNSET:
            attributes[name] = value  # whose place among the others stays
        else:
            attributes.pop(name, None)


def state_of(module: nn.Module, but: Collection[Attribute] = ()) -> object:
    """What a forward may change of a module, `but` for attributes; equal to nothing else where pickle does not take an
    attribute."""
    plain, others, tensors = list[tuple[str, Any]](), list[Any](), list[int]()
    parts = {*module.modules()}
    for path, part in module.named_modules():
        tensors += map(id, (*part._parameters.values(), *part._buffers.values()))
        for name, value in vars(part).items():
            if name not in INTERNAL and (path, name) not in but:
                plain.append((name, value)) if isinstance(value, PLAIN) else others.append(value)
    try:
        content: object = _Content(parts).of(others)
    except (AttributeError, TypeError, RuntimeError, pickle.PicklingError):  # as pickle and torch say that they cannot
        content = object()
    return plain, tensors, [*map(id, others)], content


class _Content(pickle.Pickler):
    """What objects hold, but for `parts`: a bound method is an attribute as well, and refers to its module. Torch does
    not pickle one tensor to the same bytes twice."""

    def __init__(self, parts: Set[nn.Module]) -> None:
        self._written, self._parts = io.BytesIO(), parts
        super().__init__(self._written)

    def of(self, values: object) -> bytes:
        self.dump(values)
        return self._written.getvalue()

    def persistent_id(self, obj: Any) -> object:
        if isinstance(obj, Tensor):
            return obj.dtype, tuple(obj.shape), obj.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
        return id(obj) if isinstance(obj, nn.Module) and obj in self._parts else None


def changeable(operands: Sequence[Tensor], device: torch.device) -> object:
    """What differs after a call that does more than to compute."""
    rng_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return rng_state.numpy().tobytes(), [one._version for one in operands]


class _Loaded(threading.local):
    """The calls of a thread: a module holds its tensors while it is called."""

    def __init__(self) -> None:
        self.calls: dict[str, Any] = {}


_loaded = _Loaded()


def as_text(call: Any) -> str:
    """A call as an argument of an operator. Raises what pickle raises."""
    return base64.b85encode(zlib.compress(pickle.dumps(call))).decode()


def of_text(text: str) -> Any:
    """The call in a text, the same for every time that this thread asks."""
    if text not in _loaded.calls:
        with _disable_current_modes(), torch.device("cpu"):  # else constants in attributes would be fake for good
            _loaded.calls[text] = pickle.loads(zlib.decompress(base64.b85decode(text)))
    return _loaded.calls[text]


@local_function
def called_module(call: str, *operands: Tensor) -> tuple[Tensor, ...]:
    """The tensors that the module of a `ModuleCall`, given as text, returns."""
    known: ModuleCall = of_text(call)
    if any(isinstance(one, FakeTensor) or one.is_meta for one in operands):
        return _without_values(known, operands)
    return known(operands)


def _without_values(call: ModuleCall, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Results of which shapes are known, and of whose gradients that all operands are kept for them."""
    behind = sum(((one * one).sum() for one in operands if one.is_floating_point()), operands[0].new_zeros(()))
    return tuple(
        behind.to(dtype).expand(shape).clone() if dtype.is_floating_point else behind.new_empty(shape, dtype=dtype)
        for shape, dtype in call.results
    )
