"""Fused redistributions: the same results but for the order of sums, on simulated and on real ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import Plan
from strategies.core.program import Fused, LoweringOptions
from strategies.lowering import ir
from strategies.lowering.fusion import KINDS, fuse
from strategies.lowering.lowering import lower
from strategies.runtime import initial_weights as weights
from tests.ranks import start_ranks
from tests.strategies.compiled_entries import Case as CompiledCase
from tests.strategies.on_ranks import Case, Result
from tests.strategies.simulated_model import MESH, Model

EVERYTHING = dict.fromkeys(KINDS, 2**20)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2), -1)
        return x + weights @ self.v(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).flatten(0, 1)


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model(Net(), nn.CrossEntropyLoss(), (torch.randn(4, 8, 8), torch.randint(0, 5, (32,))))


@pytest.mark.slow
def test_joined_is_equal_to_apart(model: Model, draw: Any) -> None:
    joined = 0
    for seed in range(40):
        mesh = MESH if seed % 2 else Mesh((("a", 2), ("b", 2), ("c", 2)))
        plan = model.random_plan(draw, seed, mesh)
        apart = lower(model.graph, plan, LoweringOptions(sharded_optimizer=seed % 4 > 1))
        together = fuse(apart, EVERYTHING)
        joined += sum(isinstance(one, Fused) for one in together.instructions)
        for a, b in zip(model.simulated(apart), model.simulated(together), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)
        assert together.calls.total() <= apart.calls.total()
        assert sorted(map(_step_bytes, together.redistributions)) == sorted(map(_step_bytes, apart.redistributions))
    assert joined > 20


def _step_bytes(one: Any) -> tuple[str, ...]:
    return (one.operator, *(f"{step} {step.before} {step.after}" for step in (*one.forward, *one.backward)))


def test_padded_slices_are_joined(draw: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)))
    model = Model(net, nn.MSELoss(), (torch.randn(4, 7), torch.randn(4, 3)))
    joined = 0
    for seed in range(30):
        plan = model.random_plan(draw, seed)
        sources = [source for source in model.graph.sources if source.name in plan.tensors]
        layouts = {
            source.name: draw(seed + place).layout(source.spec.shape, MESH, padded=True)
            for place, source in enumerate(sources)
        }
        apart = lower(model.graph, replace(plan, tensors=layouts))
        together = fuse(apart, EVERYTHING)
        joined += sum(isinstance(one, Fused) for one in together.instructions)
        for a, b in zip(model.simulated(apart), model.simulated(together), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)
    assert joined > 5


def sliced_weights(model: Model, mesh: Mesh = MESH) -> Plan:
    """Data parallel, but every parameter sliced over all ranks: each use gathers, each gradient is scattered."""
    plan = model.random_plan(_Nothing, 0, mesh)
    tensors = {
        source.name: Layout((mesh.names, *((),) * (len(source.spec.shape) - 1)))
        for source in model.graph.of_kind("parameter")
        if source.spec.shape[0] % mesh.size == 0
    }
    return replace(plan, tensors=plan.tensors | tensors)


class _Nothing:
    """Draws complete tensors and no slices."""

    def __init__(self, seed: int) -> None:
        self.rng = self

    def random(self) -> float:
        return 1.0

    def assignment(self, sharding: Any, mesh: Mesh) -> dict[str, tuple[str, ...]]:
        return {}

    def layout(self, shape: Any, mesh: Mesh) -> Layout:
        return Layout.replicated(len(shape))


def test_gathers_of_siblings_are_one_call(model: Model) -> None:
    apart = lower(model.graph, sliced_weights(model))
    together = fuse(apart, EVERYTHING)
    assert apart.calls["all_gather"] == 12 and together.calls["all_gather"] == 3  # two layers and the norm
    (first, *_) = (one for one in together.instructions if isinstance(one, Fused))
    assert [part.path for part in first.parts] == [("layers.0", "q")] * 2 + [("layers.0", "k")] * 2 + [
        ("layers.0", "v")
    ]
    assert first.path == ("layers.0",)
    text = ir.end(model.graph, sliced_weights(model), together, 0)
    assert f"# 5 redistributions by the same calls, %{first.id}" in text


def test_no_call_carries_more_than_allowed(model: Model) -> None:
    apart = lower(model.graph, sliced_weights(model))
    matrix = 8 * 8 * 8 // 4
    assert fuse(apart, EVERYTHING | {"all_gather": 2 * matrix}).calls["all_gather"] == 7
    assert fuse(apart, {"all_reduce": 2**20}) == apart  # collectives that are not listed stay
    assert fuse(apart, EVERYTHING | {"all_gather": 0}) == apart


def test_real_ranks_do_the_same(model: Model, draw: Any, tmp_path: Any) -> None:
    file = tmp_path / "initial.pt"
    weights.write(file, {name: model.values[name] for name in model.captured.tensors})
    batch = dict(zip("01", model.batch, strict=True))
    plans = [model.random_plan(draw, seed) for seed in range(4)] + [sliced_weights(model)]
    cases = [Case(model.graph, plan, file, batch, sizes) for plan in plans for sizes in ({}, EVERYTHING)]
    entry = "tests.strategies.on_ranks:steps"
    found: list[Result] = start_ranks(entry, cases, 4, tmp_path)
    for plan, apart, together in zip(plans, found[::2], found[1::2], strict=True):
        assert together.sent == together.predicted == apart.sent
        assert together.names == apart.names
        program = fuse(lower(model.graph, plan, LoweringOptions(partial_loss=True)), EVERYTHING)
        assert together.calls == dict(program.calls)
        assert abs(together.loss - apart.loss) < 1e-12
        for name, gradient in together.gradients.items():
            torch.testing.assert_close(gradient, apart.gradients[name], rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(gradient, model.gradients[name], rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_compiled_programs_do_the_same(model: Model, draw: Any, tmp_path: Any) -> None:
    file = tmp_path / "initial.pt"
    weights.write(file, {name: model.values[name] for name in model.captured.tensors})
    mesh = Mesh((("a", 2),))
    case = CompiledCase(
        model.graph, sliced_weights(model, mesh), file, dict(zip("01", model.batch, strict=True)), EVERYTHING
    )
    entry = "tests.strategies.compiled_entries:compare"
    found = start_ranks(entry, ([case], ["plain", "units"]), 2, tmp_path)
    for (ran,) in found:
        assert ran["units"].losses == ran["plain"].losses and ran["units"].breaks == []
        for name, gradient in ran["plain"].gradients[0].items():
            assert torch.equal(ran["units"].gradients[0][name], gradient)
