"""The table of notation: every operator in it equals eager torch under every assignment; a new one takes one line."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from strategies.core.graph import Operator, OperatorGraph, Ref, Source, TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.rules import RULES, rule_of
from strategies.rules import table as lines
from strategies.rules.notation import notation
from strategies.rules.sharding import Sharding
from tests.fuzz.cases import Case, Refused, failure, sensitive
from tests.fuzz.generators import WITHOUT
from tests.strategies.rules.random_calls import calls

TABLE = sorted(name for name, rule in RULES.items() if rule.__module__ == lines.__name__)
PARTS = 6
"""Of the operators, every sixth is in the fast tests."""


def assignments(sharding: Sharding, mesh: Mesh) -> Iterator[dict[str, tuple[str, ...]]]:
    """Every way to slice factors over the axes of a mesh."""
    for chosen in product((None, *sharding.factors), repeat=len(mesh.axes)):
        assignment: dict[str, tuple[str, ...]] = {}
        for (axis, _), factor in zip(mesh.axes, chosen, strict=True):
            if factor is not None:
                assignment[factor] = (*assignment.get(factor, ()), axis)
        if sharding.legal(assignment, mesh):
            yield assignment


def wrong(name: str, mesh: Mesh, count: int) -> str | None:
    """Differences from eager torch in the first `count` calls of an operator."""
    for call in calls(name, count):
        tensors = {source.name: Layout(((),) * len(source.spec.shape)) for source in call.graph.sources}
        for assignment in assignments(rule_of(call.operator, call.graph), mesh):
            operators = {one.name: OperatorPlan({}, "configured") for one in call.graph.operators}
            operators[call.operator.name] = OperatorPlan(assignment, "configured")
            case = Case(call.graph, call.sources, Plan(mesh, operators, tensors, tensors), False, 0)
            try:
                found = failure(case)
            except Refused:
                break
            if found is not None and not sensitive(case):
                return f"{assignment}: {found}"
    return None


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))])
def test_every_operator_of_the_table_under_every_slicing(part):
    names = [name for name in TABLE if name not in WITHOUT][part::PARTS]
    mesh = Mesh((("a", 2),))
    differing = {name: found for name in names if (found := wrong(name, mesh, 1)) is not None}
    assert len(names) * PARTS > 300 and not differing


@pytest.mark.slow
def test_more_calls_of_every_operator_of_the_table(mesh):
    differing = {name: found for name in TABLE if name not in WITHOUT and (found := wrong(name, mesh, 4)) is not None}
    assert not differing


@pytest.fixture
def scores() -> Iterator[str]:
    """A user's operator, [..., s, d] and [t, d] to [..., s, t]; its rule is registered while the test runs."""

    @torch.library.custom_op("meshwright_tests::scores", mutates_args=())
    def scores(query: Tensor, key: Tensor) -> Tensor:
        return torch.einsum("...sd,td->...st", query, key)

    scores.register_fake(lambda query, key: query.new_empty((*query.shape[:-1], len(key))))
    scores.register_autograd(
        lambda ctx, gradient: (
            gradient @ ctx.saved_tensors[1],
            gradient.flatten(0, -2).mT @ ctx.saved_tensors[0].flatten(0, -2),
        ),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    name = "meshwright_tests::scores"
    lines.line("... s d, t d -> ... s t", name, padded=True, product=True)
    yield name
    del RULES[name], lines._lines[name]


def test_adding_an_operator_is_one_line(scores, capture_cases, check, known, mesh):
    operator = torch.ops.meshwright_tests.scores
    x = torch.randn(2, 6, 12, dtype=torch.float64), torch.randn(4, 12, dtype=torch.float64)
    cases = capture_cases([("scores", operator, *x), ("of a product", lambda q, k: operator(q * 2, k), *x)])
    assert known(cases, scores) == [True, True]
    (sharding, _) = (rule_of(o, cases.captured.graph) for o in cases.captured.graph.operators if o.op == scores)
    assert sharding.factors == ("d0", "s", "d", "t") and sharding.sums == {"d"}
    assert sharding.flops == 2 * 2 * 6 * 12 * 4
    check(cases, mesh, samples=4)


def read(text: str, results: tuple[tuple[int, ...], ...], *shapes: tuple[int, ...], target: str, args=()):
    specs = tuple(TensorSpec(shape, "float32") for shape in shapes)
    sources = tuple(Source(f"x{i}", "input", f"x{i}", spec) for i, spec in enumerate(specs))
    refs = tuple(Ref(source.id) for source in sources)
    outputs = tuple(TensorSpec(shape, "float32") for shape in results)
    operator = Operator("y", "y", "", target.split(".")[1], target, (*refs, *args), (), outputs, False, "", ())
    assert OperatorGraph(sources, (operator,), (Ref("y"),), ()).operand_specs(operator) == specs
    return notation(text, operator, specs, padded=True)


@pytest.mark.parametrize(
    ("text", "results", "shapes", "operands", "sums"),
    [
        ("... k, n k, +n -> ... n", [(2, 6, 18)], [(2, 6, 12), (18, 12), (18,)], "d0 d1 k, n k, n", "k"),
        ("... k, n k, +n -> ... n", [(2, 6, 18)], [(2, 6, 12), (18, 12)], "d0 d1 k, n k", "k"),
        ("b !d, !d -> b !d", [(18, 12)], [(18, 12), (12,)], "b ., .", ""),
        ("...* -> ...", [(4, 6)], [(4, 6), (6,), (4, 1)], "d0 d1, d1, d0 .", ""),
        ("b... m k, b... k n -> b... m n", [(3, 2, 4, 5)], [(2, 4, 6), (3, 1, 6, 5)], "b1 m k, b0 . k n", "k"),
        ("x... k, y... k -> x... y...", [(2, 3, 4)], [(2, 3, 6), (4, 6)], "x0 x1 k, y0 k", "k"),
        ("b... !n !m, b... !... -> b... !...", [(2, 4, 3)], [(2, 4, 4), (2, 4, 3)], "b0 . ., b0 . .", ""),
    ],
)
def test_notation(text, results, shapes, operands, sums):
    """Names are factors, dots in the last column replicated dims; factors in no result are summed over."""
    sharding = read(text, tuple(results), *shapes, target="aten.relu.default")
    assert sharding is not None
    shown = ", ".join(" ".join(factor or "." for factor in dims) for dims in sharding.operands)
    assert shown == operands and sharding.sums == set(sums.split())
    assert sharding.padded == set(sharding.factors) - sharding.sums


@pytest.mark.parametrize(
    ("text", "shape", "operand", "result", "sums"),
    [
        ("... -> ... ; !dim", (2, 4), "d0 . d2", "d0 d2", ""),
        ("... -> ... ; +dim", (2, 4), "d0 d1 d2", "d0 d2", "d1"),
        ("... -> ... ; +dim", (2, 1, 4), "d0 d1 d2", "d0 . d2", "d1"),
        ("... -> ... ; !0", (2, 3, 4), ". d1 d2", ". d1 d2", ""),
    ],
)
def test_dims_that_an_argument_names(text, shape, operand, result, sums):
    sharding = read(text, (shape,), (2, 3, 4), target="aten.amax.default", args=((1,),))
    assert sharding is not None
    assert [" ".join(f or "." for f in dims) for dims in (*sharding.operands, *sharding.results)] == [operand, result]
    assert sharding.sums == set(sums.split())


@pytest.mark.parametrize(
    ("text", "results", "shapes"),
    [
        ("m k, k n -> m n", [(4, 5)], [(2, 4, 6), (6, 5)]),  # a dim too many
        ("m k, k n -> m n", [(4, 5)], [(4, 6)]),  # an operand too few
        ("... -> ...", [(4, 5)], [(4,)]),  # a result with another rank
        ("... -> ...", [(4,), (4,)], [(4,)]),  # a result too many
    ],
)
def test_calls_that_do_not_fit_a_line(text, results, shapes):
    assert read(text, tuple(results), *shapes, target="aten.relu.default") is None


def test_a_second_rule_is_refused():
    with pytest.raises(ValueError, match="embedding"):
        lines.line("... -> ...", "embedding")
