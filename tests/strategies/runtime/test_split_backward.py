"""Split backward (input gradients, then weight gradients) gives the gradients of one backward, each when it is due."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strategies.runtime.split_backward import backward_to

Net = Callable[[Tensor, dict[str, Tensor]], list[Tensor]]


def random_inputs() -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    names = ("first", "second", "bias", "scale", "unused")
    weights = {name: torch.randn(8, 8).requires_grad_() for name in names}
    return torch.randn(4, 8).requires_grad_(), weights


def chained(x: Tensor, w: dict[str, Tensor]) -> list[Tensor]:
    hidden = torch.tanh(F.linear(x, w["first"], w["bias"][0]))
    return [F.linear(hidden * w["scale"][0], w["second"])]


def tied(x: Tensor, w: dict[str, Tensor]) -> list[Tensor]:
    return [F.linear(torch.tanh(F.linear(x, w["first"])), w["first"]) @ w["second"]]


def through_one_value(x: Tensor, w: dict[str, Tensor]) -> list[Tensor]:
    both = w["first"] @ w["scale"]
    return [F.linear(torch.tanh(F.linear(x, both)), both)]


def beside(x: Tensor, w: dict[str, Tensor]) -> list[Tensor]:
    return [F.linear(x, w["first"]), w["second"].sin(), x * 2 + w["scale"][:4].square() + w["second"][:4]]


def in_python(x: Tensor, w: dict[str, Tensor]) -> list[Tensor]:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)  # type: ignore[attr-defined]
            return a @ b

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, Tensor]:
            a, b = ctx.saved_tensors  # type: ignore[attr-defined]
            return gradient @ b.t(), a.t() @ gradient

    return [Product.apply(F.linear(x, w["first"]), w["second"])]  # type: ignore[no-untyped-call]


CASES: dict[str, tuple[Net, set[str]]] = {
    "chained": (chained, {"first", "second", "bias", "scale"}),
    "tied": (tied, {"second"}),
    "through one value": (through_one_value, set()),
    "beside": (beside, {"first", "scale"}),
    "in python": (in_python, {"first"}),
}
"""The computation, and the parameters whose gradients can be delayed."""


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_piece(case: str) -> None:
    net, late = CASES[case]
    (x, weights), (y, truth) = random_inputs(), random_inputs()
    for _ in range(2):  # gradients add up
        made = net(x, weights)
        gradients = [torch.randn_like(one) for one in made]
        before = {name: None if w.grad is None else w.grad.clone() for name, w in weights.items()}
        second = backward_to([x], list(weights.values()), made, gradients)
        torch.autograd.backward(net(y, truth), gradients)
        assert x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)
        for name, weight in weights.items():
            same = weight.grad is before[name] or (before[name] is not None and torch.equal(weight.grad, before[name]))
            assert same == (name in late or truth[name].grad is None), name
        second()
        for name, weight in weights.items():
            if truth[name].grad is None:
                assert weight.grad is None
            else:
                assert torch.equal(weight.grad, truth[name].grad), name


def test_without_inputs_all_is_done_in_the_first_half() -> None:
    (x, weights), (_, truth) = random_inputs(), random_inputs()
    second = backward_to([], list(weights.values()), chained(x.detach(), weights), [torch.ones(4, 8)])
    chained(x.detach(), truth)[0].sum().backward()
    assert all(torch.equal(w.grad, truth[name].grad) for name, w in weights.items() if name != "unused")
    second()
    assert all(torch.equal(w.grad, truth[name].grad) for name, w in weights.items() if name != "unused")
