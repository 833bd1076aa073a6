"""Seconds of operators: flops or bytes of the rank's own slice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from strategies.core.graph import Operator, OperatorGraph
from strategies.core.mesh import Mesh
from strategies.cost.roofline import operator_seconds, operator_work
from strategies.rules import rule_of
from tests.strategies.machines import cluster
from tests.strategies.simulated_model import Model

MESH, MACHINE = Mesh((("dp", 2), ("tp", 4))), cluster(8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(1024, 4096, bias=False), nn.Linear(4096, 1000, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(torch.relu(self.wide(x)).view(512, 4096)).square().mean()


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    return Model(Net(), None, (torch.zeros(512, 1024),)).graph


def named(graph: OperatorGraph, op: str, position: int = 0) -> Operator:
    return [operator for operator in graph.operators if operator.op == op][position]


def seconds(graph: OperatorGraph, operator: Operator, trained: bool = True, **assignment: tuple[str, ...]) -> float:
    return operator_seconds(rule_of(operator, graph), assignment, operator, graph, MESH, MACHINE, trained)


def test_a_product_is_bound_by_its_flops(graph: OperatorGraph) -> None:
    product = named(graph, "linear", 1)
    forward = MACHINE.launch + 2 * 512 * 4096 * 1000 / MACHINE.peak("float64")
    assert seconds(graph, product, trained=False) == pytest.approx(forward)
    assert seconds(graph, product) == pytest.approx(3 * forward)  # a product each for x and the weight in backward


def test_the_batch_needs_no_gradient(graph: OperatorGraph) -> None:
    product = named(graph, "linear")
    work = operator_work(rule_of(product, graph), {}, product, graph, MESH, MACHINE)
    assert work.backward == pytest.approx(work.forward)


def test_slices_share_the_work_and_padding_counts(graph: OperatorGraph) -> None:
    product = named(graph, "linear", 1)
    rule = rule_of(product, graph)
    rows, columns = rule.results[0]
    assert rows is not None and columns is not None
    full, half = (seconds(graph, product, **cut) for cut in ({}, {rows: ("dp",)}))
    calls = 3 * MACHINE.launch
    assert half - calls == pytest.approx((full - calls) / 2)
    third = operator_seconds(rule, {columns: ("x",)}, product, graph, Mesh((("x", 3),)), MACHINE, True)
    assert third - calls == pytest.approx((full - calls) * 334 / 1000)  # 1000 columns in slices of 334


def test_a_pointwise_operator_is_bound_by_its_bytes(graph: OperatorGraph) -> None:
    relu = named(graph, "relu")
    size = 512 * 4096 * 8
    work = operator_work(rule_of(relu, graph), {}, relu, graph, MESH, MACHINE)
    assert work.forward == pytest.approx(MACHINE.launch + 2 * size / MACHINE.memory_bandwidth)
    assert work.backward == pytest.approx(MACHINE.launch + 3 * size / MACHINE.memory_bandwidth)


def test_a_view_moves_nothing(graph: OperatorGraph) -> None:
    assert seconds(graph, named(graph, "view")) == 0
