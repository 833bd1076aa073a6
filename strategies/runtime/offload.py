"""What leaves the device between its uses: optimizer states, parameters, and what autograd keeps for backward.

States and parameters are moved by DeepSpeed (`zero`), kept tensors by `activations`. Invariant: what comes back has the
bits, the shape and the strides of what left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

Where = Literal["none", "host", "disk"]


@dataclass(frozen=True)
class Offload:
    """The destination of each kind of state. Of activations those of the modules that `modules` (globs; none: all)
    mean, if they are of `larger_than` bytes or more. `folder` is on the disk that is meant."""

    optimizer: Where = "none"
    parameters: Where = "none"
    activations: Where = "none"
    modules: tuple[str, ...] = ()
    larger_than: int = 0
    folder: Path | None = None

    @property
    def place(self) -> Path:
        assert self.folder is not None, "a disk needs a folder"
        return self.folder


NO_OFFLOAD = Offload()


@dataclass
class OffloadTraffic:
    """Bytes of one kind: offloaded and fetched since the start, and stored elsewhere now or at the peak."""

    out: int = 0
    back: int = 0
    stored: int = 0


_side = threading.local()


@contextmanager
def on_side(host: bool) -> Iterator[None]:
    """Assign tensors that are made inside to the host's memory, or else to the device's; on a machine without a GPU
    both are one memory, and only the accounting differs."""
    before, _side.host = side(), host
    try:
        yield
    finally:
        _side.host = before


def side() -> bool | None:
    """Whether new tensors are meant for host memory; None outside of `on_side`."""
    return getattr(_side, "host", None)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: torch.device, out: bool, moved: OffloadTraffic) -> Tensor:
        ctx.device, ctx.out, ctx.moved = tensor.device, out, moved
        return _counted(tensor, device, out, moved)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _counted(gradient, ctx.device, not ctx.out, ctx.moved), None, None, None


def _counted(tensor: Tensor, device: torch.device, out: bool, moved: OffloadTraffic) -> Tensor:
    if out:
        moved.out += tensor.nbytes
    else:
        moved.back += tensor.nbytes
    with on_side(out):
        return tensor.to(device, copy=True)


def copier(host: bool, device: torch.device, moved: OffloadTraffic) -> Callable[[Tensor], Tensor]:
    """The function that a `Copy` calls; its gradient takes the way back."""
    target = torch.device("cpu") if host else device

    def copy(tensor: Tensor) -> Tensor:
        result: Tensor = _Copied.apply(tensor, target, host, moved)  # type: ignore[no-untyped-call]
        return result

    copy.__name__ = copy.__qualname__ = "to_host" if host else "to_device"
    copy.__module__ = "place"
    return copy
