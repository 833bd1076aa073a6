"""Redistributions that are started as soon as their value is there and waited for at their first use: a pass from
program to program.

What does not depend on a redistribution under way runs meanwhile. Where the batch has several copies, each runs as if
it had its own device, all at one speed and shifted against one another, so that one computes while another
communicates. Backward takes the instructions in reverse, so what overlaps there is also what stands between a start and
its wait. Invariant: every instruction still follows those whose results it takes; the values, the bytes and the calls
are those of the program before. Without copies the users of a value keep their order if there are more than two, so
gradients are added in the same order, bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from strategies.core.graph import fresh
from strategies.core.program import Compute, Fused, Instruction, Program, Redistribute, Start, Wait
from strategies.core.steps import LOCAL
from strategies.lowering.recompute import parts_of, region_of

AHEAD = 8
"""How many instructions before its use the redistribution of a parameter starts."""
WINDOW = 32
"""How many instructions may be looked through for one that need not wait."""


def overlap(program: Program, work: Mapping[str, float] | None = None, *, by_unit: bool = False) -> Program:
    """`program` with its redistributions started early and waited for late. `work` is what the operators cost, by name
    (all the same, if it is not given). What a recomputed module does stays in it; with `by_unit` (ZeRO-3, which holds
    parameters while their module runs) what any module does."""

    def section(instruction: Instruction) -> object:
        return instruction.path if by_unit else region_of(instruction, program)

    order = _Order(program, work or {}, section)
    for _, run in groupby(program.instructions, key=section):
        order.add(list(run))
    return replace(program, instructions=tuple(_joined(order.emitted)))


def _sends_forward(instruction: Instruction) -> bool:
    """Whether an instruction must not be moved ahead: any but a start or a wait that communicates only in backward."""
    if not isinstance(instruction, Wait):
        return not isinstance(instruction, Start)
    return any(step.kind not in LOCAL for step in instruction.of.parts[0].forward)


def _joined(instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    """Starts and waits with no work between them are one redistribution again."""
    worked, work_at_start, idle = 0, dict[str, int](), set[str]()
    for one in instructions:
        if isinstance(one, Start):
            work_at_start[one.id] = worked
        elif isinstance(one, Wait):
            idle |= {one.start} if work_at_start[one.start] == worked else set()
        else:
            worked += not isinstance(one, Redistribute) or bool(one.forward or one.backward)
    for one in instructions:
        if isinstance(one, Wait) and one.start in idle:
            yield one.of
        elif one.id not in idle:
            yield one


class _Order:
    """The instructions in their new order, section by section. An instruction is emitted after those that it needs;
    waits only when they are needed; starts with what they carry."""

    def __init__(self, program: Program, work: Mapping[str, float], section: Callable[[Instruction], object]) -> None:
        self.program, self.work, self.section = program, work, section
        self.emitted: list[Instruction] = []
        self.sources = {source.id for source in program.sources}
        self.done = self.sources | {"random_key"}
        self.by_id: dict[str, Instruction] = {}
        self.eager: dict[str, list[Start]] = {}
        self.regions_intact = bool(parts_of(program))
        self.users = Counter(ref for instruction in program.instructions for ref in instruction.operands)
        self.users.update(program.outputs)
        self.names = {instruction.id for instruction in program.instructions} | self.done

    def add(self, run: list[Instruction]) -> None:
        """Emit a section."""
        nodes = [node for instruction in run for node in self._split(instruction)]
        self.by_id |= {node.id: node for node in nodes}
        anchors: list[Instruction] = []
        for node in nodes:
            if isinstance(node, Start) and self._follows(node):
                ready = all(ref.id in self.done for ref in node.operands)  # by an earlier section
                for ref in node.operands:
                    self.eager.setdefault(ref.id, []).append(node)
                if ready:
                    anchors.insert(0, node)
            elif not isinstance(node, Wait):
                anchors.append(node)
        if self.program.batch_splits:
            for node in self._started_ahead(self._side_by_side(anchors)):
                self._emit(node)
        else:
            self._emit_what_need_not_wait(self._started_ahead(anchors))
        for node in nodes:
            self._emit(node)

    def _split(self, instruction: Instruction) -> tuple[Instruction, ...]:
        if not isinstance(instruction, Redistribute | Fused) or not instruction.parts[0].collectives:
            return (instruction,)
        if self.regions_intact and region_of(instruction, self.program) is not None:
            return (instruction,)
        name = fresh(f"{instruction.id}_start", self.names)
        start = Start(name, instruction, instruction.path)
        return start, Wait(instruction.id, name, instruction, instruction.path)

    def _follows(self, start: Start) -> bool:
        """Whether a start may follow right behind what it carries: not a parameter, which would start before all
        else, nor one of many uses, whose gradients are added in their order."""
        return all(ref.id not in self.sources and self.users[ref] <= 2 for ref in start.operands)

    def _emit(self, node: Instruction) -> None:
        waiting = [node]
        while waiting:
            node = waiting[-1]
            needed = [self.by_id[ref.id] for ref in node.operands if ref.id not in self.done]
            if node.id in self.done:
                waiting.pop()
            elif needed:
                waiting += reversed(needed)
            else:
                waiting.pop()
                self._append(node)
                ready = [start for start in self.eager.pop(node.id, ()) if start.id not in self.done]
                waiting += [start for start in ready if all(ref.id in self.done for ref in start.operands)]

    def _append(self, node: Instruction) -> None:
        before = self.emitted[-1] if self.emitted else None
        made = all(ref.id in self.by_id for ref in node.operands)  # what owns a parameter keeps it
        if isinstance(node, Start) and made and before is not None and self.section(before) == self.section(node):
            node = replace(node, path=before.path)  # so that no unit is cut in two
        self.done.add(node.id)
        self.emitted.append(node)

    def _started_ahead(self, anchors: Sequence[Instruction]) -> list[Instruction]:
        """Starts of parameters `AHEAD` computations before their use."""
        order: list[Instruction] = []
        for node in anchors:
            place, passed = len(order), 0
            if isinstance(node, Start) and not self._follows(node):
                while place and passed < AHEAD and not isinstance(order[place - 1], Start):
                    place -= 1
                    passed += isinstance(order[place], Compute)
            order.insert(place, node)
        return order

    def _emit_what_need_not_wait(self, anchors: Sequence[Instruction]) -> None:
        left = list(anchors)
        while left:
            node = left[0]
            independent = (
                place
                for place, other in enumerate(left[1:WINDOW], 1)
                if other.path[:1] == node.path[:1]
                and any(ref.id in self.by_id for ref in other.operands)
                and not self._must_wait(other)
                and not self._order_matters(other, left[:place])
            )
            self._emit(left.pop(next(independent, 0) if self._must_wait(node) else 0))

    def _must_wait(self, node: Instruction) -> bool:
        """Whether a redistribution that is under way in forward, or an instruction that was passed over for one, must
        come first."""
        needed = [self.by_id[ref.id] for ref in node.operands if ref.id not in self.done]
        return any(_sends_forward(one) or self._must_wait(one) for one in needed)

    def _order_matters(self, node: Instruction, passed: Sequence[Instruction]) -> bool:
        mine = {ref for ref in node.operands if self.users[ref] > 2}
        return any(not mine.isdisjoint(other.operands) for other in passed)

    def _side_by_side(self, anchors: Sequence[Instruction]) -> list[Instruction]:
        """The instructions of all splits by the time at which each would run alone; what belongs to none is emitted
        when it is needed, or at last."""
        splits = self.program.batch_splits
        own: dict[int, list[Instruction]] = {number: [] for number in sorted({index for _, index in splits.values()})}
        for node in anchors:
            if node.operator in splits:
                own[splits[node.operator][1]].append(node)
        timed: list[tuple[float, int, Instruction]] = []
        for number, mine in own.items():
            times, pause = self._times(mine)
            shift = number * pause / len(own)
            timed += [(time + shift, number, node) for time, node in zip(times, mine, strict=True)]
        return [node for _, _, node in sorted(timed, key=lambda one: one[:2])]

    def _times(self, nodes: Sequence[Instruction]) -> tuple[list[float], float]:
        """The start times of one split's instructions, and the average distance of its redistributions. A transfer is
        assumed to take as long as the compute between two redistributions."""
        costs = [self.work.get(node.operator, 1.0) if isinstance(node, Compute) else 0.0 for node in nodes]
        waits, seen = [], set[str]()
        for node in nodes:
            needed = {ref.id for ref in node.operands if isinstance(self.by_id.get(ref.id), Wait)} - seen
            waits.append(len(needed))
            seen |= needed
        between = sum(costs) / (sum(waits) + 1)
        now, times = 0.0, []
        for cost, waited in zip(costs, waits, strict=True):
            now += waited * between
            times.append(now)
            now += cost
        return times, now / max((sum(waits) + 1) / 2, 1)
