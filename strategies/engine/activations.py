"""What autograd keeps between forward and backward, on the host or on a disk instead.

Hooks around the units that are meant take every kept tensor away by its storage, so that views of one storage travel
once, and rebuild it with its strides: the numbers of backward are the same bits. Parameters and buffers stay, they are
kept anyway. On a GPU copies run beside the computation on a stream of their own; when one comes back, the one that was
kept before it is fetched ahead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from strategies.engine.disk import Disk
from strategies.engine.offload import Moved


class Activations:
    """Counts what it moves; `attach` makes modules use it. With a disk tensors go there, else to the host."""

    def __init__(self, device: torch.device, larger_than: int = 0, disk: Disk | None = None) -> None:
        self.device, self.larger_than, self.disk = device, larger_than, disk
        self.moved = Moved()
        self.here = 0
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._gone: weakref.WeakValueDictionary[tuple[int, int], Gone] = weakref.WeakValueDictionary()
        self._last: weakref.ref[Gone] | None = None

    def attach(self, modules: Iterable[nn.Module], staying: Iterable[Tensor]) -> None:
        """Take away what is kept while one of `modules` itself runs. `staying` are tensors that are kept anyway."""
        fixed = list(staying)
        for module in modules:
            module.forward = partial(self._run, module, module.forward, fixed)

    def _run(self, module: nn.Module, forward: Callable[..., Any], fixed: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        own = (*module._parameters.values(), *module._buffers.values())
        held = {_address(tensor) for tensor in (*fixed, *own) if tensor is not None}
        with saved_tensors_hooks(partial(self._take, held), _bring):
            return forward(*args, **kwargs)

    def _take(self, held: set[int], tensor: Tensor) -> Kept | Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() < max(self.larger_than, 1) or _address(tensor) in held or tensor.device != self.device:
            return tensor.detach()
        key = storage._cdata, tensor._version
        gone = self._gone.get(key)
        if gone is None:
            gone = self._gone[key] = Gone(self, storage, self._last)
            self._last = weakref.ref(gone)
        return Kept(gone, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())


class Gone:
    """A storage that is elsewhere. As long as this exists, its address means no other storage."""

    def __init__(self, home: Activations, storage: torch.UntypedStorage, before: weakref.ref[Gone] | None) -> None:
        self.home, self.size, self.before = home, storage.nbytes(), before
        self.source, self.fetched = StorageWeakRef(storage), None
        flat = _flat(storage, home.device)
        home.moved.out += self.size
        home.here += self.size
        home.moved.held = max(home.moved.held, home.here)
        self.done: torch.cuda.Event | None = None
        if home.disk is not None:
            # TODO
            self.extent = home.disk.put(flat.cpu() if home.stream else flat)
