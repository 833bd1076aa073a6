"""Rules against eager torch: many small functions in one captured graph, under every assignment on simulated ranks.

A case is (name, function, *operands). Floating operands become parameters, the others buffers; every second case hands
its parameters on through another operator, so that both kinds of edges occur. All results and gradients are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.capture import Captured, Objective, capture
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.lowering.lowering import lower
from strategies.rules import rule_of
from strategies.rules.sharding import Sharding
from strategies.runtime.simulate import Simulation

MESHES = (Mesh((("a", 2),)), Mesh((("a", 2), ("b", 2))), Mesh((("a", 2), ("b", 3))))
Assignment = dict[str, tuple[str, ...]]


class Function(nn.Module):
    """One case: a function with its operands."""

    def __init__(self, function: Callable[..., Any], operands: Sequence[Any], indirect: bool) -> None:
        super().__init__()
        self.function, self.indirect, self.operands = function, indirect, []
        for position, operand in enumerate(operands):
            name = f"x{position}"
            if isinstance(operand, Tensor) and operand.is_floating_point():
                self.register_parameter(name, nn.Parameter(operand.clone()))
            elif isinstance(operand, Tensor):
                self.register_buffer(name, operand.clone())
            self.operands.append(name if isinstance(operand, Tensor) else operand)

    def forward(self) -> tuple[Tensor, ...]:
        operands = [getattr(self, x) if isinstance(x, str) else x for x in self.operands]
        if self.indirect:
            operands = [x * 1 if isinstance(x, nn.Parameter) else x for x in operands]
        result = self.function(*operands)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)


class Suite(nn.Module):
    """All cases of a family; returns a loss that weighs every floating result, and the results."""

    def __init__(self, functions: Sequence[Function]) -> None:
        super().__init__()
        self.functions = nn.ModuleList(functions)
        self.owners: list[int] = []
        self.weights = nn.ParameterList()
        for owner, function in enumerate(functions):
            for result in function():
                self.owners.append(owner)
                self.weights.append(nn.Parameter(torch.randn(result.shape, dtype=torch.float64), requires_grad=False))

    def forward(self) -> tuple[Tensor, ...]:
        results = [result for function in self.functions for result in function()]
        terms = [(r * w).sum() for r, w in zip(results, self.weights, strict=True) if r.requires_grad]
        return torch.stack(terms).sum(), *results


def single_axis(sharding: Sharding, mesh: Mesh) -> Iterator[Assignment]:
    """The replicated assignment, then every factor over every axis that fits."""
    yield {}
    for axis, size in mesh.axes:
        yield from ({factor: (axis,)} for factor in sharding.factors if sharding.fits(factor, size))


@dataclass(frozen=True)
class Family:
    """The captured cases of one rule family."""

    names: tuple[str, ...]
    suite: Suite
    captured: Captured
    draw: Callable[[int], Any]

    @cached_property
    def operators(self) -> set[str]:
        """The torch operators that occur and whose rule covers the call."""
        graph = self.captured.graph
        return {operator.op for operator in graph.operators if rule_of(operator, graph).known}

    @cached_property
    def eager(self) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Results, and gradients by name."""
        parameters = {name: p for name, p in self.suite.named_parameters() if p.requires_grad}
        loss, *results = self.suite()
        gradients = torch.autograd.grad(loss, parameters.values(), materialize_grads=True)
        return (loss, *results), dict(zip(parameters, gradients, strict=True))

    def case_of(self, name: str) -> str:
        """The case that an operator or parameter belongs to."""
        return self.names[int(name.split(".")[1])]

    def plan(self, mesh: Mesh, turn: int) -> Plan:
        """The `turn`-th plan: operators of cases take their assignments in rotation, the loss is replicated."""
        graph, draw, operators = self.captured.graph, self.draw(turn), {}
        for operator in graph.operators:
            assignment: Assignment = {}
            if operator.module.startswith("functions."):
                sharding = rule_of(operator, graph)
                singles = list(single_axis(sharding, mesh))
                assignment = singles[turn] if turn < len(singles) else draw.assignment(sharding, mesh)
            outputs = None
            if draw.rng.random() < 0.25:
                outputs = tuple(draw.layout(spec.shape, mesh) for spec in operator.results)
            operators[operator.name] = OperatorPlan(assignment, "configured", outputs)
        tensors = {source.name: draw.layout(source.spec.shape, mesh) for source in graph.sources}
        return Plan(mesh, operators, {}, tensors)

    def samples_of(self, mesh: Mesh, samples: int) -> range:
        graph = self.captured.graph
        return range(max(len(list(single_axis(rule_of(o, graph), mesh))) for o in graph.operators) + samples)

    def wrong(self, mesh: Mesh, turn: int) -> dict[str, str]:
        """Case -> its differences from eager under the `turn`-th plan."""
        plan = self.plan(mesh, turn)
        graph = self.captured.graph
        simulation = Simulation(lower(graph, plan), self.captured.tensors)
        results = simulation.run()
        simulation.backward(results[0])
        found: dict[str, str] = {}
        expected, gradients = self.eager
        chosen = {o.module: f"{o.op} {plan.operators[o.name].assignment}" for o in graph.operators}
        for owner, ranks, want in zip(self.suite.owners, results[1:], expected[1:], strict=True):
            for rank, got in enumerate(ranks):
                if not same(got, want):
                    case = f"functions.{owner}"
                    found[self.names[owner]] = f"result on rank {rank} of {dict(mesh.axes)}, {chosen.get(case)}"
        for name, got in simulation.gradients().items():
            if not same(got, gradients[name]):
                module = name.rpartition(".")[0]
                found.setdefault(self.case_of(name), f"gradient {name} on {dict(mesh.axes)}, {chosen.get(module)}")
        return found


def same(got: Tensor, want: Tensor) -> bool:
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if not got.is_floating_point():
        return torch.equal(got, want)
    return torch.allclose(got, want, rtol=1e-10, atol=1e-10, equal_nan=True)


def family(cases: Sequence[tuple[Any, ...]], draw: Callable[[int], Any]) -> Family:
    torch.manual_seed(0)
    suite = Suite([Function(function, operands, i % 2 == 1) for i, (_, function, *operands) in enumerate(cases)])
    captured = capture(Objective(suite, None, (), ()), (), training=False)
    return Family(tuple(name for name, *_ in cases), suite, captured, draw)


@pytest.fixture(scope="module")
def cases(request, draw) -> Family:
    """The table `CASES` of the test file, captured once."""
    return family(request.module.CASES, draw)


@pytest.fixture(scope="session")
def capture_cases(draw) -> Callable[[Sequence[tuple[Any, ...]]], Family]:
    return lambda cases: family(cases, draw)


@pytest.fixture(scope="session")
def check() -> Callable[..., None]:
    """`check(cases, mesh, samples)`: every legal single-axis assignment, and `samples` random ones, equal eager."""

    def run(cases: Family, mesh: Mesh, samples: int) -> None:
        wrong: dict[str, str] = {}
        for turn in cases.samples_of(mesh, samples):
            for case, what in cases.wrong(mesh, turn).items():
                wrong.setdefault(case, f"turn {turn}: {what}")
        assert not wrong

    return run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mesh" in metafunc.fixturenames:
        *small, large = MESHES  # the last one takes longest, and random graphs have axes of 3 too
        every = [*small, pytest.param(large, marks=pytest.mark.slow)]
        metafunc.parametrize("mesh", every, ids=lambda mesh: "x".join(str(size) for _, size in mesh.axes))


@pytest.fixture
def uncovered(request) -> Callable[[Family], set[str]]:
    """Those of the operators `COVERS` of the test file that no case reaches, in whatever library."""
    label = lambda op: op.rpartition("::")[2]  # noqa: E731
    return lambda cases: set(map(label, request.module.COVERS.split())) - set(map(label, cases.operators))


@pytest.fixture(scope="session")
def known() -> Callable[[Family, str], list[bool]]:
    """For every call of an operator, in the order of the cases: whether its rule covers it."""

    def calls(cases: Family, op: str) -> list[bool]:
        graph = cases.captured.graph
        return [rule_of(operator, graph).known for operator in graph.operators if operator.op == op]

    return calls
