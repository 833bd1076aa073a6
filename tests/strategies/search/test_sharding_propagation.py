"""Sharding propagation: from the configured operators outward, each neighbour with the least redistribution."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.ffn import FFN
from models.quickstart import Net as Quickstart
from strategies.capture import Objective, capture
from strategies.core.errors import StrategyError
from strategies.core.graph import OperatorGraph
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.core.request import Operand, OperatorStrategy, Request
from strategies.cost.problem import Problem
from strategies.lowering.lowering import lower
from strategies.planner.planner import make_plan
from strategies.rules import rule_of
from strategies.search.sharding_propagation import MOST_CANDIDATES, candidates
from tests.strategies.simulated_model import TOLERANCE, Model


class Body(nn.Module):
    """Linear layers a, b, c without bias, and a function of (module, x)."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor], size: int = 16) -> None:
        super().__init__()
        self.body = body
        self.a, self.b, self.c = (nn.Linear(size, size, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def model_of(body: Callable[[Any, Tensor], Tensor], *shape: int) -> Model:
    torch.manual_seed(0)
    x = torch.randn(*(shape or (16, 16)))
    net = Body(body)
    return Model(net, nn.MSELoss(), (x, torch.zeros_like(net(x).detach())))


def wanted(*operands: Operand, out: tuple[Operand, ...] | None = None) -> OperatorStrategy:
    return OperatorStrategy(operands, out)


def plan_of(model: Model, world_size: int = 8, **options: Any) -> Plan:
    return make_plan(model.graph, Request("auto", world_size, **options))


def counts(model: Model | OperatorGraph, plan: Plan, name: str) -> list[tuple[int, ...]]:
    graph = model.graph if isinstance(model, Model) else model
    sharding = rule_of(graph.by_name[name], graph)
    return [layout.counts(plan.mesh) for layout in sharding.operand_layouts(plan.operators[name].assignment)]


def sent(graph: OperatorGraph, plan: Plan, *operators: str) -> tuple[int, int]:
    """Elements sent for the operands of `operators`, forward and backward."""
    edges = [r for r in lower(graph, plan).redistributions if r.operator in operators]
    forward = sum(step.busiest(plan.mesh) for r in edges for step in r.forward)
    return forward, sum(step.busiest(plan.mesh) for r in edges if r.differentiable for step in r.backward)


def test_quickstart() -> None:
    torch.manual_seed(0)
    model = Model(Quickstart(), nn.MSELoss(), (torch.randn(16, 32), torch.randn(16, 16)))
    plan = plan_of(model, strategies={"matmul": wanted((2, 4), (4, 1))})
    assert plan.mesh.axes == (("d0", 2), ("d1", 4))
    assert counts(model, plan, "relu") == [(2, 4)]
    assert counts(model, plan, "matmul2") == [(2, 4), (4, 1)]
    assert [plan.operators[name].origin for name in ("matmul", "relu", "matmul2")] == [
        "configured",
        "propagated",
        "propagated",
    ]
    program = lower(model.graph, plan)
    (before_relu,) = [r for r in program.redistributions if r.operator == "relu"]
    assert [str(step) for step in before_relu.forward] == ["reduce_scatter dim 1 over d1"]
    assert before_relu.forward[0].group(plan.mesh, 0) == (0, 1, 2, 3)
    assert before_relu.forward[0].after.local_shape((16, 16), plan.mesh) == (8, 4)
    assert not [r for r in program.redistributions if r.operator == "matmul2" and r.forward]
    assert model.difference(plan) < TOLERANCE


def test_relu_is_the_cheapest_of_all_that_use_every_device() -> None:
    """By enumeration of the placements of axes: no other relu makes its two edges cheaper."""
    torch.manual_seed(0)
    model = Model(Quickstart(), nn.MSELoss(), (torch.randn(16, 32), torch.randn(16, 16)))
    plan = plan_of(model, strategies={"matmul": wanted((2, 4), (4, 1))})
    chosen = sent(model.graph, plan, "relu")
    prices = {}
    for first, second in product(range(3), repeat=2):  # an axis slices dim 0, dim 1 or nothing
        assignment = {f"d{dim}": tuple(a for a, d in (("d0", first), ("d1", second)) if d == dim) for dim in (0, 1)}
        other = Plan(
            plan.mesh,
            {**plan.operators, "relu": OperatorPlan({k: v for k, v in assignment.items() if v}, "configured")},
            plan.inputs,
            plan.tensors,
        )
        if first < 2 and second < 2:
            prices[first, second] = sent(model.graph, other, "relu")
    assert (
        chosen == min(prices.values()) == prices[0, 1] == prices[0, 0]
    )  # (2, 4) and (8, 1) tie: the smaller counts win


def test_nothing_configured() -> None:
    model = model_of(lambda net, x: net.a(x))
    with pytest.raises(
        StrategyError,
        match=r"^parallel.search = sharding_propagation starts from configured operators, and none is configured",
    ):
        plan_of(model)


def test_marked_modules_are_a_start() -> None:
    model = model_of(lambda net, x: net.b(net.a(x).relu()))
    plan = plan_of(model, set_data_parallel=("b",))
    assert {counts(model, plan, name)[0] for name in ("a", "relu", "b")} == {(8, 1)}
    assert plan.operators["b"].origin == "data_parallel" and plan.operators["a"].origin == "propagated"


def test_producers_are_reached_backwards() -> None:
    model = model_of(lambda net, x: net.c(torch.tanh(net.b(net.a(x)))))
    plan = plan_of(model, strategies={"c": wanted((1, 8), (1, 8))}, dataset_strategy="full_batch")
    assert counts(model, plan, "tanh") == [(1, 8)]
    assert counts(model, plan, "b") == [(1, 1), (8, 1)]
    assert all(plan.operators[name].origin == "propagated" for name in ("a", "b", "tanh", "loss.mse_loss"))
    assert not [r for r in lower(model.graph, plan).redistributions if r.operator == "tanh"]
    assert model.difference(plan) < TOLERANCE


def test_a_join_waits_for_all_of_its_inputs() -> None:
    """a is configured, c is; b is between them and decided first, so the sum sees both of its inputs decided."""
    model = model_of(lambda net, x: net.b(net.a(x)) + net.c(x))
    strategies = {"a": wanted((1, 1), (8, 1)), "c": wanted((1, 1), (8, 1))}
    plan = plan_of(model, strategies=strategies, dataset_strategy="full_batch")
    assert counts(model, plan, "b") == [(1, 8), (1, 8)]  # takes a's layout, and leaves a partial sum
    assert counts(model, plan, "add")[0] == (1, 8)  # c's layout
    assert model.difference(plan) < TOLERANCE


def test_a_join_that_waits_in_vain_decides_with_known_inputs() -> None:
    model = model_of(lambda net, x: net.a(x) * net.b(x))
    plan = plan_of(model, strategies={"a": wanted((2, 1), (4, 1))}, dataset_strategy="full_batch")
    assert counts(model, plan, "mul") == [(2, 4), (2, 4)]
    assert counts(model, plan, "b") == [(2, 1), (4, 1)]  # reached backwards from the product
    assert {plan.operators[name].origin for name in ("mul", "b")} == {"propagated"}


def test_a_join_takes_the_smallest_sum() -> None:
    model = model_of(lambda net, x: torch.cat([net.a(x), net.b(x), net.c(x)], 0))
    strategies = {"a": wanted((8, 1), (1, 1)), "b": wanted((1, 1), (8, 1)), "c": wanted((1, 1), (8, 1))}
    plan = plan_of(model, strategies=strategies)
    assert counts(model, plan, "cat") == [(1, 8)] * 3


def test_unreachable_operators_get_the_default() -> None:
    """An operator that only updates a buffer has no neighbour on a path to the loss."""

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16)
            self.register_buffer("seen", torch.zeros(16))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.copy_(x.exp().amax(0))
            return self.a(x)

    model = Model(Watched(), nn.MSELoss(), (torch.randn(16, 16), torch.randn(16, 16)))
    plan = plan_of(model, strategies={"a": wanted((1, 8), (1, 8))})
    assert [plan.operators[name].origin for name in ("exp", "amax", "a")] == [
        "default",
        "default",
        "configured",
    ]
    assert counts(model, plan, "exp") == [(8, 1)]
    assert model.difference(plan) < TOLERANCE


def test_output_strategies_are_handed_on() -> None:
    model = model_of(lambda net, x: torch.relu(net.a(x)))
    plan = plan_of(model, strategies={"a": wanted((2, 4), (1, 4), out=((1, 8),))})
    assert counts(model, plan, "relu") == [(1, 8)]
    assert not [r for r in lower(model.graph, plan).redistributions if r.operator == "relu"]
    assert model.difference(plan) < TOLERANCE


def test_configured_operators_are_never_changed() -> None:
    model = model_of(lambda net, x: net.c(net.b(net.a(x))))
    strategies = {"a": wanted((8, 1), (1, 1)), "b": wanted((1, 2), (4, 2)), "c": wanted((1, 8), (1, 8))}
    plan = plan_of(model, strategies=strategies)
    assert {name: tuple(counts(model, plan, name)) for name in strategies} == {
        n: w.inputs for n, w in strategies.items()
    }
    assert model.difference(plan) < TOLERANCE


def test_devices_that_no_dim_can_use_stay_unused() -> None:
    model = model_of(lambda net, x: torch.relu(net.a(x)))
    plan = plan_of(model, 24, strategies={"a": wanted((4, 2), (1, 2))})  # 16 x 16 is not divisible by three
    assert counts(model, plan, "relu") == [(4, 2)]
    assert model.difference(plan) < TOLERANCE


@pytest.mark.parametrize(
    ("dim", "strategy", "follows"),
    [(0, (1, 2, 4), (1, 2, 4)), (1, (2, 1, 4), (2, 1, 4))],
)
def test_cumulative_sums_follow(dim: int, strategy: tuple[int, ...], follows: tuple[int, ...]) -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.w).cumsum(dim)

    model = Model(Sums(), nn.MSELoss(), (torch.randn(8, 8, 8), torch.randn(8, 8, 8)))
    plan = plan_of(model, strategies={"mul": wanted(strategy, strategy)}, dataset_strategy="full_batch")
    assert counts(model, plan, "cumsum") == [follows]


@pytest.mark.parametrize(
    ("counted", "devices", "index", "follows"),
    [((2, 4, 8, 16), 1024, None, (2, 4, 8, 16)), ((1, 1, 1, 16), 16, 0, (1, 1, 16))],
)
def test_many_devices_are_followed(
    counted: tuple[int, ...], devices: int, index: int | None, follows: tuple[int, ...]
) -> None:
    class Selected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(2, 4, 8, 16))

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.w
            return torch.relu(y if index is None else y[:, index])

    graph = capture(
        Objective(Selected(), nn.L1Loss(), ("0", "1"), ("1",)),
        (torch.randn(2, 4, 8, 16), torch.randn(2, 8, 16) if index is not None else torch.randn(2, 4, 8, 16)),
        training=True,
    ).graph
    request = Request("auto", devices, strategies={"mul": wanted(counted, counted)}, dataset_strategy="full_batch")
    assert counts(graph, make_plan(graph, request), "relu") == [follows]


def test_candidates_use_as_many_devices_as_the_dims_allow_and_are_all_legal() -> None:
    model = model_of(lambda net, x: net.a(x), 12, 16)
    operator = model.graph.by_name["a"]
    sharding = rule_of(operator, model.graph)
    for mesh in (Mesh((("a", 2), ("b", 3))), Mesh(tuple((f"x{i}", 2) for i in range(6))), Mesh((("only", 5),))):
        problem = Problem(model.graph, mesh, {operator.id: sharding}, {}, {}, {})
        found = candidates(sharding, problem)
        used = {mesh.product(sharding.used(assignment)) for assignment in found}
        assert used == {{6: 6, 64: 64, 5: 1}[mesh.size]}
        assert len({tuple(sorted(one.items())) for one in found}) == len(found) <= MOST_CANDIDATES
        for assignment in found:
            assert all(sharding.sizes[factor] % mesh.product(axes) == 0 for factor, axes in assignment.items())


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(6))
def test_any_start_gives_a_plan_that_trains(seed: int, draw: Any) -> None:
    """Random strategies on a few operators of a small net, everything else propagated."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        FFN([8, 16, 8]), nn.LayerNorm(8), nn.Unflatten(1, (2, 4)), nn.Softmax(-1), nn.Flatten(), nn.Linear(8, 8)
    )
    model = Model(net, nn.CrossEntropyLoss(), (torch.randn(24, 8), torch.randint(0, 8, (24,))))
    source, mesh, strategies = draw(seed), Mesh((("p", 2), ("q", 2), ("r", 3))), {}
    for operator in source.rng.sample(model.graph.operators, 3):
        sharding = rule_of(operator, model.graph)
        assignment = source.assignment(sharding, mesh)
        strategies[operator.name] = OperatorStrategy(
            tuple(layout.counts(mesh) for layout in sharding.operand_layouts(assignment)), None
        )
    plan = plan_of(model, 12, strategies=strategies)
    assert {name: tuple(counts(model, plan, name)) for name in strategies} == {
        n: w.inputs for n, w in strategies.items()
    }
    assert model.difference(plan) < TOLERANCE
