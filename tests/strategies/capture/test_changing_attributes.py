"""A forward that computes with what it changes, outside of buffers, is refused; what it sets once or only notes is
not."""

from __future__ import annotations

import builtins
import copy
import itertools
import os
import secrets
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from threading import get_ident
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from strategies.capture import Objective, capture
from strategies.core.errors import StrategyError


class Sum(tuple[int, ...]):
    """Says nothing about its length, as the irreps of e3nn."""

    def __len__(self) -> int:
        raise NotImplementedError


class Net(nn.Module):
    """Changes attributes in `change`, which returns a factor."""

    def __init__(self, change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(4, 4), change
        self.calls, self.state, self.length, self.total = 0, {"step": 0.0}, 0, 0.0
        self.center, self.table = torch.ones(4), torch.zeros(0)
        self.flag, self.hidden, self.queue, self.features = False, None, deque([torch.ones(4)], 1), list[Tensor]()
        self.object, self.numbers = SimpleNamespace(steps=0), itertools.count(1)
        self.rest, self.made = iter(range(1, 100)), (step for step in range(1, 100))
        self.seen, self.array, self.irreps = set[int](), np.ones(2), Sum((1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.change(self, x)


def number(net: Any, x: Tensor) -> float:
    net.calls += 1
    return min(1.0, net.calls / 1000)


def late(net: Any, x: Tensor) -> float:
    net.calls += 1
    return 1.0 if net.calls < 100 else 2.0


def nested(net: Any, x: Tensor) -> float:
    net.state["step"] += 0.5
    return net.state["step"]


def average(net: Any, x: Tensor) -> Tensor:
    net.center = 0.9 * net.center + 0.1 * x.detach().mean(0)
    return net.center


def cast(net: Any, x: Tensor) -> Tensor:
    net.center = net.center.double()
    return net.center.to(x.dtype)


def doubled(net: Any, x: Tensor) -> Tensor:
    net.center = 2 * net.center.double()
    return net.center.to(x.dtype)


def cached(net: Any, x: Tensor) -> Tensor:
    if net.length < x.shape[1]:
        net.length, net.table = x.shape[1], torch.arange(1.0, 1.0 + x.shape[1])
    return net.table[: x.shape[1]]


def noted(net: Any, x: Tensor) -> float:
    net.length, net.center = x.shape[0] + net.training, x.detach().mean(0)
    return 2.0


def moved(net: Any, x: Tensor) -> Tensor:
    net.center = net.center.to(x.device)
    return net.center


CALLS, TABLES, LOG = 0, dict[int, Tensor](), list[int]()


class Counted(nn.Module):
    steps = 0


def of_class(net: Any, x: Tensor) -> float:
    Counted.steps += 1
    return 1 / Counted.steps


def of_file(net: Any, x: Tensor) -> float:
    global CALLS
    CALLS += 1
    return 1 / CALLS


def enclosed() -> Callable[[Any, Tensor], float]:
    steps = 0

    def change(net: Any, x: Tensor) -> float:
        nonlocal steps
        steps += 1
        return 1 / steps

    return change


def of_iterator(net: Any, x: Tensor) -> float:
    return 1 / next(net.numbers)


def of_object(net: Any, x: Tensor) -> float:
    net.object.steps += 1
    return 1 / net.object.steps


def of_rest(net: Any, x: Tensor) -> float:
    return 1 / next(net.rest)


def of_generator(net: Any, x: Tensor) -> float:
    return 1 / next(net.made)


def of_set(net: Any, x: Tensor) -> float:
    net.seen.add(len(net.seen))
    return 1 / len(net.seen)


def of_array(net: Any, x: Tensor) -> float:
    net.array *= 0.5
    return float(net.array[0])


def turned(net: Any, x: Tensor) -> float:
    net.flag = not net.flag
    return 1.0 if net.flag else -1.0


def in_turn(net: Any, x: Tensor) -> float:
    net.calls = (net.calls + 1) % 2
    return net.calls + 1.0


def hidden(net: Any, x: Tensor) -> Tensor:
    before, net.hidden = net.hidden, x.detach().tanh()
    return torch.ones(4) if before is None else before


def queue(net: Any, x: Tensor) -> Tensor:
    before = list(net.queue)
    net.queue.append(x.detach().mean(0))
    return torch.stack([torch.ones(4), *before]).sum(0)


def history(net: Any, x: Tensor) -> Tensor:
    net.features.append(x.detach().mean(0))
    return torch.stack(net.features).mean(0)


def logged(net: Any, x: Tensor) -> float:
    net.features.append(x.detach().mean(0))
    LOG.append(x.shape[0])
    return 1.0


def counted(net: Any, x: Tensor) -> float:
    net.calls, net.length = net.calls + 1, net.length - 2
    net.total = 0.5 + net.total
    return 1.0


def counted_and_asked(net: Any, x: Tensor) -> float:
    net.length += 1
    net.calls += 1
    try:
        return 2.0 if net.calls % 100 == 0 else 1.0
    except TypeError:
        return 1.0


def shown(net: Any, x: Tensor) -> float:
    net.calls += 1
    return float(f"{net.calls}")


def multiplied(net: Any, x: Tensor) -> Tensor:
    net.calls += 1
    return torch.tensor(net.calls) * 1e-3


@lru_cache
def table(size: int) -> Tensor:
    return torch.arange(1.0, 1.0 + size)


def remembered(net: Any, x: Tensor) -> Tensor:
    return table(x.shape[1]) * TABLES.setdefault(x.shape[1], torch.ones(x.shape[1]))


def collected(net: Any, x: Tensor) -> Tensor:
    net.features.clear()
    net.features.append(x.exp())
    net.last = x.tanh()
    return net.features[-1] + net.last


def captured(change: Callable[[Any, Tensor], Any], training: bool) -> None:
    capture(Objective(Net(change), None, ("x",), ()), (torch.randn(8, 4),), training=training)


def of_day(net: Any, x: Tensor) -> float:
    return 1 + time.time() % 86400


def of_clock(net: Any, x: Tensor) -> float:
    return 1.0 + perf_counter_ns() % 1000


def of_date(net: Any, x: Tensor) -> float:
    return 1.0 + datetime.now().microsecond


def of_calendar(net: Any, x: Tensor) -> float:
    return float(time.strftime("%S"))


def of_system(net: Any, x: Tensor) -> float:
    return float(secrets.randbelow(1000))


def of_process(net: Any, x: Tensor) -> float:
    return 1.0 + os.getpid() % 7


def of_thread(net: Any, x: Tensor) -> float:
    return 1.0 + get_ident() % 7


def of_host(net: Any, x: Tensor) -> float:
    return float(len(socket.gethostname()))


def of_written_file(net: Any, x: Tensor) -> float:
    path = Path(tempfile.gettempdir()) / f"calls-{os.getpid()}"
    calls = len(path.read_text("utf-8")) if path.exists() else 0
    path.write_text("." * (calls + 1), "utf-8")
    return 1 / (calls + 1)


def of_constant_file(net: Any, x: Tensor) -> float:
    """Writes who it is into a file of its own, and reads another one."""
    Path(os.devnull).write_text(f"{os.getpid()} on {socket.gethostname()}", "utf-8")
    return float(Path(__file__).read_text("utf-8").count("def of_constant_file"))


def measured(net: Any, x: Tensor) -> float:
    """Measures how long it takes, and reports now and then."""
    begin = time.perf_counter()
    net.state["seconds"] = time.perf_counter() - begin
    if begin > 1e6:
        net.center = torch.ones(4)
    return 1.0


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (of_day, "time.time"),
        (of_clock, "time.perf_counter_ns"),
        (of_date, "time.time"),
        (of_calendar, "time.time"),
        (of_system, "os.urandom"),
        (of_process, "os.getpid"),
        (of_thread, "threading.get_ident"),
        (of_host, "socket.gethostname"),
        (of_written_file, "open"),
        (number, "calls"),
        (late, "calls"),
        (counted_and_asked, "counts in calls"),
        (shown, "calls"),
        (multiplied, "calls"),
        (nested, "state['step']"),
        (average, "center"),
        (doubled, "center"),
        (of_class, "Counted.steps"),
        (of_file, "CALLS"),
        (enclosed(), "change.steps"),
        (of_iterator, "numbers"),
        (of_object, "object"),
        (of_rest, "rest"),
        (of_generator, "made"),
        (of_set, "seen"),
        (of_array, "array"),
        (turned, "flag"),
        (in_turn, "calls"),
        (hidden, "hidden"),
        (queue, "queue"),
        (history, "features"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_refused(
    change: Callable[[Any, Tensor], Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(StrategyError) as found:
        captured(change, False)
    assert found.value.code == "MW906" and name in str(found.value)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "change",
    [cast, cached, noted, moved, remembered, collected, logged, measured, counted, of_constant_file],
    ids=lambda one: one.__name__,
)
def test_captured(change: Callable[[Any, Tensor], Any]) -> None:
    captured(change, False)
    assert not TABLES and not LOG and type(table(4)) is Tensor  # nothing is left that was only traced


def test_large_models_are_called_only_where_values_of_python_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.capture.changing_attributes.LARGEST", 0)
    captured(hidden, False)
    with pytest.raises(StrategyError, match="counts in calls"):
        captured(number, False)


class First(nn.Module):
    """Sets attributes that it did not have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.attention = self.inner(x).softmax(-1).detach()
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)
        self.calls = getattr(self, "calls", 0) + 1
        return (self.attention * self.inner(x) * self.scale).sum()


def test_attributes_that_a_forward_is_the_first_to_set_are_not_left() -> None:
    net = First()
    before = {*vars(net), *net.state_dict()}
    capture(Objective(net, None, ("x",), ()), (torch.ones(2, 4),), training=True)
    assert {*vars(net), *net.state_dict()} == before
    copy.deepcopy(net)


class Recording(nn.Module):
    """Takes the second last of the hidden states, which hooks record that its first forward installs (Llava)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        self.seen: list[Tensor] | None = None

    def record(self, _: nn.Module, __: Any, output: Tensor) -> None:
        if self.seen is not None:
            self.seen.append(output)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "installed"):
            for layer in self.layers:
                layer.register_forward_hook(self.record)
            self.installed = True
        self.seen = []
        self.layers(x)
        chosen, self.seen = self.seen[-2], None
        return chosen


def test_hooks_that_a_forward_installs_are_there_once() -> None:
    net, x = Recording(), torch.ones(2, 4)
    expected = net.layers[1](net.layers[0](x))
    for _ in range(2):
        graph = capture(Objective(net, None, ("x",), ()), (x,), training=False).graph
        assert [operator.module for operator in graph.operators] == ["layers.0", "layers.1"]
    assert torch.equal(net(x), expected)


class Once(nn.Module):
    """Does something in its first call alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner, self.first = kind, nn.Linear(4, 4), kind == "flag"
        self.scale: Tensor | None = None
        self.between: nn.Module | None = None
        if kind == "hook":
            self.handle = self.inner.register_forward_hook(self.doubled)

    def doubled(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        self.handle.remove()
        return output * 2

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x, self.first = x * 2, False
        h = self.inner(x)
        if self.kind == "numbers":
            if self.scale is None:
                self.scale = torch.randn(4)
            h = h * self.scale
        if self.kind == "layer":
            if self.between is None:
                self.between = nn.Linear(4, 4)
            h = self.between(h)
        if self.kind == "parameter" and not hasattr(self, "late"):
            self.late = nn.Parameter(torch.ones(4))
        if self.kind == "replaced":
            self.inner.weight = nn.Parameter(self.inner.weight.clamp(-0.1, 0.1))
        return h.sum()


@pytest.mark.parametrize("kind", ["flag", "hook", "numbers", "layer", "parameter", "replaced"])
def test_what_a_forward_does_once_is_refused(kind: str) -> None:
    net = Once(kind)
    hooks = dict(net.inner._forward_hooks)
    with pytest.raises(StrategyError) as refused:
        capture(Objective(net, None, ("x",), ()), (torch.ones(2, 4),), training=True)
    assert refused.value.code == "MW906"
    assert net.inner._forward_hooks == hooks


NAMESPACE = vars(builtins)
"""As packages that check types keep it."""


def test_the_namespace_of_a_module_is_left_alone() -> None:
    """The state put back after a forward that must be one operator would be all that Python has."""
    before = dict(NAMESPACE)

    def branches(net: Any, x: Tensor) -> Tensor:
        NAMESPACE["seen_in_forward"] = True
        return x.sum(1, keepdim=True) if x.sum() > 0 else x[:, :1]

    try:
        with pytest.raises(StrategyError):
            captured(branches, True)
    finally:
        NAMESPACE.pop("seen_in_forward", None)
    assert NAMESPACE.items() >= before.items()
