"""Models that pack padded sequences around recurrent networks, on random slicings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from runner.training.reference import ExactRandom
from strategies.capture import Captured, Objective, capture
from strategies.core.errors import StrategyError
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.core.program import LoweringOptions
from strategies.lowering.lowering import lower
from strategies.rules.compared import without_a_batch
from strategies.rules.packed_sequences import NAME, packed_block
from strategies.runtime.simulate import Simulation
from tests.strategies.simulated_model import TOLERANCE, Model

COVERS = "meshwright::packed_network"
MESH = Mesh((("a", 2), ("b", 3)))


class Sequences(nn.Module):
    """Sequences [8, 5, 6] and their lengths [8], through `layer`, by `use`."""

    def __init__(self, layer: nn.Module, use: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.layer, self.use = nn.Linear(6, 6), layer, use
        self.start = nn.Parameter(torch.randn(4, 1, 3))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.use(self, self.inner(x), lengths).square().mean()


def classified(net: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """By an array of lengths."""
    _, (h, c) = net.layer(pack_padded_sequence(x, lengths.cpu().numpy(), batch_first=True, enforce_sorted=False))
    return torch.cat((h, c))


def tagged(net: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """Time first, sorted, from a state of its own, to a longer tensor."""
    lengths, order = lengths.sort(descending=True)
    packed = pack_padded_sequence(x[order].transpose(0, 1), lengths)
    output, h = net.layer(packed, net.start.expand(-1, len(x), -1).contiguous())
    padded, ends = pad_packed_sequence(output, batch_first=True, padding_value=0.5, total_length=7)
    return padded * ends[:, None, None] + h.sum(0)[:, None].repeat(1, 1, 2)


def twice(net: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """A sequence packed, padded and packed again; with the length of the input."""
    x, _ = pad_packed_sequence(pack_padded_sequence(x, lengths, True, False), total_length=x.size(1))
    output, _ = net.layer(pack_padded_sequence(x, lengths, enforce_sorted=False))
    output, _ = net.layer(output)
    return pad_packed_sequence(output, batch_first=True, total_length=x.size(0))[0]


def of_known_lengths(net: Any, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_sequence([x[:, 0], x[:5, 1], x[:4, 2]])
    padded, _ = pad_packed_sequence(net.layer(packed)[0])
    assert padded.shape == (8, 3, 3)
    return padded


def looked_into(net: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """Elements of packed sequences: of scores and targets, of which one is longer, and packed again, sorted and not."""
    longer = torch.cat([x[:, :1], x], 1)
    packed = pack_padded_sequence(longer, lengths.tolist(), batch_first=True, enforce_sorted=False)
    data, sizes, *order = packed
    other = PackedSequence(data.tanh() * 2, sizes, *order)
    output, h = net.layer(other._replace(data=other.data + packed.data))
    target = pack_padded_sequence(x, lengths.tolist(), True, enforce_sorted=False).data
    padded, _ = pad_packed_sequence(output, batch_first=True, total_length=6)
    return (output.data[:, :3] - target[:, 3:]).square().mean() + h.mean() + padded.sin().mean()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor, Tensor], Tensor]]] = {
    "lstm": (lambda: nn.LSTM(6, 3, 2, bidirectional=True, batch_first=True), classified),
    "gru": (lambda: nn.GRU(6, 3, 2, bidirectional=True), tagged),
    "projected": (lambda: nn.LSTM(6, 7, 2, proj_size=6, bias=False), twice),
    "elements": (lambda: nn.GRU(6, 3, bidirectional=True, batch_first=True), looked_into),
    "tanh": (lambda: nn.RNN(6, 3), of_known_lengths),
}


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(8, 5, 6, dtype=torch.float64), "lengths": torch.tensor([2, 4, 1, 3, 3, 2, 4, 1])}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CASES)
def test_a_model(name: str, draw: Any) -> None:
    torch.manual_seed(0)
    layer, use = CASES[name]
    model = Model(Sequences(layer(), use), None, batch())
    assert sum(one.op == NAME for one in model.graph.operators) >= 1
    assert model.worst(draw, seeds=2) < TOLERANCE


def captured(net: nn.Module) -> Captured:
    return capture(Objective(net, None, ("x", "lengths"), ()), tuple(batch().values()), training=True)


@pytest.mark.parametrize(
    "layer", [nn.LSTM(6, 3, 3, dropout=0.4, bidirectional=True), nn.LSTM(6, 3, 2)], ids=["dropping", "padded rows"]
)
def test_rows_are_those_of_one_device(layer: nn.LSTM) -> None:
    """Between layers drops out what drops out of the global batch, and rows beyond its end change nothing."""
    torch.manual_seed(0)
    net, axes = Sequences(layer, classified).double(), ("a",) if layer.dropout else ("b",)
    model, given = captured(net), batch()
    with ExactRandom(7) as reference:
        loss = net(**given)
    assert reference.ordinal == (layer.dropout > 0)
    loss.backward()
    sliced = {one.name: {"n": axes} if one.op == NAME else {} for one in model.graph.operators}
    layouts = {source.name: Layout.replicated(len(source.spec.shape)) for source in model.graph.sources}
    inputs = {source.name: layouts.pop(source.name) for source in model.graph.of_kind("input")}
    plan = Plan(MESH, {name: OperatorPlan(one, "configured") for name, one in sliced.items()}, inputs, layouts)
    simulation = Simulation(lower(model.graph, plan, LoweringOptions(exact=True)), {**model.tensors, **given})
    (losses,) = simulation.run(7)
    simulation.backward(losses)
    torch.testing.assert_close(losses[0], loss)
    found = simulation.gradients()
    for name, parameter in net.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad)


def longest(net: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return pad_packed_sequence(net.layer(pack_padded_sequence(x, lengths, True, False))[0], True)[0]


def shorter(net: Any, x: Tensor, lengths: Tensor) -> Tensor:
    packed = net.layer(pack_padded_sequence(x, lengths, True, False))[0]
    return pad_packed_sequence(packed, True, total_length=x.size(1) - 1)[0]


def looking(net: Any, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(x, lengths, True, False)
    return net.layer(packed._replace(data=packed.data.cumsum(0)))[1]


def ordered(net: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return net.layer(pack_padded_sequence(x, lengths, True, False))[1] * len(
        pack_padded_sequence(x, lengths).batch_sizes
    )


@pytest.mark.parametrize("use", [longest, shorter, looking, ordered], ids=lambda one: one.__name__)
def test_refused(use: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    code = pack_padded_sequence.__code__, pad_packed_sequence.__code__, nn.GRU.forward
    with pytest.raises(StrategyError, match="total_length=") as caught:
        captured(Sequences(nn.GRU(6, 3), use).double())
    assert caught.value.code == "MW906" and "test_packed_sequences.py:" in str(caught.value)
    assert (pack_padded_sequence.__code__, pad_packed_sequence.__code__, nn.GRU.forward) == code


def test_a_step_without_a_batch() -> None:
    """Memory is traced on zeros where shapes do not do; lengths are then those of complete rows."""
    network = nn.GRU(6, 3, batch_first=True)
    given = torch.zeros(4, 5, 6), torch.zeros(4, dtype=torch.int64), (torch.zeros(1, 4, 3),), network._flat_weights
    options = "gru", True, 1, 0.0, False, True, False
    with without_a_batch():
        output, _ = packed_block(*given, *options)
    assert output.shape == (4, 5, 3)
    with pytest.raises(RuntimeError, match="greater than 0"):
        packed_block(*given, *options)
