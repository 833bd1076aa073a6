"""A forward may decide by values that never change, and check those that do; other decisions have both sides."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from strategies.capture import Captured, Objective, capture, check_decided, check_kept
from strategies.core.errors import StrategyError
from tests.strategies.simulated_model import TOLERANCE, Model


class Net(nn.Module):
    def __init__(self, body: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.dense, self.body = nn.Linear(4, 4), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.dense(x)).square().mean()


def captured(net: nn.Module) -> Captured:
    return capture(Objective(net, None, ("x",), ()), (torch.randn(8, 4),), training=True)


def mask(h: Tensor) -> Tensor:
    """Ones but for the first rows, which are written afterwards."""
    made = torch.ones_like(h[:, 0], dtype=torch.long)
    made[:2].copy_(torch.tensor([0, 0]))
    return made > 0


def written(h: Tensor) -> Tensor:
    """A constant until values of the batch are written to it."""
    made = torch.zeros(8)
    made.view(2, 4)[0] = h[0].detach()
    return made > 0


def checked(_: Net, h: Tensor) -> Tensor:
    assert not h.isnan().any() and not (h > 1e9).any(), "not a number"
    assert h.sum() == h.sum() and (h.abs().max() < 1e9).item()
    if torch.isinf(h).any():
        raise ValueError("infinite")
    if math.isnan(h.sum().item()) or h.max().item() > 1e9:
        print(f"{h.max().item():.3f}")
        h = h.exp()
        raise ValueError("not a number")
    assert torch.allclose(h, h) and torch.equal(h, h) and int(h.max()) < 1000
    return h.tanh()


def branching_check(_: Net, h: Tensor) -> Tensor:
    if (h > 0).any():
        raise ValueError
    else:
        return h.tanh()


ANSWERED: dict[str, tuple[Callable[[Net, Tensor], Tensor], str]] = {
    "any": (lambda _, h: h.tanh() if mask(h).any() else h.exp(), "tanh"),
    "all": (lambda _, h: h.tanh() if mask(h).all().item() else h.exp(), "exp"),
    "number": (lambda _, h: h[: int(mask(h).sum())].tanh(), "tanh"),
    "list": (lambda _, h: torch.cat([h[:n] for n in mask(h).long().cumsum(0).tolist()[2:]]).exp(), "exp"),
    "checks": (checked, "tanh"),
    "check with another branch": (branching_check, "tanh"),
    "a layer that is never dropped": (lambda _, h: h.exp() if torch.rand([]) < 0.0 else h.tanh(), "tanh"),
    "a layer that is always kept": (lambda _, h: h.exp() if torch.rand(1) > 0.0 else h.tanh(), "exp"),
}


@pytest.mark.parametrize("name", ANSWERED)
def test_decisions_by_constants_and_checks(name: str) -> None:
    body, op = ANSWERED[name]
    ops = [operator.op for operator in captured(Net(body)).graph.operators]
    assert op in ops and ops.count("tanh") + ops.count("exp") == 1


def packed(_: Net, h: Tensor) -> Tensor:
    """The sizes of pictures of which `h` has the patches, one behind the other, as in Qwen3-VL."""
    sizes = torch.tensor([[1, 2, 2], [2, 2, 1]])
    counts = sizes.prod(1)
    rows = torch.repeat_interleave(sizes[:, 1], counts)
    place = torch.arange(counts.sum()) % rows
    weights = torch.zeros(counts.sum()).to(h.dtype) + place
    chosen = torch.nonzero(place)[:, 0]
    ends = torch.unique_consecutive(rows).tolist()
    frames, height, _ = sizes[1]
    weights = weights + place[:height].repeat(frames * 2)
    order = torch.cat((torch.tensor([1, 0]), torch.arange(2, h.ndim)))
    h = h.permute(*order).contiguous().transpose(order[0], order[1])
    return h.tanh() * weights[:, None] + h[chosen[chosen > 2][: ends[0]]].sum()


def test_tensors_that_are_sized_by_constants(draw: Any) -> None:
    torch.manual_seed(0)
    model = Model(Net(packed), None, {"x": torch.randn(8, 4)})
    assert model.difference(model.random_plan(draw, 2)) < TOLERANCE


def repeated_a_number_of_times(_: Net, h: Tensor) -> Tensor:
    """The mask of YOSO's attention, whose size no values decide."""
    mask = torch.ones(2, 1, 4).repeat_interleave(4, dim=1).reshape(8, 4)
    return h * mask.int()


def test_repeating_a_number_of_times_is_an_operator() -> None:
    graph = captured(Net(repeated_a_number_of_times)).graph
    assert not graph.of_kind("constant")


class Strided(Net):
    """A kernel's sizes in buffers, as Encodec has them."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor], saved: bool = False) -> None:
        super().__init__(body)
        self.register_buffer("stride", torch.tensor(2), persistent=saved)
        self.register_buffer("rows", torch.arange(8) % 2 == 0, persistent=saved)


def sized_by_buffers(net: Any, h: Tensor) -> Tensor:
    if (extra := torch.ceil((h.shape[-1] + 1) / net.stride).long() * net.stride - h.shape[-1]) > 1:
        h = nn.functional.pad(h, (extra, net.stride // 2))
    h[:, net.stride // 2 : net.stride] = h[:, net.stride :][:, :1].exp()
    return h.tanh()[net.rows][: net.stride]


def test_decisions_by_buffers_that_never_change(draw: Any) -> None:
    torch.manual_seed(0)
    model = Model(Strided(sized_by_buffers), None, {"x": torch.randn(8, 4)})
    assert model.graph.by_name["tanh"].results[0].shape == (8, 7)
    assert model.worst(draw, seeds=1) < TOLERANCE


def pairs(net: Any, h: Tensor) -> Tensor:
    """All other rows of a batch for each, as contrastive losses take them."""
    apart = h @ h.mT
    others = apart[net.others].view(8, 7)
    two = torch.full((), 2)
    apart = apart[two - 2 : 8, :]
    upper = apart.masked_select(torch.ones(8, 8).triu(1).bool())
    return others.logsumexp(1).sum() + upper.mean() + h[net.others[0] & net.others[1], :][..., net.others[:4, 0]].sum()


def test_elements_by_a_constant_mask(draw: Any) -> None:
    torch.manual_seed(0)
    net = Net(pairs)
    net.others = ~torch.eye(8, dtype=torch.bool)
    model = Model(net, None, {"x": torch.randn(8, 4)})
    assert model.worst(draw, seeds=1) < TOLERANCE


def shuffled(_: Net, h: Tensor) -> Tensor:
    """The rows of a batch in an order that is drawn, less those that no mask hides, as ViLT takes patches."""
    hidden = (1 - torch.ones(8, 4, dtype=torch.long)).nonzero()
    left = hidden[hidden[:, 0] == 0]
    drawn = torch.multinomial(torch.ones(8), torch.full((2,), 8).max())
    return h.tanh()[drawn][left.shape[0] :]


def test_no_elements_keep_their_shape(draw: Any) -> None:
    torch.manual_seed(0)
    model = Model(Net(shuffled), None, {"x": torch.randn(8, 4)})
    assert model.worst(draw, seeds=1) < TOLERANCE


def counted_before(net: Any, h: Tensor) -> Tensor:
    h = h.tanh() if net.stride < 5 else h.exp()
    net.stride.add_(1)
    return h


def counted_through_a_view(net: Any, h: Tensor) -> Tensor:
    h = h.tanh() if net.stride < 5 else h.exp()
    net.stride.view(1).copy_(h.detach().sum().long())
    return h


def replaced(net: Any, h: Tensor) -> Tensor:
    h = h.tanh() if net.stride < 5 else h.exp()
    net.stride = net.stride + 1
    return h


@pytest.mark.few(2)
@pytest.mark.parametrize("body", [counted_before, counted_through_a_view, replaced])
def test_buffers_that_change_decide_in_every_step(body: Callable[[Any, Tensor], Tensor]) -> None:
    assert {"tanh", "exp", "where"} <= {operator.op for operator in captured(Strided(body)).graph.operators}


def test_a_graph_says_by_which_buffers_it_has_decided() -> None:
    graphs = [captured(Strided(sized_by_buffers, saved=saved)) for saved in (False, True)]
    assert graphs[0].decided.keys() == graphs[1].decided.keys() == {"stride", "rows"}


def caught_check(_: Net, h: Tensor) -> Tensor:
    try:
        if (h > 0).any():
            raise ValueError
    except ValueError:
        return h.exp()
    return h.tanh()


def check_caught_above(_: Net, h: Tensor) -> Tensor:
    try:
        return checked(_, h)
    except ValueError:
        return h.exp()


def gone_on(_: Net, h: Tensor) -> Tensor:
    """Not all that the check does ends in an exception."""
    if torch.isinf(h).any():
        if h.sum() > 0:
            return h.exp()
        raise ValueError("infinite")
    return h.tanh()


def of_itself(_: Net, h: Tensor) -> Tensor:
    """NaN alone differs from itself, which algebra does not say."""
    mean = h.mean().item()
    return h * 0 if mean != mean else h


def scaled_draw(_: Net, h: Tensor) -> Tensor:
    """No number between 0 and 1 any more."""
    number = torch.rand(1)
    number.view(-1).mul_(10)
    return h if number < 1 else -h


UNKNOWN: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "number": lambda _, h: h if math.isfinite(h.sum().item()) and not np.isnan(h.sum().item()) else -h,
    "number and itself": of_itself,
    "equal": lambda _, h: h if torch.equal(h, h.round()) else -h,
    "batch": lambda _, h: h if (h > 0).any() else -h,
    "parameter": lambda net, h: h if net.dense.weight.max() > 0 else -h,
    "written": lambda _, h: h if written(h).any() else -h,
    "drawn and written": scaled_draw,
    "drawn": lambda _, h: h if torch.rand(3).max() > 0.5 else -h,
    "check that is caught": caught_check,
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", UNKNOWN)
def test_decisions_by_values_have_both_sides(name: str) -> None:
    assert "where" in {operator.op for operator in captured(Net(UNKNOWN[name])).graph.operators}


REFUSED: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "check that goes on": gone_on,
    "check that is caught above": check_caught_above,
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", REFUSED)
def test_decisions_by_values_are_refused(name: str) -> None:
    with pytest.raises(StrategyError, match=r"capture/test_constants.py:\d+: ") as caught:
        captured(Net(REFUSED[name]))
    assert caught.value.code == "MW901"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        return self.dense(h) if mask.any() else self.dense(h).tanh()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, torch.full((8,), number == 4))
        return x.sum()


def test_every_layer_decides_by_its_own_constant() -> None:
    """Capture of repeated layers once would let all decide as the first."""
    assert sum(operator.op == "tanh" for operator in captured(Layers()).graph.operators) == 7


class Converted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.dense = self.dense.to(torch.float32)
        return self.dense(x).sum()


def test_a_conversion_that_changes_nothing() -> None:
    assert [operator.op for operator in captured(Converted()).graph.operators] == ["linear", "sum"]


class Codebook(nn.Module):
    """Vectors that the first batch initialises unless a saved flag says that they are ready, and as many layers as a
    frozen parameter says."""

    def __init__(self, *, ready: bool) -> None:
        super().__init__()
        self.dense, self.depth = nn.Linear(4, 4), nn.Parameter(torch.tensor(2), requires_grad=False)
        self.register_buffer("ready", torch.tensor([ready]))
        self.register_buffer("vectors", torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.dense(x)
        if not self.ready:
            self.vectors.copy_(h[torch.randperm(len(h))[:6]].detach())
            self.ready.fill_(True)
        for _ in range(int(self.depth)):
            h = h.tanh() + torch.zeros(int(self.depth), 4).sum()
        nearest = self.vectors[(h[:, None] - self.vectors).square().sum(-1).argmin(-1)]
        return (h - nearest).square().mean()


def test_a_saved_flag_that_no_forward_writes_decides(draw: Any) -> None:
    torch.manual_seed(0)
    model = Model(Codebook(ready=True), None, (torch.randn(8, 4),))
    assert model.worst(draw, 3) < TOLERANCE
    found = captured(Codebook(ready=True))
    assert [operator.op for operator in found.graph.operators].count("tanh") == 2
    assert {name: value.tolist() for name, value in found.decided.items()} == {"ready": [True], "depth": 2}
    check_decided(found.decided, {"ready": torch.tensor([True])}, "this")
    with pytest.raises(StrategyError, match=r"this has other values of depth") as error:
        check_decided(found.decided, {"depth": torch.tensor(3)}, "this")
    assert error.value.code == "MW909"


def test_a_saved_flag_that_a_forward_writes_does_not() -> None:
    with pytest.raises(StrategyError, match="takes a branch"):
        captured(Codebook(ready=False))


class Noting(nn.Module):
    """Notes in training, or in evaluation, that it is ready, and decides by that in the other mode."""

    def __init__(self, *, training: bool, saved: bool) -> None:
        super().__init__()
        self.dense, self.notes = nn.Linear(4, 4), training
        self.register_buffer("ready", torch.tensor(False), persistent=saved)

    def forward(self, x: Tensor) -> Tensor:
        h = self.dense(x)
        if self.training is self.notes:
            self.ready.fill_(True)
            return h.square().mean()
        return (h.exp() if self.ready else h.tanh()).square().mean()


@pytest.mark.parametrize("saved", [True, False])
def test_what_the_other_mode_writes_does_not_decide(saved: bool) -> None:
    """Evaluation has both sides then; training, which comes first, is refused once its evaluation is known."""
    objective = Objective(Noting(training=True, saved=saved), None, ("x",), ())
    trained = captured(objective.model)
    found = capture(objective, (torch.randn(8, 4),), training=False, like=trained.graph)
    assert {"tanh", "exp"} <= {operator.op for operator in found.graph.operators} and not found.decided
    objective = Objective(Noting(training=False, saved=saved), None, ("x",), ())
    trained = captured(objective.model)
    found = capture(objective, (torch.randn(8, 4),), training=False, like=trained.graph)
    if trained.decided:
        with pytest.raises(StrategyError, match="writes it in evaluation"):
            check_kept(trained.decided, found.graph)
    assert bool(trained.decided) is not saved
