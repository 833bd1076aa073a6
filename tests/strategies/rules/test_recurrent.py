"""Recurrent networks and cells with the batch sliced: layers, directions, projections, states, dropout in between."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from runner.training.reference import ExactRandom
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.core.program import LoweringOptions
from strategies.lowering.lowering import lower
from strategies.rules import rule_of
from strategies.runtime.simulate import Simulation

torch.manual_seed(1)


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


def network(kind, given, *states, **options):
    """A case: torch's module with its own weights as further operands."""
    net = kind(given.shape[-1], 3, **options).double()
    names = [name for name, _ in net.named_parameters()]

    def call(given, *rest):
        hidden, weights = rest[: len(states)], rest[len(states) :]
        state = hidden[0] if len(hidden) == 1 else hidden or None
        out, last = torch.func.functional_call(net, dict(zip(names, weights, strict=True)), (given, state))
        return out, *(last if isinstance(last, tuple) else (last,))

    return call, given, *states, *(p.detach() for p in net.parameters())


def cell(kind, *operands):
    net = kind(4, 3).double()
    names = [name for name, _ in net.named_parameters()]

    def call(given, *rest):
        hidden = rest[: len(operands) - 1]
        weights = dict(zip(names, rest[len(operands) - 1 :], strict=True))
        out = torch.func.functional_call(net, weights, (given, hidden[0] if len(hidden) == 1 else hidden))
        return out if isinstance(out, tuple) else (out,)

    return call, *operands, *(p.detach() for p in net.parameters())


COVERS = "gru gru_cell lstm lstm_cell rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell"
CASES = [
    ("lstm", *network(nn.LSTM, x(5, 6, 4))),
    (
        "lstm, batch first",
        *network(nn.LSTM, x(12, 3, 4), x(4, 12, 3), x(4, 12, 3), batch_first=True, num_layers=2, bidirectional=True),
    ),
    ("lstm, projected", *network(nn.LSTM, x(3, 6, 4), proj_size=2, num_layers=2, bias=False)),
    ("lstm, unbatched", *network(nn.LSTM, x(3, 4))),
    ("gru", *network(nn.GRU, x(3, 6, 4), x(2, 6, 3), num_layers=2)),
    ("gru, both directions", *network(nn.GRU, x(6, 3, 4), bidirectional=True, batch_first=True, bias=False)),
    ("tanh", *network(nn.RNN, x(3, 12, 4), x(1, 12, 3))),
    ("relu", *network(nn.RNN, x(3, 6, 4), nonlinearity="relu", num_layers=2)),
    ("lstm cell", *cell(nn.LSTMCell, x(12, 4), x(12, 3), x(12, 3))),
    ("gru cell", *cell(nn.GRUCell, x(6, 4), x(6, 3))),
    ("tanh cell", *cell(nn.RNNCell, x(6, 4), x(6, 3))),
    ("relu cell", *cell(lambda i, h: nn.RNNCell(i, h, nonlinearity="relu"), x(6, 4), x(6, 3))),
    ("uneven", *network(nn.LSTM, x(3, 7, 4), num_layers=2)),
    ("uneven cell", *cell(nn.GRUCell, x(5, 4), x(5, 3))),
]
DROPPING = [
    ("lstm", *network(nn.LSTM, x(5, 12, 4), num_layers=3, dropout=0.4)),
    (
        "lstm, batch first",
        *network(nn.LSTM, x(12, 3, 4), batch_first=True, num_layers=2, bidirectional=True, dropout=0.3),
    ),
    ("gru", *network(nn.GRU, x(3, 12, 4), x(2, 12, 3), num_layers=2, dropout=0.5)),
    ("tanh", *network(nn.RNN, x(3, 12, 4), num_layers=2, dropout=0.5)),
    ("relu", *network(nn.RNN, x(3, 12, 4), num_layers=2, dropout=1.0, nonlinearity="relu")),
]
KEY = 31
MESH = Mesh((("a", 2), ("b", 3)))


@pytest.mark.few(1)
def test_recurrent(cases, check, mesh):
    check(cases, mesh, samples=1)


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases)


def test_packed_sequences_are_not_covered(cases):
    """Their rows are concatenated in one dim."""
    graph = cases.captured.graph
    gru = next(operator for operator in graph.operators if operator.op == "gru")
    packed = replace(gru, target="aten.gru.data")
    assert rule_of(gru, graph).known
    assert not rule_of(packed, graph).known


@pytest.fixture(scope="module")
def dropping(capture_cases):
    return capture_cases(DROPPING)


def run(cases, axes, *, exact):
    """Every rank's results (without the loss), and the gradients, with the batch of every network sliced by `axes`."""
    graph = cases.captured.graph
    sliced = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
    operators = {o.name: OperatorPlan({"n": axes} if o.op in sliced else {}, "configured") for o in graph.operators}
    tensors = {source.name: Layout.replicated(len(source.spec.shape)) for source in graph.sources}
    simulation = Simulation(
        lower(graph, Plan(MESH, operators, {}, tensors), LoweringOptions(exact=exact)), cases.captured.tensors
    )
    losses, *results = simulation.run(KEY)
    simulation.backward(losses)
    return results, simulation.gradients()


@pytest.mark.parametrize("axes", [(), ("a",), ("b", "a")])
def test_exact_dropout_repeats_the_numbers_of_one_device(dropping, axes):
    with ExactRandom(KEY) as reference:
        loss, *want = dropping.suite()
    assert reference.ordinal == len(DROPPING)
    parameters = {name: p for name, p in dropping.suite.named_parameters() if p.requires_grad}
    gradients = dict(zip(parameters, torch.autograd.grad(loss, parameters.values()), strict=True))
    results, found = run(dropping, axes, exact=True)
    for ranks, expected in zip(results, want, strict=True):
        for got in ranks:
            torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-10)


def test_open_layers_are_torchs(capture_cases):
    """With almost no dropout, the definition equals torch's network."""
    case = network(nn.LSTM, x(3, 12, 4), num_layers=3, dropout=1e-12, bidirectional=True)
    cases = capture_cases([("lstm", *case)])
    results, _ = run(cases, ("a",), exact=True)
    _, *want = cases.suite()
    for ranks, expected in zip(results, want, strict=True):
        torch.testing.assert_close(ranks[0], expected, rtol=1e-9, atol=1e-9)


def test_fast_dropout_draws_per_slice(capture_cases):
    """Rows with the same input differ from slice to slice by their dropout masks; replicas and repeats agree."""
    equal_rows = x(3, 1, 4).expand(3, 12, 4)
    cases = capture_cases([("gru", *network(nn.GRU, equal_rows, num_layers=2, dropout=0.5))])
    (out, _), _ = run(cases, ("b",), exact=False)
    (again, _), _ = run(cases, ("b",), exact=False)
    assert all(torch.equal(got, out[0]) for got in [*out, *again])
    first, second, third = out[0].chunk(3, 1)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
