"""Paths: which operators they match, which of two takes precedence, and which factors a strategy assigns."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strategies.capture import Objective, capture
from strategies.core.addressing import addresses, in_module
from strategies.core.errors import StrategyError
from strategies.core.graph import OperatorGraph
from strategies.core.request import Operand, OperatorStrategy
from strategies.planner.configured_strategies import configured
from strategies.rules import rule_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 8)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.dense(x)) + x @ x.t() @ x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = F.gelu(self.head(F.gelu(x)))
        return self.head(x).square().mean()


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    return capture(Objective(Net(), None, ("x",), ()), (torch.randn(8, 8),), training=True).graph


def meant(graph: OperatorGraph, *paths: str) -> list[str]:
    """The operators that the paths configure (with strategies of the right number of ones)."""
    found: list[str] = []
    for operator in graph.operators:
        for path in paths:
            ones = OperatorStrategy(tuple((1,) * len(spec.shape) for spec in graph.operand_specs(operator)), None)
            try:
                found += [graph.by_id[id].name for id in configured(graph, shardings(graph), {path: ones})]
            except StrategyError as error:
                assert "matches no operator" not in str(error)
    return list(dict.fromkeys(found))


def shardings(graph: OperatorGraph) -> dict:
    return {operator.id: rule_of(operator, graph) for operator in graph.operators}


def wanted(*operands: Operand, out: Sequence[Operand] | None = None) -> OperatorStrategy:
    return OperatorStrategy(operands, None if out is None else tuple(out))


def test_every_operator_has_one_name(graph: OperatorGraph) -> None:
    assert [operator.name for operator in graph.operators] == [
        "layers.0.dense", "layers.0.relu", "layers.0.t",
        "layers.0.matmul@0", "layers.0.matmul@1", "layers.0.add",
        "layers.1.dense", "layers.1.relu", "layers.1.t",
        "layers.1.matmul@0", "layers.1.matmul@1", "layers.1.add",
        "gelu@0", "head@0", "gelu@1", "head@1", "square", "mean",
    ]  # fmt: skip


def test_addresses(graph: OperatorGraph) -> None:
    assert addresses(graph.by_name["layers.0.dense"]) == (
        "layers.0.dense",
        "layers.0.dense.linear",
        "layers.0.dense.matmul",
    )
    assert addresses(graph.by_name["layers.0.matmul@1"]) == ("layers.0.matmul",)
    assert addresses(graph.by_name["gelu@1"]) == ("gelu",)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("layers.0.dense", ["layers.0.dense"]),
        ("layers.0.dense.matmul", ["layers.0.dense"]),
        ("layers.*.dense", ["layers.0.dense", "layers.1.dense"]),
        ("*.*.dense.linear", ["layers.0.dense", "layers.1.dense"]),
        ("layers.?.matmul", ["layers.0.matmul@0", "layers.0.matmul@1", "layers.1.matmul@0", "layers.1.matmul@1"]),
        ("layers.1.matmul@1", ["layers.1.matmul@1"]),
        ("layers.*.matmul@0", ["layers.0.matmul@0", "layers.1.matmul@0"]),
        ("layers.[1-9].relu", ["layers.1.relu"]),
        ("gelu", ["gelu@0", "gelu@1"]),
        ("gelu@1", ["gelu@1"]),
        ("head", ["head@0", "head@1"]),
        ("head.matmul@1", ["head@1"]),
    ],
)
def test_operators_that_a_path_matches(graph: OperatorGraph, path: str, names: list[str]) -> None:
    assert meant(graph, path) == names


class Attention(nn.Module):
    """A module that calls both a linear function and matmul, as the shifted windows of torchvision do."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(F.linear(x, weight) @ x, weight)


class Windows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.attention = nn.Parameter(torch.randn(8, 8)), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, self.weight).square().mean()


def test_matmul_of_a_module_that_multiplies_is_no_linear_operator() -> None:
    graph = capture(Objective(Windows(), None, ("x",), ()), (torch.randn(8, 8),), training=True).graph
    assert meant(graph, "attention.linear@0") == ["attention.linear@0"]
    assert meant(graph, "attention.matmul") == ["attention.matmul"]


@pytest.mark.parametrize(
    "path",
    [
        "dense",
        "layers.0",
        "layers.dense",
        "layers.2.dense",
        "head@2",
        "head.matmul@2",
        "layers.0.dense@0",
        "Head",
        "*.*.*.*.*",
        "",
    ],
)
def test_a_path_without_match_is_an_error(graph: OperatorGraph, path: str) -> None:
    with pytest.raises(
        StrategyError, match=r"^parallel.strategies.* matches no operator of the model. Known: layers.0.dense, "
    ):
        configured(graph, shardings(graph), {path: wanted((1, 1), (1, 1))})


def test_the_closest_name_is_reported(graph: OperatorGraph) -> None:
    with pytest.raises(StrategyError, match=r"Did you mean 'layers\.0\.dense\.matmul'"):
        configured(graph, shardings(graph), {"layer.0.dense.matmul": wanted((1, 1), (1, 1))})


def test_modules_around(graph: OperatorGraph) -> None:
    inside = [operator.name for operator in graph.operators if in_module("layers.1", operator)]
    assert inside == [name for name in graph.by_name if name.startswith("layers.1.")]
    assert [o.name for o in graph.operators if in_module("layers.*.dense", o)] == ["layers.0.dense", "layers.1.dense"]
    assert [o.name for o in graph.operators if in_module("**.dense", o)] == ["layers.0.dense", "layers.1.dense"]
    assert [o.name for o in graph.operators if in_module("layers.**.1.**", o)] == inside
    assert not [o.name for o in graph.operators if in_module("layers.3", o)]


def test_operand_order(graph: OperatorGraph) -> None:
    """torch: x [m, k], weight [n, k]; with `.matmul`: x [m, k], w [k, n]; the bias follows."""
    for path, strategy in {
        "layers.0.dense": wanted((2, 4), (1, 4)),
        "layers.0.dense.matmul": wanted((2, 4), (4, 1)),
    }.items():
        (found,) = configured(graph, shardings(graph), {path: strategy}).values()
        assert dict(found.factors) == {"batch0": 2, "k": 4, "n": 1}


def factors(graph: OperatorGraph, name: str, strategies: dict[str, OperatorStrategy]) -> tuple[str, dict]:
    found = configured(graph, shardings(graph), strategies)[graph.by_name[name].id]
    return found.path, dict(found.factors)


def test_the_more_exact_path_counts(graph: OperatorGraph) -> None:
    one, two, four = wanted((1, 1), (1, 1)), wanted((2, 1), (1, 1)), wanted((4, 1), (1, 1))
    assert factors(graph, "head@1", {"head@1": two, "head": one})[0] == "head@1"
    assert factors(graph, "head@0", {"head@1": two, "head": one})[0] == "head"
    assert factors(graph, "head@0", {"head": one, "h*": four})[0] == "head"
    assert factors(graph, "layers.0.dense", {"layers.*.dense": two, "*.0.dense": four})[0] == "*.0.dense"
    assert factors(graph, "layers.1.dense", {"layers.*.dense": two, "*.0.dense": four})[0] == "layers.*.dense"


def test_two_exact_paths_cannot_disagree(graph: OperatorGraph) -> None:
    strategies = {"head": wanted((2, 1), (1, 1)), "head.linear": wanted((4, 1), (1, 1))}
    both = r"^parallel.strategies.head and parallel.strategies.head.linear both configure head@0"
    text = both + r" \(linear, .*\); keep one of them"
    with pytest.raises(StrategyError, match=text):
        configured(graph, shardings(graph), strategies)
    with pytest.raises(StrategyError, match="both configure"):  # the same numbers in two orders are two strategies
        configured(graph, shardings(graph), {"head": wanted((2, 2), (2, 1)), "head.matmul": wanted((2, 2), (2, 1))})


def test_a_glob_that_does_not_fit_every_operator_is_an_error(graph: OperatorGraph) -> None:
    with pytest.raises(
        StrategyError,
        match=r"^parallel.strategies.layers.0.\*: \(\(2, 1\), \(1, 1\)\) on layers.0.relu \(relu, .*2 operands",
    ):
        configured(graph, shardings(graph), {"layers.0.*": wanted((2, 1), (1, 1))})


def test_operands_that_others_determine_may_be_left_out(graph: OperatorGraph) -> None:
    """The bias of a linear operator; not the second operand of a sum, which is equivalent to the first."""
    assert factors(graph, "layers.0.dense", {"layers.0.dense": wanted((1, 1), (4, 1))})[1] == {
        "batch0": 1,
        "k": 1,
        "n": 4,
    }
    with pytest.raises(StrategyError, match=r"operand 1 \(shape \(8, 8\)\) has no entry; give one per operand"):
        factors(graph, "layers.0.add", {"layers.0.add": wanted((4, 2))})
    with pytest.raises(StrategyError, match=r"operand 1 \(shape \(8, 8\)\) has no entry; give one per operand"):
        factors(graph, "layers.0.dense", {"layers.0.dense": wanted((1, 1))})
