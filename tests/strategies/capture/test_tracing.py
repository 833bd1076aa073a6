"""Patches around an export are restored, also if it fails."""

from __future__ import annotations

import sys
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import inference_mode
from torch.distributions import Distribution, Normal, kl_divergence
from torch.nn import functional
from torch.nn.modules import transformer

from strategies.capture import Objective, capture
from strategies.capture.tracing import traceable
from strategies.core.errors import StrategyError
from tests.strategies.simulated_model import TOLERANCE, Model


def test_everything_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: Any = ModuleType("masks")
    masks.is_torchdynamo_exporting = lambda: True
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", masks)
    net = nn.Sequential(nn.BatchNorm1d(2, momentum=None), nn.BatchNorm1d(2))
    checks = lambda: (Distribution._validate_args, transformer._detect_is_causal_mask, functional.gaussian_nll_loss)  # noqa: E731
    before = inference_mode.__enter__, masks.is_torchdynamo_exporting, checks()
    with pytest.raises(ZeroDivisionError), torch.autocast("cpu", torch.bfloat16), traceable(net):
        assert not masks.is_torchdynamo_exporting()
        assert net[0].momentum is not None and net[1].momentum == 0.1
        assert not torch.is_autocast_enabled("cpu")
        with torch.inference_mode():
            assert not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()
        raise ZeroDivisionError
    assert (inference_mode.__enter__, masks.is_torchdynamo_exporting, checks()) == before
    assert net[0].momentum is None
    with torch.inference_mode():
        assert torch.is_inference_mode_enabled()


def test_masks_of_counted_positions_are_made_as_without_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of positions that a model counts itself, transformers may ask whether they are those of packed documents; of
    positions in the batch it may not."""
    masks: Any = ModuleType("masks")
    masks.is_torchdynamo_exporting = masks.is_tracing = lambda tensor=None: True
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", masks)
    found = SimpleQueue[Any]()  # capture takes back what a forward adds to a list

    class Asking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            found.put((masks.is_tracing(torch.arange(3).diff() != 1), masks.is_tracing(x), masks.is_tracing()))
            return super().forward(x).square().mean()

    capture(Objective(Asking(4, 4), None, ("x",), ()), (torch.randn(8, 4),), training=True)
    assert found.get_nowait() == (False, True, True) and found.empty() and masks.is_tracing(torch.arange(3))


def test_a_library_of_models_that_was_not_imported_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", {name: m for name, m in sys.modules.items() if "transformers" not in name})
    with traceable(SimpleNamespace(modules=list)):  # type: ignore[arg-type]
        assert "transformers" not in sys.modules


class Decoder(nn.Module):
    """torch's transformer with masks whose values it would inspect."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=x.dtype)
        hidden = torch.zeros(len(x), 4, dtype=x.dtype).masked_fill(x[..., 0] > 1, -torch.inf)
        output: Tensor = self.inner(x, x, mask, mask, src_key_padding_mask=hidden)
        return output.square().mean()


class Uncertain(nn.Module):
    """Distributions and a loss that would check their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        mean, deviation = self.inner(x).chunk(2, -1)
        found = Normal(mean, functional.softplus(deviation) + 0.1)
        apart = kl_divergence(found, Normal(torch.zeros_like(mean), torch.ones_like(mean))).mean()
        return apart - found.log_prob(x).mean() + functional.gaussian_nll_loss(mean, x, deviation.exp())


@pytest.mark.parametrize("net", [Decoder, Uncertain])
def test_checks_within_torch_are_left_out(net: type[nn.Module], draw: Any) -> None:
    torch.manual_seed(0)
    assert Model(net(), None, {"x": torch.randn(8, 4, 8)}).worst(draw, seeds=2) < TOLERANCE


class Table(nn.Module):
    """A tensor that is no buffer and a view of another, as tables of positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table = nn.Linear(8, 8), torch.randn(4, 8)[None]

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) + self.table).square().mean()


def test_a_constant_may_be_a_view(draw: Any) -> None:
    torch.manual_seed(0)
    assert Model(Table(), None, {"x": torch.randn(8, 4, 8)}).worst(draw, seeds=1) < TOLERANCE


class Gate(nn.Module):
    """Takes its parameter and its buffer from a dict and a list of its own, as cells of liquid networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(8, 8), nn.Parameter(torch.randn(8))
        self.register_buffer("mean", torch.zeros(8))
        self.weights, self.statistics = {"scale": self.scale, "inner": self.inner.weight}, [self.mean]

    def forward(self, x: Tensor) -> Tensor:
        h = functional.linear(x, self.weights["inner"]) * torch.stack([self.weights["scale"], self.scale]).sum(0)
        self.statistics[0].mul_(0.9).add_(h.detach().mean((0, 1)), alpha=0.1)
        return x + h - self.mean


@pytest.mark.parametrize("layers", [1, 7])
def test_parameters_may_be_taken_from_elsewhere(layers: int, draw: Any) -> None:
    torch.manual_seed(0)
    gates = [Gate().double() for _ in range(layers)]
    for gate in gates:
        gate.statistics = [gate.mean]  # a conversion gives modules other buffers
    model = Model(nn.Sequential(*gates), nn.MSELoss(), (torch.randn(8, 4, 8), torch.randn(8, 4, 8)))
    assert not model.graph.of_kind("constant")
    assert model.worst(draw, seeds=2) < TOLERANCE


class Copied(nn.Module):
    """Keeps the memory of a trained parameter, or that of a buffer that it writes or replaces."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.kept = [{"trained": self.inner.weight.data[:1], "written": self.mean[None]}.get(kind, self.mean)]

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        if self.kind == "written":
            self.mean.copy_(h.detach().mean(0))
        elif self.kind != "trained":
            self.mean = h.detach().mean(0)
        return (h + self.kept[0]).square().mean()


@pytest.mark.parametrize(("kind", "name"), [("trained", "inner.weight"), ("written", "mean"), ("replaced", "mean")])
def test_memory_that_changes_is_no_constant(kind: str, name: str) -> None:
    with pytest.raises(StrategyError, match=name) as refused:
        capture(Objective(Copied(kind), None, ("x",), ()), (torch.randn(4, 8),), training=True)
    assert refused.value.code == "MW901"


class Tries(nn.Module):
    """Gives layers what some of them do not take."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Bilinear(8, 8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            try:
                x = layer(x, x)
            except TypeError:
                x = layer(x)
        return x


def test_a_forward_goes_on_after_an_error_of_a_child(draw: Any) -> None:
    torch.manual_seed(0)
    model = Model(Tries(), nn.MSELoss(), (torch.randn(8, 8), torch.randn(8, 8)))
    assert [operator.module for operator in model.graph.operators][:3] == ["layers.0", "layers.1", "layers.2"]
    assert model.worst(draw, 4) < TOLERANCE
