"""The bytes of the tensors that are alive, counted while a program runs.

Every storage that an operator of torch takes or returns is counted once, from its first use until it is freed, whoever
holds it. So the count is that of an allocator, without its rounding and without the workspaces of kernels, but for
those of convolutions on a GPU. It works the same on fake tensors, whose storages have sizes too: a prediction and a
measurement that use it differ only where the programs differ.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from strategies.core import result_shapes as shapes
from strategies.runtime.offload import side
from strategies.runtime.recompute import tensors_in

DEVICE = torch.ops.prim.device.default
BACKWARD = torch.ops.aten.convolution_backward.default
CONVOLUTIONS = (torch.ops.aten.convolution.default, BACKWARD)
"""What cuDNN computes with channels last: it copies others (156 MB where operands of 103 and 51 MB meet)."""


@dataclass(frozen=True)
class _Known:
    reference: weakref.ref[torch.UntypedStorage]
    size: int
    host: bool


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of live tensors: `now` in the memory of devices of type `device`, `peak` the maximum since the last
    `restart`. Where the device is a CPU, `host` counts the tensors that stand for host memory: those made there
    (`on_side`, `hosted`) or from tensors there. While `counting` is false, a new tensor is counted only when it is seen
    again. `events`, if recorded, are all calls since the last `restart`, each with the live bytes after it; `recorded`
    are those of all times. `shapes` is the mode of fake tensors."""

    def __init__(self, device: str, shapes: FakeTensorMode | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.shapes = device, shapes
        self.now = self.peak = self.host = self.host_peak = 0
        self.counting = True
        self.events: list[tuple[object, int]] | None = None
        self.recorded: list[list[tuple[object, int]]] = []
        self._known: dict[int, _Known] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """A hook that torch calls; without it torch would import its compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:  # autograd asks for most nodes, of a tensor without numbers each time through all modes
            return _device(args[0])
        kwargs = kwargs or {}
        given = _tensors((*args, *kwargs.values()))
        self.see(given)
        results = func(*args, **kwargs) if self.shapes is None else shapes.call(func, args, kwargs, given, self.shapes)
        if not func.is_view:
            said = side()
            host = any(self._on_host(tensor) for tensor in given) if said is None and self.host else bool(said)
            self.see(_tensors((results,)), host)
        if self.events is not None:
            self.events.append((func, self.now))
        if func in CONVOLUTIONS and self.device == "cuda":
            x, moved = (given[1], given) if func is BACKWARD else (given[0], [*given, *_tensors((results,))])
            if x.stride(1) != 1:  # of its channels
                self._pass(func, sum(tensor.nbytes for tensor in moved if tensor.dim() > 2))
        return results

    def _pass(self, func: object, size: int) -> None:
        """Count `size` bytes that a call takes and frees."""
        self.peak = max(self.peak, self.now + size)
        if self.events is not None:
            self.events.append((func, self.now + size))

    def see(self, tensors: Iterable[Tensor], host: bool = False) -> None:
        """Count the storages of these tensors, if they are not counted yet."""
        for tensor in tensors if self.counting else ():
            if _device(tensor).type == self.device:
                self._add(tensor.untyped_storage(), host)

    def hosted(self, tensors: Iterable[Tensor]) -> None:
        """Count these as the host's."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._forget(storage._cdata)
            self._add(storage, True)

    def _on_host(self, tensor: Tensor) -> bool:
        known = self._known.get(tensor.untyped_storage()._cdata)
        return known is not None and known.host

    def _add(self, storage: torch.UntypedStorage, host: bool) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is not None and known.size == size:
            return
        self._forget(key)  # it was given another size
        self._known[key] = _Known(weakref.ref(storage, partial(self._gone, key)), size, host)
        if host:
            self.host += size
            self.host_peak = max(self.host_peak, self.host)
        else:
            self.now += size
            self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        known = self._known.pop(key, None)
        if known is not None and known.host:
            self.host -= known.size
        elif known is not None:
            self.now -= known.size

    def _gone(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        if key in self._known and self._known[key].reference is reference:
            self._forget(key)

    def restart(self) -> None:
        """Count the peaks anew, from now."""
        self.peak, self.host_peak = self.now, self.host
        if self.events is not None:
            self.record()

    def record(self) -> None:
        """Record the events anew, from now."""
        self.events = []
        self.recorded.append(self.events)
        self.note()

    def note(self) -> None:
        """Record an event that is no call."""
        assert self.events is not None
        self.events.append((None, self.now))

    @property
    def position(self) -> int:
        """The number of events recorded so far."""
        return sum(map(len, self.recorded))


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """The tensors that `tensors_in` finds, for the few values of a call, of which hardly one is nested."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (tuple, list, dict)):
            tensors += tensors_in(value)
    return tensors


def _device(tensor: Tensor) -> torch.device:
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages of `tensors`."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
