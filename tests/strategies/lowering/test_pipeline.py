"""Pipelines on simulated ranks: a model in stages has the loss, gradients and buffers of the unsplit model, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.gpt import GPT
from models.llama import Llama
from models.losses import NextTokenLoss
from strategies.capture import Objective, capture, loss_in
from strategies.core.errors import StrategyError
from strategies.core.plan import Plan
from strategies.core.program import LoweringOptions
from strategies.core.request import OperatorStrategy, Request
from strategies.lowering.lowering import lower, random_ordinals
from strategies.lowering.pipeline import Cuts, Stage, as_trained, cut, in_stages
from strategies.lowering.pipeline_schedule import make_schedule, owners_of
from strategies.planner.planner import make_plan
from strategies.rules import rule_of
from tests.strategies.lockstep import Lockstep
from tests.strategies.simulated_model import TOLERANCE

TENSOR_PARALLEL = {
    "layers.*.attention.[qkv]_proj.matmul": OperatorStrategy(((2, 1, 1), (1, 2)), None),
    "layers.*.attention.o_proj.matmul": OperatorStrategy(((2, 1, 2), (2, 1)), None),
    "layers.*.feed_forward.up_proj.matmul": OperatorStrategy(((2, 1, 1), (1, 2)), None),
    "layers.*.feed_forward.down_proj.matmul": OperatorStrategy(((2, 1, 2), (2, 1)), None),
}
ALONE = Request("data_parallel", 1)
DATA = Request("data_parallel", 2)
TENSOR = Request("auto", 4, mesh=(("dp", 2), ("tp", 2)), strategies=TENSOR_PARALLEL)


class Pipeline:
    """A model in fp64 and its micro-batches, captured; eager truth and stages."""

    def __init__(self, net: nn.Module, loss: nn.Module, batches: list[tuple[Tensor, ...]]) -> None:
        self.names = tuple(map(str, range(len(batches[0]))))
        self.objective = Objective(net, loss, self.names, (self.names[-1],)).double().train()
        self.batches = [tuple(t.double() if t.is_floating_point() else t for t in batch) for batch in batches]
        self.captured = capture(self.objective, self.batches[0], training=True)
        self.tensors = {name: tensor.clone() for name, tensor in self.captured.tensors.items()}

    def eager(self) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        total = 0.0
        for batch in self.batches:
            loss: Any = loss_in(self.objective(*batch))
            (loss / len(self.batches)).backward()
            total += loss.item() / len(self.batches)
        model = self.objective.model
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return total, gradients, dict(model.named_buffers())

    def stages(
        self, request: Request, count: int, cuts: Cuts, options: LoweringOptions, virtual: int = 1
    ) -> tuple[Stage, ...]:
        graph = self.captured.graph
        plan: Plan = make_plan(graph, request)
        return cut(graph, plan, in_stages(graph, count, cuts, virtual), random_ordinals(graph, options))

    def run(
        self,
        request: Request,
        count: int,
        cuts: Cuts = "auto",
        kind: str = "1f1b",
        exact: bool = False,
        virtual: int = 1,
    ) -> tuple[float, Lockstep]:
        options = LoweringOptions(exact)
        tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        batches = [dict(zip(self.names, batch, strict=True)) for batch in self.batches]
        stages = self.stages(request, count, cuts, options, virtual)
        schedule = make_schedule(kind, count, len(batches), virtual)
        lockstep = Lockstep(stages, tensors, batches, options, owners=owners_of(schedule))
        return lockstep.step(schedule, range(len(batches))), lockstep

    def difference(self, *args: Any, **kwargs: Any) -> float:
        found, lockstep = self.run(*args, **kwargs)
        self.objective.zero_grad()
        loss, gradients, buffers = self.eager()
        gaps = [abs(found - loss)]
        ours = lockstep.gradients()
        assert gradients.keys() <= ours.keys()
        assert not any(ours[name].any() for name in ours.keys() - gradients.keys())
        gaps += [((ours[n] - g).abs().max() / g.abs().max().clamp_min(1e-3)).item() for n, g in gradients.items()]
        gaps += [(lockstep.buffers()[n].double() - b.double()).abs().max().item() for n, b in buffers.items()]
        return max(gaps)


def tokens(count: int) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        ids = torch.randint(0, 16, (4, 8), generator=generator)
        labels = ids.roll(-1, 1)
        labels[0, : int(torch.randint(0, 8, (), generator=generator))] = -100  # other counts in every micro-batch
        found.append((ids, labels))
    return found


def gpt(layers: int = 2, dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    return GPT(16, 8, 8, layers, 2, dropout=dropout)


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize("request_", [ALONE, DATA, TENSOR], ids=["alone", "data", "tensor"])
@pytest.mark.parametrize("stages", [2, 3])
def test_tied_gpt(kind: str, request_: Request, stages: int) -> None:
    pipeline = Pipeline(gpt(), NextTokenLoss(), tokens(4))
    assert pipeline.difference(request_, stages, kind=kind) <= TOLERANCE


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["interleaved_1f1b", "zero_bubble"])
@pytest.mark.parametrize("request_", [ALONE, DATA, TENSOR], ids=["alone", "data", "tensor"])
@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (3, 2)], ids=str)
def test_virtual_stages_of_tied_gpt(kind: str, request_: Request, sizes: tuple[int, int]) -> None:
    stages, virtual = sizes
    pipeline = Pipeline(gpt(4, dropout=0.0), NextTokenLoss(), tokens(2 * stages))
    assert pipeline.difference(request_, stages, kind=kind, virtual=virtual) <= TOLERANCE


@pytest.mark.few(1)
@pytest.mark.parametrize("request_", [ALONE, DATA, TENSOR], ids=["alone", "data", "tensor"])
@pytest.mark.parametrize("groups", [2, 3])
def test_tied_gpt_in_a_v(request_: Request, groups: int) -> None:
    """The first and the last stage, which share the embedding, are on the same ranks."""
    pipeline = Pipeline(gpt(4, dropout=0.0), NextTokenLoss(), tokens(2 * groups))
    assert pipeline.difference(request_, groups, kind="zbv", virtual=2) <= TOLERANCE


@pytest.mark.few(1)
@pytest.mark.parametrize("request_", [ALONE, TENSOR], ids=["alone", "tensor"])
def test_every_schedule_gives_the_same_bits(request_: Request) -> None:
    pipeline = Pipeline(gpt(4, dropout=0.3), NextTokenLoss(), tokens(4))

    def bits(kind: str, stages: int, virtual: int) -> dict[str, Tensor]:
        loss, lockstep = pipeline.run(request_, stages, "auto", kind, exact=True, virtual=virtual)
        return {"loss": torch.tensor(loss), **lockstep.gradients()}

    for truth, others in [
        (
            bits("gpipe", 4, 1),
            [("1f1b", 4, 1), ("zero_bubble", 4, 1), ("interleaved_1f1b", 2, 2), ("zero_bubble", 2, 2), ("zbv", 2, 2)],
        ),
    ]:
        for other in others:
            found = bits(*other)
            names = truth.keys() - ({"tokens.weight"} if other[0] == "zbv" else set())  # added up pass by pass there
            assert [name for name in names if not torch.equal(found[name], truth[name])] == [], other


@pytest.mark.few(1)
@pytest.mark.parametrize("exact", [False, True])
def test_random_numbers_are_those_of_the_model_in_one_piece(exact: bool) -> None:
    pipeline = Pipeline(gpt(dropout=0.3), NextTokenLoss(), tokens(3))
    unsplit, one = pipeline.run(TENSOR, 1, exact=exact)
    parts, three = pipeline.run(TENSOR, 3, exact=exact)
    assert abs(unsplit - parts) <= TOLERANCE
    ours, truth = three.gradients(), one.gradients()
    assert max((ours[name] - truth[name]).abs().max().item() for name in truth) <= TOLERANCE


class Branches(nn.Module):
    """A value that skips a stage, an integer one, one without gradient; written buffers; a weight in all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(8)
        self.shared = nn.Parameter(torch.randn(8))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.first(x)) * self.shared
        places, still = a.argmax(1), a.detach() * 2
        b = self.norm(self.second(a * self.shared))
        c = b + a * torch.sin(still)
        out: Tensor = self.third(c * self.shared + F.one_hot(places, 8).double())
        return out


@pytest.mark.parametrize("request_", [ALONE, DATA], ids=["alone", "data"])
def test_values_that_skip_stages(request_: Request) -> None:
    torch.manual_seed(0)
    batches: list[tuple[Tensor, ...]] = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(3)]
    cuts = {"first": 0, "second": 1, "norm": 1, "third": 2}
    pipeline = Pipeline(Branches(), nn.CrossEntropyLoss(), batches)
    stages = pipeline.stages(request_, 3, cuts, LoweringOptions())
    assert {stage.number: sorted(stage.holders) for stage in stages}[0] == ["shared"]
    assert not all(stages[1].trainable) and any(stages[1].trainable)
    assert pipeline.difference(request_, 3, cuts) <= TOLERANCE


class Shift(nn.Module):
    def __init__(self, by: nn.Parameter) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by * x.mean()


class Shifted(nn.Module):
    """A weight whose gradient comes back as a sum over the batch in stage 0 and complete in stage 2."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.shared = nn.Parameter(torch.randn(8))
        self.shift = Shift(self.shared)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x * self.shared))
        x = torch.tanh(self.layers[1](x))
        x = self.shift(torch.tanh(self.layers[2](x)))
        out: Tensor = self.layers[3](x)
        return out


@pytest.mark.parametrize("kind", ["interleaved_1f1b", "zero_bubble"])
def test_a_weight_of_two_stages_of_the_same_ranks(kind: str) -> None:
    torch.manual_seed(0)
    batches: list[tuple[Tensor, ...]] = [(torch.randn(4, 8), torch.randint(0, 8, (4,))) for _ in range(4)]
    pipeline = Pipeline(Shifted(), nn.CrossEntropyLoss(), batches)
    cuts = {f"layers.{number}": number for number in range(4)} | {"shift": 2}
    programs = [
        lower(stage.graph, stage.plan, outputs=stage.sends)
        for stage in pipeline.stages(DATA, 2, cuts, LoweringOptions(), 2)
    ]
    assert [programs[number].reductions["shared"] for number in (0, 2)] == [("dp",), ()]
    assert pipeline.difference(DATA, 2, cuts, kind=kind, virtual=2) <= TOLERANCE


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(StrategyError) as caught:
        call()
    return str(caught.value)


def test_tables_are_made_where_they_are_used() -> None:
    """Cuts that name the first layer of every stage send no slices of the tables of the layers behind it."""
    torch.manual_seed(0)
    net = Llama(16, 8, 8, 4, 2, 2, 16)
    pipeline = Pipeline(net, NextTokenLoss(), tokens(4))
    stages = pipeline.stages(DATA, 2, {"layers.2": 1}, LoweringOptions())
    assert [len(stage.receives) for stage in stages] == [0, 1]
    assert pipeline.difference(DATA, 2, {"layers.2": 1}) <= TOLERANCE


def test_invalid_cuts_are_reported() -> None:
    graph = Pipeline(gpt(), NextTokenLoss(), tokens(1)).captured.graph
    assert "Did you mean 'layers.1'?" in refused(lambda: in_stages(graph, 2, {"layer.1": 1}))
    assert "has the stages 0 to 1" in refused(lambda: in_stages(graph, 2, {"layers.1": 2}))
    message = refused(lambda: in_stages(graph, 2, {"layers.0": 1, "layers.1": 0}))
    assert "layers.1 = 0 comes before what it uses" in message and "in stage 1" in message
    assert "leave stage 1" in refused(lambda: in_stages(graph, 2, {"layers.1": 0}))
    assert "only 53 operators" in refused(lambda: in_stages(graph, 99, "auto"))


def test_a_written_buffer_lives_in_one_stage() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x + self.mean))
            self.mean.copy_(out.detach().mean(0))
            return out

    pipeline = Pipeline(Counting(), nn.MSELoss(), [(torch.randn(4, 4), torch.randn(4, 4))])
    message = refused(lambda: pipeline.stages(ALONE, 2, {"second": 1}, LoweringOptions()))
    assert "buffer mean is written in the step and used by stages 0, 1" in message


def test_balanced_stages_are_cut_between_layers() -> None:
    graph = Pipeline(gpt(4), NextTokenLoss(), tokens(1)).captured.graph
    placed = in_stages(graph, 2, "auto")
    split = {o.module.split(".")[1]: placed[o.id] for o in graph.operators if o.module.startswith("layers.")}
    assert split == {"0": 0, "1": 0, "2": 1, "3": 1}
    assert list(placed.values()) == sorted(placed.values())


@pytest.mark.parametrize(("speeds", "layers"), [((3, 1), [0, 0, 0, 1]), ((1, 3), [0, 1, 1, 1]), ((2, 2), [0, 0, 1, 1])])
def test_stages_are_as_long_as_their_devices_are_fast(speeds: tuple[int, ...], layers: list[int]) -> None:
    graph = Pipeline(gpt(4), NextTokenLoss(), tokens(1)).captured.graph
    flops = [float(rule_of(operator, graph).flops) + 1.0 for operator in graph.operators]
    placed = in_stages(graph, 2, "auto", seconds=[[one / speed for one in flops] for speed in speeds])
    split = {o.module.split(".")[1]: placed[o.id] for o in graph.operators if o.module.startswith("layers.")}
    assert list(split.values()) == layers


def test_every_balanced_stage_has_a_parameter() -> None:
    """Fast devices would take all layers, and leave the loss to slow ones."""
    graph = Pipeline(
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), nn.MSELoss(), [(torch.randn(4, 4), torch.randn(4, 4))]
    ).captured.graph
    flops = [float(rule_of(operator, graph).flops) + 1.0 for operator in graph.operators]
    placed = in_stages(graph, 2, "auto", seconds=[flops, [1000 * one for one in flops]])
    assert [placed[o.id] for o in graph.operators if o.module.startswith("2")] == [1]
    assert "only 3 operators with a parameter" in refused(lambda: in_stages(graph, 4, "auto"))


@pytest.mark.parametrize("frozen", [(0, 1, 2, 3), (2, 3)])
def test_frozen_stages_only_run_forward_or_hand_gradients_back(frozen: tuple[int, ...]) -> None:
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    for number in frozen:
        net[number].requires_grad_(False)
    pipeline = Pipeline(net, nn.MSELoss(), [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(2)])
    assert pipeline.difference(DATA, 3, {"2": 1, "4": 2}) <= TOLERANCE
    placed = in_stages(pipeline.captured.graph, 2, "auto")
    split = [placed[o.id] for o in pipeline.captured.graph.operators if o.module.isdigit()]
    assert split == ([0, 0, 0, 0, 1, 1] if len(frozen) == 4 else [0, 0, 0, 1, 1, 1])


class Codebook(nn.Module):
    """Looks up a buffer before its first layer, which is small, and writes it after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.first, self.second, self.third, self.fourth = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x - self.mean))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.detach().mean(0))
        return self.fourth(self.third(x))


def test_balanced_stages_do_not_divide_the_uses_of_a_buffer_that_is_written() -> None:
    graph = Pipeline(Codebook(), nn.MSELoss(), [(torch.randn(4, 4), torch.randn(4, 4))]).captured.graph
    for stages, expected in ((2, [0, 0, 1, 1]), (3, [0, 0, 1, 2]), (4, [0, 1, 2, 3])):  # 4 cannot keep them together
        placed = in_stages(graph, stages, "auto")
        learning = [o for o in graph.operators if o.module in ("first", "second", "third", "fourth")]
        assert [placed[o.id] for o in learning] == expected


class Doubled(nn.Module):
    """Evaluates with an operator more, whose name is that of another one in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if not self.training:
            x = x * 2
        return self.third(self.second(x)) * 3


def test_an_operator_of_evaluation_alone_is_before_what_uses_it() -> None:
    net = Doubled()
    pipeline = Pipeline(net, nn.MSELoss(), [(torch.randn(4, 4), torch.randn(4, 4))])
    stages = pipeline.stages(ALONE, 2, {"first": 0, "second": 0, "third": 1}, LoweringOptions())
    evaluated = capture(Objective(net, None, ("0",), ()), (torch.randn(4, 4).double(),), training=False).graph
    found = as_trained(evaluated, stages)
    assert [found[operator.id] for operator in evaluated.operators] == [0, 0, 0, 1, 1]


class Headed(nn.Module):
    """Has a head for evaluation alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        return x if self.training else self.head(x)


def test_a_head_of_evaluation_alone_is_in_the_stage_before_it() -> None:
    net = Headed()
    pipeline = Pipeline(net, nn.MSELoss(), [(torch.randn(4, 4), torch.randn(4, 4))])
    stages = pipeline.stages(ALONE, 2, {"first": 0, "second": 1}, LoweringOptions())
    evaluated = capture(Objective(net, None, ("0",), ()), (torch.randn(4, 4).double(),), training=False).graph
    found = as_trained(evaluated, stages)
    assert [found[operator.id] for operator in evaluated.operators] == [0, 1, 1]
