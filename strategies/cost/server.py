"""What a step costs on parameter servers: the links of the servers carry what all workers pull and push; the gradients
of what workers keep travel around a ring of workers.

A worker computes what a rank of data parallelism does. In a synchronous step pull, compute, push, replica and update
follow one another; where slices update on arrival, servers and workers work at the same time, and the slower ones set
the pace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from strategies.cost.cluster import Cluster
from strategies.cost.step import StepCost


@dataclass(frozen=True)
class Servers:
    """`servers` that hold equal parts of the parameters, with `replicas` of each, for `workers`.

    Attributes:
        pull, push: bytes that one worker receives and sends in a step, at most.
        summed: bytes of the gradient of all slices, at most.
        sync: whether a step is one update.
        served: bytes of the parameters on servers, in fp32 or wider.
        kept: bytes of the parameters that workers keep, and of their gradients, in fp32 or wider.
        halves: whether workers compute with 16 bits.
    """

    servers: int
    workers: int
    replicas: int
    pull: int
    push: int
    summed: int
    sync: bool
    served: int
    kept: int = 0
    halves: bool = False

    @property
    def reduced(self) -> int:
        """Bytes that all workers send to one another to add up the gradients of what they keep."""
        return 2 * (self.workers - 1) * self.kept

    @property
    def replicated(self) -> int:
        """Bytes that servers hand to replicas in a step: one gradient of all slices, or one of each."""
        return self.replicas * (self.summed if self.sync else self.workers * self.push)

    def communication(self) -> dict[str, int]:
        """Bytes over the link of one server in a step."""
        sent = {"pull": self.workers * self.pull, "push": self.workers * self.push, "replicate": self.replicated}
        return {name: -(-count // self.servers) for name, count in sent.items() if count}


def served(cost: StepCost, servers: Servers, cluster: Cluster) -> StepCost:
    """The cost of a step whose compute is that of `cost`."""
    ranks, reached = 1 + servers.servers + servers.workers, 1
    link = cluster.levels[0].link
    for level in reversed(cluster.levels):  # the innermost level that joins all ranks
        reached *= level.size
        if reached >= ranks:
            link = level.link
            break
    seconds = {
        name: count / link.bandwidth + servers.workers * (link.latency + link.call)
        for name, count in servers.communication().items()
    }
    if servers.reduced:
        calls = 2 * (servers.workers - 1)
        share = servers.reduced / servers.workers
        seconds["all_reduce"] = share / link.bandwidth + calls * (link.latency + link.call)
    updates = (1 if servers.sync else servers.workers) * (1 + servers.replicas)
    by_workers = servers.kept / (servers.kept + servers.served) if servers.kept else 0.0
    optimizer = cost.optimizer * (by_workers + (1 - by_workers) * updates / servers.servers)
    if not servers.sync:
        alone = cost.compute + (servers.pull + servers.push) / link.bandwidth
        pace = max(alone, sum(seconds.values()) + optimizer)
        seconds, optimizer = {"servers": max(0.0, pace - cost.compute)}, 0.0
    return replace(cost, redistributions=seconds, weights={}, gradients=0.0, exposed=0.0, optimizer=optimizer)
