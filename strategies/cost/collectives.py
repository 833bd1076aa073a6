"""Seconds of one collective: message rounds times a latency, plus bytes over a bandwidth, by the fastest algorithm for
the size.

Per rank, of a group of n ranks where B bytes are sent (as `Step.busiest` counts them):

* ring: all-gather and reduce-scatter take n - 1 rounds, all-reduce twice as many. Every unit of a level sends over the
  links of all its members at once, so a level's bandwidth is that of a link times the group's members in a unit.
* tree: an all-reduce up and down chains in the innermost units and binary trees over the others, two trees with half of
  the tensor each; rounds grow with the logarithm, and each rank sends the complete tensor up and down.
* hierarchical: one ring per level after the other; the outer ones carry the rest of the tensor.
* rotate and mirror: one message to another rank; the slowest link decides.
* all-to-all and exchange: one message per peer; what leaves a unit goes over its members' own links.

Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (2005), and the cost
table in NCCL's src/graph/tuning.cc, which counts rounds per level in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.steps import ALL_REDUCE, ALL_TO_ALL, EXCHANGE, LOCAL, MIRROR, ROTATE, ReshardingPath, Step
from strategies.cost.cluster import HIERARCHICAL, RING, TREE, Cluster, Link
from strategies.resharding.path import resharding_path

Crossed = tuple[tuple[int, Link], ...]
"""Per level that a group crosses: among how many units, and their link; outermost first."""


def path_seconds(path: ReshardingPath, item_bytes: float, mesh: Mesh, cluster: Cluster) -> float:
    """Seconds of resharding a tensor with elements of `item_bytes` along a path."""
    return sum(step_seconds(step, item_bytes, mesh, cluster) for step in path)


def resharding_seconds(
    before: Layout, after: Layout, shape: tuple[int, ...], item_bytes: int, mesh: Mesh, cluster: Cluster
) -> float:
    """Seconds of the path from one layout to another that the engine runs."""
    return path_seconds(resharding_path(before, after, shape, mesh), item_bytes, mesh, cluster)


def joined_seconds(steps: Sequence[tuple[Step, int]], mesh: Mesh, cluster: Cluster) -> float:
    """Seconds of several steps with the same collective over the same axes, called once for all of them; each with the
    bytes of an element."""
    seconds = sum(step_seconds(step, item_bytes, mesh, cluster) for step, item_bytes in steps)
    first = steps[0][0]
    if len(steps) > 1 and first.kind not in LOCAL:
        sizes = [step.busiest(mesh) * item_bytes for step, item_bytes in steps]
        seconds -= sum(collective_seconds(first.kind, size, first.axes, mesh, cluster) for size in sizes)
        seconds += collective_seconds(first.kind, sum(sizes), first.axes, mesh, cluster)
    return seconds


def step_seconds(step: Step, item_bytes: float, mesh: Mesh, cluster: Cluster) -> float:
    """Seconds of one step, with the copies that put slices in the order in which the collective sends them."""
    sent = 0 if step.kind in LOCAL else step.busiest(mesh)
    return moved_seconds(step.kind, step.axes, copied_elements(step, mesh), sent, item_bytes, mesh, cluster)


def moved_seconds(
    kind: str, axes: tuple[str, ...], copied: int, sent: int, item_bytes: float, mesh: Mesh, cluster: Cluster
) -> float:
    """Seconds of a step that copies and sends the given numbers of elements."""
    passed = 2 * copied * item_bytes
    local = cluster.launch + passed / cluster.memory_bandwidth if passed else 0.0
    return local if kind in LOCAL else local + collective_seconds(kind, sent * item_bytes, axes, mesh, cluster)


def collective_seconds(kind: str, sent: float, axes: tuple[str, ...], mesh: Mesh, cluster: Cluster) -> float:
    """Seconds of one collective along `axes` in which the busiest rank sends `sent` bytes."""
    spread = cluster.spread(mesh, axes)
    crossed = tuple((count, level.of(kind)) for count, level in zip(spread, cluster.levels, strict=True) if count > 1)
    if not crossed:
        return 0.0
    call = max(link.call for _, link in crossed)
    if kind in (ALL_TO_ALL, EXCHANGE):
        return call + _direct(sent, crossed)
    if kind in (ROTATE, MIRROR):
        return call + max(link.latency + sent / link.bandwidth for _, link in crossed)
    passes = 2 if kind == ALL_REDUCE else 1
    seconds = [passes * _ring(sent / passes, crossed)] if RING in cluster.algorithms else []
    if TREE in cluster.algorithms and kind == ALL_REDUCE:
        seconds.append(2 * _tree(sent / 2, crossed, chained=len(cluster.levels) > 1 and spread[-1] > 1))
    if HIERARCHICAL in cluster.algorithms and len(crossed) > 1:
        seconds.append(passes * _hierarchical(sent / passes, crossed))
    return call + min(seconds)


def _members(crossed: Crossed, position: int) -> int:
    """The number of the group's ranks in one unit of a level."""
    return math.prod(count for count, _ in crossed[position + 1 :])


def _ring(sent: float, crossed: Crossed) -> float:
    seconds, units = 0.0, 1
    for count, link in crossed:
        seconds += (units * count - units) * link.latency
        units *= count
    return seconds + sent / min(link.bandwidth * _members(crossed, i) for i, (_, link) in enumerate(crossed))


def _tree(sent: float, crossed: Crossed, *, chained: bool) -> float:
    """`sent` is what a ring sends per pass, (n - 1) / n of the tensor; `chained`: the last level crossed has chains."""
    ranks = math.prod(count for count, _ in crossed)
    tensor = sent * ranks / (ranks - 1)
    seconds = 0.0
    for position, (count, link) in enumerate(crossed):
        chain_here = chained and position == len(crossed) - 1
        seconds += (count - 1 if chain_here else math.ceil(math.log2(count))) * link.latency
    return seconds + tensor / min(link.bandwidth * _members(crossed, i) for i, (_, link) in enumerate(crossed))


def _hierarchical(sent: float, crossed: Crossed) -> float:
    ranks = math.prod(count for count, _ in crossed)
    tensor, seconds = sent * ranks / (ranks - 1), 0.0
    for count, link in reversed(crossed):
        seconds += (count - 1) * link.latency + tensor * (count - 1) / count / link.bandwidth
        tensor /= count
    return seconds


def _direct(sent: float, crossed: Crossed) -> float:
    """Messages to peers in other units of a level leave over that level's link; all links work at once."""
    ranks, inside, slowest, latency = math.prod(count for count, _ in crossed), 1, 0.0, 0.0
    for count, link in reversed(crossed):
        peers = inside * count - inside
        latency += peers * link.latency
        slowest = max(slowest, sent * peers / (ranks - 1) / link.bandwidth)
        inside *= count
    return latency + slowest


def copied_elements(step: Step, mesh: Mesh) -> int:
    """Elements that a rank copies beside sending: slices along any dim but the first are not contiguous."""
    before = step.before.local_elements(step.shape, mesh)
    after = step.after.local_elements(step.shape, mesh)
    if step.kind in (ALL_TO_ALL, EXCHANGE):
        return before + after
    if step.kind == ALL_REDUCE:
        return after  # the operand stays as it was
    return max(before, after) if step.dim or step.kind in LOCAL else 0
