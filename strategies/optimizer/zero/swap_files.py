"""Files for DeepSpeed's swapping, without its compiled reader: what it takes for an `aio_handle`.

DeepSpeed writes through asynchronous I/O of the kernel, which needs a library and a compiler at the user's. Here the
same calls go to a `Disk`. Its paths are only names: nothing appears under them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strategies.runtime.disk import Disk, Extent
from strategies.runtime.offload import OffloadTraffic, on_side


class SwapFiles:
    """Stands for `deepspeed.ops.op_builder.AsyncIOBuilder`, its instances and what they load: every handle shares one
    disk. `moved` counts by the path's folder: `optimizer`, or else `parameters`."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.extents: dict[str, Extent] = {}
        self.moved = {"optimizer": OffloadTraffic(), "parameters": OffloadTraffic()}

    def builder(self) -> SwapFiles:
        return self

    def load(self, **_: Any) -> SwapFiles:
        return self

    def of(self, path: str) -> OffloadTraffic:
        return self.moved["optimizer" if path.split("/")[-3] == "optimizer" else "parameters"]

    def aio_handle(self, **_: Any) -> Handle:
        return Handle(self)


class Handle:
    """The calls that DeepSpeed's swappers make. Buffers for swapping come from `new_cpu_locked_tensor`."""

    def __init__(self, files: SwapFiles) -> None:
        self._files = files
        self._buffers: dict[int, Tensor] = {}
        self._in_flight: list[Extent] = []

    def async_pwrite(self, tensor: Tensor, path: str, offset: int) -> int:
        known, moved = self._files.extents.get(path), self._files.of(path)
        moved.out += tensor.nbytes
        if known is not None and known.size == tensor.nbytes:
            self._files.disk.put_again(known, tensor.detach())
        else:
            moved.stored += tensor.nbytes
            known = self._files.extents[path] = self._files.disk.put(tensor.detach())
        self._in_flight.append(known)
        return 0

    def async_pread(self, tensor: Tensor, path: str, offset: int) -> int:
        extent = self._files.extents[path]
        self._files.disk.get(extent, tensor.detach())
        self._files.of(path).back += tensor.nbytes
        self._in_flight.append(extent)
        return 0

    def wait(self) -> int:
        """The number of calls since the last time, all of them done."""
        writing, self._in_flight = self._in_flight, []
        for extent in writing:
            self._files.disk.wait(extent)
        return len(writing)

    def new_cpu_locked_tensor(self, elements: int, example: Tensor) -> Tensor:
        with on_side(True):
            buffer = torch.empty(elements, dtype=example.dtype, pin_memory=torch.cuda.is_available())
        self._buffers[buffer.untyped_storage().data_ptr()] = buffer
        return buffer

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        return self._buffers.pop(tensor.untyped_storage().data_ptr(), None) is not None

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in self._buffers


def keep_gradients(self: Any, parameter: Any, gradient_offsets: Any, gradient_tensors: Any, **_: Any) -> None:
    """Keep gradients in memory until the step. It replaces DeepSpeed 0.19's `OptimizerSwapper._swap_out_gradients`,
    which damages gradients on their way to a disk."""
    info = self.swap_params_info.get(self.parameter_id(parameter))
    if info is not None:
        for tensor, offset in zip(gradient_tensors, gradient_offsets, strict=True):
            info.unswapped_gradients[offset] = tensor.clone()
