"""A torch.autograd.Function is one operator with both directions of its author; what ranks cannot call is refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn, no_grad

from strategies.capture import Objective, capture
from strategies.core.errors import StrategyError
from strategies.core.graph import OperatorGraph
from strategies.core.request import Request
from strategies.lowering.lowering import lower
from strategies.planner.planner import make_plan
from strategies.runtime.simulate import Simulation
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


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Reversed(torch.autograd.Function):
    """What its forward returns shares memory with its operand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Clipped(torch.autograd.Function):
    """Its backward is not linear: it must see the gradient of one device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e-2, 1e-2)


class Scaled(torch.autograd.Function):
    """x [b, d] times w [d]; the gradient of w is twice what autograd would make."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient * w, 2 * (gradient * x).sum(0)


class Shifting(torch.autograd.Function):
    """Writes into its argument without a word, as the sparsemax of pytorch-tabnet does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: float) -> Tensor:
        x -= shift
        ctx.save_for_backward(result := x.tanh())
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (result,) = ctx.saved_tensors
        return 3 * gradient * (1 - result.square()), None


class Doubling(torch.autograd.Function):
    """Writes into its argument, which is its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 5 * gradient


class Typed(torch.autograd.Function):
    """A product in the dtype of the autocast around it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        with torch.enable_grad():
            product = torch.mm(x, w)
        ctx.save_for_backward(x, w)
        return product.float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w.t(), -x.t() @ gradient


class Net(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.dense = function, nn.Linear(8, 8)
        self.plain = torch.arange(8.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.dense(x)).square().mean()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of this file as if an installed library defined them."""
    monkeypatch.setattr(sys.modules[__name__], "__file__", "/lib/site-packages/library.py")


def graph_of(body: Any, training: bool = True) -> OperatorGraph:
    return capture(Objective(Net(body), None, ("x",), ()), (torch.randn(8, 8),), training=training).graph


def weighed(net: Net, h: Tensor) -> Tensor:
    product, total = Product.apply(Softened.apply(h, 0.5), net.dense.weight)
    return product + total


EXACT = {
    "several results": weighed,
    "straight through": lambda net, h: Straight.apply(3 * h) * h,
    "reversed": lambda net, h: Reversed.apply(h) + h,
    "clipped": lambda net, h: Clipped.apply(h),
    "of a parameter": lambda net, h: h @ Reversed.apply(net.dense.weight),
    "of an attribute that is no buffer": lambda net, h: Scaled.apply(h, net.plain),
    "its result is written": lambda net, h: Softened.apply(h, 1.0).add_(h),
    "its argument is written": lambda net, h: (h + 1) * Shifting.apply(h, 0.5),
    "its argument is its result": lambda net, h: (a := 2 * h, Doubling.apply(a), a * h)[-1],
    "under no_grad": lambda net, h: h * no_grad(Straight.apply)(h),
    "twice": lambda net, h: Scaled.apply(Scaled.apply(h, net.dense.bias), net.dense.bias),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", EXACT)
def test_a_function_keeps_its_own_backward(kind: str, draw: Any) -> None:
    torch.manual_seed(0)
    model = Model(Net(EXACT[kind]), None, {"x": torch.randn(8, 8)})
    assert model.worst(draw, 4) < TOLERANCE


def test_a_function_is_one_operator() -> None:
    operators = {operator.op: operator for operator in graph_of(weighed).operators}
    first, second = operators[f"{__name__}::Softened"], operators[f"{__name__}::Product"]
    assert (first.target, first.args[1:], first.label) == (f"function.Softened@{__name__}", (0.5,), "Softened")
    assert [spec.shape for spec in second.results] == [(8, 8), ()] and second.source.startswith(
        "capture/test_own_backward.py:"
    )
    assert not {"tanh", "matmul"} & operators.keys()


def test_where_no_gradient_flows_its_operators_are_seen(draw: Any) -> None:
    """As in autograd, a tensor in a list has no gradient."""
    torch.manual_seed(0)
    body = lambda net, h: h + Called.apply(net.plain, [h]) * no_grad(Softened.apply)(h, 1.0)  # noqa: E731
    model = Model(Net(body), None, {"x": torch.randn(8, 8)})
    assert {"mul", "tanh"} <= {operator.op for operator in model.graph.operators}
    assert model.worst(draw, 2) < TOLERANCE


def test_autocast_around_a_function(draw: Any) -> None:
    def body(net: Net, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return Typed.apply(h, net.dense.weight)

    graph = graph_of(body)
    (operator,) = (o for o in graph.operators if o.label == "Typed")
    assert operator.target == f"function:bfloat16.Typed@{__name__}"
    torch.manual_seed(0)
    net, x = Net(body), torch.randn(8, 8)
    captured = capture(Objective(net, None, ("x",), ()), (x,), training=True)
    plan = make_plan(captured.graph, Request("data_parallel", world_size=2))
    simulation = Simulation(lower(captured.graph, plan), {**captured.tensors, "x": x})
    ((loss, _),) = simulation.run()
    simulation.backward(simulation.run()[0])
    net(x).backward()
    assert loss.item() == pytest.approx(net(x).item(), rel=1e-6)
    found, truth = simulation.gradients()["dense.weight"], net.dense.weight.grad
    assert truth is not None and torch.allclose(found, truth, rtol=1e-5, atol=1e-7)


class Drawing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Shaking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.rand_like(gradient)


class Called(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any) -> Tensor:
        result: Tensor = function(x) if callable(function) else function[0] * x
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def local() -> Any:
    class Hidden(Straight):
        pass

    return Hidden


REFUSED = {
    "random": (lambda net, h: Drawing.apply(h), "Drawing draws random numbers, so"),
    "random in backward": (lambda net, h: Shaking.apply(h), "Shaking draws random numbers in backward"),
    "written and read": (lambda net, h: Shifting.apply(h, 0.5) + h, "Shifting writes into an argument that is used"),
    "written and read by a view": (lambda net, h: h.t() + Shifting.apply(h, 0.5).t(), "Shifting writes into an arg"),
    "a written parameter": (lambda net, h: h @ Shifting.apply(net.dense.weight, 0.5), "Shifting writes into an arg"),
    "a callable": (lambda net, h: Called.apply(h, torch.relu), r"Called takes a builtin.* \(argument 1\)"),
    "a list": (lambda net, h: Called.apply(h, [h]), "Called takes tensors in a list"),
    "local": (lambda net, h: local().apply(h), r"Hidden is not found as .*local.<locals>.Hidden"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_functions_that_ranks_could_not_call_are_refused(kind: str) -> None:
    body, reason = REFUSED[kind]
    with pytest.raises(StrategyError, match=reason) as refused:
        graph_of(body)
    assert refused.value.code == "MW904"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kind", ["several results", "straight through", "reversed", "clipped"])
def test_functions_of_a_library_are_as_exact(kind: str, draw: Any) -> None:
    torch.manual_seed(0)
    model = Model(Net(EXACT[kind]), None, {"x": torch.randn(8, 8)})
    opaque = {operator.op for operator in model.graph.operators if "::" in operator.op}
    assert bool(opaque) == (kind != "several results")  # whose backwards are those of autograd
    assert model.worst(draw, 2) < TOLERANCE


@pytest.mark.usefixtures("installed")
def test_gradients_flow_on_behind_a_function_that_is_looked_through(draw: Any) -> None:
    """Its forward switches gradients on, and off again as they were: for autograd, not for the graph."""
    torch.manual_seed(0)
    model = Model(Net(lambda net, h: Enabling.apply(h) @ net.dense.weight), None, {"x": torch.randn(8, 8)})
    assert not [operator for operator in model.graph.operators if "::" in operator.op]
    assert model.worst(draw, 2) < TOLERANCE


class Enabling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def test_functions_are_left_as_they_were() -> None:
    graph_of(weighed)
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)
    assert Softened.apply(torch.ones(2), 0.0).sum() == 0


class Launching(torch.autograd.Function):
    """A kernel takes the address of a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * (x.data_ptr() > 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_a_kernel_that_is_launched_is_to_be_an_operator() -> None:
    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Launching.apply(super().forward(x)).sum()

    with pytest.raises(StrategyError, match=r"test_own_backward.py:\d+.*triton_op"):
        capture(Objective(Net(4, 4), None, ("x",), ()), (torch.randn(8, 4),), training=True)
