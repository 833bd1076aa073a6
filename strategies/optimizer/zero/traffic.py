"""Bytes that ZeRO sends, as plans predict them. Knows nothing of DeepSpeed but what it sends at each stage.

Invariant: with the buckets that `deepspeed_config` chooses (all of a rank's parameters), the bytes are those that
DeepSpeed sends, padding included, but for the norm of the gradients.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from strategies.core.graph import Source
from strategies.core.program import Program
from strategies.core.steps import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from strategies.optimizer.buckets import all_reduce_elements
from strategies.optimizer.updates import Groups, local_elements, updated_together
from strategies.optimizer.zero.partition import elements_of_part
from strategies.runtime.module_tree import units

REDUCED = 4
"""Bytes of an element of a gradient when it is added: always fp32."""


@dataclass(frozen=True)
class Calls:
    """`count` calls of one collective over `axes` in which a rank sends `bytes` in all."""

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int


def calls(
    program: Program, stage: int, accumulate: int = 1, groups: Groups | None = None, complete: int = 0
) -> tuple[Calls, ...]:
    """What one rank calls per optimizer step. `groups` are the optimizer's parameter groups; None is one group of
    all trainable parameters. At stage 3 parameters of at most `complete` elements stay complete.

    Stages 1 and 2, per replica group: an all-reduce of all gradients (after every micro-batch at stage 2) and, per
    parameter group, an all-gather of the new weights, which are padded to equal parts. Stage 3, per micro-batch: a
    gather of the weights of every unit for forward and one for backward, and a reduce-scatter of all gradients; every
    parameter is padded to equal parts. What stays complete is gathered after the update instead, one by one.
    """
    if stage == 0:
        return ()
    trainable = set(program.trainable_names)
    given = [list(trainable)] if groups is None else [one["names"] for one in groups]
    given = [names for group in given for names in updated_together(program, group)]
    by_replicas: dict[tuple[str, ...], list[Source]] = {}
    for source in program.parameters:
        axes = program.layouts[source.id].replica_axes(program.mesh)
        if program.mesh.product(axes) > 1:
            by_replicas.setdefault(axes, []).append(source)
    gathered = _gathered(program, trainable) if stage == 3 else []
    found: list[Calls] = []
    for axes, sources in by_replicas.items():
        ranks = program.mesh.product(axes)
        sizes = {source.name: local_elements(program, source) for source in sources}
        trained = {name: size for name, size in sizes.items() if name in trainable}
        if stage == 3:
            item_bytes = {source.name: source.spec.item_bytes for source in sources}
            part = {name: elements_of_part([size], ranks, stage) * item_bytes[name] for name, size in sizes.items()}
            stay = [part[name] for name, size in sizes.items() if size <= complete]
            gathers = [[part[name] for name in names if sizes.get(name, 0) > complete] for names in gathered]
            sent = accumulate * (ranks - 1) * sum(map(sum, gathers))
            found.append(Calls(ALL_GATHER, axes, sent, accumulate * sum(map(bool, gathers))))
            found.append(Calls(ALL_GATHER, axes, (ranks - 1) * sum(stay), len(stay)))
            reduced = elements_of_part(list(trained.values()), ranks, stage) * REDUCED
            found.append(Calls(REDUCE_SCATTER, axes, accumulate * (ranks - 1) * reduced, accumulate))
            continue
        times = accumulate if stage == 2 else 1
        reduced = all_reduce_elements([sum(trained.values())], ranks) * REDUCED
        found.append(Calls(ALL_REDUCE, axes, times * reduced, times))
        widest = max((source.spec.item_bytes for source in sources if source.name in trained), default=0)
        for names in given:
            elements = elements_of_part([trained[name] for name in names if name in trained], ranks, stage)
            found.append(Calls(ALL_GATHER, axes, (ranks - 1) * elements * widest, 1))
    return tuple(one for one in found if one.bytes)


def _gathered(program: Program, trainable: set[str]) -> list[tuple[str, ...]]:
    """The parameters of every all-gather of stage 3, forward and backward of one micro-batch. Those gathered for the
    backward of a unit without input gradient (an embedding, a use of another module's weight) are kept to the end."""
    entered = units(program)
    found, kept = [one.parameters for one in entered], set[str]()
    for one in reversed(entered):
        if trainable.isdisjoint(one.parameters) and not one.inward:
            continue
        found.append(tuple(name for name in one.parameters if name not in kept))
        if not one.inward:
            kept |= set(one.parameters)
    return found


def agreement(program: Program) -> tuple[Calls, ...]:
    """What one rank calls per optimizer step, at any stage and of either engine, to agree on the parameters without a
    gradient."""
    mesh, count = program.mesh, len(program.optional_names)
    if not count or mesh.size == 1:
        return ()
    return (Calls(ALL_REDUCE, mesh.sorted(mesh.names), all_reduce_elements([count], mesh.size) * REDUCED, 1),)


def predicted(
    program: Program, stage: int, accumulate: int = 1, groups: Groups | None = None, complete: int = 0
) -> dict[str, int]:
    """Bytes that one rank sends per optimizer step for gradients and weights, by collective, without the norm."""
    found: Counter[str] = Counter()
    for one in calls(program, stage, accumulate, groups, complete):
        found[one.kind] += one.bytes
    return dict(found)
