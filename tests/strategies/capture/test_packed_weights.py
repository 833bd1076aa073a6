"""Fused weights are sliced section by section: found in every form, exact under random plans, and no other dim is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from strategies.capture import Objective, capture
from strategies.capture.packed_weights import sections_of
from strategies.core.graph import FusedSections
from strategies.core.layout import Stripes, stored
from strategies.core.mesh import Mesh
from strategies.core.request import OperatorStrategy, Request
from strategies.core.steps import LOCAL
from strategies.lowering.lowering import lower
from strategies.planner.planner import follow, make_plan
from strategies.runtime.simulate import Simulation
from tests.strategies.simulated_model import TOLERANCE, Model

WIDTH, SIZE = 8, 12
TAKEN = {
    "chunk": lambda y: y.chunk(3, -1),
    "split": lambda y: y.split(SIZE, -1),
    "unequal": lambda y: _repeated(y.split([SIZE, SIZE // 2, SIZE // 2], -1)),
    "slices": lambda y: [y[..., at : at + SIZE] for at in range(0, 3 * SIZE, SIZE)],
    "narrow": lambda y: [y.narrow(-1, at, SIZE) for at in range(0, 3 * SIZE, SIZE)],
    "unbind": lambda y: y.view(*y.shape[:-1], 3, SIZE).unbind(-2),
    "heads": lambda y: _heads(y.view(*y.shape[:-1], 3, 2, SIZE // 2).permute(2, 0, 3, 1, 4)),
    "glu": lambda y: [functional.glu(y, -1)] * 3,
}
"""What takes a fused projection apart into three of `SIZE`."""
MESHES = [Mesh(axes) for axes in ((("a", 2), ("b", 2)), (("a", 2), ("b", 3)), (("a", 4),))]


def _repeated(parts: Sequence[Tensor]) -> list[Tensor]:
    return [parts[0], *(torch.cat([one, one], -1) for one in parts[1:])]


def _heads(parts: Tensor) -> list[Tensor]:
    return [parts[number].transpose(1, 2).flatten(-2) for number in range(3)]


class Fused(nn.Module):
    def __init__(self, kind: str, layer: str) -> None:
        super().__init__()
        size = {"glu": 2 * SIZE, "unequal": 2 * SIZE}.get(kind, 3 * SIZE)
        self.kind, self.layer = kind, layer
        self.proj: nn.Module = Conv1D(size, WIDTH) if layer == "conv1d" else nn.Linear(WIDTH, size, layer != "plain")
        self.scale = nn.Parameter(torch.rand(size) + 0.5)
        self.out = nn.Linear(SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.layer == "weights":  # taken apart before they are used
            pairs = zip(self.proj.weight.chunk(3), self.proj.bias.chunk(3), strict=True)
            parts: Any = [functional.linear(x, weight, bias) for weight, bias in pairs]
        else:
            parts = TAKEN[self.kind](functional.gelu(self.proj(x)) * self.scale)
        return self.out(parts[0] * parts[1].sigmoid() + parts[2].tanh())


def model(kind: str, layer: str = "linear") -> Model:
    torch.manual_seed(0)
    return Model(Fused(kind, layer), nn.MSELoss(), (torch.randn(12, 4, WIDTH), torch.randn(12, 4, WIDTH)))


CASES = [*((kind, "linear") for kind in TAKEN), ("chunk", "conv1d"), ("split", "plain"), ("chunk", "weights")]


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "layer"), CASES)
def test_fused_weights_are_packed_and_exact(kind: str, layer: str, draw: Any) -> None:
    made = model(kind, layer)
    marks = sections_of(made.graph)
    assert {"proj.weight"} <= marks.keys() <= {"proj.weight", "proj.bias", "scale"}
    sizes = {"glu": (SIZE, SIZE), "unequal": (SIZE, SIZE // 2, SIZE // 2)}.get(kind, (SIZE,) * 3)
    assert marks["proj.weight"] == FusedSections(1 if layer == "conv1d" else 0, sizes)
    striped = 0
    for seed in range(6):
        plan = made.random_plan(draw, seed, MESHES[seed % 3])
        assert made.difference(plan) < TOLERANCE
        parameters = made.graph.of_kind("parameter")
        striped += sum(isinstance(stored(plan.tensors[p.name], p.spec, plan.mesh), Stripes) for p in parameters)
    assert striped


class Plain(nn.Module):
    """No packed weights: heads, parts of a table, halves of a head, a residual beside the sections."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.fused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.table = nn.Parameter(torch.randn(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query(x + self.table[: x.shape[1]]).view(*x.shape[:-1], 2, WIDTH // 2).transpose(1, 2)
        first, second = heads.chunk(2, -1)
        turned = torch.cat([-second, first], -1).transpose(1, 2).flatten(-2)
        both = self.fused(turned)
        one, other = both.chunk(2, -1)
        return one * other + both.cumsum(-1)[..., :WIDTH]


def test_other_dims_are_not_packed() -> None:
    made = Model(Plain(), nn.MSELoss(), (torch.randn(4, 4, WIDTH), torch.randn(4, 4, WIDTH)))
    assert sections_of(made.graph) == {}


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, 12)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.proj(x).chunk(2, -1)
        return gate.sigmoid() * up


class Shown(Fused):
    """Returns its projection, in one piece, when it is evaluated."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else self.proj(x)


@pytest.mark.parametrize("kind", ["chunk", "unequal"])
def test_a_graph_that_takes_nothing_apart_reads_the_stripes_of_another(kind: str, draw: Any) -> None:
    net = Shown(kind, "linear").double()
    x = torch.randn(12, 4, WIDTH).double()
    made = Model(net, nn.MSELoss(), (x, torch.randn(12, 4, WIDTH)))
    seen = capture(Objective(net, None, ("0",), ()), (x,), training=False, like=made.graph)
    marks = sections_of(made.graph)
    assert marks and {name: marks[name] for name in sections_of(seen.graph)} == sections_of(seen.graph)
    for seed in range(4):
        plan = follow(made.random_plan(draw, seed, MESHES[seed % 3]), seen.graph)
        (outputs,) = Simulation(lower(seen.graph, plan), seen.tensors | {"0": x}).run()
        torch.testing.assert_close(outputs[0], net.eval()(x), rtol=TOLERANCE, atol=TOLERANCE)


def test_slices_that_do_not_divide_sections_are_blocks() -> None:
    """Two sections of 6 in 4 slices, which a user asks for: as without sections, so taking them apart gathers."""
    torch.manual_seed(0)
    net = Halves()
    made = Model(net, nn.MSELoss(), (torch.randn(8, WIDTH), torch.randn(8, 6)))
    assert sections_of(made.graph)["proj.weight"] == FusedSections(0, (6, 6))
    for count in (2, 4):
        wanted = OperatorStrategy(((1, 1), (count, 1), (count,)), None)
        request = Request("auto", count, strategies={"proj": wanted}, dataset_strategy="full_batch")
        plan = make_plan(made.graph, request)
        program = lower(made.graph, plan)
        blocks = [block for block, _ in program.layouts[made.graph.sources[0].id].blocks((12, WIDTH), plan.mesh, 1)]
        assert [rows for rows, _ in blocks] == ([(3, 6), (9, 12)] if count == 2 else [(3, 6)])
        sent = [one.operator for one in program.redistributions if any(step.kind not in LOCAL for step in one.forward)]
        assert ("chunk" in sent) == (count == 4)
        assert made.difference(plan) < TOLERANCE


def test_what_is_not_to_be_packed_is_sliced_in_blocks() -> None:
    net, x = Fused("chunk", "linear"), torch.randn(12, 4, WIDTH)
    for sections in ({}, {"proj.weight": FusedSections(0, (SIZE,) * 3)}):  # the bias and the scale share its dim
        step = Objective(net, nn.MSELoss(), ("0", "1"), ("1",), sections=sections)
        assert sections_of(capture(step, (x, x), training=True).graph) == sections


def test_defaults_keep_the_slices_of_what_they_take_apart() -> None:
    net = Halves()
    made = Model(net, nn.MSELoss(), (torch.randn(8, WIDTH), torch.randn(8, 6)))
    wanted = OperatorStrategy(((1, 1), (2, 1), (2,)), None)
    plan = make_plan(made.graph, Request("semi_auto", 2, strategies={"proj": wanted}))
    assert plan.operators["chunk"].assignment.keys() == {"d1"}
    sent = [one.operator for one in lower(made.graph, plan).redistributions if one.forward]
    assert "chunk" not in sent and made.difference(plan) < TOLERANCE
