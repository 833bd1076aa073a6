"""Reductions of one dim, several, all, kept or not, of floats, integers and booleans."""

import math

import pytest
import torch

from strategies.core.mesh import Mesh
from strategies.rules import rule_of

torch.manual_seed(1)


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


def integers(*shape):
    return torch.randint(0, 3, shape)


def tied(*shape):
    """Several elements equal the largest one and the smallest one."""
    return integers(*shape).double()


def over(name, *dims, **options):
    """The reduction `name` with its arguments after the tensor."""
    return lambda a: getattr(torch, name)(a, *dims, **options)


AMINMAX = "NotImplemented" not in type(torch.aminmax(torch.ones(1, requires_grad=True)).min.grad_fn).__name__
"""Whether it has a derivative (since torch 2.12)."""
EVERY = "sum mean amax amin prod max min median std var argmax argmin".split()
EXTREMES = "max min amax argmax argmin".split()
SLICED = "all any linalg_vector_norm logsumexp prod std std_mean var var_mean".split()
COVERS = "amax amin argmax argmin histc max min nanquantile quantile " + " ".join(SLICED)
CASES = [
    *((name, over(name), x(6, 12)) for name in EVERY),
    *((f"{name} dim", over(name, 1), x(6, 12)) for name in "sum mean prod argmax argmin".split()),
    *((f"{name} dim", over(name, -1), x(2, 6, 12)) for name in "max min median mode amax".split()),
    *((f"{name} kept", over(name, dim=0, keepdim=True), x(6, 12)) for name in "sum mean max".split()),
    *((f"{name} several", over(name, (0, -1)), x(6, 4, 12)) for name in "sum mean amin std".split()),
    *((name, over(name, dim=1, keepdim=True), x(6, 12)) for name in ("var_mean", "std_mean")),
    ("var unbiased", lambda a: a.var(unbiased=False), x(6, 12)),
    ("var correction", lambda a: torch.var(a, 0, correction=2, keepdim=True), x(6, 12)),
    ("std_mean all", torch.std_mean, x(6, 12)),
    ("sum of nothing", lambda a: a.sum(dim=()), x(6, 12)),
    ("sum of a scalar", torch.sum, x().reshape(())),
    ("sum as", lambda a: a.sum(1, dtype=torch.float64), integers(6, 12)),
    ("sum of integers", lambda a: a.sum(0), integers(6, 12)),
    ("sum of booleans", lambda a: (a > 1).sum(), integers(6, 12)),
    ("sum size one", lambda a: a.sum(1), x(6, 1, 12)),
    ("mean as", lambda a: a.mean(dtype=torch.float64), integers(6, 12)),
    ("mean of the rest", lambda a: a - a.mean((1, 2), keepdim=True), x(6, 4, 12)),
    ("count_nonzero", torch.count_nonzero, integers(6, 12)),
    ("count_nonzero dim", lambda a: torch.count_nonzero(a, dim=1), integers(6, 12)),
    ("logsumexp", lambda a: a.logsumexp(1), x(6, 12)),
    ("logsumexp kept", lambda a: a.logsumexp((0, 1), keepdim=True), x(6, 12)),
    ("norm", torch.linalg.vector_norm, x(6, 12)),
    ("norm dim", lambda a: torch.linalg.vector_norm(a, 3, dim=-1, keepdim=True), x(6, 12)),
    ("mode", torch.mode, integers(6, 12)),
    ("mode kept", lambda a: torch.mode(a, 0, True), integers(6, 12)),
    ("linalg_norm", torch.linalg.norm, x(6, 12)),
    ("linalg_norm rows", lambda a: torch.linalg.norm(a, dim=1), x(6, 12)),
    ("linalg_norm of matrices", lambda a: torch.linalg.norm(a, dim=(0, 2)), x(4, 6, 7)),
    ("linalg_matrix_norm", torch.linalg.matrix_norm, x(6, 4, 7)),
    ("norm.Scalar", lambda a: torch.ops.aten.norm.Scalar(a, 3), x(6, 12)),
    ("norm.ScalarOpt_dim", lambda a: torch.ops.aten.norm.ScalarOpt_dim(a, None, [1], True), x(6, 12)),
    ("nansum", lambda a: torch.where(a > 1, math.nan, a).nansum(1), x(6, 12)),
    ("nanmean", lambda a: torch.where(a > 1, math.nan, a).nanmean(0), x(6, 12)),
    ("nanmedian", lambda a: a.nanmedian(1, keepdim=True), x(6, 7)),
    ("aminmax", lambda a: torch.aminmax(a if AMINMAX else a.detach(), dim=1), x(6, 12)),
    ("kthvalue", lambda a: a.kthvalue(2), x(6, 12)),
    ("quantile", lambda a: a.quantile(0.3, dim=1), x(6, 7)),
    ("quantiles", lambda a, q: a.quantile(q.detach(), dim=0, keepdim=True), x(6, 4), torch.rand(2).double()),
    ("nanquantile", lambda a: torch.nanquantile(a, 0.5), x(6, 4)),
    ("nanquantile dim", lambda a: torch.nanquantile(a, 0.5, dim=-1), x(6, 4)),
    ("histc", lambda a: torch.histc(a.detach(), bins=5, min=-1, max=1), x(6, 4)),
    ("histc of their range", lambda a: torch.histc(a.detach(), bins=5), x(6, 4)),
    ("_is_all_true", lambda a: torch.ops.aten._is_all_true(a > 0), integers(6, 4)),
    ("_is_any_true", lambda a: torch.ops.aten._is_any_true(a > 1), integers(6, 4)),
    ("any", lambda a: (a > 1).any(), integers(6, 12)),
    ("any dim", lambda a: (a > 1).any(1), integers(6, 12)),
    ("all", lambda a: (a > 0).all(), integers(6, 12)),
    ("all dims", lambda a: (a > 0).all((0, 1), keepdim=True), integers(6, 12)),
    ("any of bytes", lambda a: torch.any(a.to(torch.uint8), 0), integers(6, 12)),
    ("logsumexp of a mask", lambda a: torch.where(torch.arange(12) < 4, a, -math.inf).logsumexp(1), x(6, 12)),
    ("prod of zeros", lambda a: torch.where(torch.arange(12) % 5 == 3, 0, a).prod(1, keepdim=True), x(6, 12)),
    ("prod of one zero", lambda a: torch.where(torch.arange(12) == 7, 0, a).prod(1), x(6, 12)),
    ("prod of integers", lambda a: torch.prod(a, 0, dtype=torch.float64), integers(6, 4)),
    ("std of equals", lambda a: (0 * a + 3).std(0), x(6, 12)),
    ("var of large ones", lambda a: (1000 + a).var((0, 1), correction=0), x(6, 12)),
    ("var of some", lambda a: torch.var(a, (0, 2), unbiased=True), x(6, 2, 12)),
    ("var_mean of all", torch.var_mean, x(6, 12)),
    ("norm of zeros", lambda a: torch.linalg.vector_norm(0 * a, dim=1), x(6, 12)),
    *(
        (f"norm {order}", lambda a, order=order: torch.linalg.vector_norm(a, order, (0, 1)), x(6, 12))
        for order in (1, 1.5, 3.5, math.inf, 0)
    ),
    ("norm inf of equals", lambda a: torch.linalg.vector_norm(a.clamp(-0.1, 0.1), math.inf, 0), x(6, 12)),
    ("max other", torch.max, x(6, 12), x(12)),
    ("min other", torch.min, x(6, 1), x(12)),
    ("max of integers", torch.max, integers(6, 12)),
    *((f"{name} of ties", over(name, (0, 2)), tied(6, 2, 12)) for name in ("amax", "amin")),
    *((f"{name} of all ties", over(name), tied(6, 4)) for name in ("amax", "max", "min", "argmax", "argmin")),
    *((f"{name} of ties kept", over(name, 1, keepdim=True), tied(6, 12)) for name in EXTREMES),
    *((f"{name} of ties in front", over(name, 0), tied(12, 5)) for name in EXTREMES),
    ("amax of infinities", lambda a: (a - math.inf).amax(1), x(6, 12)),
    ("amin of integers", lambda a: a.amin(0), integers(6, 12)),
]


def test_reductions(cases, check):
    check(cases, Mesh((("a", 2),)), samples=2)


@pytest.mark.slow
def test_reductions_on_every_mesh(cases, check, mesh):
    check(cases, mesh, samples=4)


def test_extremes_are_those_of_all_slices(cases):
    """No dim stays replicated because it is reduced."""
    graph = cases.captured.graph
    extremes = [one for one in graph.operators if one.op in EXTREMES and len(one.operands) == 1]
    assert len(extremes) > 20
    for operator in extremes:
        assert None not in rule_of(operator, graph).operands[0], operator


def unsliced(case):
    """Whether a case is a norm whose dims stay replicated."""
    return "norm 0" in case or "norm inf" in case


def test_reductions_are_those_of_all_slices(cases):
    graph = cases.captured.graph
    reductions = [one for one in graph.operators if one.op in SLICED and not unsliced(cases.case_of(one.name))]
    assert len(reductions) > 30
    for operator in reductions:
        assert None not in rule_of(operator, graph).operands[0], operator


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases)


def test_ranges_of_all_elements_run_replicated(cases, known):
    assert known(cases, "histc") == [True, False]
    assert known(cases, "nanquantile") == [False, True]
