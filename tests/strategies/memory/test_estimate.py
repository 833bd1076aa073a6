"""The bytes by which searches compare plans, against those of their traced programs."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn

from models.gpt import GPT
from models.losses import NextTokenLoss
from strategies.capture import Objective, capture
from strategies.core.graph import OperatorGraph
from strategies.core.mesh import Mesh
from strategies.core.plan import Plan
from strategies.cost.problem import Problem
from strategies.lowering.lowering import lower
from strategies.memory.estimate import plan_bytes
from strategies.memory.parts import memory
from strategies.memory.trace import trace
from strategies.optimizer.settings import OptimizerSettings
from strategies.rules import rule_of
from strategies.rules.traits import saved
from tests.fuzz.plans import random_plan

MESH = Mesh((("a", 2), ("b", 2)))


def graph_of(module: nn.Module, loss: nn.Module | None, *batch: Tensor) -> OperatorGraph:
    names = tuple(map(str, range(len(batch))))
    given = () if loss is None else names[-1:]
    return capture(Objective(module, loss, names, given), batch, training=True).graph


def estimated(graph: OperatorGraph, plan: Plan) -> float:
    planned = {operator.id: plan.operators[operator.name] for operator in graph.operators}
    outputs = {id: one.outputs for id, one in planned.items() if one.outputs is not None}
    rules = {operator.id: rule_of(operator, graph) for operator in graph.operators}
    problem = Problem(graph, plan.mesh, rules, {}, {}, outputs)
    return plan_bytes(problem, {id: one.assignment for id, one in planned.items()})


def test_estimates_order_plans_as_their_peaks_do() -> None:
    """Copies of saved tensors in the layouts of their users decide what random plans of one model store."""
    tokens = torch.randint(0, 32, (8, 32))
    graph = graph_of(GPT(32, 32, 32, 2, 2), NextTokenLoss(), tokens, tokens.roll(1))
    draw, settings = random.Random(0), OptimizerSettings()
    plans = [random_plan(draw, graph, MESH) for _ in range(24)]
    sizes = [estimated(graph, plan) for plan in plans]
    peaks = [memory(trace(lower(graph, plan), settings), settings).peak for plan in plans]
    first, second = (np.argsort(np.argsort(values)) for values in (sizes, peaks))
    assert np.corrcoef(first, second)[0, 1] > 0.6


class Used(nn.Module):
    """relu saves its result, which three products save, too, one of them expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.heads = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x).relu()
        first, second = (head(y) for head in self.heads)
        return (first + second + (y.expand(3, 4, 8) * self.inner.weight.sum()).mean(0)).mean()


def test_operators_share_what_they_save() -> None:
    graph = graph_of(Used(), None, torch.randn(4, 8))
    shares = {operator.name: saved(graph)[operator.id] for operator in graph.operators}
    assert (shares["relu"], shares["heads.0"], shares["heads.1"]) == ([0.25, 0], [0, 0.25, 0, 0], [0, 0.25, 0, 0])
    assert shares["mul"] == [0, 0.25 / 3, 1]  # of 3 times the elements; of the sum all
