"""How many rows of a micro-batch each rank gets where the devices of a cluster differ.

A step waits for its slowest rank, so the rows minimise the largest time to compute. The time of a rank is a line in its
rows: calls take as long for one row as for many. No kind of device gets more rows than its memory is large enough for.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from runner.config.schema import Config
from runner.planning import lowering
from runner.planning.clusters import clusters_of
from strategies.core.errors import StrategyError
from strategies.core.graph import OperatorGraph
from strategies.core.mesh import Share
from strategies.core.plan import Plan
from strategies.cost.cluster import Cluster
from strategies.cost.step import works_of
from strategies.memory.parts import in_words, memory
from strategies.memory.trace import trace
from strategies.optimizer.settings import OptimizerSettings


@dataclass(frozen=True)
class EqualRanks:
    """The `ranks` with equal devices, which `cluster` describes, and equal slices of the batch; `plan` as they see
    it."""

    ranks: tuple[int, ...]
    rows: int
    cluster: Cluster
    plan: Plan


def kinds_of(config: Config, plan: Plan, device: str) -> list[EqualRanks]:
    """The kinds of ranks of a plan with batch rows, in the order of their first ranks."""
    clusters = clusters_of(config, device, plan.mesh.size)
    found: list[EqualRanks] = []
    for rank, cluster in enumerate(clusters):
        own = plan.of_rank(rank)
        assert own.mesh.share is not None
        rows = own.mesh.share.stop - own.mesh.share.start
        at = next((at for at, kind in enumerate(found) if (kind.rows, kind.cluster) == (rows, cluster)), None)
        if at is None:
            found.append(EqualRanks((rank,), rows, cluster, own))
        else:
            found[at] = replace(found[at], ranks=(*found[at].ranks, rank))
    return found


def with_batch_rows(config: Config, graph: OperatorGraph, plan: Plan, settings: OptimizerSettings) -> Plan:
    """`plan` with the rows of `parallel.batch_rows`, or by the speeds of `cluster.groups`; with equal slices without
    either, and where these mean a pipeline or another mode.

    Raises:
        StrategyError: the batch is not sliced over all ranks; ranks would have to exchange rows; a kind of device has
            too little memory.
    """
    plan = replace(plan, batch_rows=())
    if not config.has_uneven_rows:
        return plan
    ranks, entries = plan.mesh.size, [source for source in graph.of_kind("input")]
    total = entries[0].spec.shape[0]
    if plan.batch_axes != {(plan.mesh.names[0],)} or len(plan.mesh.names) > 1:
        raise StrategyError(
            "MW414",
            f"The {total} rows of a micro-batch (data.batch_size / train.accumulate) are not sliced over all {ranks} "
            f"ranks, which slices of different sizes need; take a data.batch_size that {ranks} divides.",
        )
    rows = config.parallel.batch_rows or _by_speed(config, graph, plan, settings, total)
    plan = replace(plan, batch_rows=tuple(rows))
    for kind in kinds_of(config, plan, settings.device):
        lowering.training_program(config, graph, kind.plan)
    return plan


def _by_speed(
    config: Config, graph: OperatorGraph, plan: Plan, settings: OptimizerSettings, total: int
) -> tuple[int, ...]:
    clusters = clusters_of(config, settings.device, plan.mesh.size)
    axis = plan.mesh.names[0]

    def shared(rows: int) -> Plan:
        return replace(plan, mesh=replace(plan.mesh, share=Share(axis, 0, rows, total)))

    def seconds(cluster: Cluster, rows: int) -> float:
        return sum(work.forward + work.backward for work in works_of(graph, shared(rows), cluster))

    def peak(rows: int) -> int:
        return memory(trace(lowering.training_program(config, graph, shared(rows)), settings), settings).peak

    different = list(dict.fromkeys(clusters))
    lines = {one: (seconds(one, 1), (seconds(one, total) - seconds(one, 1)) / max(total - 1, 1)) for one in different}
    most = dict.fromkeys(different, total)
    while True:
        rows = divided(total, [lines[one] for one in clusters], [most[one] for one in clusters])
        largest = {one: max(own for own, of in zip(rows, clusters, strict=True) if of == one) for one in different}
        full = [one for one in different if peak(largest[one]) > one.memory]
        if not full:
            return rows
        for one in full:
            most[one] = _largest(largest[one] - 1, peak, one.memory)
        if not all(most.values()) or sum(most[one] for one in clusters) < total:
            raise StrategyError(
                "MW501",
                f"A micro-batch of {total} rows does not fit into the memory of the devices: "
                + ", ".join(f"{one.name} ({in_words(one.memory)}) has room for {most[one]} rows" for one in different)
                + " per device. Choose more train.accumulate, parallel.recompute=full, a higher parallel.zero.stage or "
                "more devices.",
            )


def divided(total: int, lines: Sequence[tuple[float, float]], most: Sequence[int]) -> tuple[int, ...]:
    """Rows per rank, one at least, that add up to `total` and minimise the largest time.

    Each row goes to the rank that is done first with it, which is optimal because no rank gets faster with more rows.

    Args:
        total: The rows of all ranks, as many as ranks or more.
        lines: Of each rank the seconds of its first row, and of every further one.
        most: Of each rank the most rows; together `total` or more.
    """
    rows = [1] * len(lines)
    waiting = [(first + more, rank) for rank, (first, more) in enumerate(lines) if most[rank] > 1]
    heapq.heapify(waiting)
    for _ in range(total - len(lines)):
        _, rank = heapq.heappop(waiting)
        rows[rank] += 1
        if rows[rank] < most[rank]:
            first, more = lines[rank]
            heapq.heappush(waiting, (first + rows[rank] * more, rank))
    return tuple(rows)


def _largest(most: int, bytes_of: Callable[[int], int], limit: int) -> int:
    """The largest number of rows up to `most` that need no more than `limit`; 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if bytes_of(middle) <= limit else (low, middle - 1)
    return low
