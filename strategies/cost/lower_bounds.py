"""Lower bounds of a step's seconds and a rank's bytes, whatever the plan is: they cost a walk over the graph.

Invariant: no plan of that many ranks is estimated below, because work is divided evenly among ranks, nothing is sent,
and only what stays from step to step counts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from strategies.core.graph import OperatorGraph, modules_around
from strategies.core.mesh import Mesh
from strategies.cost.cluster import Cluster
from strategies.cost.roofline import operator_work
from strategies.optimizer.bytes_per_element import needed
from strategies.optimizer.settings import OptimizerSettings
from strategies.rules import rule_of


@dataclass(frozen=True)
class StepLowerBound:
    """Costs of one micro-batch on one device.

    Attributes:
        work: Seconds of all operators without their kernel launches.
        launches: Seconds of the launches.
        repeated: Seconds of forward inside repeated layers, without launches.
        elements: Of the trainable parameters.
        bytes: Of the trainable parameters.
    """

    work: float
    launches: float
    repeated: float
    elements: int
    bytes: int

    def seconds(self, stages: int, ranks: int, micro_batches: int, more: int, *, again: bool, waits: bool) -> float:
        """Seconds of a step of a pipeline.

        Where a stage `waits`, t seconds of all stages of one micro-batch take at least t / (1 - (1 - 1/m)**s): stage k
        starts when those before it have passed one micro-batch, and then takes m times its own part.

        Args:
            stages: Stages, s.
            ranks: Ranks of one stage.
            micro_batches: Micro-batches, m.
            more: How many times as small they are as the measured one.
            again: Whether repeated layers are recomputed.
            waits: Whether a stage waits for the one before it.
        """
        work = self.work + (self.repeated if again else 0.0)
        once = work / more / ranks + self.launches
        if not waits or stages == 1:
            return once * micro_batches / stages
        return once / (1 - (1 - 1 / micro_batches) ** stages)

    def persistent(self, stages: int, ranks: int, settings: OptimizerSettings, *, sliced: bool) -> float:
        """Bytes of a rank: weights, gradients and states, divided among as many ranks as may have parts of them.
        `sliced`: plans may slice parameters."""
        if settings.offload.optimizer != "none" or settings.offload.parameters != "none":
            return 0.0
        zero, among = settings.stage, ranks if sliced else 1
        states = needed(settings.factory, torch.float32).kept * self.elements
        own = self.bytes / (ranks if zero == 3 else among)
        return (own + states / (ranks if zero else among)) / stages


def step_lower_bound(graph: OperatorGraph, cluster: Cluster, layers: Collection[str]) -> StepLowerBound:
    """The bound of the `graph` of a training step; `layers` are the paths of the repeated ones."""
    alone, work, launches, repeated = Mesh((("alone", 1),)), 0.0, 0.0, 0.0
    for operator in graph.operators:
        seconds = operator_work(rule_of(operator, graph), {}, operator, graph, alone, cluster)
        calls = min(cluster.launch + cluster.launch * bool(seconds.backward), seconds.forward + seconds.backward)
        work += seconds.forward + seconds.backward - calls
        launches += calls
        if any(module in layers for module in modules_around(operator.path)):
            repeated += max(seconds.forward - cluster.launch, 0.0)
    learning = [source.spec for source in graph.of_kind("parameter") if source.trainable]
    elements, size = sum(one.elements for one in learning), sum(one.elements * one.item_bytes for one in learning)
    return StepLowerBound(work, launches, repeated, elements, size)
