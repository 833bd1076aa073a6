"""A module in a layer that decides by values is one operator, and decides anew on every batch."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strategies.capture import LossFunction, Objective, capture
from strategies.core.errors import StrategyError
from strategies.core.program import LoweringOptions
from strategies.lowering.lowering import lower
from strategies.runtime.simulate import Simulation
from tests.strategies.simulated_model import TOLERANCE, Model


class Experts(nn.Module):
    """x [n, 4] -> [n, 4]: a loop over the experts that rows choose."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.router, self.up, self.act = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 4, 4)), act
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, x: Tensor, *, weighted: bool) -> tuple[Tensor, None]:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for expert in F.one_hot(chosen, 3).sum(0).nonzero():
            (rows,) = torch.where(chosen == expert)
            if len(rows) == 0:
                continue
            new = self.act(x[rows] @ self.up[int(expert)]) * self.scale[int(expert)]
            out.index_add_(0, rows, new * weights[rows, None] if weighted else new)
        return out, None


class Layer(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.dense, self.experts = nn.Linear(4, 4), experts

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(self.dense(x).relu(), weighted=True)[0]


def net(act: Callable[[Tensor], Tensor] = torch.tanh) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), *(Layer(Experts(act)) for _ in range(2)), nn.Linear(4, 1))


def squares(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


class Squares(nn.Module):
    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return squares(out, target)


def test_trains_like_the_model(draw: Any) -> None:
    torch.manual_seed(0)
    model = Model(net(), Squares(), (torch.randn(16, 4), torch.randn(16, 1)))
    assert [op.op for op in model.graph.operators].count("called_module") == 2
    assert model.worst(draw, 4) < TOLERANCE


class Owner:
    """Refers to the module of a parameter."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


def test_a_module_may_refer_to_itself(draw: Any) -> None:
    torch.manual_seed(0)
    experts = Experts(torch.tanh)
    experts.owner = Owner(experts)  # type: ignore[assignment]
    model = Model(nn.Sequential(Layer(experts), nn.Linear(4, 1)), Squares(), (torch.randn(16, 4), torch.randn(16, 1)))
    assert [op.op for op in model.graph.operators].count("called_module") == 1
    assert model.worst(draw, 2) < TOLERANCE


def test_modules_of_torch_that_decide_by_values(draw: Any) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.head = nn.Linear(4, 8), nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10], div_value=2)

        def forward(self, x: Tensor, words: Tensor) -> Tensor:
            loss: Tensor = self.head(self.dense(x).relu(), words).loss
            return loss

    torch.manual_seed(0)
    model = Model(Head(), None, (torch.randn(16, 4), torch.randint(20, (16,))))
    assert [op.op for op in model.graph.operators].count("called_module") == 1
    assert model.worst(draw, 4) < TOLERANCE


class Matching(nn.Module):
    """Places of those rows that a target has, as many as it says."""

    def forward(self, target: Tensor) -> Tensor:
        return torch.as_tensor((target[:, 0] > 0).numpy().nonzero()[0])


class Matched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matching, self.distance = Matching(), self.median_of_squares  # a bound method is an attribute, too
        self.weights = torch.tensor([0.5, 2.0], dtype=torch.float64)  # and so is what no buffer holds

    def median_of_squares(self, out: Tensor, target: Tensor) -> Tensor:
        return (out - target).square().median() * self.weights.sum()

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        found = self.matching(target)
        return self.distance(out[found], target[found]) if len(found) else out.sum() * 0


class Task(nn.Module):
    """A mixture of experts and a loss within a model, in no list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.head, self.criterion = Experts(torch.tanh), nn.Linear(4, 1), Matched()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.criterion(self.head(self.experts(x, weighted=True)[0]), target)
        return loss


@pytest.mark.slow
def test_children_that_decide_by_values(draw: Any) -> None:
    torch.manual_seed(0)
    model = Model(Task(), None, (torch.randn(16, 4), torch.randn(16, 1)))
    assert [op.op for op in model.graph.operators].count("called_module") == 2
    assert model.worst(draw, 4) < TOLERANCE


def test_other_values_decide_otherwise(draw: Any) -> None:
    """The graph is captured on rows of which all choose one expert."""
    torch.manual_seed(0)
    rows = torch.randn(1, 4).expand(16, 4).contiguous(), torch.zeros(16, 1)
    model = Model(net(), Squares(), rows)
    other = torch.randn(16, 4, dtype=torch.float64), torch.randn(16, 1, dtype=torch.float64)
    program = lower(model.graph, model.random_plan(draw, 0), LoweringOptions())
    simulation = Simulation(program, model.values | dict(zip(("0", "1"), other, strict=True)))
    (losses,) = simulation.run()
    simulation.backward(losses)
    model.objective.zero_grad()
    truth = model.objective(*other)
    truth.backward()
    assert all(abs(loss.item() - truth.item()) < TOLERANCE for loss in losses)
    found = simulation.gradients()
    assert all(torch.allclose(found[name], p.grad, rtol=0, atol=TOLERANCE) for name, p in model.net.named_parameters())


def of_some(out: Tensor, target: Tensor) -> Tensor:
    """A loss over the rows that values choose, as many as there are."""
    rows = target[:, 0] > 0
    return (out[rows] - target[rows]).square().median()


def at_worst(out: Tensor, target: Tensor) -> Tensor:
    """A loss that branches on values, and is of as many rows as these say."""
    worst = (out - target).abs().amax(1)
    return worst.mean() if worst.max() < 1 else worst[worst > 0.5].median()


class AtWorst(nn.Module):
    def forward(me, out: Tensor, target: Tensor) -> Tensor:
        return at_worst(out, target)


def of_pairs(out: Tensor, target: Tensor) -> Tensor:
    """A loss over pairs that numpy finds, as scipy's linear_sum_assignment for DETR."""
    costs = (out - target.T).abs().detach().cpu().numpy()
    found = torch.as_tensor(costs.argmin(1))
    return (out - target[found]).square().mean()


LOSSES = [LossFunction(of_some, {}), LossFunction(at_worst, {}), LossFunction(of_pairs, {}), AtWorst()]


@pytest.mark.few(2)
@pytest.mark.parametrize("loss", LOSSES, ids=["mask", "branch", "pairs", "module"])
def test_a_loss_that_decides_by_values(draw: Any, loss: nn.Module) -> None:
    torch.manual_seed(0)
    batch = torch.randn(16, 4), torch.randn(16, 1)
    model = Model(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), loss, batch)
    assert [op.op for op in model.graph.operators][-1] == "called_module"
    assert model.worst(draw, 4) < TOLERANCE


class CountingPairs(nn.Module):
    """A loss over pairs of unequal labels, the number of which it leaves in an attribute, as a miner does."""

    def forward(self, out: Tensor, labels: Tensor) -> Tensor:
        one, other = (labels[:, None] < labels[None]).nonzero(as_tuple=True)
        if len(one) == 0:
            return self.without(out)
        self.count = len(one)
        return (out[one] - out[other]).square().mean()

    def without(self, out: Tensor) -> Tensor:
        return out.sum() * 0


class Earlier(CountingPairs):
    """Reads the number of an earlier batch, where it has no pairs."""

    def without(self, out: Tensor) -> Tensor:
        return out.sum() * self.count


class Running(CountingPairs):
    """Counts on."""

    seen = 0

    def forward(self, out: Tensor, labels: Tensor) -> Tensor:
        self.seen += int((labels > 0).sum())
        return super().forward(out, labels)


class Outside(nn.Module):
    """What is around the module reads the number."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = CountingPairs()

    def forward(self, out: Tensor, labels: Tensor) -> Tensor:
        loss = self.pairs(out, labels)
        return loss * (1 + self.pairs.count)


def of_labels() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(16, 4), torch.arange(16) // 4


@pytest.mark.few(2)
def test_a_loss_may_note_how_many_pairs_it_has(draw: Any) -> None:
    loss = CountingPairs()
    capture(Objective(nn.Linear(4, 2), loss, ("0", "1"), ("1",)), of_labels(), training=True)
    assert "count" not in vars(loss)
    model = Model(nn.Linear(4, 2), loss, of_labels())
    assert [op.op for op in model.graph.operators][-1] == "called_module"
    assert model.worst(draw, 4) < TOLERANCE


@pytest.mark.parametrize("loss", [Earlier(), Running(), Outside()], ids=lambda loss: type(loss).__name__)
def test_a_number_that_is_read_is_refused(loss: nn.Module) -> None:
    batch = of_labels()
    loss(*batch)  # as in training before: the attribute then has the value that the example batch gives it
    with pytest.raises(StrategyError) as caught:
        capture(Objective(nn.Linear(4, 2), loss, ("0", "1"), ("1",)), batch, training=True)
    assert caught.value.code in ("MW901", "MW906")


class Rows(nn.Module):
    """A number of rows that values decide, within."""

    def forward(self, x: Tensor, *, weighted: bool) -> tuple[Tensor, None]:
        chosen = x[:, 0] > x[:, 1]
        return torch.zeros_like(x).masked_scatter(chosen[:, None], x[chosen].tanh()), None


def test_a_shape_within() -> None:
    objective = Objective(nn.Sequential(nn.Linear(4, 4), Layer(Rows())), None, ("0",), ())
    ops = [op.op for op in capture(objective, (torch.randn(16, 4),), training=False).graph.operators]
    assert ops.count("called_module") == 1 and "tanh" not in ops


def attending(h: Tensor) -> Tensor:
    """Torch marks the operator as one that may draw random numbers."""
    h = h.reshape(1, 1, *h.shape)
    return F.scaled_dot_product_attention(h, h, h)[0, 0]


def test_attention_within_draws_nothing() -> None:
    objective = Objective(net(attending), Squares(), ("0", "1"), ("1",))
    graph = capture(objective, (torch.randn(16, 4), torch.randn(16, 1)), training=True).graph
    assert [op.op for op in graph.operators].count("called_module") == 2


@pytest.mark.slow
def test_functions_that_the_collector_does_not_know() -> None:
    gc.freeze()
    try:
        test_attention_within_draws_nothing()
    finally:
        gc.unfreeze()


def noisy(h: Tensor) -> Tensor:
    return F.dropout(h, 0.5)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        self.calls.add_(1)
        return h


class Remembering(nn.Module):
    """Has what it was given in an attribute, or in a list."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.every = name, list[Tensor]()

    def forward(self, h: Tensor) -> Tensor:
        setattr(self, self.name, h) if self.name else self.every.append(h)
        return h


class Scaling(nn.Module):
    """By a tensor that is no buffer, which it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(())

    def forward(self, h: Tensor) -> Tensor:
        self.scale += 1
        return h * self.scale


def hooked() -> nn.Module:
    act = nn.Tanh()
    act.register_forward_hook(lambda module, given, h: 10 * h)
    return act


MORE = {
    "draws": noisy,
    "writes": Counting(),
    "remembers": Remembering("last"),
    "remembers unseen": Remembering("_last"),
    "appends": Remembering(""),
    "plain tensor": Scaling(),
    "hook": hooked(),
}


@pytest.mark.slow
@pytest.mark.parametrize("act", MORE.values(), ids=MORE)
def test_a_module_that_does_more_than_to_compute_is_refused(act: Any) -> None:
    objective = Objective(net(act), Squares(), ("0", "1"), ("1",))
    with pytest.raises(StrategyError, match=r"capture/test_opaque_modules.py:\d+: for expert in") as caught:
        capture(objective, (torch.randn(16, 4), torch.randn(16, 1)), training=True)
    assert caught.value.code == "MW901"
    assert type(objective.model[1].experts).forward is Experts.forward  # type: ignore[index, union-attr]


class Balanced(Experts):
    """Keeps the loss that balances its experts, and how many rows each had, in attributes."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__(act)
        self.balance: Tensor | None = None
        self.names = ["a"]

    def forward(self, x: Tensor, *, weighted: bool) -> tuple[Tensor, None]:
        assert self.balance is None
        share = self.router(x).softmax(-1).mean(0)
        self.rows = F.one_hot(self.router(x).argmax(-1), 3).sum(0)
        self.balance = (share * self.rows).sum()
        return super().forward(x, weighted=weighted)


class WithBalance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(Balanced(torch.tanh)) for _ in range(2)])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        balance: Any = sum(layer.experts.balance + 0.1 * layer.experts.rows.max() for layer in self.layers)
        for layer in self.layers:
            layer.experts.balance = None
        return squares(x[:, :1], target) + 0.01 * balance


def test_a_module_may_keep_new_tensors_in_attributes(draw: Any) -> None:
    torch.manual_seed(0)
    model = Model(WithBalance(), None, (torch.randn(16, 4), torch.randn(16, 1)))
    ops = [op.op for op in model.graph.operators]
    assert ops.count("called_module") == 2
    assert "index_add" not in ops
    assert model.worst(draw, 4) < TOLERANCE


class Deciding(Experts):
    """Returns a number, by which the layer decides."""

    def forward(self, x: Tensor, *, weighted: bool) -> tuple[Tensor, Any]:
        h = super().forward(x, weighted=weighted)[0]
        return h, bool((h > 100).any())


class Showing(Experts):
    """Returns a view of what it was given, which the layer writes."""

    def forward(self, x: Tensor, *, weighted: bool) -> tuple[Tensor, None]:
        x = x + 0 * super().forward(x, weighted=weighted)[0] if x.sum() < -1e9 else x
        return x.view(-1, 4), None


class Outer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x).relu() + 1
        h, large = self.experts(x, weighted=True)
        return x + (h.exp() if large else h.mul_(2))


@pytest.mark.slow
@pytest.mark.parametrize("experts", [Deciding, Showing])
def test_a_layer_that_decides_by_what_a_module_returns_is_the_operator(experts: Any, draw: Any) -> None:
    torch.manual_seed(0)
    batch = torch.randn(16, 4), torch.randn(16, 1)
    model = Model(nn.Sequential(nn.Linear(4, 4), Outer(experts(torch.tanh)), nn.Linear(4, 1)), Squares(), batch)
    ops = [op.op for op in model.graph.operators]
    assert ops.count("called_module") == 1 and "relu" not in ops
    assert model.worst(draw, 1) < TOLERANCE


class Rarely(nn.Module):
    """Does more than to compute for values that no trial has."""

    def __init__(self, more: Any) -> None:
        super().__init__()
        self.more, self.factor = more, 1.0
        self.register_buffer("last", torch.zeros(()))

    def forward(self, h: Tensor) -> Any:
        return self.more(self, h) if h.abs().max() > 9 else h


def assigned(module: Rarely, h: Tensor) -> Tensor:
    module.last = h.mean().detach()
    return h


def counted(module: Rarely, h: Tensor) -> Tensor:
    module.factor += 1
    return h * module.factor


def drawn(_: Rarely, h: Tensor) -> Tensor:
    return noisy(h)


def drawn_by_python(_: Rarely, h: Tensor) -> Tensor:
    return h * random.random()


@pytest.mark.few(1)
@pytest.mark.parametrize("more", [drawn, drawn_by_python, assigned, counted], ids=lambda more: more.__name__)
def test_what_no_trial_did_ends_the_step(more: Any, draw: Any) -> None:
    torch.manual_seed(0)
    model = Model(net(Rarely(more)), Squares(), (torch.zeros(16, 4), torch.zeros(16, 1)))
    program = lower(model.graph, model.random_plan(draw, 0), LoweringOptions())
    with pytest.raises(RuntimeError, match=r"Experts.* drew random numbers"):
        Simulation(program, model.values | {"0": torch.randn(16, 4, dtype=torch.float64) * 100}).run()


def failed(_: Rarely, h: Tensor) -> Tensor:
    return h @ h


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("more", "code", "named"), [(counted, "MW906", r"experts\.act\.factor"), (failed, "MW901", r"return h @ h")]
)
def test_what_the_example_batch_does_is_seen(more: Any, code: str, named: str) -> None:
    objective = Objective(net(Rarely(more)), Squares(), ("0", "1"), ("1",))
    with pytest.raises(StrategyError, match=named) as error:
        capture(objective, (torch.randn(16, 4) * 100, torch.randn(16, 1)), training=True)
    assert error.value.code == code


@pytest.mark.slow
def test_no_values_are_needed() -> None:
    with torch.device("meta"):
        objective = Objective(net(), Squares(), ("0", "1"), ("1",))
        captured = capture(objective, (torch.randn(16, 4), torch.randn(16, 1)), training=True)
    assert [op.op for op in captured.graph.operators].count("called_module") == 2
