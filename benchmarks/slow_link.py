"""An injected slow link between ranks: every all-reduce takes an additional latency plus its bytes over a bandwidth,
serialised. Waiting uses no CPU time, as on a real link.

With the wall clock, waiting sleeps. With the clock `cpu`, time is the CPU time of this process plus the time it would
have slept, so that other work on the machine does not count; all ranks are assumed to run at the same speed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Link:
    """The latency and bandwidth of calls, in seconds and bytes per second; `free` is when the last one completes,
    `taken` the total time of calls and `waited` the time spent waiting for the link alone."""

    latency: float
    bandwidth: float
    clock: str = "wall"
    free: float = 0.0
    taken: float = 0.0
    waited: float = 0.0

    def now(self) -> float:
        return time.perf_counter() if self.clock == "wall" else time.thread_time() + self.waited

    def accept(self, size: int) -> float:
        """The completion time of a call issued now."""
        seconds = self.latency + size / self.bandwidth
        self.taken += seconds
        self.free = max(self.free, self.now()) + seconds
        return self.free

    def wait(self, due: float) -> None:
        """Wait until a call is due."""
        missing = max(due - self.now(), 0.0)
        self.waited += missing
        if self.clock == "wall":
            time.sleep(missing)


class _Work:
    """A pending collective, complete when both the real one and the link are."""

    def __init__(self, work: Any, link: Link, due: float) -> None:
        self.work, self.link, self.due = work, link, due

    def wait(self) -> bool:
        done: bool = self.work.wait()
        self.link.wait(self.due)
        return done


@contextmanager
def slowed(link: Link) -> Iterator[Link]:
    """Route the all-reduces of this process through `link`."""
    import torch.distributed as dist

    real: Any = dist.all_reduce

    def all_reduce(tensor: Any, *args: Any, async_op: bool = False, **kwargs: Any) -> _Work | None:
        due = link.accept(tensor.numel() * tensor.element_size())
        work = _Work(real(tensor, *args, async_op=True, **kwargs), link, due)
        if async_op:
            return work
        work.wait()
        return None

    dist.all_reduce = all_reduce
    try:
        yield link
    finally:
        dist.all_reduce = real


def agreed(seconds: float) -> float:
    """The maximum over ranks of a measured time, on all ranks."""
    import torch
    import torch.distributed as dist

    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()
