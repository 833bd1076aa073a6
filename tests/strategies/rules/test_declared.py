"""Rules that authors declare: for autograd functions and operators of libraries, sliced and compared with eager; an
operator with a name of torch's has none of torch's rule."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies import sharding_rule
from strategies.capture import Objective, capture
from strategies.rules import declared, rule_of
from strategies.rules.declared import lines_of
from tests.strategies.simulated_model import TOLERANCE, Model


@sharding_rule("b s !d, !d -> b s !d", "s !d, !d -> s !d")
class Normed(torch.autograd.Function):
    """Rows over their sums, times a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x / x.abs().sum(-1, keepdim=True) * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        total = x.abs().sum(-1, keepdim=True)
        inner = (gradient * w * x).sum(-1, keepdim=True) / total.square()
        return gradient * w / total - inner * x.sign(), (gradient * x / total).flatten(0, -2).sum(0)


@torch.library.custom_op("declared_tests::scores", mutates_args=())
def scores(query: Tensor, key: Tensor) -> Tensor:
    """[..., s, d] and [t, d] to [..., s, t]."""
    return torch.einsum("...sd,td->...st", query, key)


scores.register_fake(lambda query, key: query.new_empty((*query.shape[:-1], len(key))))
scores.register_autograd(
    lambda ctx, gradient: (
        gradient @ ctx.saved_tensors[1],
        gradient.flatten(0, -2).mT @ ctx.saved_tensors[0].flatten(0, -2),
    ),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
sharding_rule("... s d, t d -> ... s t")(scores)


@torch.library.triton_op("declared_tests::shifted", mutates_args=())
def shifted(x: Tensor) -> Tensor:
    """As an author of Triton kernels wraps them; this one calls none, which a CPU could not run."""
    return x + 1


shifted.register_autograd(lambda ctx, gradient: 3 * gradient)
sharding_rule("b s d -> b s d")(torch.ops.declared_tests.shifted)


@torch.library.custom_op("declared_tests::gelu", mutates_args=())
def gelu(x: Tensor) -> Tensor:
    """Not torch's gelu: a softmax over the rows."""
    return x.softmax(0)


gelu.register_fake(torch.empty_like)
gelu.register_autograd(lambda ctx, gradient: gradient.cumsum(0))


class Net(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body, self.dense = body, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.dense(x)).square().mean()


BODIES = {
    "function": lambda net, h: Normed.apply(h, net.dense.bias) + Normed.apply(h[0], net.dense.bias),
    "library": lambda net, h: scores(h, net.dense.weight),
    "triton": lambda net, h: shifted(h) * h,
}
OPS = {"function": f"{__name__}::Normed", "library": "declared_tests::scores", "triton": "declared_tests::shifted"}
FACTORS = {"function": ("b", "s"), "library": ("d0", "s", "d", "t"), "triton": ("b", "s", "d")}


def model(body: Any) -> Model:
    torch.manual_seed(0)
    return Model(Net(body), None, {"x": torch.randn(4, 8, 8)})


@pytest.mark.parametrize("kind", BODIES)
def test_a_declared_operator_is_sliced(kind: str, draw: Any) -> None:
    subject = model(BODIES[kind])
    first = next(operator for operator in subject.graph.operators if operator.op == OPS[kind])
    assert rule_of(first, subject.graph).factors == FACTORS[kind]
    plans = [subject.random_plan(draw, seed) for seed in range(6)]
    assert any(plan.operators[first.name].assignment for plan in plans)
    assert max(subject.difference(plan) for plan in plans) < TOLERANCE


def test_a_rule_is_found_by_a_process_that_did_not_declare_it(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = model(BODIES["triton"])
    monkeypatch.setattr(declared, "_lines", {})
    (operator,) = (o for o in subject.graph.operators if o.op == OPS["triton"])
    assert operator.lines == ("b s d -> b s d",) and operator.target == f"declared_tests.shifted.default@{__name__}"
    changed = Model(Net(BODIES["triton"]), None, {"x": torch.randn(4, 8, 8)})
    assert changed.graph.signature() != subject.graph.signature()  # another plan in the cache


def test_a_declared_function_is_one_operator_in_evaluation_too() -> None:
    objective = Objective(Net(BODIES["function"]), None, ("x",), ())
    graph = capture(objective, (torch.randn(4, 8, 8),), training=False).graph
    assert [o.op for o in graph.operators].count(OPS["function"]) == 2


def test_a_name_of_torch_has_no_rule_of_torch(draw: Any) -> None:
    subject = model(lambda net, h: gelu(h))
    (operator,) = (o for o in subject.graph.operators if o.label == "gelu")
    assert not rule_of(operator, subject.graph).known
    assert subject.worst(draw, 4) < TOLERANCE


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ((), "needs a line"),
        (("b s d",), "operands -> results"),
        (("b s -> b -> s",), "operands -> results"),
        (("b s -> b s e",), "no operand carries e"),
        (("b !s -> b s",), "s is sliced in one place"),
        (("b 2 -> b",), "is no dim"),
        (("b b -> b",), "b stands twice"),
        (("b s d -> b s d, b s",), "result 2 lacks d"),
        (("... b ... -> b",), "at most one"),
        ((5,), "operands -> results"),
    ],
)
def test_lines_that_mean_nothing_are_refused(lines: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sharding_rule(*lines)


def test_what_can_be_declared() -> None:
    for name in ("declared_tests::named", torch.ops.declared_tests.scores.default):
        assert sharding_rule("b -> b")(name) is name
    assert lines_of("declared_tests::named") == lines_of("declared_tests::scores") == ("b -> b",)
    sharding_rule("... s d, t d -> ... s t")(scores)
    with pytest.raises(ValueError, match="torch's"):
        sharding_rule("b -> b")(torch.ops.aten.relu)
    with pytest.raises(TypeError, match="decorates"):
        sharding_rule("b -> b")(torch.relu)


def test_a_call_that_fits_no_line_runs_replicated() -> None:
    """Dims with one letter have one size."""
    subject = model(lambda net, h: HalfGradient.apply(h))
    (operator,) = (o for o in subject.graph.operators if o.label == "HalfGradient")
    assert not rule_of(operator, subject.graph).known


@sharding_rule("b s d -> b s d")
class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x[..., :4] * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.cat([gradient, 0 * gradient], -1)


def test_example() -> None:
    assert doctest.testmod(declared).failed == 0
