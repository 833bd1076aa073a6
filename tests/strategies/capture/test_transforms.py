"""Models that call torch.vmap and torch.func train as eager torch does, on random plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.func import functional_call

from strategies.capture import Objective, capture
from strategies.core.errors import StrategyError
from tests.strategies.simulated_model import TOLERANCE, Model


class Net(nn.Module):
    """A linear layer, an ensemble of weights, and a body given as a function of (net, x [8, 4, 8])."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.dense = nn.Linear(8, 8)
        self.heads = nn.Parameter(torch.randn(4, 8, 8))
        self.kept = dict(self.dense.named_parameters())
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def masked(net: Net, x: Tensor) -> Tensor:
    """A mask from a function of two positions."""
    places, h = torch.arange(x.shape[1]), net.dense(x)[:, None]
    window = torch.vmap(torch.vmap(lambda i, j: (i - j).abs() < 2, (None, 0)), (0, None))(places, places)
    return F.scaled_dot_product_attention(h, h, h, attn_mask=window)


def looked_up(net: Net, x: Tensor) -> Tensor:
    """A mask from a table that positions index, as transformers' masks of packed documents are made."""
    table, places, h = x[:, :, 0] > 0, torch.arange(x.shape[1]), net.dense(x)[:, None]
    rows = torch.vmap(torch.vmap(lambda row, i: table[row, i], (None, 0)), (0, None))
    with TransformGetItemToIndex():
        kept = rows(torch.arange(x.shape[0]), places)
    return h.masked_fill(kept[:, None, :, None], 0.5)


def ensemble(net: Net, x: Tensor) -> Tensor:
    h = net.dense(x)
    return torch.vmap(lambda weight: torch.softmax(h @ weight.T, -1))(net.heads).square().mean(0)


def without_gradients(net: Net, x: Tensor) -> Tensor:
    """A region around keeps its meaning."""
    with torch.no_grad():
        fixed = net.dense(x).tanh()
    return torch.vmap(net.dense)(x) * fixed


def written(net: Net, x: Tensor) -> Tensor:
    def one(row: Tensor) -> Tensor:
        h = net.dense(row).clone()
        h[0] = 1.0
        return h.mul_(2)

    return torch.vmap(one)(x)


def region(net: Net, x: Tensor) -> Tensor:
    """Without gradients for a factor, inside of a row; the derivative of the rest."""

    def one(row: Tensor) -> Tensor:
        with torch.no_grad():
            fixed = net.dense(row)
        return (net.dense(row).tanh() * fixed).sum()

    return torch.vmap(torch.func.grad(one))(net.dense(x))


def adapted(net: Net, x: Tensor) -> Tensor:
    """Weights of each sample after a step on its own loss (test-time training)."""
    h = net.dense(x)
    weights = {name: one.expand(len(x), *one.shape) for name, one in net.inner.named_parameters()}

    def loss(weights: dict[str, Tensor], row: Tensor, wanted: Tensor) -> Tensor:
        return (functional_call(net.inner, weights, row) - wanted).square().mean()

    steps = torch.vmap(torch.func.grad(loss))(weights, h, x)
    after = {name: one - 0.5 * steps[name] for name, one in weights.items()}
    return torch.vmap(lambda weights, row: functional_call(net.inner, weights, row))(after, h)


def residual(net: Net, x: Tensor) -> Tensor:
    """Of a differential equation: the Laplacian of a field at places."""
    field = lambda place: net.inner(place).sum()  # noqa: E731
    curved = torch.vmap(lambda place: torch.func.hessian(field)(place).diagonal().sum())(net.dense(x[:, 0]))
    return curved[:, None] + torch.vmap(torch.func.jacfwd(net.inner))(x[:, 0]).sum(-1)


def pulled_back(net: Net, x: Tensor) -> Tensor:
    """By a function that is called when the transform has ended, and a result beside the derivative."""
    found, back = torch.func.vjp(net.inner, x)
    steps, (value, beside) = torch.func.grad_and_value(lambda h: (net.inner(h).sum(), h.detach() * h), has_aux=True)(x)
    return back(net.dense(x))[0] * found + steps * value + beside


def of_kept_parameters(net: Net, x: Tensor) -> Tensor:
    """Parameters that are taken from a dict of the model's own."""
    steps = torch.func.grad(lambda kept: functional_call(net.dense, kept, x).tanh().sum())(net.kept)
    return torch.vmap(lambda row, of: row * of, (0, None))(x, net.kept["bias"]) + steps["weight"].sum(0)


def rows_of_a_jacobian(net: Net, x: Tensor) -> Tensor:
    """By torch.autograd.grad under vmap, of a value from outside."""
    h = net.dense(x).requires_grad_()
    found = net.inner(h).sum((0, 1))
    rows = torch.vmap(lambda row: torch.autograd.grad(found, h, row, create_graph=True)[0])(torch.eye(8))
    return rows.square().sum(0)


def of_weights(net: Net, x: Tensor) -> Tensor:
    """Gradients of the weights of convolutions, of which one upsamples."""

    def loss(weights: Tensor, row: Tensor) -> Tensor:
        down = F.conv1d(row[None], weights, stride=2, padding=1, dilation=2, groups=4)
        return F.conv_transpose1d(down.tanh(), weights, stride=2, groups=2).square().sum()

    return torch.vmap(torch.func.grad(loss), (None, 0))(net.heads[:, :1, :3], x).sum(0) + x.mean()


def of_rows(net: Net, x: Tensor) -> Tensor:
    """What torch writes in place itself, or asks about a tensor: single rows without gradients, cosines, solutions."""

    def one(row: Tensor) -> Tensor:
        with torch.no_grad():
            fixed = net.dense(row[0])
        near = F.cosine_similarity(net.dense(row), fixed, dim=-1)
        return torch.linalg.solve(torch.eye(4) * 3 + row[:, :4], near)

    return torch.vmap(one)(x)


def batched(net: Net, x: Tensor) -> Tensor:
    """Several gradients by torch.autograd at once."""
    h = net.dense(x).requires_grad_()
    found = net.inner(h).sum((0, 1))
    return torch.autograd.grad(found, h, torch.eye(8), create_graph=True, is_grads_batched=True)[0].square().sum(0)


def twice(net: Net, x: Tensor) -> Tensor:
    """A derivative by torch.autograd of one by torch.func."""
    h = net.dense(x).requires_grad_()
    steps = torch.func.grad(lambda h: net.inner(h).sum())(h)
    return torch.autograd.grad(steps.square().sum(), h, create_graph=True)[0]


BODIES: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "rows": lambda net, x: torch.vmap(net.dense)(x).tanh(),
    "losses of samples": lambda net, x: torch.vmap(lambda row: F.mse_loss(net.dense(row), row))(x),
    "masked": masked,
    "looked up": looked_up,
    "ensemble": ensemble,
    "without gradients": without_gradients,
    "detached": lambda net, x: torch.vmap(lambda row: net.dense(row) * net.dense(row).detach())(x),
    "written in place": written,
    "rows of another dim": lambda net, x: torch.vmap(net.dense, in_dims=1, out_dims=-1)(x).tanh(),
    "region": region,
    "adapted": adapted,
    "residual": residual,
    "pushed forward": lambda net, x: torch.func.jvp(net.inner, (x,), (net.dense(x),))[1],
    "pulled back": pulled_back,
    "twice": twice,
    "of kept parameters": of_kept_parameters,
    "rows of a Jacobian": rows_of_a_jacobian,
    "of weights": of_weights,
    "of rows": of_rows,
    "batched": batched,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # torch's own, of formulas of forward-mode derivatives
@pytest.mark.few(3)
@pytest.mark.parametrize("name", BODIES)
def test_trains_like_the_model(name: str, draw: Any) -> None:
    torch.manual_seed(0)
    model = Model(Net(lambda net, x: BODIES[name](net, x).square().sum()), None, (torch.randn(8, 4, 8),))
    assert model.worst(draw) < TOLERANCE


class Straight(torch.autograd.Function):
    """The sign, with the derivative of a tanh."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x.sign()

    @staticmethod
    def setup_context(context: Any, inputs: tuple[Tensor], _: Tensor) -> None:
        context.save_for_backward(*inputs)

    @staticmethod
    def backward(context: Any, above: Tensor) -> Tensor:  # type: ignore[override]
        return above * (1 - context.saved_tensors[0].tanh().square())


def switched_on(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.vmap(torch.enable_grad()(net.dense))(x)


REFUSED: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "random numbers": lambda net, x: torch.vmap(F.dropout, randomness="different")(net.dense(x)),
    "functionalized": lambda net, x: torch.func.functionalize(net.dense)(x),
    "function": lambda net, x: torch.vmap(lambda row: Straight.apply(net.dense(row)))(x),
    "switched on": switched_on,
    "linearized": lambda net, x: torch.func.linearize(net.dense, x)[1](x),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    net = Net(lambda net, x: REFUSED[name](net, x).sum())
    with pytest.raises(StrategyError, match=r"torch\.func or torch\.vmap") as caught:
        capture(Objective(net, None, ("x",), ()), (torch.randn(8, 4, 8),), training=True)
    assert caught.value.code == ("MW904" if name == "function" else "MW906")
