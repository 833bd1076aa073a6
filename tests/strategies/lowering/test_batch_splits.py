"""Batch splits: the same loss and gradients, whatever is joined at the loss; unsupported models are rejected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from models.gpt import GPT
from models.losses import NextTokenLoss
from strategies.capture import capture
from strategies.core.errors import StrategyError
from strategies.core.graph import OperatorGraph
from strategies.core.plan import Plan, Recompute
from strategies.core.program import Compute, Fused, LoweringOptions, Program, Start, Wait
from strategies.lowering.batch_splits import BatchSplits, split_batch
from strategies.lowering.fusion import KINDS, fuse
from strategies.lowering.lowering import lower, random_ordinals
from strategies.lowering.overlap import overlap
from strategies.runtime import initial_weights as weights
from strategies.runtime.simulate import Simulation
from tests.ranks import start_ranks
from tests.strategies.lowering.test_overlap import check_order
from tests.strategies.on_ranks import Case, Result
from tests.strategies.simulated_model import MESH, TOLERANCE, Model

ROWS = 16


class Attending(nn.Module):
    """Masks made of the batch's size, a value all rows share, and products of merged dims."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(16, 8), nn.Embedding(6, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.q, self.k, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 16)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        rows, length = ids.shape
        x = self.embedding(ids) + self.places(torch.arange(length)).expand(rows, length, 8)
        mask = torch.ones(rows, length, length).tril() == 0
        scores = (self.q(x) @ self.k(x).mT).masked_fill(mask, -1e9)
        x = x + scores.softmax(-1) @ x
        flat = x.reshape(rows * length, 8)
        flat = flat + self.down(functional.gelu(self.up(flat)))
        self.seen.add_(1)
        return self.head(flat)


class Ignoring(nn.Module):
    """A mean over the labels that count, whose number differs between splits, and a statistic of the full batch."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = functional.cross_entropy(logits, labels.flatten(), ignore_index=-100)
        weights = (labels != -100).double()
        return loss + (logits.square().mean(-1) * (weights / weights.sum()).flatten()).sum()


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    labels = torch.randint(0, 16, (ROWS, 6))
    labels[:3, 2:] = -100
    labels[5] = -100
    return Model(Attending(), Ignoring(), (torch.randint(0, 16, (ROWS, 6)), labels))


PARTS: dict[tuple[Model, int], OperatorGraph] = {}


def split(model: Model, plan: Plan, count: int, exact: bool = False) -> BatchSplits:
    rows = len(model.batch[0]) // count
    key = (model, count)
    if key not in PARTS:
        PARTS[key] = capture(model.objective, [entry[:rows] for entry in model.batch], training=True).graph
    return split_batch(model.graph, PARTS[key], plan, count, rows, exact=exact)


def gap(model: Model, program: Program, size: int = 1) -> float:
    """The largest difference of loss, gradients and buffers to eager."""
    simulation = Simulation(program, model.values)
    (losses,) = simulation.run()
    simulation.backward(losses)
    gaps = [abs(loss.item() - model.loss.item()) for loss in losses]
    gaps += [(found - model.buffers[name]).abs().max().item() for name, found in simulation.buffers().items()]
    for name, found in simulation.gradients().items():
        truth = model.gradients[name]
        gaps.append(((found / size - truth).abs().max() / truth.abs().max().clamp_min(1e-3)).item())
    return max(gaps)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_one_batch_in_any_plan(model: Model, draw: Any, count: int) -> None:
    done = 0
    for seed in range(12):
        plan = model.random_plan(draw, seed)
        try:
            made = split(model, plan, count)
        except StrategyError as error:
            assert "which cannot be cut as the strategy of" in str(error)
            continue
        sharded = seed % 2 == 1
        program = lower(made.graph, made.plan, LoweringOptions(sharded_optimizer=sharded))
        early = overlap(fuse(program, dict.fromkeys(KINDS, 2**20)), by_unit=seed % 5 == 0)
        check_order(early)
        for one in (program, early):
            assert gap(model, one, MESH.size if sharded else 1) < TOLERANCE
        done += 1
    assert done > 3


@pytest.mark.slow
def test_values_per_batch_and_per_split(model: Model, draw: Any) -> None:
    made = split(model, replicated(model, draw), 2)
    names = [operator.name for operator in made.graph.operators]
    assert {"up~0", "up~1", "q~0", "softmax~1", "head~1"} <= set(names)
    assert {"places", "arange", "loss.cross_entropy_loss"} <= set(names)
    by_name = made.graph.by_name
    assert by_name["up~1"].batch_slice is not None and by_name["up~1"].results[0].shape == (48, 16)
    assert by_name["loss.cross_entropy_loss"].batch_slice is None


def replicated(model: Model, draw: Any) -> Plan:
    """A plan in which everything is replicated."""
    plan = model.random_plan(draw, 0)
    bare = {name: replace(one, assignment={}, outputs=None) for name, one in plan.operators.items()}
    inputs = {name: replace(one, dims=tuple(() for _ in one.dims)) for name, one in plan.inputs.items()}
    tensors = {name: replace(one, dims=tuple(() for _ in one.dims)) for name, one in plan.tensors.items()}
    return replace(plan, operators=bare, inputs=inputs, tensors=tensors)


def tensor_parallel(model: Model, draw: Any) -> Plan:
    """A plan that shards only `up` by columns and `down` by rows."""
    plan = replicated(model, draw)
    sliced = {"up": {"n": ("a", "b")}, "down": {"k": ("a", "b")}}
    return replace(
        plan,
        operators=plan.operators | {name: replace(plan.operators[name], assignment=a) for name, a in sliced.items()},
    )


def test_splits_share_the_slices_of_a_parameter(model: Model, draw: Any) -> None:
    plan = tensor_parallel(model, draw)
    once = lower(model.graph, plan)
    made = split(model, plan, 4)
    program = lower(made.graph, made.plan)

    def of_weights(program: Program) -> int:
        return sum(one.value.id.startswith("p_") for one in program.redistributions)

    assert of_weights(once) == of_weights(program) > 0
    assert program.calls["all_reduce"] == 4 * once.calls["all_reduce"]


def test_one_split_computes_while_another_communicates(model: Model, draw: Any) -> None:
    """Between a start and its wait stands some product of another split, for every all-reduce but the last one of
    forward and of backward."""
    made = split(model, tensor_parallel(model, draw), 4)
    work = {operator.name: 1.0 for operator in made.graph.operators}
    early = overlap(fuse(lower(made.graph, made.plan), dict.fromkeys(KINDS, 2**20)), work)
    assert not any(isinstance(one, Fused) and one.operator.startswith(("up", "down")) for one in early.instructions)
    starts = {one.id: place for place, one in enumerate(early.instructions) if isinstance(one, Start)}
    covered = 0
    for place, one in enumerate(early.instructions):
        if isinstance(one, Wait) and one.operator in early.batch_splits:
            copy = early.batch_splits[one.operator][1]
            between = early.instructions[starts[one.start] : place]
            others = {early.batch_splits.get(c.operator, ("", copy))[1] for c in between if isinstance(c, Compute)} - {
                copy
            }
            covered += bool(others)
    assert covered >= 6  # of four forward and four backward


def test_real_ranks(model: Model, draw: Any, tmp_path: Path) -> None:
    file = tmp_path / "initial.pt"
    weights.write(file, {name: model.values[name] for name in model.captured.tensors})
    batch = dict(zip("01", model.batch, strict=True))
    made = [split(model, tensor_parallel(model, draw), count) for count in (2, 4)]
    cases = [
        Case(one.graph, one.plan, file, batch, dict.fromkeys(KINDS, 2**20), early)
        for one in made
        for early in (False, True)
    ]
    found: list[Result] = start_ranks("tests.strategies.on_ranks:steps", cases, 4, tmp_path)
    for case, ran in zip(cases, found, strict=True):
        assert ran.sent == ran.predicted
        assert ran.names == found[0].names
        assert ran.calls["all_reduce"] == 2 * (2 if case in cases[:2] else 4)
        assert abs(ran.loss - model.loss.item()) < TOLERANCE
        for name, gradient in ran.gradients.items():
            torch.testing.assert_close(gradient, model.gradients[name], rtol=1e-10, atol=1e-12)


def test_recompute_and_splits(model: Model, draw: Any) -> None:
    recompute = Recompute(("up", "down"), ("up",), False, False)
    made = split(model, replace(tensor_parallel(model, draw), recompute=recompute), 2)
    assert made.plan.recompute is not None and made.plan.recompute.kept == ("up~0", "up~1")
    assert gap(model, overlap(lower(made.graph, made.plan))) < TOLERANCE


@pytest.mark.slow
def test_exact_random_numbers_are_those_of_one_batch(draw: Any) -> None:
    torch.manual_seed(0)
    net = GPT(16, 6, 8, 2, 2, dropout=0.3, attention_dropout=0.2)
    model = Model(net, NextTokenLoss(), (torch.randint(0, 16, (ROWS, 6)), torch.randint(0, 16, (ROWS, 6))))
    truth = _trained(lower(model.graph, replicated(model, draw), LoweringOptions(exact=True)), model)
    done = 0
    for seed in range(16):
        try:
            made = split(model, model.random_plan(draw, seed), 2, exact=True)
        except StrategyError:
            continue
        for a, b in zip(_trained(lower(made.graph, made.plan, LoweringOptions(exact=True)), model), truth, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
        done += 1
    assert done > 3
    made = split(model, replicated(model, draw), 2)
    fast, exact = (random_ordinals(made.graph, LoweringOptions(exact=exact)) for exact in (False, True))
    assert len(set(fast.values())) == len(fast) == len(exact) == 2 * len(set(exact.values()))


def _trained(program: Program, model: Model) -> Sequence[Tensor]:
    simulation = Simulation(program, model.values)
    (losses,) = simulation.run(key=7)
    simulation.backward(losses)
    return [losses[0], *simulation.gradients().values()]


class Normalised(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 3))


class Sorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).sort(0).values)


class Centred(Sorted):
    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(0)
        return self.second(self.first(x))


class Summed(Sorted):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).cumsum(0))


class Paired(Sorted):
    def forward(self, x: Tensor) -> Tensor:
        pairs = self.first(x).view(len(x) // 2, 2, 4).sum(1, keepdim=True).expand(len(x) // 2, 2, 4)
        return self.second(pairs.reshape(len(x), 4))


class Sized(Sorted):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) / len(x))


class Uneven(Sorted):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) if len(x) > 8 else self.first(x).relu())


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("net", "expected"),
    [
        (Normalised, "1.batch_norm (batch_norm_training) mixes the rows"),
        (Sorted, "sort (sort, lowering/test_batch_splits.py:"),
        (Centred, "mean (mean, lowering/test_batch_splits.py:"),
        (Summed, "cumsum (cumsum, lowering/test_batch_splits.py:"),
        (Paired, "view (view, lowering/test_batch_splits.py:"),
        (Uneven, "computes something else for 8 rows than for 16, at second"),
    ],
)
def test_operators_that_mix_rows_are_refused(draw: Any, net: type[nn.Module], expected: str) -> None:
    torch.manual_seed(0)
    model = Model(net(), nn.CrossEntropyLoss(), (torch.randn(ROWS, 4), torch.randint(0, 3, (ROWS,))))
    with pytest.raises(StrategyError) as error:
        split(model, replicated(model, draw), 2)
    assert expected in str(error.value) and "parallel.copies=1" in str(error.value)


def test_a_number_made_of_the_size_of_the_batch(draw: Any) -> None:
    model = Model(Sized(), nn.CrossEntropyLoss(), (torch.randn(ROWS, 4), torch.randint(0, 3, (ROWS,))))
    try:
        made = split(model, replicated(model, draw), 2)
    except StrategyError as error:
        assert "div (" in str(error)
    else:
        assert gap(model, lower(made.graph, made.plan)) < TOLERANCE


def test_random_operators_that_cannot_be_exact(draw: Any) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.FeatureAlphaDropout(0.5), nn.Linear(8, 3))
    model = Model(net, nn.CrossEntropyLoss(), (torch.randn(ROWS, 4), torch.randint(0, 3, (ROWS,))))
    with pytest.raises(StrategyError, match=r"parallel.copies = 2 and train.random = 'exact' do not go together for 1"):
        split(model, replicated(model, draw), 2, exact=True)
    assert split(model, replicated(model, draw), 2).graph.by_name["1~1"].batch_slice is not None
