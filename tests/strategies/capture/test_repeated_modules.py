"""Repeated layers are captured once, and the graph is that of a complete capture; what is more than a repetition is
captured completely."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.gpt import GPT
from models.llama import Llama
from models.losses import NextTokenLoss
from strategies.capture import Captured, Objective, capture, repeated_modules
from tests.matrix.zoo import ARCHITECTURES, Architecture
from tests.matrix.zoo.architecture import HuggingFace

TOKENS = torch.zeros(4, 8, dtype=torch.int64)
DEPTH = 7
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
"""Settings of transformers that say how deep a model is."""


@pytest.fixture
def repeated(monkeypatch) -> list[str]:
    """The layers that are not traced."""
    paths: list[str] = []
    note = repeated_modules._note

    def noted(tracer: Any, kind: str, path: str, tensors: Any) -> Any:
        if kind == "again":
            paths.append(path)
        return note(tracer, kind, path, tensors)

    monkeypatch.setattr(repeated_modules, "_note", noted)
    return paths


def completely(monkeypatch, objective: Objective, batch: tuple[Tensor, ...], training: bool = True) -> Captured:
    """A capture that traces all layers."""
    with monkeypatch.context() as patched:
        patched.setattr(repeated_modules, "LEAST_LAYERS", 1000)
        return capture(objective, batch, training=training)


def check(monkeypatch, objective: Objective, batch: tuple[Tensor, ...], training: bool = True) -> None:
    once, complete = capture(objective, batch, training=training), completely(monkeypatch, objective, batch, training)
    assert once.graph == complete.graph
    assert [*once.tensors] == [*complete.tensors]


@pytest.mark.few(2)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_graph_is_that_of_a_complete_capture(monkeypatch, repeated, name, autocast, training):
    model = Llama(16, 8, 16, DEPTH, 2, 1, 16) if name == "llama" else GPT(16, 8, 16, DEPTH, 2, 0.1)
    loss = NextTokenLoss() if training else None
    names = ("0", "1")[: 1 + training]
    objective = Objective(model, loss, names, names[1:], autocast)
    check(monkeypatch, objective, (TOKENS,) * len(names), training)
    lists = {path.rpartition(".")[0] for path in repeated}
    assert len(lists) == 1
    assert len(repeated) == DEPTH - 3


class Layer(nn.Module):
    """A layer that knows its number, and of which `kind` decides what else it does."""

    def __init__(self, number: int, kind: str) -> None:
        super().__init__()
        self.number, self.kind, self.linear = number, kind, nn.Linear(4, 4, bias=kind != "first" or number > 0)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, seen: Any = None) -> Any:
        y = self.linear(x).relu()
        if self.kind == "reads" and self.number == 5:
            y = y.tanh()
        if self.kind == "stores":
            self.last = y.mean()
        if self.kind == "writes":
            self.steps.add_(1)
        if self.kind == "constant":
            y = y * torch.tensor([1.0, 2.0, 3.0, 4.0])
        if self.kind == "object":
            seen.append(y.mean())
        return y


class Layers(nn.Module):
    def __init__(self, kind: str, depth: int = 8) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(Layer(number, kind) for number in range(depth))
        if kind == "shared":
            for layer in self.layers:
                layer.linear = self.layers[0].linear

    def forward(self, x: Tensor) -> Tensor:
        seen: Any = [] if self.kind == "object" else None
        for number, layer in enumerate(self.layers if self.kind != "some" else self.layers[:-1]):
            x = x * 2 if self.kind == "between" else x
            x = x.double() if self.kind == "wider" and number == 0 else x
            x = layer(x, seen) if self.kind == "object" else layer(x)
            x = layer(x) if self.kind == "twice" and number == 4 else x
            x = x.t().contiguous().t() if self.kind == "strides" and number == 4 else x
        total = x.sum()
        if self.kind == "stores":
            total = total + sum(layer.last for layer in self.layers)
        return total + sum(seen) if seen else total


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["plain", "between"])
def test_layers_that_know_their_number_are_captured_once(monkeypatch, repeated, kind):
    check(monkeypatch, Objective(Layers(kind), None, ("0",), ()), (torch.ones(4, 4),))
    assert repeated == [f"model.layers.{number}" for number in (2, 3, 4, 5, 6)]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "once"),
    {
        "reads": 0,
        "stores": 0,
        "writes": 0,
        "constant": 5,
        "object": 0,
        "shared": 0,
        "twice": 3,
        "strides": 4,
        "first": 5,
        "some": 5,
    }.items(),
)
def test_layers_that_do_more_are_captured_completely(monkeypatch, repeated, kind, once):
    """Where a layer was taken for a repetition too early, the complete model is captured after all."""
    check(monkeypatch, Objective(Layers(kind), None, ("0",), ()), (torch.ones(4, 4),))
    assert len(repeated) == once


def _deep(one: Architecture) -> Architecture:
    assert isinstance(one.build, HuggingFace)
    settings = {key: DEPTH if key in LAYERS else value for key, value in one.build.settings.items()}
    return replace(one, build=replace(one.build, settings=settings))


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", [one for one in ARCHITECTURES if isinstance(one.build, HuggingFace)], ids=lambda one: one.name
)
def test_matrix_is_captured_as_completely(monkeypatch, architecture):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, batch = _deep(architecture).build(0.1)
        check(monkeypatch, Objective(model, None, tuple(batch), ()), tuple(batch.values()))
