"""A function that draws numbers with numpy or Python is one random operator; what cannot be one is refused."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import rand
from torch import Tensor, nn

from strategies.capture import Captured, Objective, capture
from strategies.core.errors import StrategyError
from strategies.core.program import LoweringOptions
from strategies.core.request import Request
from strategies.lowering.lowering import lower
from strategies.planner.planner import make_plan
from strategies.rules.drawing_calls import FUNCTIONS
from strategies.runtime.simulate import Simulation

Body = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """x [8, 4] -> a scalar, by `body`."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.inner, self.body = nn.Linear(4, 4), body
        self.generator, self.of_torch = random.Random(0), torch.Generator()

    @staticmethod
    def noise(size: int) -> np.ndarray:
        return np.random.rand(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x).square().mean()


def captured(body: Body, training: bool = True) -> Captured:
    return capture(Objective(Net(body), None, ("x",), ()), (torch.randn(8, 4),), training=training)


def drawn(of: Captured) -> int:
    return [operator.op for operator in of.graph.operators].count("drawn_function")


def scales(size: int, low: float = 0.5) -> np.ndarray:
    return np.random.uniform(low, 1.0, size).astype("float32")


def scaled(x: Tensor) -> Tensor:
    return x * torch.from_numpy(scales(4))


def either(draws: bool) -> np.ndarray:
    return scales(4) if draws else np.ones(4, dtype="float32")


CAPTURED: dict[str, tuple[Body, int]] = {
    "numpy": (lambda net, x: net.inner(x) * torch.from_numpy(scales(4)), 1),
    "twice": (lambda net, x: net.inner(x) * torch.as_tensor(scales(4)) + torch.tensor(scales(4, low=0.1)), 2),
    "static": (lambda net, x: net.inner(x) * torch.tensor(net.noise(4), dtype=x.dtype), 1),
    "within a function of tensors": (lambda net, x: scaled(net.inner(x)), 1),
    "around it": (lambda net, x: net.inner(scaled(x)), 1),
    "none in this call": (lambda net, x: net.inner(x) * torch.tensor(either(False)) * torch.tensor(either(True)), 1),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CAPTURED)
def test_captured(name: str) -> None:
    """Every key draws other numbers; nothing stays patched, and no generator moves."""
    body, count = CAPTURED[name]
    before = scales, Net.__dict__["noise"], torch.from_numpy, np.random.rand, random.random
    states = random.getstate(), np.random.get_state()[2]
    made = captured(body)
    assert drawn(made) == count and drawn(captured(body, training=False)) == count
    assert before == (scales, Net.__dict__["noise"], torch.from_numpy, np.random.rand, random.random)
    program = lower(made.graph, make_plan(made.graph, Request("semi_auto", 2)), LoweringOptions())
    values = made.tensors | {"x": torch.randn(8, 4)}
    losses = [[loss.item() for loss in Simulation(program, values).run(key)[0]] for key in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2] and losses[0][0] == losses[0][1]
    assert states == (random.getstate(), np.random.get_state()[2])


GENERATOR = np.random.default_rng(0)


def number(size: int) -> float:
    return float(np.random.rand(size).sum())


def with_torch(size: int) -> np.ndarray:
    return np.random.rand(size) + torch.rand(size).numpy()


def from_elsewhere(size: int) -> np.ndarray:
    return np.random.rand(size) + os.urandom(1)[0]


def writing(x: Tensor) -> Tensor:
    return x.mul_(random.random())


def seen(x: Tensor) -> Tensor:
    random.random()
    return x


def by_values(x: Tensor) -> Tensor:
    return torch.from_numpy(np.random.rand(int(x.sum()) + 1, 4)).float()


REFUSED: dict[str, tuple[Body, str]] = {
    "in the forward": (
        lambda net, x: net.inner(x) * random.random(),
        r"draws numbers with random at capture/test_drawing_functions.py:\d+, outside of torch",
    ),
    "under another name": (lambda net, x: net.inner(x) * float(rand() > 2), "draws numbers with numpy.random, outside"),
    "of a file": (
        lambda net, x: net.inner(x) * float(GENERATOR.random() > 2),
        "from a Generator of its own, outside of torch",
    ),
    "of a module": (lambda net, x: net.inner(x) * net.generator.random(), "from a Random of its own"),
    "without a seed": (lambda net, x: net.inner(x) * np.random.default_rng().random(), "from a Generator of its own"),
    "of torch": (
        lambda net, x: net.inner(x) + torch.rand(4, generator=net.of_torch),
        r"rand at capture/test_drawing_functions.py:\d+ draws numbers from a torch.Generator of its own",
    ),
    "a comparison": (
        lambda net, x: net.inner(x) if random.uniform(0, 1) < 0.5 else x,
        r"draws numbers with random at capture/test_drawing_functions.py:\d+",
    ),
    "a product": (lambda net, x: net.inner(x) * np.random.uniform(0, 1), "draws numbers with numpy.random at"),
    "a number": (lambda net, x: net.inner(x) * number(3), r"::number, .* returns a float, beside"),
    "torch": (lambda net, x: net.inner(x) * torch.tensor(with_torch(4)), "also draws with torch, or writes"),
    "another source": (lambda net, x: net.inner(x) * torch.tensor(from_elsewhere(4)), "returns other numbers where"),
    "writes": (lambda net, x: net.inner(writing(x)), "or writes into a tensor"),
    "a view": (lambda net, x: net.inner(seen(x)), "returns memory of its arguments"),
    "arithmetic": (
        lambda net, x: net.inner(x) * torch.tensor(1 - scales(4)),
        r"at capture/test_drawing_functions.py:\d+ more is done with it than to make a tensor",
    ),
    "method": (lambda net, x: net.inner(x) * float(scales(4).sum()), "more is done with it than to make a tensor"),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    body, message = REFUSED[name]
    before = [dict(vars(module)) for module in FUNCTIONS]
    with pytest.raises(StrategyError, match=message) as caught:
        captured(body)
    assert caught.value.code == "MW906"
    assert before == [dict(vars(module)) for module in FUNCTIONS]


def test_other_shapes_end_the_step() -> None:
    made = captured(lambda net, x: net.inner(x) + by_values((x > 5).any()).mean(0))
    program = lower(made.graph, make_plan(made.graph, Request("semi_auto", 2)), LoweringOptions())
    Simulation(program, made.tensors | {"x": torch.zeros(8, 4)}).run(1)
    with pytest.raises(RuntimeError, match=r"by_values, .* returned \(\(\(2, 4\).* plan is made for \(\(\(1, 4\)"):
        Simulation(program, made.tensors | {"x": torch.full((8, 4), 6.0)}).run(1)


def sometimes(x: Tensor) -> np.ndarray:
    return scales(4) if int(x.sum()) == 0 else np.ones(4, dtype="float32")


def test_a_call_that_draws_nothing_ends_the_step() -> None:
    """The reference would count one random operator less."""
    made = captured(lambda net, x: net.inner(x) * torch.from_numpy(sometimes((x > 5).any())))
    program = lower(made.graph, make_plan(made.graph, Request("semi_auto", 2)), LoweringOptions())
    with pytest.raises(RuntimeError, match=r"sometimes, .* drew none"):
        Simulation(program, made.tensors | {"x": torch.full((8, 4), 6.0)}).run(1)


def test_no_values_are_needed() -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        h: Tensor = net.inner(x) * torch.tensor(scales(4), device=x.device)
        return h

    with torch.device("meta"):
        assert drawn(captured(body)) == 1


def test_numbers_that_a_forward_seeds_are_constants() -> None:
    """Random blocks of BigBird's attention are drawn from one seed in every step."""

    def body(net: Net, x: Tensor) -> Tensor:
        np.random.seed(3)
        return net.inner(x) * torch.from_numpy(scales(4))

    seed = np.random.seed
    assert drawn(captured(body)) == 0 and np.random.seed is seed


class Checked(nn.Module):
    """A forward whose `check` draws; with `more` it draws itself, by a function that a wrapper has kept."""

    def __init__(self, check: Any, more: bool) -> None:
        super().__init__()
        self.inner, self.check, self.draw, self.more = nn.Linear(4, 4), check, random.getrandbits, more

    def forward(self, x: Tensor) -> Tensor:
        self.check(self.draw)
        return (self.inner(x) * (self.draw(2) if self.more else 1)).mean()


@pytest.mark.parametrize("more", [False, True])
def test_checks_of_types_may_draw(more: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of beartype, of random elements of lists."""
    monkeypatch.setitem(sys.modules, "beartype", ModuleType("beartype"))
    names: dict[str, Any] = {}
    exec(compile("def check(getrandbits):\n    getrandbits(32)", "<@beartype(check) at 0x1>", "exec"), names)
    objective = Objective(Checked(names["check"], more), None, ["x"], ())
    if more:
        with pytest.raises(StrategyError, match="draws numbers with random"):
            capture(objective, [torch.randn(2, 4)], training=True)
    else:
        assert len(capture(objective, [torch.randn(2, 4)], training=True).graph.operators) >= 2
    assert sys.getprofile() is None
