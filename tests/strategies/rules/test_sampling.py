"""Random operators beyond dropout: `exact` repeats one device's numbers, `fast` draws per slice, replicas agree."""

import pytest
import torch
import torch.nn.functional as F

from runner.training.reference import ExactRandom
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.core.program import LoweringOptions
from strategies.lowering.lowering import lower
from strategies.rules import rule_of
from strategies.rules.random import draws, rrelu_block, seeded
from strategies.runtime.simulate import Simulation

torch.manual_seed(1)
DOUBLE = {"dtype": torch.float64}
X = torch.rand(12, 6, 12, **DOUBLE)
SIGNED = X - 0.5
ROWS = torch.rand(12, 30, **DOUBLE) + 0.1
COVERS = """
alpha_dropout bernoulli cauchy exponential feature_alpha_dropout feature_dropout geometric log_normal multinomial
native_dropout normal normal_functional rand rand_like randint randint_like randn randn_like random rrelu uniform
"""
CASES = [
    ("rand", lambda x: x * torch.rand(12, 6, 12, **DOUBLE), X),
    ("randn", lambda x: x * torch.randn(6, 12, **DOUBLE), X),
    ("randint", lambda x: x * torch.randint(9, (12, 6, 1)), X),
    ("randint from", lambda x: x * torch.randint(-5, 90, (12, 6, 12)), X),
    ("normal of a size", lambda x: x * torch.normal(1.0, 2.0, (12, 6, 12), **DOUBLE), X),
    ("rand_like", lambda x: x * torch.rand_like(x), X),
    ("rand_like turned", lambda x: x * torch.rand_like(x.transpose(0, 2)).transpose(0, 2), X),
    ("randn_like", lambda x: x + torch.randn_like(x), X),
    ("randint_like", lambda x: x * torch.randint_like(x, 2, 90), X),
    ("bernoulli", lambda x: x * torch.bernoulli(x), X),
    ("bernoulli turned", lambda x: x * torch.bernoulli(x.transpose(0, 2)).transpose(0, 2), X),
    ("bernoulli p", lambda x: x * torch.bernoulli(x.detach(), 0.3), X),
    ("bernoulli_", lambda x: x * torch.empty_like(x).bernoulli_(0.3), X),
    ("normal_", lambda x: x * torch.empty_like(x).normal_(1, 2), X),
    ("normal", lambda x: torch.normal(x.detach(), x[:, :, :1].detach()) * x, X),
    ("normal around 2", lambda x: torch.normal(2.0, x.detach()) * x, X),
    ("normal of spread 2", lambda x: torch.normal(x.detach(), 2.0) * x, X),
    ("uniform_", lambda x: x * torch.empty_like(x).uniform_(-1, 3), X),
    ("exponential_", lambda x: x * torch.empty_like(x).exponential_(0.5), X),
    ("cauchy_", lambda x: x * torch.empty_like(x).cauchy_().tanh(), X),
    ("geometric_", lambda x: x * torch.empty_like(x).geometric_(0.3), X),
    ("log_normal_", lambda x: x * torch.empty_like(x).log_normal_(), X),
    ("random_", lambda x: x * torch.empty_like(x).random_(50), X),
    ("native", lambda x: torch.native_dropout(x, 0.3, True)[0], X),
    ("alpha", lambda x: F.alpha_dropout(x, 0.3, training=True), SIGNED),
    ("features", lambda x: F.dropout1d(x, 0.3), X),
    ("features of pictures", lambda x: F.dropout2d(x.reshape(12, 6, 6, 2), 0.3), X),
    ("features, alpha", lambda x: F.feature_alpha_dropout(x, 0.3, training=True), SIGNED),
    ("gumbel", lambda x: F.gumbel_softmax(x, dim=1), X),
    ("rrelu", lambda x: F.rrelu(x, training=True), SIGNED),
    ("rrelu wide", lambda x: F.rrelu(x, -1, 3, training=True), SIGNED),
    ("multinomial", lambda w: w.gather(1, torch.multinomial(w, 3)), ROWS),
    ("multinomial once", lambda w: w.gather(1, torch.multinomial(w, 1)), ROWS),
    ("multinomial again", lambda w: w.gather(1, torch.multinomial(w, 8, replacement=True)), ROWS),
    ("multinomial of one row", lambda w: w[torch.multinomial(w, 4)], ROWS[0]),
    ("poisson", lambda x: x * torch.poisson(x.detach()), X),
]
IDLE = [
    ("features", lambda x: F.dropout1d(x, 0.3, training=False), X),
    ("features, none", lambda x: F.dropout2d(x.reshape(12, 6, 6, 2), 0.0), X),
    ("alpha", lambda x: F.alpha_dropout(x, 0.3), X),
    ("rrelu", lambda x: F.rrelu(x), SIGNED),
]
KEY = 4321
MESH = Mesh((("a", 2), ("b", 3), ("c", 2)))


def plan(cases, assignments):
    graph = cases.captured.graph
    operators = {o.name: OperatorPlan(assignments.get(o.name, {}), "configured") for o in graph.operators}
    tensors = {source.name: Layout.replicated(len(source.spec.shape)) for source in graph.sources}
    return Plan(MESH, operators, {}, tensors)


def run(cases, assignments, *, exact, key=KEY):
    """Every rank's results by case, and the gradients, with one assignment per operator."""
    program = lower(cases.captured.graph, plan(cases, assignments), LoweringOptions(exact=exact))
    simulation = Simulation(program, cases.captured.tensors)
    losses, *results = simulation.run(key)
    simulation.backward(losses)
    return dict(zip(cases.names, results, strict=True)), simulation.gradients()


def drawing(cases):
    return [operator for operator in cases.captured.graph.operators if draws(operator)]


@pytest.mark.slow
def test_exact_repeats_the_numbers_of_one_device(cases, draw):
    with ExactRandom(KEY) as reference:
        loss, *want = cases.suite()
    assert reference.ordinal == len(CASES)
    parameters = {name: p for name, p in cases.suite.named_parameters() if p.requires_grad}
    gradients = dict(zip(parameters, torch.autograd.grad(loss, parameters.values()), strict=True))
    graph = cases.captured.graph
    for seed in range(4):
        chosen = {o.name: draw(seed).assignment(rule_of(o, graph), MESH) for o in drawing(cases)}
        results, found = run(cases, chosen if seed else {}, exact=True)
        wrong = [
            name
            for (name, ranks), expected in zip(results.items(), want, strict=True)
            if not all(torch.allclose(got, expected, rtol=1e-12, atol=1e-12) for got in ranks)
        ]
        assert not wrong
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)


def test_fast_draws_per_slice(cases):
    """Replicas and repeats agree; slices, keys and operators differ."""
    graph = cases.captured.graph
    chosen = {o.name: {"d0": ("b",)} for o in drawing(cases) if rule_of(o, graph).sizes.get("d0", 1) % 3 == 0}
    results, _ = run(cases, chosen, exact=False)
    again, _ = run(cases, chosen, exact=False)
    others, _ = run(cases, chosen, exact=False, key=KEY + 1)
    for name, ranks in results.items():
        assert all(torch.equal(got, ranks[0]) for got in [*ranks, *again[name]]), name
        assert not torch.equal(ranks[0], others[name][0]), name
    assert not torch.equal(results["rand"][0], results["rand_like"][0])


ONES = torch.ones(12, 6, 12, **DOUBLE)
EQUIVALENT = [
    ("rand", lambda x: x * torch.rand(12, 6, 12, **DOUBLE), ONES),
    ("bernoulli", lambda x: x * torch.bernoulli(x / 2), ONES),
    ("alpha", lambda x: F.alpha_dropout(x, 0.5, training=True), ONES),
    ("features", lambda x: F.dropout1d(x, 0.5), ONES),
    ("rrelu", lambda x: F.rrelu(-x, training=True), ONES),
    ("native", lambda x: torch.native_dropout(x, 0.5, True)[0], ONES),
]


@pytest.mark.parametrize("factor", ["d0", "d1", "d2"])
def test_fast_slices_of_equal_data_differ(capture_cases, factor):
    """But the slices of a channel agree on whether the channel is dropped."""
    cases = capture_cases(EQUIVALENT)
    results, _ = run(cases, {o.name: {factor: ("b",)} for o in drawing(cases)}, exact=False)
    for name, ranks in results.items():
        slices = ranks[0].chunk(3, int(factor[1]))
        same = name == "features" and factor == "d2"
        assert torch.equal(slices[0], slices[1]) == torch.equal(slices[1], slices[2]) == same, name
    assert all(len(row.unique()) == 1 for row in results["features"][0].flatten(0, 1))


def test_no_numbers_are_generated_where_nothing_is_dropped(capture_cases):
    cases = capture_cases(IDLE)
    with ExactRandom(KEY) as reference:
        _, *want = cases.suite()
    assert reference.ordinal == 0
    graph = cases.captured.graph
    program = lower(graph, plan(cases, {o.name: {"d0": ("b",)} for o in drawing(cases)}), LoweringOptions(exact=True))
    assert not program.random
    _, *results = Simulation(program, cases.captured.tensors).run(KEY)
    for ranks, expected in zip(results, want, strict=True):
        assert all(torch.equal(got, expected) for got in ranks)


def test_rrelu_is_leaky_with_slopes_between_the_bounds():
    x = torch.randn(1000)
    slopes = rrelu_block(x, 0.1, 0.4, 1, 2, (1000,), (0,)) / x
    assert (slopes[x > 0] == 1).all()
    assert slopes[x < 0].min() >= 0.1 - 1e-6
    assert slopes[x < 0].max() <= 0.4 + 1e-6
    assert abs(slopes[x < 0].mean() - 0.25) < 0.02


def test_full_draws_do_not_depend_on_the_memory_format():
    one, other = torch.ones(6, 4), torch.ones(4, 6).t()
    assert torch.equal(*(seeded("aten.rand_like.default", 1, 2, x) for x in (one, other)))


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases)


def test_the_rest_runs_replicated(known, cases):
    assert known(cases, "poisson") == [False]
