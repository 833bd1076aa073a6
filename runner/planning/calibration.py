"""What each rank measures for `run calibrate`: all ranks do the same at the same time, as they do in training.

Points are measured in order of their influence on a plan's cost, each as long as the remaining time allows. Invariant:
every rank makes the same calls in the same order; the measurements and their repetitions depend only on times that all
ranks agree on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, cycle, product
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from strategies.core.graph import OperatorGraph, Ref, rewrite
from strategies.core.steps import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, EXCHANGE, REDUCE_SCATTER
from strategies.cost.calibration_fit import SEND, Product, Ran, TimedCollective, TimedCopy
from strategies.cost.sample_operators import FORMS, STACK, VOCABULARY, sample, stack
from strategies.rules.registry import resolve
from strategies.runtime.communicator import all_gather, reduce_scatter

PRODUCTS = {"float32": (768, 64, 256, 512, 128), "float64": (384, 128), "bfloat16": (384, 128)}
LARGER = {"float32": (4096, 1024), "float64": (2048,), "float16": (8192, 1024, 4096), "bfloat16": (8192, 1024, 4096)}
SIDES = {"cpu": PRODUCTS, "cuda": LARGER}
"""Sides of square matrices by dtype, first those that show the rate."""
COPIED = (2**24, 2**20, 2**22)
CACHED = 2**26
"""Bytes of the operands that copies take in turn, more than caches hold: between two uses of a tensor a step
computes everything else."""
SENT = (2**10, 2**23, 2**18, 2**21, 2**15)
"""Bytes, first the ends, which separate seconds per call from seconds per byte."""
KINDS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, EXCHANGE, SEND)
"""The first three are in nearly every plan."""
BUCKET, BUCKETS = 2**20, 4
"""Bytes, and how many there are, of gradients that are added while products run."""
FACTOR = 64
"""By how much what GPUs copy and send is larger."""
CYCLES, LONGEST_ISSUE, QUEUED = 2e9, 0.1, 8
"""What a GPU counts in a second, about; seconds that issuing calls may take; calls at most that wait together, because
a GPU's queue has room for about 1,000 kernels."""
CHAIN = 32
"""Views in a row."""
LAYERS, WIDTH, TOKENS = 2, 16, 8
"""Of small layers: their operators take as long as it takes to begin them."""
BETWEEN = (8, 128, 64)
"""Layers, width and tokens of the computation before each collective, as in a step: ranks do not arrive simultaneously,
and their caches are cold. On 8 ranks of 2 cores an all-reduce of 1 KiB between 2 (8) ranks takes 2.2 (17) ms behind
another one, 4.4 (24) ms behind this."""
ADDED = 0.25
"""Minimum share of its standalone seconds that a call adds to the computation before it, in which it may
drown."""
TOGETHER = 3
"""Calls that are timed together, including the computation before them."""
MIN_DIFFERENCES = 3
"""Differences of which the middle is taken: any one may be below zero."""
LEAST = 1.0
"""Seconds to measure something that matters."""
ENOUGH = 0.3
"""Seconds in which computation is timed well, on busy cores too."""
BESIDE = 0.9
"""Seconds for each of the times whose difference is the overlap; in 0.3 it was 0.0 to 0.3 where it is 0.5."""
BATCHES = 3
"""The fastest batch of calls counts: what else runs on the machine only makes them slower."""
VIEWS, CALLS = 16, 35
"""Of a layer, forward and backward together, as `strategies.cost.roofline` counts them."""
HEADS = 4
SAMPLED = (64, 1024, 256)
"""Tokens of operators that are measured by name, first the ends, which separate seconds per call from those of the
work."""
MOST_COLD = 64
"""Sets of operands that calls take in turn, at most."""
LEAST_BACKWARD = 0.1
"""Of forward's seconds: those of backward, in which a difference may drown, at least."""


@dataclass(frozen=True)
class Measured:
    """Measured times of one of `world_size` busy ranks; `memory` in bytes, `launch` and `view` in seconds per operator,
    `overlap` the share of adding gradients that hides behind products. None: not measured for lack of time."""

    world_size: int
    device: str
    memory: float
    launch: float | None
    view: float | None
    overlap: float | None
    products: tuple[Product, ...]
    copies: tuple[TimedCopy, ...]
    calls: tuple[TimedCollective, ...]
    operators: tuple[Ran, ...] = ()


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure(rank: int, world_size: int, device: torch.device, until: float) -> Measured:
    """Measure until `until` by time.monotonic(), which all processes of a machine share, or until all points are
    measured, and for LEAST seconds where processes took long to start; rank 0 prints the progress."""
    return Bench(rank, world_size, device, Timer(world_size, device, until)).run()


class Timer:
    """Times simultaneous actions of all ranks, by the slowest rank.

    Attributes:
        left: seconds until the end, by the rank that has least; LEAST at first, at least.
        last: seconds that the last `time` took in all.
    """

    def __init__(self, world_size: int, device: torch.device, until: float) -> None:
        self._alone, self._device, self._until = world_size == 1, device, until
        self.left = until - time.monotonic()
        self._issuing = 1e-3
        self.time(lambda: None)  # the last rank arrives
        missing = max(LEAST - self.left, 0.0)
        self._until, self.left, self.last = until + missing, self.left + missing, 0.0

    def time(self, action: Callable[[], object], count: int = 1) -> float:
        """Seconds of one of `count` calls in a row."""
        self._synchronize()
        if not self._alone:
            dist.barrier()
        if self._device.type == "cpu":
            start = time.perf_counter()
            for _ in range(count):
                action()
            seconds = (time.perf_counter() - start) / count
        else:
            seconds = self._of_kernels(action, count)
        slowest = torch.tensor([seconds, time.monotonic() - self._until], dtype=torch.float64, device=self._device)
        if not self._alone:
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        seconds, late = slowest.tolist()
        self.left, self.last = -late, self.left + late
        return float(seconds)

    def worked(self, action: Callable[[], object], count: int) -> tuple[float, float]:
        """Seconds of one of `count` calls in a row, and those of its CPU, the mean of all ranks."""
        worked = 0.0

        def run() -> None:
            nonlocal worked
            started = time.process_time()
            for _ in range(count):
                action()
            worked = (time.process_time() - started) / count

        seconds = self.time(run) / count
        if self._alone:
            return seconds, worked
        total = torch.tensor(worked, dtype=torch.float64)
        dist.all_reduce(total)
        return seconds, float(total) / dist.get_world_size()

    def _of_kernels(self, action: Callable[[], object], count: int) -> float:
        """Seconds of the kernels of a call on a GPU: they wait until all calls have been issued, as those of a step
        wait for the ones before them, so what issues them takes no time of its own."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        while True:
            torch.cuda._sleep(round(self._issuing * CYCLES))  # type: ignore[no-untyped-call]
            started = time.perf_counter()
            start.record()
            for _ in range(count):
                action()
            end.record()
            issued = time.perf_counter() - started
            self._synchronize()
            waited, self._issuing = issued < self._issuing or self._issuing > LONGEST_ISSUE, 2 * issued
            if waited:
                return float(start.elapsed_time(end)) / 1e3 / count

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.cuda.synchronize()

    def fits(self, seconds: float = 0.0) -> bool:
        """Whether there is time for an action that takes `seconds`, or as long as the last one."""
        return self.left > max(seconds, self.last)


@dataclass(frozen=True)
class Point:
    """Something to measure.

    Attributes:
        title: the text to print.
        measure: measures for about the given number of seconds, or less if time runs out.
        enough: seconds for an accurate measurement.
    """

    title: str
    measure: Callable[[float], None]
    enough: Callable[[], float]


class Bench:
    """The points and their measurements."""

    def __init__(self, rank: int, world_size: int, device: torch.device, timer: Timer) -> None:
        self.rank, self.size, self.device, self.timer = rank, world_size, device, timer
        self.cpu = device.type == "cpu"
        self.sides = SIDES[device.type]
        halves = range((world_size & -world_size).bit_length())  # the world size, divided repeatedly by two
        self.sizes = [world_size >> power for power in halves if world_size >> power > 1]
        self.groups: dict[int, Any] = {}
        self.products: list[Product] = []
        self.copies: list[TimedCopy] = []
        self.calls: list[TimedCollective] = []
        self.ran: list[Ran] = []
        self.launch: float | None = None
        self.view: float | None = None
        self.overlap: float | None = None if world_size > 1 else 0.0

    def run(self) -> Measured:
        needed, title = [*self._needed_points()], ""
        points = [*needed, *self._further_points()]
        for number, point in enumerate(points):
            if not self.timer.fits():
                break
            enough, further = point.enough(), number >= len(needed)
            if further and not self.timer.fits(enough):
                continue
            wanted = enough if further else min(enough, self.timer.left / (len(needed) - number))
            share = max(wanted, self.timer.left / (len(points) - number))
            if point.title != title and self.rank == 0:
                print(f"calibrate: {point.title}", flush=True)
            title = point.title
            point.measure(share)
        return Measured(
            *(self.size, self.device.type, self._memory(), self.launch, self.view, self.overlap),
            *(tuple(self.products), tuple(self.copies), tuple(self.calls), tuple(self.ran)),
        )

    def _needed_points(self) -> Iterator[Point]:
        """The points that every constant needs, most important first."""
        first, *others = self.sides
        yield from self._of_products(first, self.sides[first][:3])
        for size in COPIED:
            yield Point("memory", partial(self._copy, size), lambda: ENOUGH)
        for kind in KINDS[:3]:
            yield from self._of_calls(SENT[:2], [kind], self.sizes[:1])
        yield Point("small operators", self._operators, lambda: 2 * ENOUGH)
        for tokens in SAMPLED[:0:-1]:
            yield Point("stack of layers", partial(self._stack, tokens), lambda: ENOUGH)
        for kind in KINDS[3:]:
            yield from self._of_calls(SENT[:2], [kind], self.sizes[:1])
        for dtype in others:
            yield from self._of_products(dtype, self.sides[dtype][:3])
        if self.size > 1:  # last, since it takes as long as many others
            yield Point("products beside all-reduces", self._overlap, lambda: 3 * BESIDE)

    def _further_points(self) -> Iterator[Point]:
        """Points that make constants more accurate: operators by name, other sizes, then other groups, alternating
        between kinds."""
        for op in FORMS:
            yield Point("operators by name", partial(self._operator, op), lambda: len(SAMPLED) * 2 * ENOUGH)
        for dtype, sides in self.sides.items():
            yield from self._of_products(dtype, sides[3:])
        yield from self._of_calls(SENT[2:], KINDS, self.sizes[:1])
        yield from self._of_calls(SENT, [kind for kind in KINDS if kind != SEND], self.sizes[1:])

    def _of_products(self, dtype: str, sides: Sequence[int]) -> Iterator[Point]:
        for side in sides:
            yield Point(f"products of {dtype}", partial(self._product, dtype, side), lambda: ENOUGH)

    def _of_calls(self, sizes: Sequence[int], kinds: Sequence[str], groups: Sequence[int]) -> Iterator[Point]:
        for ranks, size, kind in product(groups, sizes, kinds):
            yield Point(kind, partial(self._collective, kind, ranks, size), partial(self._enough, kind))

    def _seconds(self, action: Callable[[], object], share: float) -> float | None:
        """Seconds of one call while all ranks make it, measured for `share` seconds; None if there is no time."""
        end = self.timer.left - share
        self.timer.time(action)
        if not self.timer.fits():
            return None
        first = self.timer.time(action)
        count = max(1, min(int(share / BATCHES / max(first, 1e-9)), 1000 if self.cpu else QUEUED))
        batches: list[float] = []
        while len(batches) < BATCHES and self.timer.left > end and self.timer.fits(count * first):
            batches.append(self.timer.time(action, count))
        return min(batches, default=first)

    def _worked(self, action: Callable[[], object], share: float) -> tuple[float, float] | None:
        """Seconds of computation alone, as `_seconds` measures; and those of its CPU, the mean of the ranks, which
        neither their number nor other programs change much. GPUs compute for nobody else."""
        if not self.cpu:
            seconds = self._seconds(action, share)
            return None if seconds is None else (seconds, seconds)
        end = self.timer.left - share
        self.timer.time(action)
        if not self.timer.fits():
            return None
        first = self.timer.worked(action, 1)
        count = max(1, min(int(share / BATCHES / max(first[0], 1e-9)), 1000))
        batches: list[tuple[float, float]] = []
        while len(batches) < BATCHES and self.timer.left > end and self.timer.fits(count * first[0]):
            batches.append(self.timer.worked(action, count))
        seconds, worked = (min(some) for some in zip(*(batches or [first]), strict=True))
        return worked * self._sharing or seconds, worked

    @cached_property
    def _sharing(self) -> float:
        """Ranks per core, 0 where each has one. Where they share cores, a step takes their CPU seconds times that. A
        clock also counts when each begins, and all else that runs: 8 ranks on 2 cores read and write 1 MiB at 6 GB/s
        each by their CPU, and at 0.01 to 1 GB/s by the clock."""
        return self.size / cores() if self.cpu and self.size > cores() else 0.0

    def _added(self, action: Callable[[], object], share: float) -> float | None:
        """Seconds that a call adds to the computation before it, while all ranks run both: the median of the
        measurements in `share` seconds. By the clock, because ranks wait for each other, and relative to the
        computation alone, because a busy machine stretches both. If `share` is too short, the seconds of a call with
        nothing before it; None if there is no time for that either."""
        compute, _ = self._between

        def both() -> None:
            compute()
            action()

        end = self.timer.left - share
        self.timer.time(both)
        batches: list[tuple[float, float]] = []
        while len(batches) < BATCHES and (not batches or self.timer.left > end) and self.timer.fits():
            batches.append(self._timed(action, 1))
        if not batches:
            return None
        alone, took = min(priced for priced, _ in batches), min(seconds for _, seconds in batches)
        found: list[float] = []
        if share >= self._needed(took):
            took = self._needed(took) / MIN_DIFFERENCES
            while self.timer.fits(took) and (len(found) < MIN_DIFFERENCES or self.timer.left > end):
                before = self.timer.left
                priced, without = self._timed(compute, TOGETHER)
                found.append(priced * (self._timed(both, TOGETHER)[1] / without - 1))
                took = before - self.timer.left
        return max(median(found), ADDED * alone) if len(found) >= MIN_DIFFERENCES else alone

    def _timed(self, action: Callable[[], object], count: int) -> tuple[float, float]:
        """Seconds of one of `count` calls in a row as plans are priced with, and those that it takes to measure."""
        seconds, worked = self.timer.worked(action, count)
        return worked * self._sharing or seconds, seconds

    @cached_property
    def _between(self) -> tuple[Callable[[], None], float]:
        """The computation before each collective, and its seconds."""
        compute = SampleLayers(self.device, *BETWEEN).forward
        self.timer.time(compute)
        return compute, self.timer.time(compute)

    def _needed(self, call: float) -> float:
        """Seconds for the minimum number of differences of a call that takes `call` seconds standalone."""
        return MIN_DIFFERENCES * TOGETHER * (2 * self._between[1] + call)

    def _enough(self, kind: str) -> float:
        """Seconds for an accurate measurement of a call: it takes no longer than the longest one of its kind."""
        known = [call.seconds for call in self.calls if call.kind == kind] or [call.seconds for call in self.calls]
        return self._needed(max(known, default=0.0))

    def _product(self, dtype: str, side: int, share: float) -> None:
        a, b = (torch.ones(side, side, dtype=getattr(torch, dtype), device=self.device) for _ in range(2))
        if (took := self._worked(lambda: a @ b, share)) is not None:
            self.products.append(Product(dtype, 2.0 * side**3, *took))

    def _copy(self, size: int, share: float) -> None:
        elements = size // 4 * (1 if self.cpu else FACTOR)
        cold = cycle([torch.ones(elements, device=self.device) for _ in range(max(CACHED // (4 * elements), 1))])
        if (took := self._worked(lambda: torch.relu(next(cold)), share)) is not None:
            self.copies.append(TimedCopy(8 * elements, *took))

    def _operators(self, share: float) -> None:
        """Seconds per view and per operator of small layers that computes, each the mean of forward and backward. A GPU
        does not see views."""
        view: float | None = 0.0
        if self.cpu:
            x = torch.ones(4, 4, requires_grad=True)

            def transpose() -> None:
                y = x
                for _ in range(CHAIN):
                    y = y.transpose(0, 1)
                torch.autograd.backward(y, torch.ones_like(y))

            chain = self._worked(transpose, share / 2)
            view = None if chain is None else chain[0] / (2 * CHAIN)
        self.view = view
        if view is not None and self.timer.fits():
            layers = self._worked(SampleLayers(self.device, LAYERS, WIDTH, TOKENS).step, share / 2)
            if layers is not None:
                self.launch = max(layers[0] - LAYERS * VIEWS * view, 0.0) / (LAYERS * CALLS)

    def _operator(self, op: str, share: float) -> None:
        """Time forward and backward of one operator; backward is what a step takes beside forward."""
        for tokens in SAMPLED:
            tokens *= 1 if self.cpu else FACTOR
            graph = sample(op, tokens)
            (operator,), size = graph.operators, sum(source.spec.elements for source in graph.sources) * 4
            cold = cycle([self._call_of(graph) for _ in range(min(max(CACHED // size, 1), MOST_COLD))])

            def step(cold: Iterator[tuple[Callable[[], Tensor], list[Tensor]]] = cold) -> None:
                call, learning = next(cold)
                y = call()
                torch.autograd.grad(y, learning, torch.ones_like(y))

            def ahead(cold: Iterator[tuple[Callable[[], Tensor], list[Tensor]]] = cold) -> None:
                next(cold)[0]()

            forward = self._worked(ahead, share / (2 * len(SAMPLED)))
            both = self._worked(step, share / (2 * len(SAMPLED))) if forward is not None else None
            if forward is None or both is None:
                return
            backward = max(both[1] - forward[1], LEAST_BACKWARD * forward[1])
            self.ran.append(Ran(operator.op, tokens, forward[1], backward))

    def _stack(self, tokens: int, share: float) -> None:
        """Time forward and backward of layers, none of which share parameters."""
        tokens *= 1 if self.cpu else FACTOR
        call, learning = self._call_of(stack(tokens))

        def step() -> None:
            y = call()
            torch.autograd.grad(y, learning, torch.ones_like(y))

        if (took := self._worked(step, share)) is not None:
            self.ran.append(Ran(STACK, tokens, took[0], 0.0))

    def _call_of(self, graph: OperatorGraph) -> tuple[Callable[[], Tensor], list[Tensor]]:
        """A sample on tensors, and those of them that have gradients."""
        values: dict[Ref, Tensor] = {}
        for source in graph.sources:
            shape = source.spec.shape
            if source.spec.floating:
                values[Ref(source.id)] = torch.ones(shape, device=self.device, requires_grad=source.trainable)
            else:
                values[Ref(source.id)] = torch.arange(shape[0], device=self.device) % VOCABULARY
        calls = [(Ref(one.id), resolve(one.target), one.args, dict(one.kwargs)) for one in graph.operators]

        def run() -> Tensor:
            known = dict(values)
            for ref, function, args, kwargs in calls:
                result = function(*rewrite(args, lambda leaf: known[leaf] if isinstance(leaf, Ref) else leaf), **kwargs)
                known[ref] = result[0] if isinstance(result, tuple) else result
            return known[graph.outputs[0]]

        return run, [value for value in values.values() if value.requires_grad]

    def _overlap(self, share: float) -> None:
        """The share of an all-reduce of several gradient buckets that is hidden by matrix products of equal
        duration."""
        if share < 2 * BESIDE:
            return
        side = 256 if self.cpu else 4096
        a = torch.ones(side, side, device=self.device)
        flats = [torch.ones(BUCKET // 4 * (1 if self.cpu else FACTOR), device=self.device) for _ in range(BUCKETS)]
        sum_ = self._added(lambda: dist.all_reduce(flats[0]), share / 3)
        product = self._worked(lambda: a @ a, share / 3) if sum_ is not None and self.timer.fits() else None
        if sum_ is None or product is None:
            return
        once, _ = product
        repeats = max(1, round(sum_ / once))
        alone = repeats * once

        def both() -> None:
            works = []
            for flat in flats:
                for _ in range(repeats):
                    a @ a
                works.append(dist.all_reduce(flat, async_op=True))
            for work in works:
                assert work is not None
                work.wait()

        if not self.timer.fits(BUCKETS * (sum_ + alone)):
            return
        together = self._worked(both, share / 3)
        if together is not None:
            hidden = sum_ + alone - together[0] / BUCKETS
            self.overlap = min(max(hidden / min(sum_, alone), 0.0), 1.0)

    def _collective(self, kind: str, ranks: int, size: int, share: float) -> None:
        elements = size // 4 * (1 if self.cpu else FACTOR)
        elements = max(elements // ranks, 1) * ranks
        sent, action = self._call(kind, ranks, elements)
        if (seconds := self._added(action, share)) is not None:
            self.calls.append(TimedCollective(kind, ranks, 4 * sent, seconds))

    def _group(self, ranks: int) -> Any:
        """The process group of `ranks` ranks that holds this rank; creating the groups is collective and takes time."""
        if ranks not in self.groups:
            made = [dist.new_group(list(range(first, first + ranks))) for first in range(0, self.size, ranks)]
            self.groups[ranks] = made[self.rank // ranks]
        return self.groups[ranks]

    def _call(self, kind: str, ranks: int, elements: int) -> tuple[int, Callable[[], object]]:
        """Elements that a rank sends, and the call; `elements` are those of the larger side."""
        group, part = self._group(ranks), elements // ranks
        tensor, piece = torch.ones(elements, device=self.device), torch.ones(part, device=self.device)
        if kind == ALL_REDUCE:
            return -(-2 * (ranks - 1) * elements // ranks), lambda: dist.all_reduce(tensor, group=group)
        if kind == ALL_GATHER:
            return (ranks - 1) * part, lambda: all_gather(tensor, piece, group=group)
        if kind == REDUCE_SCATTER:
            return (ranks - 1) * part, lambda: reduce_scatter(piece, tensor, group=group)
        if kind == SEND:
            return elements, lambda: self._exchange_with_neighbour(tensor)
        own = self.rank % ranks
        sizes = [0 if kind == EXCHANGE and peer == own else part for peer in range(ranks)]
        out, into = tensor[: sum(sizes)], torch.empty(sum(sizes), device=self.device)
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


class SampleLayers:
    """A stack of layers of one width, each with separate weights, for two sequences of `tokens`."""

    def __init__(self, device: torch.device, layers: int, width: int, tokens: int) -> None:
        def values(*shape: int) -> Tensor:
            return torch.full(shape, 1 / width, device=device, requires_grad=True)

        self.x = values(2, tokens, width)
        self.layers = [[values(width, width) for _ in range(7)] for _ in range(layers)]

    def step(self) -> None:
        """Run forward and backward."""
        y = self._run()
        torch.autograd.backward(y, torch.ones_like(y))
        for one in (self.x, *chain.from_iterable(self.layers)):
            one.grad = None

    @torch.no_grad()
    def forward(self) -> None:
        self._run()

    def _run(self) -> Tensor:
        y = self.x
        shape = y.shape[-1:]
        for query, key, value, out, gate, up, down in self.layers:
            normed = functional.layer_norm(y, shape)
            q, k, v = (self._heads(normed @ one) for one in (query, key, value))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            y = y + mixed.transpose(1, 2).reshape(y.shape) @ out
            normed = functional.layer_norm(y, shape)
            y = y + (functional.silu(normed @ gate) * (normed @ up)) @ down
        return y

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], HEADS, x.shape[-1] // HEADS).transpose(1, 2)
