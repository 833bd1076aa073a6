"""What redistributions add to a step: a rank computes and sends in two queues, each in the order of the program.

A redistribution that nothing overlaps blocks both queues. One that starts early blocks computing where its wait comes
before it is done, and always for the share of its time that cannot be hidden (1 - `Cluster.overlap`). Of a path the
first collective runs beside computing, as `Communicator.launcher` has it; steps before belong to the start, steps after
to the wait. Backward takes the instructions in reverse. Invariant: nothing adds more than if every redistribution
blocked, and without starts exactly that. Cost: linear in the instructions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial

from strategies.core.mesh import Mesh
from strategies.core.program import Compute, Cooperate, Copy, Fused, Instruction, Program, Redistribute, Start, Wait
from strategies.core.steps import LOCAL, ROTATE
from strategies.cost.cluster import Cluster
from strategies.cost.collectives import joined_seconds
from strategies.cost.roofline import Work

COPIES = "copies"
"""The kind of steps that send nothing."""

Stages = Sequence[tuple[str, float]]
"""The kinds of the steps of paths that share their calls, and their seconds."""


def added_seconds(
    program: Program, works: Mapping[str, Work], cluster: Cluster, without: Container[str] = ()
) -> dict[str, float]:
    """Seconds that redistributions add to one micro-batch, by kind.

    Args:
        program: What a rank runs.
        works: Of the operators, by plan name.
        cluster: The machine.
        without: Ids of sources whose redistributions are left out.
    """
    added: defaultdict[str, float] = defaultdict(float)

    def stages(one: Redistribute | Fused, backward: bool) -> Stages:
        return () if any(ref.id in without for ref in one.operands) else _stages(one, backward, program.mesh, cluster)

    main = main_calls(program.instructions)
    ahead, back = (_Queues(partial(stages, backward=way), cluster.overlap, added) for way in (False, True))
    for queues, instructions in ((ahead, program.instructions), (back, program.instructions[::-1])):
        left = {name: work.forward if queues is ahead else work.backward for name, work in works.items()}
        for one in instructions:
            if isinstance(one, Compute):
                work = left.get(one.operator, 0.0) if one is main[one.operator] else 0.0
                queues.now += work
                if isinstance(one, Cooperate):
                    queues.carry(cooperation_stages(one, work, queues is back, program.mesh, cluster))
            elif isinstance(one, Start | Wait):
                (queues.begin if isinstance(one, Start) == (queues is ahead) else queues.finish)(one.of)
            elif not isinstance(one, Copy):
                queues.carry(queues.stages(one))
    if program.recompute is not None and not program.recompute.keeps_communication:
        for one in program.instructions:  # nothing that is recomputed starts early
            if isinstance(one, Redistribute | Fused) and program.recompute.region(one.path) is not None:
                back.carry(stages(one, backward=False))
    if program.recompute is not None:
        for one in program.instructions:
            again = isinstance(one, Cooperate) and program.recompute.region(one.path) is not None
            if isinstance(one, Cooperate) and again and one.operator not in program.recompute.kept:
                work = works[one.operator].forward if one.operator in works else 0.0
                back.carry(cooperation_stages(one, work, False, program.mesh, cluster))
    return dict(added)


def hidden_gathers(
    program: Program, works: Mapping[str, Work], gathers: Mapping[str, tuple[int, float]], last: int, share: float
) -> tuple[float, float]:
    """Seconds of gathering parameters that forward and backward of one micro-batch hide, as
    `strategies.runtime.gathering` orders them: a bucket is gathered where something first uses it, forward and
    backward, and while the bucket before it is used.

    Args:
        program: What a rank runs.
        works: Of the operators, by plan name.
        gathers: The number of the bucket of every parameter that is gathered, and the seconds of its gather, by id.
        last: The bucket that stays complete from forward to backward.
        share: The share of a gather that can hide.
    """
    main, hidden, beside = main_calls(program.instructions), [0.0, 0.0], 0.0
    for backward, instructions in enumerate((program.instructions, program.instructions[::-1])):
        used = {last} if backward else set[int]()
        for one in instructions:
            for number, seconds in (gathers[ref.id] for ref in one.operands if ref.id in gathers):
                if number not in used:
                    hidden[backward] += min(share * seconds, beside) if used else 0.0  # nothing knows of the first
                    used.add(number)
                    beside = 0.0
            if isinstance(one, Compute) and one is main[one.operator] and one.operator in works:
                beside += works[one.operator].backward if backward else works[one.operator].forward
    return hidden[0], hidden[1]


def cooperation_stages(one: Cooperate, work: float, backward: bool, mesh: Mesh, cluster: Cluster) -> Stages:
    """What communication adds to a cooperative computation of `work` seconds, in one direction: rotations run beside
    all blocks but one, except for the last one of backward, which brings the gradients home; others block."""
    added, rotating, last, slices = defaultdict[str, float](float), 0.0, 0.0, 1
    for channel in one.channels:
        for kind, seconds in _stages(channel, backward, mesh, cluster):
            if kind != ROTATE:
                added[kind] += seconds
                continue
            rotating, last = rotating + seconds, seconds if backward else 0.0
            slices = mesh.product(channel.parts[0].forward[0].axes) if channel.parts[0].forward else slices
    if rotating:
        hidden = min(cluster.overlap * (rotating - last), work * (slices - 1) / slices)
        added[ROTATE] = rotating - hidden
    return list(added.items())


def main_calls(instructions: Iterable[Instruction]) -> dict[str, Compute]:
    """The call that represents all of an operator's, by the operator's name: the first of those that take most
    values."""
    calls: dict[str, Compute] = {}
    for one in instructions:
        if isinstance(one, Compute):
            known = calls.setdefault(one.operator, one)
            if len(one.operands) > len(known.operands):
                calls[one.operator] = one
    return calls


def _stages(one: Redistribute | Fused, backward: bool, mesh: Mesh, cluster: Cluster) -> Stages:
    """What it does in one direction, with a value or its gradient. Fused ones are one call."""
    if backward and not one.differentiable:
        return ()
    parts = one.parts if isinstance(one, Fused) else (one,)
    stages = []
    for steps in zip(*(part.backward if backward else part.forward for part in parts), strict=True):
        sized = [(step, part.spec.item_bytes) for step, part in zip(steps, parts, strict=True)]
        kind = COPIES if steps[0].kind in LOCAL else steps[0].kind
        stages.append((kind, joined_seconds(sized, mesh, cluster)))
    return stages


class _Queues:
    """When computing goes on (`now`) and when the links are free, in seconds since the first instruction."""

    def __init__(
        self, stages: Callable[[Redistribute | Fused], Stages], hidden: float, added: defaultdict[str, float]
    ) -> None:
        self.stages, self.hidden, self.added = stages, hidden, added
        self.now = self.free = 0.0
        self.under_way: dict[str, tuple[str, float, Stages]] = {}

    def begin(self, one: Redistribute | Fused) -> None:
        """The steps before its first collective, and the start of that."""
        stages = self.stages(one)
        first = next((i for i, (kind, _) in enumerate(stages) if kind != COPIES), len(stages))
        self.carry(stages[:first])
        for kind, seconds in stages[first : first + 1]:
            self.free = max(self.free, self.now) + seconds
            self.under_way[one.id] = kind, self.free, stages[first + 1 :]
            self._hold(kind, self.now + (1 - self.hidden) * seconds)

    def finish(self, one: Redistribute | Fused) -> None:
        """Waits for it, and does the rest of its path."""
        if one.id in self.under_way:
            kind, end, rest = self.under_way.pop(one.id)
            self._hold(kind, end)
            self.carry(rest)

    def carry(self, stages: Stages) -> None:
        """All of it at once."""
        for kind, seconds in stages:
            if kind == COPIES:
                self._hold(kind, self.now + seconds)
            else:
                self._hold(kind, max(self.now, self.free) + seconds)
                self.free = self.now

    def _hold(self, kind: str, until: float) -> None:
        if until > self.now:
            self.added[kind] += until - self.now
            self.now = until
