"""Dims that do not divide: slices are padded, and loss, gradients and stored slices are those of one device."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from strategies.capture import Objective, capture
from strategies.core.errors import StrategyError
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.core.program import LoweringOptions
from strategies.core.request import OperatorStrategy, Request
from strategies.lowering.lowering import lower
from strategies.planner.planner import make_plan
from strategies.rules import rule_of
from strategies.runtime.simulate import Simulation, shard

MESHES = [Mesh((("a", 2), ("b", 2))), Mesh((("a", 4),)), Mesh((("a", 3), ("b", 2))), Mesh((("a", 2), ("b", 4)))]


class Odd(nn.Module):
    """A tied table of 37 words, products with 11 columns, 5 tokens, views and dims of prime sizes."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(37, 6)
        self.wide, self.narrow = nn.Linear(6, 11), nn.Linear(11, 6)
        self.mix = nn.Parameter(torch.randn(3, 5, 7) / 3)
        self.head = nn.Linear(6, 37)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens)
        x = x + self.narrow(F.gelu(self.wide(x)))
        mixed = torch.matmul(x.transpose(1, 2).unsqueeze(1), self.mix).permute(3, 0, 1, 2)
        x = x + mixed.tanh().expand(7, 3, 3, 6).mean((0, 2)).unsqueeze(1)
        return self.head(x).float().double()


class Loss(nn.Module):
    def forward(self, scores, target):
        return F.cross_entropy(scores.transpose(1, 2), target) + scores.sigmoid().mean()


@pytest.fixture(scope="module")
def odd():
    torch.manual_seed(0)
    model = Odd().double()
    tokens, target = torch.randint(0, 37, (3, 5)), torch.randint(0, 37, (3, 5))
    target[0, 1] = -100
    objective = Objective(model, Loss(), ("0", "1"), ("1",))
    captured = capture(objective, (tokens, target), training=True)
    loss = objective(tokens, target)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return captured.graph, {**captured.tensors, "0": tokens, "1": target}, loss.detach(), gradients


def check(odd, draw, seed):
    """Factors, layouts of sources and of results are often padded where allowed. True if some were."""
    graph, values, loss, gradients = odd
    draws, mesh = draw(seed), random.Random(seed).choice(MESHES)
    operators, padded = {}, False
    for operator in graph.operators:
        sharding = rule_of(operator, graph)
        assignment = draws.assignment(sharding, mesh)
        padded |= any(sharding.sizes[factor] % mesh.product(axes) for factor, axes in assignment.items())
        outputs = tuple(draws.layout(spec.shape, mesh, padded=True) for spec in operator.results)
        operators[operator.name] = OperatorPlan(assignment, "configured", outputs if draws.rng.random() < 0.2 else None)
    layouts = {source.name: draws.layout(source.spec.shape, mesh, padded=True) for source in graph.sources}
    inputs = {source.name: layouts[source.name] for source in graph.of_kind("input")}
    plan = Plan(mesh, operators, inputs, {name: layout for name, layout in layouts.items() if name not in inputs})
    sharded = seed % 2 == 1
    simulation = Simulation(lower(graph, plan, LoweringOptions(sharded_optimizer=sharded)), values)
    (losses,) = simulation.run()
    simulation.backward(losses)
    for got in losses:
        torch.testing.assert_close(got.detach(), loss, rtol=1e-10, atol=1e-10)
    for name, found in simulation.gradients().items():
        torch.testing.assert_close(found / (mesh.size if sharded else 1), gradients[name], rtol=1e-10, atol=1e-10)
    for source in graph.of_kind("parameter"):  # an optimizer never moves the padding
        pieces = simulation.slices[next(ref for ref in simulation.slices if ref.id == source.id)]
        layout = layouts[source.name]
        for rank, piece in enumerate(pieces):
            own = tuple(slice(stop - start) for start, stop in layout.block(source.spec.shape, mesh, rank))
            rest = piece.grad.clone() if piece.grad is not None else torch.zeros_like(piece)
            rest[own] = 0
            assert not rest.any()
    return padded


def test_random_plans_with_padded_slices(odd, draw):
    assert sum(check(odd, draw, seed) for seed in range(40)) > 30


@pytest.mark.slow
def test_many_random_plans_with_padded_slices(odd, draw):
    for seed in range(1000, 1600):
        check(odd, draw, seed)


def test_slices_of_a_dim_that_does_not_divide():
    mesh = Mesh((("a", 4),))
    pieces = shard(torch.arange(1.0, 7.0), Layout((("a",),)), mesh)
    assert [piece.tolist() for piece in pieces] == [[1, 2], [3, 4], [5, 6], [0, 0]]


def plan_of(odd, **strategies):
    wanted = {name: OperatorStrategy(tuple(counts), None) for name, counts in strategies.items()}
    return make_plan(odd[0], Request("auto", 8, strategies=wanted))


def test_a_configured_vocabulary_of_37_on_8_devices(odd):
    plan = plan_of(odd, table=((8, 1), (1, 1)), head=((1, 1, 1), (8, 1)))
    assert plan.tensors["table.weight"].local_shape((37, 6), plan.mesh) == (5, 6)
    graph, values, loss, gradients = odd
    simulation = Simulation(lower(graph, plan), values)
    (losses,) = simulation.run()
    simulation.backward(losses)
    torch.testing.assert_close(losses[0].detach(), loss, rtol=1e-10, atol=1e-10)
    for name, found in simulation.gradients().items():
        torch.testing.assert_close(found, gradients[name], rtol=1e-10, atol=1e-10)


def test_a_contraction_that_does_not_divide_is_refused(odd):
    with pytest.raises(StrategyError, match=r"narrow: .* cannot be cut into 8 equal slices; counts that fit: 1, 11"):
        plan_of(odd, narrow=((1, 1, 8), (1, 8)))


def test_no_slice_is_empty(odd):
    with pytest.raises(StrategyError, match=r"wide: .* cannot be cut into 4 equal slices; counts that fit: 1, 2, 3, 5"):
        plan_of(odd, wide=((1, 4, 1), (1, 1)))
