"""Products of rows with the matrices of their experts, sliced over rows, experts, contraction and columns; and a layer
that routes tokens as Hugging Face models do."""

import pytest
import torch
from torch import Tensor

from strategies.core.mesh import Mesh
from strategies.rules import rule_of
from strategies.rules.products import expert_products
from strategies.rules.registry import RULES

torch.manual_seed(1)


def products(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """A product per expert; rows without an expert are 0."""
    result, starts = x.new_zeros(len(x), weights.shape[2]), [0, *ends.tolist()]
    for start, stop, matrix in zip(starts, starts[1:], weights, strict=False):
        result[start:stop] = x[start:stop] @ matrix
    return result


@torch.library.custom_op("rule_tests::grouped_mm_fallback", mutates_args=())
def grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """An operator with its own backward under the name that Hugging Face gives it."""
    return products(x, weights, ends)


@grouped.register_fake
def _(x, weights, ends):
    return x.new_empty(x.shape[0], weights.shape[2])


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _back(ctx, gradient):
    x, weights, ends = ctx.saved_tensors
    with torch.enable_grad():
        own = x.detach().requires_grad_(), weights.detach().requires_grad_()
        return *torch.autograd.grad(products(*own, ends), own, gradient), None


grouped.register_autograd(_back, setup_context=_keep)
RULES["rule_tests::grouped_mm_fallback"] = RULES["transformers::grouped_mm_fallback"]


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


def numbers(*shape):
    return torch.randint(-1, 2, shape).double()


def single(a, w, ends):
    """torch's own product does not support double precision; small integers are exact in half precision too."""
    return torch.nn.functional.grouped_mm(a.detach().bfloat16(), w.detach().bfloat16(), offs=ends)


def routed(h, router, up, down):
    """Two experts per token: sort by expert, multiply, put back, weigh, add up."""
    weights, chosen = torch.topk((h @ router).softmax(-1), 2, dim=-1)
    order = torch.argsort(chosen.reshape(-1), stable=True)
    counts = torch.histc(chosen.reshape(-1).float(), bins=4, min=0, max=3)
    ends = counts.cumsum(0).to(torch.int32)
    sorted_rows = grouped(h[torch.div(order, 2, rounding_mode="floor")], up, ends).relu()
    inverse = torch.empty_like(order).index_put((order,), torch.arange(len(order)))
    rows = grouped(sorted_rows, down, ends)[inverse] * weights.reshape(-1, 1)
    return rows.view(len(h), 2, -1).sum(1)


def ends(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


COVERS = "_grouped_mm transformers::grouped_mm_fallback"
CASES = [
    ("rows of experts", grouped, x(12, 6), x(4, 6, 8), ends(2, 7, 7, 12)),
    ("uneven", grouped, x(11, 6), x(3, 6, 7), ends(5, 6, 11)),
    ("one expert has all", grouped, x(12, 4), x(7, 4, 4), ends(0, 0, 0, 12, 12, 12, 12)),
    ("rows of nobody", grouped, x(12, 4), x(2, 4, 6), ends(3, 8)),
    ("torch's own", single, numbers(12, 16), numbers(4, 16, 8), ends(2, 7, 7, 12)),
    ("a layer", routed, x(6, 8), x(8, 4), x(4, 8, 12), x(4, 12, 8)),
]


def test_experts(cases, check):
    check(cases, Mesh((("a", 2), ("b", 2))), samples=1)


@pytest.mark.slow
def test_experts_on_every_mesh(cases, check, mesh):
    check(cases, mesh, samples=6)


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases)


def test_every_operator_of_the_layer_has_a_rule(cases):
    graph = cases.captured.graph
    layer = [o for o in graph.operators if o.module == "functions.5"]
    assert len(layer) > 15 and all(rule_of(o, graph).known for o in layer)


@pytest.mark.parametrize("first", [0, 6])
def test_torch_and_own_products_agree(first):
    """The first half of the rows and the second, with integers, which are exact."""
    rows, weights, stops = numbers(12, 16).float(), numbers(4, 16, 8).float(), ends(2, 7, 7, 12)
    want = torch.nn.functional.grouped_mm(rows, weights, offs=stops)[first : first + 6]
    assert torch.equal(expert_products(rows[first : first + 6], weights, stops, first, 0), want)
