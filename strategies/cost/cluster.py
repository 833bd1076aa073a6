"""A machine that is only described: devices by level, what one device computes, and what the links between them carry.

Pure data; every number is what programs achieve, not what a data sheet promises. Invariant: the ranks of a mesh are
laid row-major over the innermost devices, so which levels a group of ranks crosses follows from the mesh alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from strategies.core.errors import StrategyError
from strategies.core.mesh import Mesh

RING, TREE, HIERARCHICAL = "ring", "tree", "hierarchical"


@dataclass(frozen=True)
class Link:
    """`bandwidth`: bytes per second that one rank sends; `latency`: seconds per round of messages; `call`: seconds of a
    collective, whatever it carries and among however many ranks."""

    bandwidth: float
    latency: float
    call: float = 0.0


@dataclass(frozen=True)
class Pace:
    """One direction of an operator that is not as fast as the roofline: `call` seconds, whatever it works on, and
    `factor` times the roofline's seconds for flops and bytes."""

    call: float
    factor: float


@dataclass(frozen=True)
class Level:
    """`size` units of the next level (devices, for the last one) joined by `link`; `kinds` are links of collectives
    that run at rates of their own, by the kind of step."""

    name: str
    size: int
    link: Link
    kinds: Mapping[str, Link] = field(default_factory=dict, hash=False)

    def of(self, kind: str) -> Link:
        """The link as one kind of collective finds it."""
        return self.kinds.get(kind, self.link)


@dataclass(frozen=True)
class Cluster:
    """`levels` are outermost (slowest) first; the product of their sizes is the number of devices.

    Of one device: `flops` per second by dtype, `memory` in bytes, `memory_bandwidth` in bytes per second (read plus
    written), `launch` seconds per operator that computes, `view` per operator that only renames its elements. `overlap`
    is the share of adding gradients that can hide behind backward; `algorithms` are what the collectives choose among;
    `fraction` is the share that `flops` are of the data sheet's. Where devices differ, `each` describes that of every
    rank, and the numbers here are those of the slowest, for which all ranks of a step with equal slices wait.
    `operators` are those that have paces of their own, forward and backward.
    """

    name: str
    levels: tuple[Level, ...]
    flops: Mapping[str, float] = field(hash=False)
    memory: int
    memory_bandwidth: float
    launch: float
    view: float = 0.0
    overlap: float = 0.0
    algorithms: tuple[str, ...] = (RING, TREE, HIERARCHICAL)
    fraction: float = 1.0
    each: tuple[Cluster, ...] = ()
    operators: Mapping[str, tuple[Pace, Pace]] = field(default_factory=dict, hash=False)

    def of_group(self, group: int, ranks: int) -> Cluster:
        """The slowest devices of one of the groups of `ranks` consecutive ranks, such as those of a pipeline."""
        return slowest(self.each[group * ranks : (group + 1) * ranks]) if self.each else self

    @property
    def fastest(self) -> Cluster:
        """Devices as fast and as large as the best of any rank: for lower bounds."""
        return _combined(self.each, max, min) if self.each else self

    @cached_property
    def devices(self) -> int:
        return math.prod(level.size for level in self.levels)

    def peak(self, dtype: str) -> float:
        """Flops per second with operands of `dtype`; a dtype that is not listed computes like float32, float64 at half
        of that."""
        if dtype in self.flops:
            return self.flops[dtype]
        return self.flops["float32"] / (2 if dtype == "float64" else 1)

    def units(self, ranks: int) -> tuple[int, ...]:
        """The number of units of each level but the innermost over which that many ranks are spread, outermost first;
        levels that they do not fill evenly are left out."""
        inner = [math.prod(level.size for level in self.levels[depth:]) for depth in range(1, len(self.levels))]
        return tuple(ranks // size for size in inner if ranks % size == 0 and ranks > size)

    def link(self, mesh: Mesh, axes: Iterable[str]) -> Link:
        """The link of the slowest level that a group along `axes` crosses (the innermost one for a single rank).

        Raises StrategyError if the mesh has more ranks than the cluster devices.
        """
        for level, peers in zip(self.levels, self.spread(mesh, axes), strict=True):
            if peers > 1:
                return level.link
        return self.levels[-1].link

    def between(self, first: int, second: int, kind: str) -> Link:
        """The link over which two devices exchange messages of one kind, such as the sends of a pipeline."""
        units = self.devices
        for level in self.levels:
            units //= level.size
            if first // units != second // units:
                return level.of(kind)
        return self.levels[-1].of(kind)

    def spread(self, mesh: Mesh, axes: Iterable[str]) -> tuple[int, ...]:
        """Per level, among how many units a group along `axes` is spread: (4, 2) are 4 nodes with 2 ranks each. Where
        groups differ, the most of any; the product is at least the size of the group."""
        return _spread(tuple(level.size for level in self.levels), mesh, mesh.sorted(axes), self.name)


def slowest(clusters: Sequence[Cluster]) -> Cluster:
    """Devices as slow and as small as the worst of any of the `clusters`, which have the same links."""
    return _combined(clusters, min, max)


def _combined(clusters: Sequence[Cluster], rate: Callable[..., Any], seconds: Callable[..., Any]) -> Cluster:
    different = tuple(dict.fromkeys(clusters))
    if len(different) == 1:
        return different[0]
    first: Cluster = rate(different, key=lambda one: one.peak("float32"))
    return replace(
        first,
        name=" and ".join(one.name for one in different),
        flops={dtype: rate(one.peak(dtype) for one in different) for own in different for dtype in own.flops},
        memory=rate(one.memory for one in different),
        memory_bandwidth=rate(one.memory_bandwidth for one in different),
        launch=seconds(one.launch for one in different),
        view=seconds(one.view for one in different),
        overlap=rate(one.overlap for one in different),
        operators=_paces(different, seconds),
    )


def _paces(clusters: Sequence[Cluster], seconds: Callable[..., Any]) -> dict[str, tuple[Pace, Pace]]:
    """The largest or smallest paces of several machines; one that does not know an operator is at the roofline."""
    paces = {}
    for op in sorted({op for one in clusters for op in one.operators}):
        known = [one.operators.get(op, (Pace(one.launch, 1.0),) * 2) for one in clusters]
        forward, backward = (
            Pace(seconds(one.call for one in some), seconds(one.factor for one in some))
            for some in zip(*known, strict=True)
        )
        paces[op] = forward, backward
    return paces


def one_level(devices: int) -> Cluster:
    """Fast devices (a data sheet's H100, at what programs achieve) joined by one fast link: for plans whose machine
    nobody described."""
    flops = {"float64": 47e12, "float32": 47e12, "float16": 692e12, "bfloat16": 692e12}
    return Cluster("one_level", (Level("device", devices, Link(369e9, 1.9e-6, 10e-6)),), flops, 83 * 10**9, 3e12, 5e-6)


@cache
def _spread(sizes: tuple[int, ...], mesh: Mesh, axes: tuple[str, ...], name: str) -> tuple[int, ...]:
    if mesh.size > math.prod(sizes):
        raise StrategyError(
            "MW443",
            f"Cluster {name} has {math.prod(sizes)} devices ({' x '.join(map(str, sizes))}), but the mesh "
            f"{' x '.join(str(size) for _, size in mesh.axes)} needs {mesh.size}; describe a larger one.",
        )
    ranks = np.arange(mesh.size)
    offsets = np.zeros(1, dtype=np.int64)
    for axis in axes:
        ranks = ranks[ranks // mesh.strides[axis] % mesh.sizes[axis] == 0]
        offsets = (offsets[:, None] + np.arange(mesh.sizes[axis]) * mesh.strides[axis]).ravel()
    members = ranks[:, None] + np.sort(offsets)  # [group, member]
    counts, before = [], np.ones(len(ranks), dtype=np.int64)
    for depth in range(len(sizes)):
        unit = members // math.prod(sizes[depth + 1 :])
        units = (np.diff(unit, axis=1) > 0).sum(axis=1) + 1
        counts.append(int((-(-units // before)).max()))
        before = units
    return tuple(counts)
