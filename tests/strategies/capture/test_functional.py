"""In-place writes become functional: loss, gradients and buffers equal eager torch, whatever view was written
through, and unsupported writes are rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from strategies.capture import LossFunction, Objective, capture
from strategies.core.errors import StrategyError
from strategies.lowering.lowering import lower
from strategies.runtime.simulate import Simulation
from tests.strategies.simulated_model import TOLERANCE, Model


class Net(nn.Module):
    """A linear layer, some buffers, and a body given as a function of (net, x [8, 8])."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.dense, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.teacher = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("table", torch.arange(32.0).view(4, 8) / 32)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("old", torch.full((8,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def column(net: Net, x: Tensor) -> Tensor:
    h = net.dense(x)
    flat = h.view(-1)
    h[:, 0] = 1
    h[2:5, 1:4] = x[2:5, 1:4] * 3
    return h + flat.view(8, 8).tanh()


def view_of_view(net: Net, x: Tensor) -> Tensor:
    h = net.dense(x)
    deep = h.view(2, 4, 8).transpose(0, 1)
    deep[1].mul_(x[:2])
    deep.unsqueeze(0).squeeze(0)[0, 1].sub_(3)
    h.add_(1)
    return deep.reshape(8, 8) * 2 + h


def pieces(net: Net, x: Tensor) -> Tensor:
    """Autograd lets only tensors without gradient be written so."""
    h = x * 2
    left, right = h.split([3, 5], -1)
    one, two = h.chunk(2, 0)
    left.mul_(2)
    two.relu_()
    h.unbind(1)[4].copy_(x[:, 0])
    return net.dense(h) * right.sum() + one.sum() * left.sum()


def diagonal(net: Net, x: Tensor) -> Tensor:
    h = net.dense(x)
    h.diagonal().fill_(0.5)
    h.t()[1].zero_()
    return h + (2 * h).fill_diagonal_(3)


def shifted(net: Net, x: Tensor) -> Tensor:
    """As sequence-to-sequence models shift their labels."""
    h = net.dense(x)
    moved = h.new_zeros(h.shape)
    moved[:, 1:] = h[:, :-1].clone()
    moved[:, 0] = 2
    moved.masked_fill_(moved > 1, -1.0)
    return moved


def indexed(net: Net, x: Tensor) -> Tensor:
    h, rows = net.dense(x), torch.tensor([1, 3])
    h[rows] = x[:2]
    h.index_put_((rows + 1,), x[2:4], accumulate=True)
    h.scatter_(1, rows.expand(8, 2), 0.0)
    h.scatter_add_(0, torch.zeros(2, 8, dtype=torch.long), x[:2])
    h.index_add_(0, rows, x[4:6]).div_(3)
    return h


def narrowed(net: Net, x: Tensor) -> Tensor:
    """Writes that cast and repeat what they write."""
    h = net.dense(x).float()
    h[:4] = x[0]
    h += x
    h[:, :2] += 1
    return h.double()


def other_names(net: Net, x: Tensor) -> Tensor:
    h = net.dense(x)
    first = h.mul_(2)
    again = h
    again += x
    first.sub_(0.1)
    h.unsqueeze_(0)
    return F.relu(again.squeeze_(0), inplace=True) + h


def out_argument(net: Net, x: Tensor) -> Tensor:
    h = torch.empty_like(x)
    torch.mul(x, 2, out=h[:])
    return net.dense(h)


def parts_of_complex(net: Net, x: Tensor) -> Tensor:
    h = torch.view_as_complex(net.dense(x).view(8, 4, 2) * 1)
    h[1] *= 2
    pairs = torch.view_as_real(h)
    pairs[..., 0] = 1
    return torch.view_as_real(h).flatten(1)


def counting(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    net.calls.add_(1)
    return net.dense(x) * net.calls


def moving_average(net: Net, x: Tensor) -> Tensor:
    h = net.dense(x)
    before = net.mean + 1
    with torch.no_grad():
        net.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return h * net.mean + before


def shown_between_writes(net: Net, x: Tensor) -> Tensor:
    h = net.dense(x)
    net.mean.mul_(0.9)
    shown = net.mean.view(2, -1)
    row = shown[1]
    net.mean.add_(h.detach().mean(0))
    return h * net.mean + shown.sum() + row.sum()


def following(net: Net, x: Tensor) -> Tensor:
    """Frozen parameters follow the trainable ones."""
    with torch.no_grad():
        for slow, quick in zip(net.teacher.parameters(), net.dense.parameters(), strict=True):
            slow.mul_(0.9).add_(quick, alpha=0.1)
    return net.dense(x) * net.teacher(x)


def detached(net: Net, x: Tensor) -> Tensor:
    net.mean.detach().copy_(net.dense(x).detach().mean(0))
    return net.dense(x) - net.mean


def exchanged(net: Net, x: Tensor) -> Tensor:
    """Two buffers exchange their values."""
    kept = net.mean.clone()
    net.mean.copy_(net.old)
    net.old.copy_(kept + x.mean(0))
    return net.dense(x) + net.mean


def copied(net: Net, x: Tensor) -> Tensor:
    """Buffers that take over a parameter, a constant, an entry of the batch and one another."""
    with torch.no_grad():
        net.mean.copy_(net.dense.bias)
        net.old.copy_(net.mean)
        net.calls.copy_(torch.tensor(7))
        net.table.copy_(x[:4])
    return net.dense(x) * net.old


def assigned(net: Net, x: Tensor) -> Tensor:
    """New tensors in the place of buffers; a name for the old one keeps its values."""
    h, before = net.dense(x), net.mean
    net.mean = 0.9 * net.mean + 0.1 * h.detach().mean(0)
    net.mean = net.mean * 2
    net.calls = net.calls + 1
    return h * net.mean * before + net.calls


def swapped(net: Net, x: Tensor) -> Tensor:
    net.mean, net.old = net.old, net.mean
    return net.dense(x) * net.mean + net.old


def queue(net: Net, x: Tensor) -> Tensor:
    """As a memory bank does: rows of a buffer are written, all of it is read."""
    h = net.dense(x)
    net.table[1:3] = h[:2].detach()
    net.table[0, 4] = 7
    return h @ net.table.t()


def combined(net: Net, x: Tensor) -> Tensor:
    """Operators with an equals sign, between truths and between integers."""
    mask, other, bits = x > -1, x < 1, (4 * x).long()
    mask &= other
    other |= mask
    other ^= x > 0
    bits <<= 1
    bits >>= other.long()
    bits &= 7
    return net.dense(x).masked_fill(mask, 0.5) * bits


def normed(net: Net, x: Tensor) -> Tensor:
    return net.norm(net.dense(x)) + net.norm(x)


def batch_in_place(net: Net, x: Tensor) -> Tensor:
    """What the caller holds stays; the loss has the target, which is no input, as it was."""
    x.clamp_(-1, 1)
    x.view(-1)[:8].mul_(net.old)
    return net.dense(x) + x


def data(net: Net, x: Tensor) -> Tensor:
    h = net.dense(x)
    net.mean.data.add_(h.data.mean(0))
    net.old.data = 0.9 * net.old.data + 0.1 * net.mean.data
    return h * h.data.abs().max() + net.mean + net.old


def kept_values(net: Net, x: Tensor) -> Tensor:
    """A buffer takes values through `.data`, and nothing of their gradient; the tensor of `.data` has it."""
    h = net.dense(x)
    shown = net.old.data
    shown.copy_(h.mean(0))
    net.mean.data[:4] = h[0, :4]
    net.mean.data = 2 * net.mean.data + h[1]
    return h * net.mean + net.old + shown


def advantages(net: Net, x: Tensor) -> Tensor:
    """Of actor-critic methods: backwards in time, into a tensor that is only shaped like what has a gradient."""
    values = net.dense(x)
    found, last = torch.zeros_like(values), torch.ones_like(values[:, 0])
    noise = torch.full_like(values, 0.25)
    with torch.no_grad():
        for step in reversed(range(8)):
            last = x[:, step] + 0.9 * last - values[:, step]
            found[:, step] = last
        noise += values
    return (values * found).tanh() + noise


def literals(net: Net, x: Tensor) -> Tensor:
    """What `torch.tensor` makes is new in every step: a loss is added up in it, weights are written into it."""
    total, weights = torch.tensor(0.0, dtype=x.dtype), torch.tensor([1.0, 2.0] * 4)
    shown = weights[2:]
    weights[0] = 5.0
    weights.mul_(2)
    chosen = weights[torch.arange(8) % 2 == 0]
    chosen += 1
    for one in (net.dense(x), x):
        total += one.square().mean()
    return net.dense(x) * weights + total * shown.sum() + chosen.sum()


class Shifted(nn.Module):
    def __init__(self, shift: Tensor) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.shift


def adapted(net: Net, x: Tensor) -> Tensor:
    """A parametrization for one forward, as of peft's `target_parameters`, which sets a tensor to itself."""
    parametrize.register_parametrization(net.teacher, "weight", Shifted(net.dense.weight.sin()))
    try:
        return net.teacher(x)
    finally:
        parametrize.remove_parametrizations(net.teacher, "weight", leave_parametrized=False)


def clamped(net: Net, x: Tensor) -> Tensor:
    """As a temperature is, twice, and in part."""
    with torch.no_grad():
        net.dense.bias.clamp_(-0.1, 0.1)
        net.dense.bias.mul_(2)
        net.dense.weight[1:3, ::2].zero_()
    return net.dense(x) * net.dense.bias


def bounded(net: Net, x: Tensor) -> Tensor:
    """Weights with a largest norm, as those of networks for brain waves have."""
    net.dense.weight.data = torch.renorm(net.dense.weight.data, 2, 0, 0.3)
    return net.dense(x)


def bounded_rows(net: Net, x: Tensor) -> Tensor:
    return net.dense(F.embedding((x[:, 0] > 0).long(), net.dense.weight, max_norm=0.3))


def written_late(net: Net, x: Tensor) -> Tensor:
    return net.dense(x) + net.dense.bias.detach().add_(1) * net.dense.bias.data.sub_(0.5)


BODIES = [
    adapted, advantages, literals, clamped, bounded, bounded_rows, written_late,
    column, view_of_view, pieces, diagonal, shifted, indexed, narrowed, other_names, out_argument, parts_of_complex,
    counting, moving_average, shown_between_writes, following, detached, exchanged, copied, assigned, swapped,
    queue, combined, normed, batch_in_place, data, kept_values,
]  # fmt: skip


def loss(out: Tensor, target: Tensor) -> Tensor:
    return (out.square().sum() - target.sum()) / 100


@pytest.mark.few(5)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_trains_like_the_model(body: Callable[[Any, Tensor], Tensor], draw: Any) -> None:
    torch.manual_seed(0)
    model = Model(Net(body), LossFunction(loss, {}), (torch.randn(8, 8), torch.randn(8, 8)))
    assert model.worst(draw, 4) < (TOLERANCE if body is not narrowed else 1e-5)
    assert not any(operator.target.split(".")[1].endswith("_") for operator in model.graph.operators)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(8, momentum=None),
        nn.BatchNorm1d(8, affine=False),
        nn.BatchNorm1d(8, track_running_stats=False),
        nn.InstanceNorm1d(8, affine=True, track_running_stats=True),
        nn.InstanceNorm1d(8),
        nn.BatchNorm1d(8).eval(),
    ],
    ids=["average over all", "not affine", "no statistics", "instances", "instances, no statistics", "eval"],
)
def test_statistics_go_on_over_steps(norm: nn.Module, draw: Any) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.norm = nn.Linear(6, 6), norm

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.dense(x)).square().mean() + self.norm(x).abs().sum() / 50

        def train(self, mode: bool = True) -> Normed:
            super().train(mode)
            self.norm.train(norm.training and mode)
            return self

    was = norm.training
    torch.manual_seed(0)
    net = Normed()
    net.norm.train(was)
    model = Model(net, None, {"x": torch.randn(4, 8, 6)})
    plan = model.random_plan(draw, 3)
    assert model.difference(plan) < TOLERANCE
    simulation = Simulation(lower(model.graph, plan), model.values)
    for _ in range(2):
        simulation.run()
    model.net(*model.batch)  # the second step; the first one was the model's
    for name, buffer in model.net.named_buffers():
        assert torch.allclose(simulation.buffers()[name].double(), buffer.double(), rtol=1e-10), name


@pytest.mark.parametrize("layers", [1, 8])
def test_buffers_that_layers_assign_go_on_over_steps(layers: int, draw: Any) -> None:
    """Eight equal layers: none of them may be traced for another."""

    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(6, 6)
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            h = self.dense(x)
            self.mean = 0.5 * self.mean + h.detach().mean(0)
            return (h - self.mean).tanh()

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Averaging() for _ in range(layers))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    torch.manual_seed(0)
    model = Model(Layers(), None, {"x": torch.randn(8, 6)})
    plan = model.random_plan(draw, 3)
    assert model.difference(plan) < TOLERANCE
    simulation = Simulation(lower(model.graph, plan), model.values)
    for _ in range(2):
        simulation.run()
    model.net(*model.batch)
    for name, buffer in model.net.named_buffers():
        assert torch.allclose(simulation.buffers()[name].double(), buffer.double(), rtol=1e-10), name


@pytest.mark.parametrize("made", [lambda t: t[:2], lambda t: t.double(), lambda t: None])
def test_a_buffer_keeps_its_shape_and_dtype(made: Callable[[Tensor], Tensor | None]) -> None:
    def grows(net: Net, x: Tensor) -> Tensor:
        net.table = made(net.table.float())
        return net.dense(x)

    with pytest.raises(StrategyError, match="table") as refused:
        capture(Objective(Net(grows), LossFunction(torch.sum, {}), ("0",), ()), (torch.randn(8, 8),), training=True)
    assert refused.value.code == "MW908"


class Positions(nn.Module):
    """Has a table of positions for the batches that it has seen."""

    def __init__(self, persistent: bool = False, reads: bool = False) -> None:
        super().__init__()
        self.dense, self.reads = nn.Linear(8, 8), reads
        self.register_buffer("table", torch.ones(1, 1), persistent)

    def forward(self, x: Tensor) -> Tensor:
        h = self.dense(x)
        if self.reads:
            h = h + self.table
        if self.table.shape[0] != x.shape[0]:
            self.table = torch.arange(x.shape[0]).view(-1, 1).to(x.dtype)
        return (h * self.table).square().mean()


def test_a_table_of_numbers_grows(draw: Any) -> None:
    torch.manual_seed(0)
    model = Model(nn.Sequential(Positions()), None, {"0": torch.randn(8, 8)})
    assert not model.graph.of_kind("buffer")
    assert model.difference(model.random_plan(draw, 2)) < TOLERANCE


@pytest.mark.parametrize("net", [Positions(persistent=True), Positions(reads=True)])
def test_a_table_that_is_saved_or_read_before_does_not_grow(net: nn.Module) -> None:
    with pytest.raises(StrategyError, match="table") as refused:
        capture(Objective(nn.Sequential(net), None, ("0",), ()), (torch.randn(8, 8),), training=True)
    assert refused.value.code == "MW908"


def test_a_momentum_of_none_is_given_back() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None))
    capture(Objective(net, LossFunction(torch.sum, {}), ("0",), ()), (torch.randn(4, 8),), training=True)
    assert net[1].momentum is None


def unseen_gradient(net: Net, x: Tensor) -> Tensor:
    h = net.dense(x)
    with torch.no_grad():
        h[:, 0] = 1
    return h


def detached_write(net: Net, x: Tensor) -> Tensor:
    h = net.dense(x)
    h.detach().mul_(2)
    return h


def detached_buffer(net: Net, x: Tensor) -> Tensor:
    """A buffer that has a gradient since it was written."""
    net.mean.copy_(net.dense(x).mean(0))
    net.mean.detach().mul_(2)
    return x * net.mean


def plain_attribute(net: Net, x: Tensor) -> Tensor:
    ATTRIBUTE.add_(1)
    return net.dense(x) + ATTRIBUTE


def tied_write(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.dense.bias.add_(1)
    return net.dense(x) + net.tied.bias


ATTRIBUTE = torch.zeros(8)

REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "parameter of two names": (
        tied_write,
        "add_ at capture/test_functional.py:.* writes in place to a parameter under several names; use the new value",
    ),
    "constant": (plain_attribute, r"writes in place to a constant; register it as a buffer"),
    "detached": (detached_write, "writes in place, through a detached tensor, to a value that needs a gradient"),
    "detached buffer": (
        detached_buffer,
        "writes in place, through a detached tensor, to a value that needs a gradient",
    ),
    "its shape": (lambda net, x: net.dense(x) + net.old.unsqueeze_(0), "changes the shape of a tensor in place"),
    "another memory": (lambda net, x: net.dense(x) + net.old.set_(net.mean), "use the other tensor in its place"),
    "under no_grad": (unseen_gradient, "writes in place, under no_grad, to a value that needs a gradient"),
    "several": (
        lambda net, x: net.dense(x) + torch._foreach_add_([net.mean, net.old], 1)[0],
        "writes in place to several tensors",
    ),
    "windows": (
        lambda net, x: (h := net.dense(x)) + h.unfold(0, 4, 4).mul_(2).sum(),
        "writes in place through unfold",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_paragraph(name: str) -> None:
    body, text = REFUSED[name]
    net = Net(body)
    if body is tied_write:
        net.tied = net.dense
    with pytest.raises(StrategyError, match=text) as caught:
        capture(Objective(net, LossFunction(torch.sum, {}), ("x",), ()), (torch.randn(8, 8),), training=True)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("known", [True, False])
def test_a_table_that_forward_registers_is_computed_anew(known: bool) -> None:
    """The buffer is None before, or not there; the module has its own buffers again when it is captured."""

    def cached(net: Net, x: Tensor) -> Tensor:
        if getattr(net, "bias", None) is None:
            net.register_buffer("bias", torch.arange(8.0), persistent=False)
        return net.dense(x) + net.bias  # type: ignore[no-any-return]

    net, x = Net(cached), torch.randn(8, 8)
    if known:
        net.register_buffer("bias", None, persistent=False)
    before = dict(net._buffers)
    graph = capture(Objective(net, LossFunction(torch.sum, {}), ("0",), ()), (x,), training=True).graph
    assert dict(net._buffers) == before
    assert not [source for source in graph.of_kind("buffer") if source.name.endswith("bias")]
    again = capture(Objective(net, LossFunction(torch.sum, {}), ("0",), ()), (x,), training=True).graph
    assert again == graph
