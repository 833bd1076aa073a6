"""What each rank measures for `run calibrate`: all ranks do the same at the same time, as they do in training.

Invariant: every rank makes the same calls in the same order, and how often follows from times that all ranks agree on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runner.planning.sample_layers import CALLS, VIEWS, SampleLayers
from runner.worker import RankContext
from strategies.cost.laws import SEND, Call, Copy, Product
from strategies.engine.communicator import all_gather, reduce_scatter
from strategies.redistribution import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, EXCHANGE, REDUCE_SCATTER

PRODUCTS = {"float32": (64, 128, 256, 512, 768), "float64": (128, 384), "bfloat16": (128, 384)}
LARGER = {"float32": (1024, 4096), "float64": (2048,), "float16": (1024, 4096, 8192), "bfloat16": (1024, 4096, 8192)}
"""Sides of square matrices by dtype, on CPU and on GPUs."""
COPIED = (2**20, 2**22, 2**24)
SENT = (2**10, 2**15, 2**18, 2**21, 2**23)
"""Bytes."""
BUCKET, BUCKETS = 2**20, 4
"""Bytes, and how many there are, of gradients that are added while products run."""
FACTOR = 64
"""By how much what GPUs copy and send is larger."""
CHAIN = 32
"""Views in a row."""
LAYERS, WIDTH, TOKENS = 2, 16, 8
"""Of small layers: their operators take as long as it takes to begin them."""
BETWEEN = (8, 128, 64)
"""Layers, width and tokens of what is computed before each collective, as in a step: ranks are not all there at once,
and what was in their caches is gone. On 8 ranks of 2 cores an all-reduce of 1 KiB between 2 (8) ranks takes 2.2 (17) ms
behind another one, 4.4 (24) ms behind this."""
SHORTEST = 1e-6
"""Seconds of a call whose time drowns in that of what computes beside it."""
TOGETHER = 3
"""Calls that are timed at once, what is computed before them included."""
FEWEST = 3
"""Differences of which the middle is taken: any one may be below zero."""
ENDS = (2**10, 2**23)
"""Bytes that are sent by every kind of collective between all ranks, however little time there is."""
BATCHES = 3
"""The fastest batch of calls counts: what else runs on the machine only makes them slower."""


@dataclass(frozen=True)
class Measured:
    """Times of one of `world_size` busy ranks; `memory` in bytes, `launch` and `view` in seconds per operator,
    `overlap` the share of adding gradients that hides behind products."""

    world_size: int
    device: str
    memory: float
    launch: float
    view: float
    overlap: float
    products: tuple[Product, ...]
    copies: tuple[Copy, ...]
    calls: tuple[Call, ...]


def measure(rank: RankContext, payload: Mapping[str, float]) -> Measured:
    """Measure until `payload["until"]` by time.monotonic(), which all processes of a machine share; rank 0 tells what
    it is at. The least that a description needs is measured even if that takes longer."""
    return _Bench(rank, payload["until"]).run()


class _Bench:
    def __init__(self, rank: RankContext, until: float) -> None:
        self.rank, self.size, self.device = rank.rank, rank.world_size, torch.device(rank.device)
        self.cpu = self.device.type == "cpu"
        self.groups = {ranks: self._group(ranks) for ranks in self._sizes()}
        self.sides = PRODUCTS if self.cpu else LARGER
        self.points = sum(map(len, self.sides.values())) + len(COPIED) + 1 + self.cpu + 3 * (self.size > 1)
        self.points += len(SENT) * (5 * len(self.groups) + bool(self.groups))
        self.until = until
        self.between = SampleLayers(self.device, *BETWEEN).forward

    def _sizes(self) -> Iterator[int]:
        """The world, and what halving it makes."""
        size = self.size
        while size > 1:
            yield size
            if size % 2:
                return
            size //= 2

    def _group(self, ranks: int) -> Any:
        made = [dist.new_group(list(range(first, first + ranks))) for first in range(0, self.size, ranks)]
        return made[self.rank // ranks]

    def run(self) -> Measured:
        self.between()
        self.computing = self._time(self.between, 1)
        products = tuple(self._products())
        copies = tuple(self._copies())
        view = self._view()
        launch, overlap = self._launch(view), self._overlap()
        calls = tuple(self._calls())
        return Measured(self.size, self.device.type, self._memory(), launch, view, overlap, products, copies, calls)

    def _say(self, text: str) -> None:
        if self.rank == 0:
            print(f"calibrate: {text}", flush=True)

    def _wait(self) -> None:
        if not self.cpu:
            torch.cuda.synchronize()
        if self.size > 1:
            dist.barrier()

    def _agreed(self, seconds: float) -> float:
        """The slowest rank's time."""
        total = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        if self.size > 1:
            dist.all_reduce(total, op=dist.ReduceOp.MAX)
        return float(total)

    def _time(self, action: Callable[[], object], count: int) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(count):
            action()
        if not self.cpu:
            torch.cuda.synchronize()
        return self._agreed((time.perf_counter() - start) / count)

    def _left(self) -> float:
        """Seconds that are left, by the rank that has the fewest."""
        return max(-self._agreed(time.monotonic() - self.until), 0.0)

    def _share(self) -> float:
        """Seconds for the next point."""
        share = self._left() / max(self.points, 1)
        self.points -= 1
        return share

    def _seconds(self, action: Callable[[], object]) -> float:
        """Seconds of one call while all ranks make it."""
        share = self._share() / BATCHES
        self._time(action, 1)
        first = self._time(action, 1)
        count = max(1, min(int(share / max(first, 1e-9)), 1000))
        return min(self._time(action, count) for _ in range(BATCHES if share > first else 1))

    def _added(self, action: Callable[[], object], share: float) -> float:
        """Seconds that a call adds to what is computed before it, while all ranks do both: the middle of what was found
        in `share` seconds. Where that is too short, the seconds of a call with nothing before it."""

        def both() -> None:
            self.between()
            action()

        both()
        alone = min(self._time(action, 1) for _ in range(BATCHES))
        if share < self._needed(alone):
            return max(alone, SHORTEST)
        found: list[float] = []
        start = time.perf_counter()
        while len(found) < FEWEST or self._agreed(time.perf_counter() - start) < share:
            without = self._time(self.between, TOGETHER)
            found.append(self._time(both, TOGETHER) - without)
        return max(median(found), SHORTEST)

    def _needed(self, call: float) -> float:
        """Seconds for the fewest differences of a call that takes `call` seconds by itself."""
        return FEWEST * TOGETHER * (2 * self.computing + call)

    def _products(self) -> Iterator[Product]:
        for dtype, sides in self.sides.items():
            self._say(f"products of {dtype}")
            for side in sides:
                a, b = (torch.ones(side, side, dtype=getattr(torch, dtype), device=self.device) for _ in range(2))
                yield Product(dtype, 2.0 * side**3, self._seconds(lambda a=a, b=b: a @ b))  # type: ignore[misc]

    def _copies(self) -> Iterator[Copy]:
        self._say("memory")
        for size in COPIED:
            elements = size // 4 * (1 if self.cpu else FACTOR)
            x = torch.ones(elements, device=self.device)
            yield Copy(8 * elements, self._seconds(lambda x=x: torch.relu(x)))  # type: ignore[misc]

    def _launch(self, view: float) -> float:
        """Seconds per operator of small layers that computes, the mean of forward and backward; `view` per one that
        does not."""
        small = SampleLayers(self.device, LAYERS, WIDTH, TOKENS)
        return max(self._seconds(small.step) - LAYERS * VIEWS * view, 0.0) / (LAYERS * CALLS)

    def _view(self) -> float:
        """Seconds per view, the mean of forward and backward; none on a GPU, which does not see them."""
        self._say("small operators")
        if not self.cpu:
            return 0.0
        x = torch.ones(4, 4, device=self.device, requires_grad=True)

        def run() -> None:
            y = x
            for _ in range(CHAIN):
                y = y.transpose(0, 1)
            torch.autograd.backward(y, torch.ones_like(y))

        return self._seconds(run) / (2 * CHAIN)

    def _overlap(self) -> float:
        """How much of adding several buckets of gradients is hidden by products that take as long."""
        if self.size == 1:
            return 0.0
        self._say("products beside all-reduces")
        side = 256 if self.cpu else 4096
        a = torch.ones(side, side, device=self.device)
        flats = [torch.ones(BUCKET // 4 * (1 if self.cpu else FACTOR), device=self.device) for _ in range(BUCKETS)]
        sum_ = self._added(lambda: dist.all_reduce(flats[0]), self._share())
        product = self._seconds(lambda: a @ a)
        repeats = max(1, round(sum_ / product))

        def both() -> None:
            works = []
            for flat in flats:
                for _ in range(repeats):
                    a @ a
                works.append(dist.all_reduce(flat, async_op=True))
            for work in works:
                assert work is not None
                work.wait()

        alone = repeats * product
        hidden = sum_ + alone - self._seconds(both) / BUCKETS
        return min(max(hidden / min(sum_, alone), 0.0), 1.0)

    def _calls(self) -> Iterator[Call]:
        """Every kind between all ranks first, then all sizes and groups for as long as there is time."""
        kinds = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, EXCHANGE, SEND) if self.groups else ()
        every = [(kind, ranks, size) for kind in kinds for ranks in self.groups for size in SENT]
        every = [one for one in every if one[0] != SEND or one[1] == self.size]
        least = [one for one in every if one[1] == self.size and one[2] in ENDS]
        others = sorted((one for one in every if one not in least), key=lambda one: -one[1])
        told, took = "", 0.0
        for number, (kind, ranks, size) in enumerate([*least, *others]):
            share = self._left() / (len(every) - number)
            if number < len(least):
                share = max(share, min(self._needed(took), self._left() / (len(least) - number)))
            elif self._left() < (share := max(share, self._needed(took))):
                return
            if kind != told:
                self._say(kind)
                told = kind
            elements = size // 4 * (1 if self.cpu else FACTOR)
            elements = max(elements // ranks, 1) * ranks
            sent, action = self._call(kind, ranks, elements)
            call = Call(kind, ranks, 4 * sent, self._added(action, share))
            took = max(took, call.seconds)
            yield call

    def _call(self, kind: str, ranks: int, elements: int) -> tuple[int, Callable[[], object]]:
        """Elements that a rank sends, and the call; `elements` are those of the larger side."""
        group, part = self.groups[ranks], elements // ranks
        whole, piece = torch.ones(elements, device=self.device), torch.ones(part, device=self.device)
        if kind == ALL_REDUCE:
            return -(-2 * (ranks - 1) * elements // ranks), lambda: dist.all_reduce(whole, group=group)
        if kind == ALL_GATHER:
            return (ranks - 1) * part, lambda: all_gather(whole, piece, group=group)
        if kind == REDUCE_SCATTER:
            return (ranks - 1) * part, lambda: reduce_scatter(piece, whole, group=group)
        if kind == SEND:
            return elements, lambda: self._exchange_with_neighbour(whole)
        own = self.rank % ranks
        sizes = [0 if kind == EXCHANGE and peer == own else part for peer in range(ranks)]
        out, into = whole[: sum(sizes)], torch.empty(sum(sizes), device=self.device)
        return (ranks - 1) * part, lambda: dist.all_to_all_single(into, out, sizes, sizes, group=group)

    def _exchange_with_neighbour(self, tensor: Tensor) -> None:
        """Even ranks send to the next rank, odd ones receive."""
        if self.rank % 2 == 0 and self.rank + 1 < self.size:
            dist.send(tensor, self.rank + 1)
        elif self.rank % 2:
            dist.recv(tensor, self.rank - 1)

    def _memory(self) -> float:
        if self.cpu:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / self.size
        return float(torch.cuda.mem_get_info(self.device)[0])
