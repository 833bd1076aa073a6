"""An entire net under random plans: loss and all gradients on simulated ranks equal eager, in fp64."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from strategies.capture import Objective, capture
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.core.program import LoweringOptions
from strategies.lowering.lowering import lower
from strategies.rules import rule_of
from strategies.runtime.simulate import Simulation

MESHES = [
    Mesh((("a", 2), ("b", 2))),
    Mesh((("a", 4), ("b", 2))),
    Mesh((("a", 2), ("b", 2), ("c", 2))),
]


class Net(nn.Module):
    """Tied weights, a table, explicit attention, norms, a residual, a mean, a buffer, a frozen weight, one unused."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 8, padding_idx=1)
        self.norm = nn.LayerNorm(8)
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight
        self.gain = nn.Parameter(torch.ones(8), requires_grad=False)
        self.idle = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.linspace(0, 1, 8))

    def forward(self, tokens):
        x = self.table(tokens) + self.shift
        x = x + self.narrow(torch.relu(self.wide(self.norm(x))))
        q = x.view(8, 8, 2, 4).transpose(1, 2)
        x = x + (torch.softmax(q @ q.transpose(-1, -2), -1) @ q).transpose(1, 2).reshape(8, 8, 8)
        first, second = (x * self.gain).chunk(2, -1)
        x = torch.cat((second, first), -1)
        return self.head(x - x.mean(-1, keepdim=True)).flatten(0, 1)


class Loss(nn.Module):
    def forward(self, scores, target):
        return F.cross_entropy(scores, target.flatten())


@pytest.fixture(scope="module")
def net():
    """Graph, full tensors, loss and gradients by name."""
    torch.manual_seed(0)
    model = Net().double()
    tokens, target = torch.randint(0, 16, (8, 8)), torch.randint(0, 16, (8, 8))
    target[:2] = -100  # two ignored rows: some slices have no target
    objective = Objective(model, Loss(), ("0", "1"), ("1",))
    captured = capture(objective, (tokens, target), training=True)
    loss = objective(tokens, target)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    values = {**captured.tensors, "0": tokens, "1": target}
    return captured.graph, values, loss.detach(), gradients


def random_plan(draw, graph, mesh):
    operators = {}
    for operator in graph.operators:
        outputs = None
        if draw.rng.random() < 0.2:
            outputs = tuple(draw.layout(spec.shape, mesh) for spec in operator.results)
        assignment = draw.assignment(rule_of(operator, graph), mesh)
        operators[operator.name] = OperatorPlan(assignment, "configured", outputs)
    layouts = {source.name: draw.layout(source.spec.shape, mesh) for source in graph.sources}
    inputs = {source.name: layouts[source.name] for source in graph.of_kind("input")}
    return Plan(mesh, operators, inputs, {name: layout for name, layout in layouts.items() if name not in inputs})


def check(net, draw, seed):
    graph, values, loss, gradients = net
    mesh = random.Random(seed).choice(MESHES)
    plan = random_plan(draw(seed), graph, mesh)
    assert Plan.from_json(plan.to_json()) == plan
    sharded = seed % 2 == 1  # a sharded optimizer divides by the number of ranks
    simulation = Simulation(lower(graph, plan, LoweringOptions(sharded_optimizer=sharded)), values)
    (losses,) = simulation.run()
    simulation.backward(losses)
    for got in losses:
        torch.testing.assert_close(got.detach(), loss, rtol=1e-10, atol=1e-10)
    found = simulation.gradients()
    assert gradients.keys() <= found.keys()
    for name, gradient in found.items():
        want = gradients.get(name, torch.zeros_like(gradient))
        torch.testing.assert_close(gradient / (mesh.size if sharded else 1), want, rtol=1e-10, atol=1e-10)


def test_random_plans(net, draw):
    for seed in range(30):
        check(net, draw, seed)


@pytest.mark.slow
def test_many_random_plans(net, draw):
    for seed in range(1000, 1400):
        check(net, draw, seed)


def test_every_operator_of_the_net_has_a_rule(net):
    graph = net[0]
    assert [operator.name for operator in graph.operators if not rule_of(operator, graph).known] == []
