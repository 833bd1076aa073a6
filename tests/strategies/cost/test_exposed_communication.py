"""Exposed communication: redistributions started early overlap with computation, as far as there is any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.core.mesh import Mesh
from strategies.core.program import Program, Redistribute, Start, Wait
from strategies.core.request import OperatorStrategy, Request
from strategies.core.steps import LOCAL
from strategies.cost.collectives import step_seconds
from strategies.cost.exposed_communication import COPIES, added_seconds
from strategies.cost.roofline import Work
from strategies.cost.step import works_of
from strategies.lowering.fusion import fuse
from strategies.lowering.lowering import lower
from strategies.lowering.overlap import overlap
from strategies.planner.planner import make_plan
from tests.strategies.machines import cluster
from tests.strategies.simulated_model import Model

MACHINE = replace(cluster(1, 8), overlap=1.0)


class Branches(nn.Module):
    """Two layers whose branches do not depend on one another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return (self.first(x) + torch.tanh(self.second(x))).square().mean()


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model(Branches(), None, (torch.randn(64, 64),))


def at_once(program: Program, machine: Any = MACHINE) -> dict[str, float]:
    """The sum of all steps of all redistributions."""
    found: dict[str, float] = {}
    for one in program.redistributions:
        for step in (*one.forward, *(one.backward if one.differentiable else ())):
            kind = COPIES if step.kind in LOCAL else step.kind
            seconds = step_seconds(step, one.spec.item_bytes, program.mesh, machine)
            found[kind] = found.get(kind, 0.0) + seconds
    return found


def works(model: Model, plan: Any, machine: Any = MACHINE) -> dict[str, Work]:
    return dict(zip((o.name for o in model.graph.operators), works_of(model.graph, plan, machine), strict=True))


def test_without_starts_all_of_it_is_added(model: Model, draw: Any) -> None:
    for seed in range(20):
        plan = model.random_plan(draw, seed)
        program = lower(model.graph, plan)
        assert added_seconds(program, works(model, plan), MACHINE) == pytest.approx(at_once(program))


def test_overlap_is_at_most_the_time_of_both_sides(model: Model, draw: Any) -> None:
    """Between the full sum, where operators take no time, and the steps that are no collective or cannot be hidden."""
    started = less = 0
    for seed in range(40):
        plan = model.random_plan(draw, seed, Mesh((("a", 2), ("b", 2), ("c", 2))))
        early = overlap(fuse(lower(model.graph, plan), {"all_reduce": 1 << 30} if seed % 2 else {}))
        busy = works(model, plan)
        idle = {name: Work(0.0, 0.0, 0.0) for name in busy}
        every = sum(added_seconds(early, idle, MACHINE).values())
        plain = added_seconds(replace(early, instructions=tuple(_without_starts(early))), busy, MACHINE)
        started += sum(isinstance(one, Start) for one in early.instructions)
        some = sum(added_seconds(early, busy, MACHINE).values())
        assert some <= every * (1 + 1e-12) and every <= sum(plain.values()) * (1 + 1e-12)
        less += some < 0.999 * every
        never = added_seconds(early, busy, replace(MACHINE, overlap=0.0))
        assert never == pytest.approx(plain)
        half = sum(added_seconds(early, busy, replace(MACHINE, overlap=0.5)).values())
        assert some <= half * (1 + 1e-12) and half <= sum(plain.values()) * (1 + 1e-12)
    assert started > 100 and less > 10


def _without_starts(program: Program) -> list[Any]:
    """The instructions with every start and wait merged again, at the position of the wait."""
    return [one.of if isinstance(one, Wait) else one for one in program.instructions if not isinstance(one, Start)]


@pytest.mark.parametrize(("forward", "backward"), [(0.0, 0.0), (1e-5, 0.0), (0.0, 1e-5), (1e-5, 1e-5), (1.0, 1.0)])
def test_a_sum_overlaps_with_the_other_branch_forward_and_backward(
    model: Model, forward: float, backward: float
) -> None:
    """first's sum runs while `second` and its tanh compute; in backward likewise for the gradients."""
    program, machine = split(model), replace(MACHINE, launch=0.0, memory_bandwidth=1e18)  # copies take no time
    (start,) = (one for one in program.instructions if isinstance(one, Start) and one.of.operator == "add")
    order = [one.id for one in program.instructions]
    between = order[order.index(start.id) : order.index(start.of.id)]
    assert {"linear_1", "tanh"} <= set(between)
    names = {o.name: Work(0.0, 0.0, 0.0) for o in model.graph.operators}
    idle = added_seconds(program, names, machine)
    names |= {"tanh": Work(forward, backward, 0.0)}
    some = added_seconds(program, names, machine)
    one = start.of
    assert isinstance(one, Redistribute)
    directions = [(forward, one.forward), (backward, one.backward)]
    sent = [sum(step_seconds(s, one.spec.item_bytes, program.mesh, machine) for s in chain) for _, chain in directions]
    hidden = sum(min(time, seconds) for (time, _), seconds in zip(directions, sent, strict=True))
    assert sum(idle.values()) - sum(some.values()) == pytest.approx(hidden)
    assert sent[0] > 1e-5


def split(model: Model) -> Program:
    """Only `first` is sharded along its contraction, so its result is partial."""
    wanted = {"first": OperatorStrategy(((1, 8), (1, 8), (1,)), None)}
    plan = make_plan(model.graph, Request("semi_auto", 8, strategies=wanted, dataset_strategy="full_batch"))
    return overlap(lower(model.graph, plan))
