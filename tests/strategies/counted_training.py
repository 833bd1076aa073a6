"""What runs on each rank for `test_zero_traffic`: bytes that a step sends, and those that the plan predicts."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

from strategies.core.program import Program
from strategies.memory.trace import trace
from strategies.optimizer import sharding
from strategies.optimizer.settings import OptimizerSettings, own_sizes, persisting
from strategies.optimizer.zero import traffic as zero_traffic

training: Any = importlib.import_module("sharded_training")


def counted(rank: Any, payload: list[tuple[Any, Any]]) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Per case: bytes of the second step of this rank, by collective; and what was predicted."""
    found = []
    for task, case in payload:
        setup = training.Setup(task, case, rank.rank, training.MESH)
        for micro_batches in task.batches:
            before = Counter(setup.communicator.sent)
            for x, y in micro_batches:
                setup.updates.backward(setup.updates.module(*setup.batch(setup.program, x, y)))
            setup.updates.step()
        sent = dict(setup.communicator.sent - before)
        setup.updates.close()
        groups = training.groups_of(setup.program)
        predicted = redistributed(setup.program, rank.rank, case.accumulate)
        if case.engine == "native":
            predicted.update(native(setup.program, case, groups))
        else:
            complete = persisting(case.options)
            predicted.update(zero_traffic.predicted(setup.program, case.stage, case.accumulate, groups, complete))
        for call in zero_traffic.agreement(setup.program):
            predicted[call.kind] += call.bytes
        found.append((sent, dict(predicted)))
    return found


def native(program: Program, case: Any, groups: list[dict[str, Any]]) -> Counter[str]:
    """Bytes that our own engine sends for gradients and weights; those of a micro-batch of stage 3 are traced."""
    bucket, complete = own_sizes(case.options)
    settings = OptimizerSettings(
        case.stage, groups=groups, accumulate=case.accumulate, bucket=bucket, engine="native", complete=complete
    )
    total: Counter[str] = Counter()
    names = [one["names"] for one in groups]
    buckets = sharding.sharded_buckets(program, names, settings.limit, case.stage, complete)
    found = sharding.calls(program, names, case.accumulate, settings.limit, case.stage, complete)
    if case.stage == 3:
        total.update({kind: case.accumulate * count for kind, count in trace(program, settings).zero.items()})
        found = tuple(sharding.after_update(buckets))
    for call in found:
        total[call.kind] += call.bytes
    return total


def redistributed(program: Program, rank: int, parts: int) -> Counter[str]:
    """Bytes of redistributions that this rank sends."""
    total: Counter[str] = Counter()
    for one in program.redistributions:
        for chain in (one.forward, one.backward) if one.differentiable else (one.forward,):
            for step in chain:
                total[step.kind] += parts * step.elements(program.mesh, rank) * one.spec.item_bytes
    return total
