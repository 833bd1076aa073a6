"""Random operators: `exact` repeats the numbers of one device, `fast` draws per slice, replicas always agree."""

from itertools import combinations

import pytest
import torch
import torch.nn.functional as F

from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.core.program import LoweringOptions
from strategies.lowering.lowering import lower
from strategies.rules import rule_of
from strategies.rules.random import dropout_block, mix
from strategies.runtime.simulate import Simulation

KEY = 12345
MESH = Mesh((("a", 2), ("b", 3), ("c", 2)))
X = torch.rand(12, 12, dtype=torch.float64) + 0.5
COVERS = "dropout"
CASES = [
    ("dropout", lambda x: F.dropout(x, 0.4), X),
    ("dropout again", lambda x: F.dropout(x, 0.4), X),
    ("three dims", lambda x: F.dropout(x.reshape(12, 6, 2), 0.4), X),
    ("all", lambda x: F.dropout(x, 1.0), X),
    ("nothing", lambda x: F.dropout(x, 0.0), X),
    ("evaluation", lambda x: F.dropout(x, 0.4, training=False), X),
]
WITHOUT_RULE = [
    ("rand", lambda x: x * torch.rand(12, 12, dtype=torch.float64), X),
    ("rand_like", lambda x: x * torch.rand_like(x), X),
    ("bernoulli", lambda x: x * torch.bernoulli(x / 2), X),
    ("alpha", lambda x: F.alpha_dropout(x, 0.3, training=True), X),
    ("several results", lambda x: torch.ops.aten.native_dropout(x, 0.5, True)[0], X),
]


def run(cases, assignments, *, exact, key=KEY):
    """Every rank's results (without the loss), and the gradients, with one assignment per random operator."""
    graph = cases.captured.graph
    operators = {o.name: OperatorPlan(assignments.get(o.name, {}), "configured") for o in graph.operators}
    tensors = {source.name: Layout.replicated(len(source.spec.shape)) for source in graph.sources}
    program = lower(graph, Plan(MESH, operators, {}, tensors), LoweringOptions(exact=exact))
    assert program.random
    simulation = Simulation(program, cases.captured.tensors)
    losses, *results = simulation.run(key)
    simulation.backward(losses)
    return results, simulation.gradients()


def dropouts(cases):
    return [o.name for o in cases.captured.graph.operators if o.op == "dropout"]


def slicings(cases, draw, count):
    """Assignments of every dropout: none, then random ones."""
    graph = cases.captured.graph
    yield {}
    for seed in range(count):
        yield {name: draw(seed).assignment(rule_of(graph.by_name[name], graph), MESH) for name in dropouts(cases)}


def test_exact_repeats_the_numbers_of_one_device(cases, draw):
    want = [
        dropout_block(x, p, KEY, ordinal, x.shape, (0,) * x.dim())
        for ordinal, (x, p) in enumerate([(X, 0.4), (X, 0.4), (X.reshape(12, 6, 2), 0.4), (X, 1.0)])
    ]
    reference = None
    for assignments in slicings(cases, draw, 12):
        results, gradients = run(cases, assignments, exact=True)
        for ranks, expected in zip(results, [*want, X, X], strict=True):
            assert all(torch.equal(got, expected) for got in ranks)
        reference = reference or gradients
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, reference[name], rtol=1e-12, atol=1e-12)


def test_operators_and_keys_draw_different_numbers(cases):
    (first, second, *_), _ = run(cases, {}, exact=True)
    (other, *_), _ = run(cases, {}, exact=True, key=KEY + 1)
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], other[0])
    assert mix(1, 23) != mix(12, 3)


def test_fast_draws_per_slice(cases):
    """Replicas agree, slices differ, about the right share is kept, gradients have the mask."""
    (name, *_) = dropouts(cases)
    assignment = {name: {"d0": ("a",), "d1": ("c",)}}
    results, gradients = run(cases, assignment, exact=False)
    again, _ = run(cases, assignment, exact=False)
    result = results[0][0]
    assert all(torch.equal(got, result) for got in results[0])  # assembled from slices: replicas over b are equal
    assert torch.equal(again[0][0], result)
    masks = [block != 0 for half in result.chunk(2, 0) for block in half.chunk(2, 1)]
    assert all(not torch.equal(one, other) for one, other in combinations(masks, 2))
    assert 0.4 < (result != 0).double().mean() < 0.8
    torch.testing.assert_close(result[result != 0], X[result != 0] / 0.6)
    weights = cases.captured.tensors["weights.0"]
    torch.testing.assert_close(gradients["functions.0.x0"], (result != 0) * weights / 0.6)


@pytest.fixture(scope="module")
def without_rule(capture_cases):
    return capture_cases(WITHOUT_RULE)


@pytest.mark.parametrize("exact", [False, True])
def test_random_operators_without_a_rule_agree_on_all_ranks(without_rule, exact):
    state = torch.random.get_rng_state()
    results, _ = run(without_rule, {}, exact=exact)
    other, _ = run(without_rule, {}, exact=exact, key=KEY + 1)
    assert torch.equal(state, torch.random.get_rng_state())
    for ranks, others in zip(results, other, strict=True):
        assert all(torch.equal(got, ranks[0]) for got in ranks)
        assert not torch.equal(ranks[0], others[0])


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases)
