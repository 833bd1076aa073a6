"""What autograd keeps between forward and backward, on the host or on a disk instead.

Hooks around the modules that are meant take every kept tensor away by its storage, so that views of one storage travel
once, and rebuild it with its strides: backward computes the same bits. A part of a storage that is no view for autograd
(a chunk of an LSTM's gates) travels by itself, since others are written without a change of its version. A parameter is
not taken away but looked up again in backward (at ZeRO stage 3 it is gathered anew by then). Of a recomputed module the
same is done with what it stores: its inputs and kept results. On a GPU copies run beside the computation on a stream
of their own; when one comes back from the host, the one that was kept before it is fetched ahead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from strategies.core.addressing import means_module
from strategies.runtime.disk import Disk, Extent
from strategies.runtime.module_tree import MODULE
from strategies.runtime.offload import OffloadTraffic, on_side
from strategies.runtime.recompute import in_region

_Addresses = dict[int, Tensor]
"""Tensors by the addresses of their storages."""


class Activations:
    """Offloads storages of at least `larger_than` bytes to `disk`, or to the host without one, and counts them.
    `moved.stored` is the peak of the offloaded bytes. On a GPU copies overlap the computation if `beside` is set."""

    def __init__(
        self, device: torch.device, larger_than: int = 0, disk: Disk | None = None, *, beside: bool = True
    ) -> None:
        self.device, self.larger_than, self.disk = device, max(larger_than, 1), disk
        self.moved, self.away = OffloadTraffic(), 0
        self.writing: Extent | None = None
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda" and beside:
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._known: weakref.WeakValueDictionary[Any, _Away] = weakref.WeakValueDictionary()
        self._last: weakref.ref[_Away] | None = None

    def attach(self, modules: Iterable[nn.Module], staying: Sequence[Tensor]) -> None:
        """Offload the tensors saved while one of `modules` runs; `staying` tensors stay on the device."""
        for module in modules:
            _around(module, lambda own: partial(self._take, own, {_address(one): one for one in staying}))

    def _take(self, own: _Addresses, staying: _Addresses, tensor: Tensor) -> _Saved | Tensor:
        address, storage = _address(tensor), tensor.untyped_storage()
        if (parameter := _still(own, address)) is not None:
            return _of_parameter(parameter, tensor)
        if _still(staying, address) is not None or storage.nbytes() < self.larger_than or tensor.device != self.device:
            return tensor.detach()
        key: Any = address, tensor._version
        content = tensor
        if not tensor._is_view() and tensor.nbytes < storage.nbytes():
            key, content = (*key, tensor.storage_offset(), tensor.shape, tensor.stride()), tensor.detach().clone()
        away = self._known.get(key)
        if away is None:
            away = self._known[key] = _Away(self, storage, content.untyped_storage(), self._last)
            self._last = weakref.ref(away)
        return _Saved(away, content.dtype, content.shape, content.stride(), int(content.storage_offset()))

    def forget(self, size: int, extent: Extent | None) -> None:
        """Backward needs a storage no more."""
        self.away -= size
        if extent is not None and self.disk is not None:
            self.disk.free(extent)


def look_up_parameters(module: nn.Module) -> None:
    """Let what autograd keeps of the parameters of `module` be looked up in backward: views that it keeps would hold
    what stage 3 has gathered for forward until then."""

    def looking_up(own: _Addresses) -> Callable[[Tensor], _Saved | Tensor]:
        def take(tensor: Tensor) -> _Saved | Tensor:
            parameter = _still(own, _address(tensor))
            return tensor if parameter is None else _of_parameter(parameter, tensor)

        return take

    for unit in module.modules():
        if any(parameter is not None for parameter in unit._parameters.values()):
            _around(unit, looking_up)


def _around(module: nn.Module, hook: Callable[[_Addresses], Callable[[Tensor], _Saved | Tensor]]) -> None:
    """Let the hook that `hook` makes, given the module's own parameters, take what autograd saves while it runs."""
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:  # a function: the compiler looks for the code of a module's forward
        if not torch.is_grad_enabled() or in_region():
            return forward(*args, **kwargs)
        parameters = (parameter for parameter in module._parameters.values() if parameter is not None)
        own: _Addresses = {_address(parameter): parameter for parameter in parameters}
        with saved_tensors_hooks(hook(own), _bring):
            return forward(*args, **kwargs)

    module.forward = run


def _still(tensors: _Addresses, address: int) -> Tensor | None:
    """What had its storage at `address`, if it has it there still: stage 3 lets go of storages in between, and others
    take their addresses."""
    tensor = tensors.get(address)
    return tensor if tensor is not None and _address(tensor) == address else None


def _of_parameter(parameter: Tensor, tensor: Tensor) -> _Saved:
    offset = int(tensor.storage_offset() - parameter.storage_offset())
    return _Saved(parameter, tensor.dtype, tensor.shape, tensor.stride(), offset)


def matching_modules(module: nn.Module, globs: Sequence[str]) -> list[nn.Module]:
    """Everything inside `module` that runs and belongs to what `globs` (of the user's modules; none: all) mean."""

    def matches(name: str, unit: nn.Module) -> bool:
        path = unit.meta.get(MODULE, name) if isinstance(unit, fx.GraphModule) else name
        return not globs or any(means_module(glob, path) for glob in globs)

    named = module.named_modules()
    return [unit for name, unit in named if type(unit).forward is not nn.Module.forward and matches(name, unit)]


class _Away:
    """A storage that is elsewhere: that of `original`, or a copy of a part of it. While this lives, the address of
    `original` means no other one."""

    def __init__(
        self,
        home: Activations,
        original: torch.UntypedStorage,
        storage: torch.UntypedStorage,
        before: weakref.ref[_Away] | None,
    ) -> None:
        self.home, self.size, self.before = home, storage.nbytes(), before
        self.original = _weak(original)  # keeps the address
        self.returned: StorageWeakRef | None = None
        home.moved.out += self.size
        home.away += self.size
        home.moved.stored = max(home.moved.stored, home.away)
        self.ahead: Tensor | None = None
        self.host: Tensor | None = None
        self.extent: Extent | None = None
        content, done = _flat(storage, home.device), None
        if home.disk is None or home.stream is not None:
            content, done = self._to_host(content)
        if home.disk is None:
            self.host = content
        else:
            if home.writing is not None:  # no more than one storage waits in memory for the disk
                home.disk.wait(home.writing)
            self.extent = home.writing = home.disk.put(content, after=None if done is None else done.synchronize)
        weakref.finalize(self, home.forget, self.size, self.extent).atexit = False

    def _to_host(self, content: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        stream = self.home.stream
        with on_side(True):
            host = torch.empty(self.size, dtype=torch.uint8, pin_memory=stream is not None)
        if stream is None:
            return host.copy_(content), None
        stream.wait_stream(torch.cuda.current_stream(self.home.device))
        with torch.cuda.stream(stream):
            host.copy_(content, non_blocking=True)
        content.record_stream(stream)
        return host, stream.record_event()

    def storage(self) -> torch.UntypedStorage:
        """It, back on the device; the same one as long as somebody still uses it."""
        if self.returned is not None and not self.returned.expired():  # type: ignore[no-untyped-call]
            return torch.UntypedStorage._new_with_weak_ptr(self.returned.cdata)
        content = self._fetched() if self.ahead is None else self.ahead
        self.ahead = None
        stream = self.home.stream
        if stream is not None:
            here = torch.cuda.current_stream(self.home.device)
            here.wait_stream(stream)
            content.record_stream(here)
            before = None if self.before is None else self.before()
            if before is not None and before.host is not None and before.ahead is None and before.returned is None:
                before.ahead = before._fetched()
        storage = content.untyped_storage()
        self.returned = _weak(storage)
        return storage

    def _fetched(self) -> Tensor:
        home, host = self.home, self.host
        home.moved.back += self.size
        if host is None:
            assert home.disk is not None and self.extent is not None
            host = torch.empty(self.size, dtype=torch.uint8, pin_memory=home.stream is not None)
            home.disk.get(self.extent, host)
            if home.device.type == "cpu":
                return host
        with torch.cuda.stream(home.stream), on_side(False):
            return torch.empty(self.size, dtype=torch.uint8, device=home.device).copy_(host, non_blocking=True)


@dataclass(frozen=True, eq=False)
class _Saved:
    """What autograd saves in place of a tensor: its storage, and its strides and offset there."""

    holder: _Away | Tensor
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def _bring(saved: _Saved | Tensor) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    holder = saved.holder
    if isinstance(holder, _Away):
        empty = torch.empty(0, dtype=saved.dtype, device=holder.home.device)
        return empty.set_(holder.storage(), saved.offset, saved.shape, saved.stride)
    if not holder.numel():
        raise RuntimeError("Backward needs a parameter that stage 3 has not gathered.")
    return holder.detach().as_strided(saved.shape, saved.stride, saved.offset + int(holder.storage_offset()))


def _weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _flat(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))
