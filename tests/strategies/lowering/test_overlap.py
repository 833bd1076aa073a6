"""Redistributions overlapped with computation: bitwise equal results, same calls and bytes, in another order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.core.graph import Ref, TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import Recompute
from strategies.core.program import Compute, LoweringOptions, Program, Redistribute, Start, Wait
from strategies.lowering import ir
from strategies.lowering.fusion import KINDS, fuse
from strategies.lowering.lowering import lower
from strategies.lowering.overlap import overlap
from strategies.lowering.recompute import region_of
from strategies.resharding.path import resharding_path
from strategies.runtime import initial_weights as weights
from strategies.runtime.communicator import Communicator
from strategies.runtime.redistributions import starting, waiting
from tests.ranks import start_ranks
from tests.strategies.on_ranks import Case, Result
from tests.strategies.simulated_model import MESH, Model

EVERYTHING = dict.fromkeys(KINDS, 2**20)


class Branch(nn.Module):
    """Two branches of one input, added to it: communication of one can overlap with the other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.first, self.second = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.first(y) + self.second(y)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Branch(), Branch()])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).flatten(0, 1)


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model(Net(), nn.CrossEntropyLoss(), (torch.randn(4, 8, 8), torch.randint(0, 5, (32,))))


def check_order(program: Program) -> None:
    """Every instruction follows its inputs, and every start has one wait."""
    known = {source.id for source in program.sources} | {"random_key"}
    for instruction in program.instructions:
        assert {ref.id for ref in instruction.operands} <= known
        known.add(instruction.id)
    starts = [one.id for one in program.instructions if isinstance(one, Start)]
    assert sorted(starts) == sorted(one.start for one in program.instructions if isinstance(one, Wait))


def test_scaling_a_gradient_does_not_count_as_overlap(model: Model, draw: Any) -> None:
    """With a sharded optimizer every parameter has such an edge."""
    pairs = scaling = 0
    for seed in range(40):
        options = LoweringOptions(sharded_optimizer=True)
        program = overlap(lower(model.graph, model.random_plan(draw, seed), options))
        place = {one.id: number for number, one in enumerate(program.instructions)}
        for one in program.instructions:
            if isinstance(one, Wait):
                between = program.instructions[place[one.start] + 1 : place[one.id]]
                idle = [isinstance(step, Redistribute) and not (step.forward or step.backward) for step in between]
                others = [isinstance(step, Start | Wait) for step in between]
                pairs, scaling = pairs + 1, scaling + sum(idle)
                assert not all(a or b for a, b in zip(idle, others, strict=True))
    assert pairs > 100 and scaling > 0


@pytest.mark.slow
def test_the_same_bits_in_another_order(model: Model, draw: Any) -> None:
    started = 0
    for seed in range(40):
        mesh = MESH if seed % 2 else Mesh((("a", 2), ("b", 2), ("c", 2)))
        plan = model.random_plan(draw, seed, mesh)
        plain = fuse(
            lower(model.graph, plan, LoweringOptions(sharded_optimizer=seed % 4 > 1)), EVERYTHING if seed % 3 else {}
        )
        early = overlap(plain, by_unit=seed % 5 == 0)
        check_order(early)
        started += sum(isinstance(one, Start) for one in early.instructions)
        for a, b in zip(model.simulated(plain), model.simulated(early), strict=True):
            assert torch.equal(a, b)
        assert early.calls == plain.calls
        assert sorted(one.id for one in early.redistributions) == sorted(one.id for one in plain.redistributions)
    assert started > 200


def test_independent_computation_comes_before_the_wait(model: Model, draw: Any) -> None:
    """The sum of the first branch runs while the second one is computed."""
    plan = model.random_plan(draw, 3)
    plans_by_operator = {name: replace(one, assignment={}, outputs=None) for name, one in plan.operators.items()}
    for layer in range(2):
        name = f"layers.{layer}.first"
        plans_by_operator[name] = replace(plans_by_operator[name], assignment={"k": ("a", "b")})
    plan = replace(
        plan, operators=plans_by_operator, tensors={n: Layout.replicated(len(t.dims)) for n, t in plan.tensors.items()}
    )
    early = overlap(lower(model.graph, plan))
    order = [one.id for one in early.instructions]
    (start, *_) = (one for one in early.instructions if isinstance(one, Start) and one.of.value.id == "linear")
    between = order[order.index(start.id) : order.index(start.of.id)]
    assert {"linear_1", "gelu", "linear_2"} <= set(between)
    text = ir.end(model.graph, plan, early, 0)
    assert f"%{start.id} = start(%linear)" in text and f"# wait for %{start.id}" in text


@pytest.mark.parametrize("kept", [(), ("layers.0.first",)])
def test_overlap_keeps_recomputed_modules_in_one_piece(model: Model, draw: Any, kept: tuple[str, ...]) -> None:
    started = 0
    for seed in range(6):
        recompute = Recompute(("layers.0", "layers.1"), kept, False, False)
        plain = lower(model.graph, replace(model.random_plan(draw, seed), recompute=recompute))
        early = overlap(plain)
        check_order(early)
        regions = [[region_of(one, program) for one in program.instructions] for program in (plain, early)]
        crossings = [[a for a, b in zip(where, [*where[1:], "end"], strict=True) if a != b] for where in regions]
        assert crossings[0] == crossings[1]  # no module is split
        inside = [one for one in early.instructions if isinstance(one, Start) and region_of(one, early) is not None]
        assert not (kept and inside)
        started += len(inside)
    assert kept or started > 20


def test_a_start_launches_and_a_wait_lands_forward_and_backward() -> None:
    events: list[str] = []

    class Noted(Communicator):
        def launcher(self, paths: Any, *, later: bool = True) -> Any:
            def launch(tensors: Any) -> Any:
                events.append("launch")
                now = [tensor * 2 for tensor in tensors]
                return lambda: events.append("land") or now

            return launch

    class Between(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            events.append("compute")
            return x * 3

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            events.append("compute")
            return gradient * 3

    layout, mesh = Layout.replicated(1), Mesh((("a", 2),))
    carried = resharding_path(Layout(layout.dims, frozenset("a")), layout, (4,), mesh)
    one = Redistribute("r", Ref("x"), carried, carried, 5.0, True, TensorSpec((4,), "float32"), "x", 0, ())
    communicator = Noted(Mesh((("world", 1),)), 0)
    start, wait = starting(one, communicator), waiting(one, communicator)
    x = torch.ones(4, requires_grad=True)
    y = torch.ones(4, requires_grad=True)
    started = start(x)
    beside = Between.apply(y)
    result = wait(started) + beside
    assert events == ["launch", "compute", "land"] and torch.equal(result, torch.full((4,), 5.0))
    events.clear()
    result.sum().backward()
    assert events == ["launch", "compute", "land"]
    assert torch.equal(x.grad, torch.full((4,), 10.0)) and torch.equal(y.grad, torch.full((4,), 3.0))


@pytest.mark.slow
def test_real_ranks_do_the_same(model: Model, draw: Any, tmp_path: Any) -> None:
    file = tmp_path / "initial.pt"
    weights.write(file, {name: model.values[name] for name in model.captured.tensors})
    batch = dict(zip("01", model.batch, strict=True))
    plans = [model.random_plan(draw, seed) for seed in range(5)]
    cases = [
        Case(model.graph, plan, file, batch, sizes, early)
        for plan in plans
        for sizes in ({}, EVERYTHING)
        for early in (False, True)
    ]
    entry = "tests.strategies.on_ranks:steps"
    found: list[Result] = start_ranks(entry, cases, 4, tmp_path)
    for plain, early in zip(found[::2], found[1::2], strict=True):
        assert early.sent == early.predicted == plain.sent and early.calls == plain.calls
        assert early.loss == plain.loss and early.names == plain.names
        for name, gradient in early.gradients.items():
            assert torch.equal(gradient, plain.gradients[name])


def test_a_start_directly_before_its_wait_is_removed(model: Model, draw: Any) -> None:
    for seed in range(10):
        early = overlap(lower(model.graph, model.random_plan(draw, seed)))
        for one, following in zip(early.instructions, early.instructions[1:], strict=False):
            assert not (isinstance(one, Start) and isinstance(following, Wait) and following.start == one.id)
        assert any(isinstance(one, Compute) for one in early.instructions)
