"""Branches on values are captured with both sides, and decide anew on every batch: loss, gradients and buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.capture import LossFunction, Objective, capture
from strategies.capture.branches import DRAWING, PATHS, RESULTS, STATISTICAL, TRAINING
from strategies.capture.model import duplicate
from strategies.core.errors import StrategyError
from strategies.core.program import LoweringOptions
from strategies.core.request import Request
from strategies.lowering.lowering import lower
from strategies.planner.planner import make_plan
from strategies.runtime.simulate import Simulation
from tests.strategies.simulated_model import TOLERANCE, Model


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)


class Clamped(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        if not torch.isfinite(h).all() or h.max() > 0.9:
            h = torch.clamp(h, -0.5, 0.5) * 2
        return self.b(h)


class Guarded(Net):
    """A division that is by 0 on the side that is not taken, backward too."""

    def forward(self, x: Tensor) -> Tensor:
        squares, mask = self.b(self.a(x)).square(), (x[:, :1] > 1).to(x.dtype)
        if mask.sum() > 0:
            return squares * mask / (squares.detach() * mask).sum().sqrt()
        return squares * 0.1


class Numbers(Net):
    def forward(self, x: Tensor) -> Tensor:
        if x.max().item() > 1:
            x = x / 10
        h = self.a(x)
        if h.mean().item() < 0:
            h = -h
        return self.b(h)


class Breaking(Net):
    def forward(self, x: Tensor) -> Tensor:
        states = []
        for _ in range(5):
            x = self.a(x).tanh()
            states.append(x)
            if x.abs().mean() < 0.3:
                break
        return self.b(states[-1])


class Initialized(Net):
    """Buffers that the first step sets, and later ones average."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("begun", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if not self.begun:
            self.mean.copy_(h.detach().mean(0))
            self.begun.fill_(True)
        else:
            self.mean.mul_(0.9).add_(h.detach().mean(0) * 0.1)
        return self.b(h - self.mean)


class Assigned(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.low.abs().max() < 1e-5:
            self.low = h.detach().amin(0)
        elif h.sum() > 0:
            self.low = torch.minimum(self.low, h.detach().amin(0))
        return self.b(h - self.low)


class Centers(Net):
    """Rows of a buffer, written through views."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centers", torch.zeros(2, 8))
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            for row in range(2):
                chosen = x[:, row] > 1
                if chosen.any():
                    mean = (h * chosen[:, None]).sum(0) / chosen.sum()
                    self.centers[row] = 0.9 * self.centers[row] + 0.1 * mean
                    self.count[row] += 1
        return self.b(h - self.centers.sum(0))


class Regions(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            weight = h.sum(-1, keepdim=True)
            weight = self.a(weight.expand(-1, 8)).sigmoid() if weight.mean() > 0 else weight * 2
        if x.sum() > 0:
            with torch.no_grad():
                half = self.b(h)
            return half + self.b(h * weight)
        return self.b(h * weight)


class Masked(Net):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape, dtype=torch.bool)
        if x.sum() > 0:
            mask[:, :4][x[:, :4] > 0] = True
        else:
            mask[:, 4:] = True
        return self.b(self.a(x).masked_fill(mask, 0.1))


class Placed(Net):
    """Sides write into what others computed, of which one divides by what may be zero."""

    def forward(self, x: Tensor) -> Tensor:
        h, rest = self.a(x), x.sum().clamp(min=0)
        out = torch.zeros_like(h)
        if rest > 0:
            out[:, :4] = h[:, :4] / rest
            out[:, 4] = out[:, 0].exp() * h[:, 1]
        else:
            h[h > 0] = 0.5
        return self.b(out + h)


class Pair(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
        self.largest = x.max()
        h = self.a(x)
        if (h > 0.5).any():
            self.largest = h.max()
            return h.sin(), {"k": self.b(h), "n": None}
        return h, {"k": self.b(h).cos(), "n": None}


class Nested(Net):
    def __init__(self) -> None:
        super().__init__()
        self.pair, self.layers = Pair(), nn.ModuleList([Clamped() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        for layer in self.layers:
            h = h + layer(h)
        first, more = self.pair(h)
        if (h > 1).any():
            h = h / h.abs().max()
        return first * more["k"] + h * self.pair.largest


def checked(model: Model, batches: int, draw: Any) -> float:
    """The largest difference on further batches of several sizes, under random plans."""
    worst, random = 0.0, torch.Generator().manual_seed(1)
    for seed in range(batches):
        x = torch.randn(16, 8, generator=random, dtype=torch.float64) * (0.1, 1, 3)[seed % 3] + seed % 2 - 0.5
        other = x, torch.randn(16, 8, generator=random, dtype=torch.float64)
        truth = duplicate(model.objective)
        program = lower(model.graph, model.random_plan(draw, seed), LoweringOptions())
        state = {name: value for name, value in (*truth.model.named_buffers(), *model.values.items())}
        values = state | dict(truth.model.named_buffers()) | dict(zip(("0", "1"), other, strict=True))
        simulation = Simulation(program, {name: value.detach().clone() for name, value in values.items()})
        (losses,) = simulation.run()
        simulation.backward(losses)
        truth.zero_grad()
        loss = truth(*(one.clone() for one in other))
        loss.backward()
        worst = max(worst, *(abs(one.item() - loss.item()) for one in losses))
        found, buffers = simulation.gradients(), simulation.buffers()
        for name, p in truth.model.named_parameters():
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            worst = max(worst, (found[name] - gradient).abs().nan_to_num(nan=torch.inf).max().item())
        for name, buffer in truth.model.named_buffers():
            if name in buffers:
                worst = max(worst, (buffers[name].double() - buffer.double()).abs().max().item())
        if seed > batches // 2:  # goes on with the buffers of this batch
            model.objective.load_state_dict(truth.state_dict())
    return worst


class Shown(Net):
    """Views of a parameter, anew on every side."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x[:2].mean(1) > 0
        if not kept[0]:
            x = x + x * self.a.bias[None, :]
        if not kept[1]:
            x = x + x * self.a.bias[None, :]
        return self.b(self.a(x))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "net",
    [Clamped, Guarded, Numbers, Breaking, Initialized, Assigned, Centers, Regions, Masked, Placed, Nested, Shown],
    ids=lambda n: n.__name__,
)
def test_trains_like_the_model_on_every_batch(draw: Any, net: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = Model(net(), nn.MSELoss(), (torch.randn(16, 8), torch.randn(16, 8)))
    assert not any(operator.op == "called_module" for operator in model.graph.operators)
    assert checked(model, 5, draw) < TOLERANCE


def of_some(out: Tensor, target: Tensor) -> Tensor:
    some = target > 1
    return ((out - target).square() * some).sum() / some.sum() if some.any() else 0 * out.sum()


def test_a_loss_over_what_a_batch_may_lack(draw: Any) -> None:
    torch.manual_seed(0)
    model = Model(nn.Linear(8, 8), LossFunction(of_some, {}), (torch.randn(16, 8), torch.randn(16, 8).clamp(max=0.5)))
    assert float(model.loss) == 0
    assert checked(model, 4, draw) < TOLERANCE


class Exiting(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x))
        for limit in range(5):
            x = x + self.a(x).tanh()
            if x.abs().mean() > 1 + limit / 4:
                return self.b(x)
        return self.b(2 * x)


@pytest.mark.slow
def test_early_exits_take_a_graph_that_grows_with_their_square(draw: Any) -> None:
    torch.manual_seed(0)
    model = Model(Exiting(), nn.MSELoss(), (torch.randn(16, 8), torch.randn(16, 8)))
    assert len(model.graph.operators) < 140  # 178 where gates of gates have gates of their own, which doubles with each
    assert model.worst(draw, 1) < TOLERANCE


def test_what_is_equal_again_stands_once() -> None:
    """Of three questions each, behind which the model goes on."""
    objective = Objective(Numbers(), None, ("0",), ())
    ops = [one.op for one in capture(objective, (torch.randn(16, 8),), training=False).graph.operators]
    assert ops.count("linear") == 2


class OneSide(Net):
    """torch leaves the parameters of the other side without a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else self.b(x)


class Beforehand(Net):
    """So does a side that alone uses what was computed before the branch."""

    def forward(self, x: Tensor) -> Tensor:
        h, other = self.a(x), self.b(x)
        if x.sum() > 0:
            h = h + other
        return h


class PlacedAlone(Net):
    """A side that alone assigns it."""

    def forward(self, x: Tensor) -> Tensor:
        h, other = self.a(x), self.b(x)
        if x.sum() > 0:
            h[:, 0] = other[:, 0]
        return h


@pytest.mark.parametrize("net", [OneSide, PlacedAlone], ids=lambda net: net.__name__)
def test_sides_with_other_parameters_are_evaluated(net: type[nn.Module]) -> None:
    module, x = net().double(), torch.rand(16, 8, dtype=torch.float64)
    seen = capture(Objective(module, None, ("0",), ()), (x,), training=False)
    program = lower(seen.graph, make_plan(seen.graph, Request("data_parallel", 2)), LoweringOptions())
    for batch in (x, -x):
        (results,) = Simulation(program, {**seen.tensors, "0": batch.clone()}).run()
        assert all(torch.equal(result, module(batch)) for result in results)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        return self.norm(h) if h.sum() > 0 else h


class Shaped(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        return h[:, :4] if h.sum() > 0 else h


class Appending(Net):
    def __init__(self) -> None:
        super().__init__()
        self.states: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        self.states.append(h)
        return h if h.sum() > 0 else -h


class Counting(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = 2 if x.sum() > 0 else 3
        return self.b(self.a(x)) * self.calls


class Drawing(Net):
    """A device that goes on without the dropout would draw other numbers behind it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        h = nn.functional.dropout(h) if h.sum() > 0 else h
        return h + torch.randn_like(h)


class Clamp(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        if h.max() > 0.1:
            h = h.clamp(-1, 1)
        return h


class Written(Net):
    """What the inner module returns is its argument, or is not."""

    def __init__(self) -> None:
        super().__init__()
        self.clamp = Clamp()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.clamp(h)
        y += 1
        return self.b(y * h)


class WrittenBehind(Written):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.clamp(h)
        h += 1
        return self.b(y)


class Skipping(Net):
    """torch trains nothing by a batch that it leaves out; a gradient of zero times NaN is NaN."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        return h if torch.isfinite(h).all() else torch.zeros(h.shape, requires_grad=True)


class Many(Net):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(17):
            if x.sum() > 0:
                x = self.a(x)
        return self.b(x)


WHY = {OneSide: TRAINING, Normed: STATISTICAL, Shaped: RESULTS, Drawing: DRAWING, Many: PATHS}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "net",
    [
        OneSide,
        Beforehand,
        PlacedAlone,
        Normed,
        Shaped,
        Appending,
        Counting,
        Drawing,
        Written,
        WrittenBehind,
        Skipping,
        Many,
    ],
    ids=lambda net: net.__name__,
)
def test_what_cannot_be_chosen_is_refused(net: type[nn.Module]) -> None:
    objective = Objective(net(), nn.MSELoss(reduction="mean"), ("0", "1"), ("1",))
    with pytest.raises(StrategyError) as refusal:
        capture(objective, (torch.randn(16, 8), torch.randn(16, 8)), training=True)
    assert refusal.value.code in ("MW901", "MW906")
    assert WHY.get(net, "") in str(refusal.value)
