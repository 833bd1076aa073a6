"""Ring attention against eager attention, forward and all gradients, on simulated ranks; what ranks compute, store and
send."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.gpt import GPT
from models.losses import NextTokenLoss
from runner.training.reference import ExactRandom
from strategies.capture.model import Captured, LossFunction, Objective, capture
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.core.program import Cooperate, LoweringOptions, Program
from strategies.core.request import OperatorStrategy, Request
from strategies.core.steps import MIRROR, ROTATE
from strategies.cost.cluster import Cluster, Level, Link
from strategies.cost.exposed_communication import cooperation_stages
from strategies.lowering.lowering import lower
from strategies.memory.trace import trace
from strategies.optimizer.settings import OptimizerSettings
from strategies.planner.planner import make_plan
from strategies.rules import ring_attention
from strategies.runtime.simulate import Simulation
from tests.strategies.memory.test_memory import adamw

KEY = 5
Assignment = dict[str, tuple[str, ...]]


class Attend(nn.Module):
    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: object) -> None:
        super().__init__()
        self.q, self.k, self.v = map(nn.Parameter, (q, k, v))
        self.options = options
        if mask is not None and mask.is_floating_point():
            mask = nn.Parameter(mask)
        self.mask = mask if mask is None or isinstance(mask, nn.Parameter) else nn.Buffer(mask)

    def forward(self, weights: Tensor) -> Tensor:
        seen = F.scaled_dot_product_attention(self.q, self.k, self.v, self.mask, **self.options)
        return (seen * weights).sum()


def x(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def program_of(
    model: Attend, mesh: Mesh, assignment: Assignment, exact: bool = True
) -> tuple[Program, Captured, Tensor]:
    weights = x(*model.q.shape[:-1], model.v.shape[-1])
    found = capture(Objective(model, None, ("weights",), ()), [weights], training=True)
    graph = found.graph
    operators = {
        one.name: OperatorPlan(assignment if one.op == "scaled_dot_product_attention" else {}, "configured")
        for one in graph.operators
    }
    layouts = {source.name: Layout.replicated(len(source.spec.shape)) for source in graph.sources}
    program = lower(graph, Plan(mesh, operators, layouts, layouts), LoweringOptions(exact=exact, ring=True))
    assert any(isinstance(one, Cooperate) for one in program.instructions)
    return program, found, weights


def compare(model: Attend, mesh: Mesh, assignment: Assignment) -> None:
    """Loss and every gradient with those of one device."""
    program, found, weights = program_of(model, mesh, assignment)
    simulation = Simulation(program, {**found.tensors, "weights": weights})
    (losses,) = simulation.run(KEY)
    simulation.backward(losses)
    with ExactRandom(KEY):
        want = model(weights)
    want.backward()
    for loss in losses:
        torch.testing.assert_close(loss, want, rtol=1e-10, atol=1e-10)
    gradients = simulation.gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-10)


def packed(rows: int, length: int, documents: int) -> Tensor:
    """Which positions each one sees, where every row holds several documents: those before it in its own."""
    ends = torch.stack([torch.randperm(length - 1)[: documents - 1].sort().values for _ in range(rows)])
    number = (torch.arange(length)[None, :, None] > ends[:, None, :]).sum(-1)
    return (number[:, None, :, None] == number[:, None, None, :]).tril()


def random_case(seed: int) -> tuple[Attend, Mesh, Assignment]:
    """A random attention, and slices of its sequence over 2 to 8 ranks."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    count = draw.choice([2, 3, 4, 8])
    length, grouped, width = count * draw.choice([1, 2, 3, 4]), draw.random() < 0.4, draw.choice([4, 8])
    heads, out = draw.choice([1, 2, 4]) if grouped else 4, draw.choice([width, 6])
    options: dict[str, object] = {"enable_gqa": True} if grouped else {}
    mask, form = None, draw.choice(["none", "causal", "causal", "boolean", "bias", "packed"])
    if form == "causal":
        options["is_causal"] = True
    elif form == "packed":
        mask = packed(2, length, min(3, length))
    elif form != "none":
        shapes = [(2, 4, length, length), (2, 1, length, length), (length, length), (2, 1, 1, length), (length, 1)]
        mask = x(*draw.choice(shapes))
        mask = mask > -0.3 if form == "boolean" else mask
    options |= {"dropout_p": 0.3} if draw.random() < 0.4 else {}
    options |= {"scale": 0.7} if draw.random() < 0.4 else {}
    mesh, assignment = Mesh((("b", count),)), {"s": ("b",)}
    if draw.random() < 0.5:
        mesh = Mesh((("a", 2), ("b", count)))
        assignment[draw.choice(["b0", "e", *(["h"] if heads != 1 else [])])] = ("a",)
    elif count == 8:
        mesh, assignment = Mesh((("b", 2), ("a", 2), ("c", 4))), {"s": draw.choice([("b", "c"), ("c", "b")])}
    model = Attend(x(2, 4, length, width), x(2, heads, length, width), x(2, heads, length, out), mask, **options)
    return model, mesh, assignment


@pytest.mark.few(5)
@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40, 400))])
def test_equals_one_device(seed):
    compare(*random_case(seed))


@pytest.mark.parametrize("options", [{"is_causal": True, "dropout_p": 0.3}, {"dropout_p": 0.3, "enable_gqa": True}])
def test_tiles_of_one_row_equal_one_device(monkeypatch, options):
    monkeypatch.setattr(ring_attention, "SCORES", 1)
    torch.manual_seed(1)
    heads = 2 if "enable_gqa" in options else 4
    model = Attend(x(2, 4, 8, 4), x(2, heads, 8, 4), x(2, heads, 8, 4), **options)
    compare(model, Mesh((("a", 4),)), {"s": ("a",)})


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_packed_documents_whose_queries_and_heads_are_sliced(dropout):
    torch.manual_seed(3)
    model = Attend(x(2, 4, 24, 4), x(2, 2, 24, 4), x(2, 2, 24, 4), packed(2, 24, 4), enable_gqa=True, dropout_p=dropout)
    compare(model, Mesh((("a", 4), ("b", 2))), {"s": ("a",), "h": ("b",)})


class Packed(nn.Module):
    """Attention inside of the documents of a row, by the number of each token's document [b, s]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.tokens, self.out = heads, nn.Embedding(32, width), nn.Linear(width, 32)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        x, places = self.tokens(tokens), torch.arange(tokens.shape[1])
        same = documents[:, None, :, None] == documents[:, None, None, :]
        seen = same & (places[:, None] >= places[None, :])
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, seen, dropout_p=0.2)
        return x + self.out(attended.transpose(1, 2).flatten(2)) @ self.out.weight


def test_a_model_of_packed_documents_with_sliced_tokens_and_documents():
    """The mask is made by the model, of slices: its queries are sliced with the tokens, its keys are those of all."""
    torch.manual_seed(4)
    model = Packed(16, 2).double()
    tokens, targets = (torch.randint(32, (2, 16)) for _ in range(2))
    documents = torch.randint(2, (2, 16)).cumsum(1)
    loss = LossFunction(lambda x, y: F.cross_entropy(model.out(x).transpose(1, 2), y), {})
    objective = Objective(model, loss, ("0", "1", "2"), ("2",))
    found = capture(objective, (tokens, documents, targets), training=True)
    along, rows = (1, 1, 4, 1), (1, 4)
    strategies = {"scaled_dot_product_attention": OperatorStrategy((along, along, along, along), None)}
    request = Request("auto", 4, "sharding_propagation", (("cp", 4),), strategies, dataset_strategy=(rows,) * 3)
    program = lower(found.graph, make_plan(found.graph, request), LoweringOptions(exact=True, ring=True))
    mask = next(one for one in program.instructions if isinstance(one, Cooperate)).args[3]
    assert program.mesh.size == 4 and mask is not None
    simulation = Simulation(program, {**found.tensors, "0": tokens, "1": documents, "2": targets})
    (losses,) = simulation.run(KEY)
    simulation.backward(losses)
    with ExactRandom(KEY):
        want = objective(tokens, documents, targets)
    want.backward()
    torch.testing.assert_close(losses[0], want, rtol=1e-10, atol=1e-10)
    gradients = simulation.gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-10)


def test_fast_dropout_has_the_gradient_of_its_forward():
    """Forward and backward drop the same probabilities: the loss changes as its gradient says."""
    torch.manual_seed(2)
    model = Attend(x(2, 2, 8, 4), x(2, 2, 8, 4), x(2, 2, 8, 4), is_causal=True, dropout_p=0.4)
    program, found, weights = program_of(model, Mesh((("a", 4),)), {"s": ("a",)}, exact=False)

    def loss(moved: dict[str, Tensor]) -> tuple[Tensor, Simulation]:
        simulation = Simulation(program, {**found.tensors, **moved, "weights": weights})
        (losses,) = simulation.run(KEY)
        simulation.backward(losses)
        assert all(torch.equal(one, losses[0]) for one in losses)
        return losses[0].detach(), simulation

    gradients = loss({})[1].gradients()
    for name, gradient in gradients.items():
        direction = torch.randn_like(gradient)
        ahead, behind = (loss({name: found.tensors[name].detach() + sign * 1e-6 * direction})[0] for sign in (1, -1))
        torch.testing.assert_close((ahead - behind) / 2e-6, (gradient * direction).sum(), rtol=1e-6, atol=1e-7)
    other = Simulation(program, {**found.tensors, "weights": weights}).run(KEY + 1)[0][0]
    assert not torch.equal(other, loss({})[0])


@pytest.mark.few(2)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_causal_work_is_the_same_on_every_rank_at_every_step(monkeypatch, ranks):
    computed: dict[tuple[int, int], int] = {}
    add = ring_attention._Attention.add

    def counted(self: ring_attention._Attention, step: int, *pair: Tensor) -> None:
        work = sum(queries.length * keys.length for queries, keys in self._visible(step))
        computed[self.settings.position, step] = work
        add(self, step, *pair)

    monkeypatch.setattr(ring_attention._Attention, "add", counted)
    model = Attend(*(x(1, 2, 4 * ranks, 4) for _ in range(3)), is_causal=True)
    compare(model, Mesh((("a", ranks),)), {"s": ("a",)})
    assert len(computed) == ranks * ranks
    assert {computed[rank, step] for rank in range(ranks) for step in range(1, ranks)} == {2 * 2 * 2}
    assert {computed[rank, 0] for rank in range(ranks)} == {3 * 2 * 2}  # two of these blocks are causal


def gpt(length: int, ring: bool = True, ranks: int = 4, dropout: float = 0.0) -> tuple[Program, Plan]:
    """A GPT of one layer whose sequence is sliced."""
    tokens = torch.zeros(1, length, dtype=torch.long)
    model = GPT(16, length, 16, 1, 2, attention_dropout=dropout)
    found = capture(Objective(model, NextTokenLoss(), ("0", "1"), ("1",)), (tokens, tokens), training=True)
    along = (1, 1, ranks, 1)
    strategies = {
        "layers.*.attention.scaled_dot_product_attention": OperatorStrategy((along, along, along), None),
        "head.matmul": OperatorStrategy(((1, ranks, 1), (1, 1)), None),
        "loss.cross_entropy_loss": OperatorStrategy(((1, 1, ranks), (1, ranks)), None),
    }
    dataset = ((1, ranks), (1, ranks))
    request = Request("auto", ranks, "sharding_propagation", (("cp", ranks),), strategies, dataset_strategy=dataset)
    plan = make_plan(found.graph, request)
    return lower(found.graph, plan, LoweringOptions(partial_loss=True, ring=ring)), plan


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_stored_is_one_slice_whatever_the_ring_holds(dropout):
    """Without the loss's count of targets, [8 bytes]: half with twice the ranks, twice with twice the length."""
    settings = OptimizerSettings(factory=adamw)
    stored = {
        (length, ranks): trace(gpt(length, ranks=ranks, dropout=dropout)[0], settings).activations - 8
        for length, ranks in ((256, 2), (256, 4), (256, 8), (512, 4))
    }
    assert stored[256, 2] == 2 * stored[256, 4] == 4 * stored[256, 8]
    assert stored[512, 4] == 2 * stored[256, 4]
    assert trace(gpt(256, ring=False)[0], settings).activations > 1.2 * stored[256, 4]


def test_predicted_bytes_are_those_that_are_sent():
    program, _ = gpt(64)
    sent = trace(program, OptimizerSettings(factory=adamw)).sent
    predicted = dict.fromkeys(sent, 0)
    for one in program.redistributions:
        for step in one.collectives:
            predicted[step.kind] += step.busiest(program.mesh) * one.spec.item_bytes
    assert predicted == sent
    piece = 16 * 16 * 4  # of queries, keys, values or results: [16, 16] in fp32
    assert sent[ROTATE] == 2 * piece * (3 + 3 + 3)
    assert sent[MIRROR] == piece // 2 * (4 + 5)


def test_rotations_hide_behind_blocks():
    """Of the rotations what takes longer than a block costs time, and in backward the last one; swaps cost theirs."""
    link = Link(1e9, 0.0)
    fast = Cluster("fast", (Level("device", 4, link),), {"float32": 1e12}, 10**9, 1e12, 0.0, overlap=1.0)
    (ring,) = (one for one in gpt(64)[0].instructions if isinstance(one, Cooperate))
    mesh, piece = Mesh((("cp", 4),)), 16 * 16 * 4 / 1e9

    def added(work: float, backward: bool) -> dict[str, float]:
        return dict(cooperation_stages(ring, work, backward, mesh, fast))

    assert added(1.0, False) == {ROTATE: 0.0, MIRROR: pytest.approx(2 * piece)}
    assert added(1.0, True) == {ROTATE: pytest.approx(2 * piece), MIRROR: pytest.approx(2.5 * piece)}
    assert added(0.0, False)[ROTATE] == pytest.approx(6 * piece)


def test_a_layer_stays_sliced_along_the_sequence():
    program, plan = gpt(64)
    layer = {name: plan.operators[name] for name in plan.operators if name.startswith("layers.")}
    assert {axes for one in layer.values() for axes in one.assignment.values() if axes} == {("cp",)}
    moved = [one for one in program.redistributions if one.operator.startswith("layers.") and one.collectives]
    assert {step.kind for one in moved for step in one.collectives} == {ROTATE, MIRROR}
