"""Attention with batch, heads, groups of heads, queries and value dim sliced; masks, causal, dropout exact and fast."""

import math

import pytest
import torch
import torch.nn.functional as F

from runner.training.reference import ExactRandom
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.core.program import LoweringOptions, Redistribute
from strategies.core.steps import ALL_GATHER, REDUCE_SCATTER
from strategies.lowering.lowering import local_instructions, lower
from strategies.rules import ring_attention, rule_of
from strategies.rules.attention import attention_block, by_query_head, grouped_attention
from strategies.runtime.simulate import Simulation

torch.manual_seed(1)


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


def mask(*shape):
    """Random, with one key that every query attends to."""
    found = torch.rand(shape) < 0.5
    found[..., 0] = True
    return found


def attend(**options):
    return lambda q, k, v, *masks: F.scaled_dot_product_attention(q, k, v, *masks, **options)


def qkv(s=12, t=5, *, heads=6, kv=6, d=4, e=6):
    return x(2, heads, s, d), x(2, kv, t, d), x(2, kv, t, e)


BLIND = mask(2, 1, 12, 5).index_fill(-2, torch.tensor([3, 7]), False)
COVERS = "scaled_dot_product_attention"
CASES = [
    ("plain", attend(), *qkv()),
    ("scaled", attend(scale=0.3), *qkv(7, 12)),
    ("causal", attend(is_causal=True), *qkv(12, 12)),
    ("causal, fewer keys", attend(is_causal=True), *qkv(12, 5)),
    ("causal, more keys", attend(is_causal=True, scale=2.0), *qkv(6, 13)),
    ("grouped", attend(enable_gqa=True), *qkv(heads=12, kv=6)),
    ("grouped, causal", attend(enable_gqa=True, is_causal=True), *qkv(12, 12, heads=12, kv=2)),
    ("one head of keys", attend(enable_gqa=True, is_causal=True), *qkv(12, 12, heads=6, kv=1)),
    ("as many heads of keys", attend(enable_gqa=True), *qkv()),
    ("boolean mask", attend(), *qkv(), mask(2, 6, 12, 5)),
    ("mask for all heads", attend(), *qkv(), mask(2, 1, 12, 5)),
    ("mask of keys", attend(), *qkv(), mask(2, 1, 1, 5)),
    ("mask [s, t]", attend(enable_gqa=True), *qkv(heads=12, kv=6), mask(12, 5)),
    ("queries without keys", attend(), *qkv(), BLIND),
    ("bias", attend(), *qkv(), x(1, 6, 12, 5)),
    ("bias of keys", attend(), *qkv(), x(5)),
    ("as many keys", attend(), *qkv(12, 12)),
    ("as many keys, mask", attend(enable_gqa=True), *qkv(12, 12, heads=12, kv=6), mask(2, 1, 12, 12)),
    ("as many keys, bias", attend(scale=0.3), *qkv(12, 12), x(6, 12, 12)),
    ("broadcast batch", attend(), x(2, 6, 12, 4), x(1, 6, 5, 4), x(6, 5, 6)),
    ("broadcast heads", attend(is_causal=True), x(2, 6, 12, 4), x(2, 1, 12, 4), x(2, 6, 12, 6)),
    ("one batch dim", attend(is_causal=True), x(6, 12, 4), x(6, 12, 4), x(6, 12, 2)),
    ("no batch dim", attend(), x(12, 4), x(5, 4), x(5, 6)),
    ("three batch dims", attend(is_causal=True), x(2, 3, 2, 4, 4), x(2, 3, 2, 4, 4), x(2, 3, 2, 4, 4)),
    ("uneven", attend(is_causal=True), x(5, 7, 6, 4), x(5, 7, 6, 4), x(5, 7, 6, 2)),
]


@pytest.mark.few(1)
def test_attention(cases, check, mesh):
    check(cases, mesh, samples=3)


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases)


def test_grouped_heads_are_cut_at_group_boundaries(cases):
    graph = cases.captured.graph
    sizes = {
        name: rule_of(operator, graph).sizes["h"]
        for operator in graph.operators
        if operator.op == "scaled_dot_product_attention" and "h" in rule_of(operator, graph).sizes
        for name in [cases.case_of(f"{operator.module}.x")]
    }
    assert sizes["plain"] == 6
    assert (sizes["grouped"], sizes["grouped, causal"], sizes["one head of keys"]) == (6, 2, 6)


def test_flops(cases):
    graph = cases.captured.graph
    first = next(o for o in graph.operators if o.op == "scaled_dot_product_attention")
    assert rule_of(first, graph).flops == 2.0 * (2 * 6 * 12) * 5 * (4 + 6)


@pytest.mark.parametrize("heads", [1, 2, 6])
def test_groups_may_be_repeated_by_query_head(heads):
    q, k, v = torch.randn(2, 6, 3, 4), torch.randn(2, heads, 5, 4), torch.randn(2, heads, 5, 7)
    want = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    found = F.scaled_dot_product_attention(q, by_query_head(q, k), by_query_head(q, v))
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(grouped_attention(q, k, v, None, 0.0, False, None), want)


@pytest.mark.parametrize(
    ("arguments", "start", "grouped"),
    [
        (qkv(), None, False),
        ((*qkv(), mask(2, 1, 12, 5)), None, False),
        ((*qkv(), BLIND), None, False),
        ((*qkv(), x(6, 12, 5)), None, False),
        (qkv(heads=12, kv=6), None, True),
        (qkv(12, 7), 0, False),
    ],
)
def test_open_attention_is_torchs(arguments, start, grouped):
    """With dropout that drops nothing, the definition equals torch's attention, gradients included."""
    q, k, v, *masks = (a.clone().requires_grad_(a.is_floating_point()) for a in arguments)
    given = masks[0] if masks else None
    shape = (*q.shape[:-1], k.shape[-2])
    found = attention_block(q, k, v, given, start, 0.0, 0.4, grouped, 1, 2, shape, (0,) * len(shape))
    want = F.scaled_dot_product_attention(q, k, v, given, is_causal=start == 0, scale=0.4, enable_gqa=grouped)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    probe, inputs = torch.randn_like(want), [a for a in (q, k, v, *masks) if a.requires_grad]
    for got, expected in zip(*(torch.autograd.grad((y * probe).sum(), inputs) for y in (found, want)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_keys_and_values_are_sliced_with_the_queries(cases):
    """Gathered for the computation, and their gradients scattered; keys of another number stay replicated."""
    graph = cases.captured.graph
    found = {cases.case_of(f"{operator.module}.x"): operator for operator in attentions(cases)}
    for name, sliced in (("causal", True), ("grouped, causal", True), ("as many keys, bias", True), ("plain", False)):
        operator, assignment = found[name], {"s": ("a", "b")}
        sharding = rule_of(operator, graph)
        query, *others = sharding.operand_layouts(assignment)[:3]
        assert query.dims[-2] == ("a", "b")
        assert {other.dims[-2] for other in others} == {("a", "b") if sliced else ()}
        carried = [
            step
            for step in local_instructions(operator, sharding, assignment, graph, MESH)
            if isinstance(step, Redistribute)
        ]
        assert [[step.kind for step in part.collectives] for part in carried] == [[ALL_GATHER, REDUCE_SCATTER]] * (
            2 * sliced
        )


@pytest.mark.few(2)
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("scores", [ring_attention.SCORES, 700])
@pytest.mark.parametrize(
    "assignment", [{"s": ("a", "b", "c")}, {"s": ("c", "a"), "h": ("b",)}, {"s": ("b",), "b0": ("c",)}]
)
def test_sequences_sliced_over_several_axes(cases, assignment, ring, scores, monkeypatch):
    """Every attention that can be, in the same way: forward and all gradients of one device."""
    monkeypatch.setattr(ring_attention, "SCORES", scores)
    graph = cases.captured.graph
    chosen = {o.name: assignment for o in attentions(cases) if rule_of(o, graph).legal(assignment, MESH)}
    assert len(chosen) >= 8
    loss, *want = cases.suite()
    compare(cases, run(cases, chosen, exact=True, ring=ring), loss, want)


def compare(cases, found, loss, want):
    parameters = {name: p for name, p in cases.suite.named_parameters() if p.requires_grad}
    gradients = dict(zip(parameters, torch.autograd.grad(loss, parameters.values(), retain_graph=True), strict=True))
    results, of_parameters = found
    for ranks, expected in zip(results, want, strict=True):
        for got in ranks:
            torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)
    for name, gradient in gradients.items():
        torch.testing.assert_close(of_parameters[name], gradient, rtol=1e-10, atol=1e-10)


KEY = 77
MESH = Mesh((("a", 2), ("b", 3), ("c", 2)))
DROPPING = [
    ("plain", attend(dropout_p=0.4), *qkv()),
    ("causal", attend(dropout_p=0.4, is_causal=True), *qkv(12, 12)),
    ("causal, fewer keys", attend(dropout_p=0.4, is_causal=True), *qkv(12, 5)),
    ("masked", attend(dropout_p=0.4, scale=0.7), *qkv(), BLIND),
    ("bias", attend(dropout_p=0.4), *qkv(), x(6, 12, 5)),
    ("grouped", attend(dropout_p=0.4, enable_gqa=True, is_causal=True), *qkv(12, 12, heads=12, kv=6)),
    ("one head of keys", attend(dropout_p=0.4, enable_gqa=True), *qkv(heads=12, kv=1)),
    ("one batch dim", attend(dropout_p=0.4), x(6, 12, 4), x(6, 5, 4), x(6, 5, 2)),
    ("as many keys, masked", attend(dropout_p=0.4), *qkv(12, 12), mask(2, 1, 12, 12)),
    ("all", attend(dropout_p=1.0), *qkv()),
]


@pytest.fixture(scope="module")
def dropping(capture_cases):
    return capture_cases(DROPPING)


def run(cases, assignments, *, exact, key=KEY, ring=False):
    """Every rank's results (without the loss), and the gradients, with one assignment per attention."""
    graph = cases.captured.graph
    operators = {o.name: OperatorPlan(assignments.get(o.name, {}), "configured") for o in graph.operators}
    tensors = {source.name: Layout.replicated(len(source.spec.shape)) for source in graph.sources}
    program = lower(graph, Plan(MESH, operators, {}, tensors), LoweringOptions(exact=exact, ring=ring))
    simulation = Simulation(program, cases.captured.tensors)
    losses, *results = simulation.run(key)
    simulation.backward(losses)
    return results, simulation.gradients()


def attentions(cases):
    return [o for o in cases.captured.graph.operators if o.op == "scaled_dot_product_attention"]


@pytest.mark.slow
@pytest.mark.parametrize("ring", [False, True])
def test_exact_dropout_repeats_the_numbers_of_one_device(dropping, draw, ring):
    with ExactRandom(KEY) as reference:
        loss, *want = dropping.suite()
    assert reference.ordinal == len(DROPPING)
    graph = dropping.captured.graph
    together = {o.name: {"s": ("b", "a")} for o in attentions(dropping)}
    for seed in range(4):
        chosen = {o.name: draw(seed).assignment(rule_of(o, graph), MESH) for o in attentions(dropping)}
        assignments = chosen if seed else together if ring else {}
        found = run(dropping, assignments, exact=True, ring=ring)
        compare(dropping, found, loss, want)


@pytest.mark.parametrize("factor", ["b0", "h", "s"])
def test_fast_dropout_draws_per_slice(capture_cases, factor):
    """With values of ones the result is the sum of the probabilities that remain: replicas agree, slices differ, the
    slices of the value dim share theirs, and the mean is 1."""
    ones = torch.zeros(6, 6, 12, 4), torch.zeros(6, 6, 30, 4), torch.ones(6, 6, 30, 2)
    cases = capture_cases([("uniform", attend(dropout_p=0.5), *(a.double() for a in ones))])
    (operator,) = attentions(cases)
    assignment = {factor: ("b",), "e": ("a",)}
    (ranks,), _ = run(cases, {operator.name: assignment}, exact=False)
    (again,), _ = run(cases, {operator.name: assignment}, exact=False)
    (other,), _ = run(cases, {operator.name: assignment}, exact=False, key=KEY + 1)
    result = ranks[0]
    assert all(torch.equal(got, result) for got in [*ranks, *again])
    assert not torch.equal(other[0], result)
    assert torch.equal(result[..., 0], result[..., 1])
    slices = result[..., 0].chunk(3, {"b0": 0, "h": 1, "s": 2}[factor])
    assert not torch.equal(slices[0], slices[1])
    assert math.isclose(result.mean().item(), 1, abs_tol=0.05)


def test_fast_dropout_is_causal_and_masked(dropping, draw):
    """Keys that no query may attend to have no gradient, whatever is dropped."""
    graph = dropping.captured.graph
    chosen = {o.name: draw(5).assignment(rule_of(o, graph), MESH) for o in attentions(dropping)}
    results, gradients = run(dropping, chosen, exact=False)
    named = dict(zip(dropping.names, results, strict=True))
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
    assert all(
        not got[:, :, [3, 7]][BLIND.expand(2, 6, 12, 5)[:, :, [3, 7]].any(-1) == 0].any() for got in named["masked"]
    )
    v = dropping.captured.tensors["functions.2.x2"]
    first = named["causal, fewer keys"][0][:, :, 0]  # attends to the first key only, which is doubled or dropped
    share = first / v[:, :, 0] * 0.6
    assert all(math.isclose(value, round(value), abs_tol=1e-9) for value in share.flatten().tolist())
