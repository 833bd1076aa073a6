"""A slow link between ranks, injected: every all-reduce takes a latency and its bytes over a bandwidth, one after the
other, on top of what it takes anyway. Waiting costs no computing time, as on a real link."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Link:
    """What calls take, in seconds and bytes per second; `free` is when the last one has come through."""

    latency: float
    bandwidth: float
    free: float = 0.0

    def accept(self, size: int) -> float:
        """When a call that is made now has come through."""
        self.free = max(self.free, time.perf_counter()) + self.latency + size / self.bandwidth
        return self.free


class _Work:
    """A collective under way, which is done when both the real one and the link are."""

    def __init__(self, work: Any, due: float) -> None:
        self.work, self.due = work, due

    def wait(self) -> bool:
        done: bool = self.work.wait()
        time.sleep(max(self.due - time.perf_counter(), 0.0))
        return done


@contextmanager
def slowed(link: Link) -> Iterator[Link]:
    """All-reduces of this process through `link`."""
    import torch.distributed as dist

    real: Any = dist.all_reduce

    def all_reduce(tensor: Any, *args: Any, async_op: bool = False, **kwargs: Any) -> _Work | None:
        work = _Work(real(tensor, *args, async_op=True, **kwargs), link.accept(tensor.numel() * tensor.element_size()))
        if async_op:
            return work
        work.wait()
        return None

    dist.all_reduce = all_reduce
    try:
        yield link
    finally:
        dist.all_reduce = real
