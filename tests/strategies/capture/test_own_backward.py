"""Custom backwards are rejected by name, except those of installed libraries that equal autograd's."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.capture import Objective, capture
from strategies.core.errors import StrategyError
from tests.strategies.simulated_model import TOLERANCE, Model


class Softened(torch.autograd.Function):
    """A memory-saving activation with a correct custom backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.slope = slope
        return torch.tanh(slope * x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * ctx.slope * (1 - torch.tanh(ctx.slope * x) ** 2), None


class Product(torch.autograd.Function):
    """Two results, in the newer form with a context apart."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x @ weight, x.sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return first @ weight.t() + second, x.t() @ first


def passing(name: str, backward: Any) -> Any:
    """A function that returns its operand, with a custom backward."""

    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    def back(ctx: Any, gradient: Tensor) -> Tensor:
        found: Tensor = backward(gradient)
        return found

    return type(name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(back)})


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Net(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.dense = function, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.dense(x)).square().mean()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of this file as if an installed library defined them."""
    monkeypatch.setattr(sys.modules[__name__], "__file__", "/lib/site-packages/library.py")


def test_custom_functions_of_a_user_are_always_refused() -> None:
    net = Net(lambda net, h: Softened.apply(h, 0.5))
    with pytest.raises(StrategyError, match=r"torch.autograd.Function Softened, whose own backward is lost"):
        capture(Objective(net, None, ("x",), ()), (torch.randn(8, 8),), training=True)


@pytest.mark.usefixtures("installed")
def test_a_backward_like_autograds_is_captured(draw: Any) -> None:
    def body(net: Net, h: Tensor) -> Tensor:
        product, total = Product.apply(Softened.apply(h, 0.5), net.dense.weight)
        return product + total

    torch.manual_seed(0)
    model = Model(Net(body), None, {"x": torch.randn(8, 8)})
    assert {"tanh", "matmul"} <= {operator.op for operator in model.graph.operators}
    assert model.worst(draw, 4) < TOLERANCE


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "function",
    [
        passing("Reversed", lambda gradient: -gradient),
        passing("Clipped", lambda gradient: gradient.clamp(-100, 100)),
        passing("Cleaned", lambda gradient: gradient.nan_to_num()),
        Straight,
    ],
    ids=lambda function: function.__name__,
)
def test_any_other_is_refused_by_name(function: Any) -> None:
    apply = function.apply  # bound before the capture
    with pytest.raises(StrategyError, match=f"torch.autograd.Function {function.__name__}, whose own backward is lost"):
        capture(Objective(Net(lambda net, h: apply(h)), None, ("x",), ()), (torch.randn(8, 8),), training=True)


@pytest.mark.usefixtures("installed")
def test_a_backward_that_fails_on_random_numbers_is_refused() -> None:
    class Picky(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ValueError("not today")

    with pytest.raises(StrategyError, match="Picky"):
        capture(Objective(Net(lambda net, h: Picky.apply(h)), None, ("x",), ()), (torch.randn(8, 8),), training=True)


def test_a_function_that_the_loss_does_not_need_is_no_matter() -> None:
    def body(net: Net, h: Tensor) -> Tensor:
        Straight.apply(h)
        with torch.no_grad():
            scale = Straight.apply(h * math.pi).mean()
        return h * scale

    graph = capture(Objective(Net(body), None, ("x",), ()), (torch.randn(8, 8),), training=True).graph
    assert [operator.op for operator in graph.operators].count("round") == 1


@pytest.mark.usefixtures("installed")
def test_functions_are_left_as_they_were() -> None:
    capture(
        Objective(Net(lambda net, h: Softened.apply(h, 1.0)), None, ("x",), ()), (torch.randn(8, 8),), training=True
    )
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)
    assert Softened.apply(torch.ones(2), 0.0).sum() == 0
