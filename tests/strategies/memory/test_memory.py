"""The predicted memory of a step against the same step on one rank, counted: equal to the byte, in every phase."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import _get_current_dispatch_mode

import meshwright
from models.gpt import GPT
from models.losses import NextTokenLoss
from strategies.capture import Captured, Objective, capture
from strategies.core.program import LoweringOptions, Program
from strategies.core.request import RecomputeRequest, Request
from strategies.cost.step import step_cost
from strategies.lowering.device_placement import on_host, place_on_host
from strategies.lowering.lowering import lower
from strategies.lowering.pipeline_schedule import Action
from strategies.memory.parts import Memory, group_memory, memory, over
from strategies.memory.trace import Trace, UnreadMasks, trace
from strategies.memory.zero import FlatGroup
from strategies.optimizer.replicated import BucketedUpdates
from strategies.optimizer.settings import OptimizerSettings
from strategies.planner.planner import make_plan
from strategies.runtime.activation_offload import Activations, matching_modules
from strategies.runtime.communicator import Communicator
from strategies.runtime.live_tensors import Live
from strategies.runtime.module_tree import build
from strategies.runtime.offload import Offload
from tests.strategies.machines import cluster


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01)


@pytest.fixture(scope="module")
def gpt() -> Captured:
    torch.manual_seed(0)
    tokens = torch.randint(0, 32, (4, 32))
    model = GPT(32, 32, 32, 2, 2, dropout=0.2)
    return capture(Objective(model, NextTokenLoss(), ("0", "1"), ("1",)), (tokens, tokens.roll(1)), training=True)


def program_of(found: Captured, wanted: RecomputeRequest | None = None, hosted: tuple[str, ...] = ()) -> Program:
    plan = make_plan(found.graph, Request("data_parallel", 1, recompute=wanted))
    return place_on_host(lower(found.graph, plan, LoweringOptions(partial_loss=True)), on_host(found.graph, hosted))


class Step:
    """Real steps of one rank at stage 0: peaks of the second one by phase, its gradients, and the persistent bytes."""

    def __init__(self, found: Captured, program: Program, settings: OptimizerSettings) -> None:
        learns = {source.name for source in program.sources if source.trainable}
        self.tensors: dict[str, Tensor] = {
            name: nn.Parameter(tensor.clone()) if name in learns else tensor.clone()
            for name, tensor in found.tensors.items()
        }
        communicator = Communicator(program.mesh, 0)
        self.module = build(program, self.tensors, communicator, "cpu")
        if settings.offload.activations == "host":
            Activations(torch.device("cpu"), settings.offload.larger_than).attach(
                matching_modules(self.module, settings.offload.modules), [*self.tensors.values()]
            )
        groups = [{"names": list(program.trainable_names)}]
        self.updates = BucketedUpdates(
            self.module, program, communicator, settings.factory, groups, accumulate=settings.accumulate
        )
        self.accumulate, self.random = settings.accumulate, program.random
        self.peaks = {"forward": 0, "backward": 0, "update": 0}
        self.gradients: dict[str, Tensor] = {}
        self.host = 0
        with Live("cpu") as live:
            self._step(live, 0)
            live.see(self.tensors.values())
            self.persistent, self.kept = live.now, 0
            self.peaks, self.host = dict.fromkeys(self.peaks, 0), 0
            self._step(live, 1)

    def _step(self, live: Live, number: int) -> None:
        for micro in range(self.accumulate):
            before = live.now
            loss = self._phase(live, "forward", partial(self._forward, number * self.accumulate + micro))
            if not micro:
                self.kept = live.now - before
            self._phase(live, "backward", partial(self.updates.backward, loss))
            del loss
        self._phase(live, "update", self.updates.reduce)
        live.counting = False
        self.gradients = {name: one.clone() for name, one in self.updates.gradients()}
        live.counting = True
        self._phase(live, "update", self.updates.update)

    def _forward(self, key: int) -> Tensor:
        tokens = torch.randint(0, 32, (4, 32), generator=torch.Generator().manual_seed(key))
        loss: Tensor = self.module(tokens, tokens.roll(1), *([key] if self.random else []))
        return loss

    def _phase(self, live: Live, name: str, work: Any) -> Any:
        live.restart()
        result = work()
        self.peaks[name] = max(self.peaks[name], live.peak)
        self.host = max(self.host, live.host_peak)
        return result


FULL, CHEAP = RecomputeRequest("full"), RecomputeRequest("selective")
HOST = OptimizerSettings(factory=adamw, offload=Offload(activations="host"))
CASES: dict[str, tuple[RecomputeRequest | None, tuple[str, ...], OptimizerSettings]] = {
    "plain": (None, (), OptimizerSettings(factory=adamw)),
    "accumulated": (None, (), OptimizerSettings(factory=adamw, accumulate=3)),
    "full": (FULL, (), OptimizerSettings(factory=adamw)),
    "selective": (CHEAP, (), OptimizerSettings(factory=adamw)),
    "offloaded": (None, (), HOST),
    "offloaded in part": (None, (), replace(HOST, offload=Offload(activations="host", modules=("layers.1",)))),
    "full, offloaded": (FULL, (), HOST),
    "selective, offloaded": (CHEAP, (), HOST),
    "placed": (None, ("layers.*.feed_forward",), OptimizerSettings(factory=adamw)),
    "full, placed": (FULL, ("layers.*.feed_forward",), OptimizerSettings(factory=adamw)),
    "selective, placed": (CHEAP, ("layers.0", "norm"), OptimizerSettings(factory=adamw)),
    "full, placed, offloaded": (FULL, ("layers.1.attention",), HOST),
}
SMALL = 4096 + 1024
"""Bytes: the batch, the loss and optimizer counters live slightly longer on one side or the other."""


@pytest.fixture(scope="module")
def truth(gpt) -> dict[str, Tensor]:
    return Step(gpt, program_of(gpt), OptimizerSettings(factory=adamw)).gradients


@pytest.mark.few(2)
@pytest.mark.parametrize("case", CASES)
def test_every_phase_takes_the_predicted_memory(gpt, truth, case):
    wanted, hosted, settings = CASES[case]
    program = program_of(gpt, wanted, hosted)
    predicted = memory(trace(program, settings), settings)
    step = Step(gpt, program, settings)
    assert abs(predicted.persistent - step.persistent) <= SMALL
    assert abs(predicted.activations - step.kept) <= SMALL
    assert abs(predicted.host - step.host) <= SMALL
    for phase, peak in step.peaks.items():
        assert abs(predicted.peaks[phase] - peak) <= SMALL
    if settings.accumulate == 1:
        assert all(torch.equal(step.gradients[name], expected) for name, expected in truth.items())


def test_recompute_and_offload_save_the_predicted_memory(gpt):
    found = {}
    for case in ("plain", "full", "offloaded"):
        wanted, hosted, settings = CASES[case]
        program = program_of(gpt, wanted, hosted)
        found[case] = (
            memory(trace(program, settings), settings).peak,
            max(Step(gpt, program, settings).peaks.values()),
        )
    for case in ("full", "offloaded"):
        predicted, measured = (found["plain"][side] - found[case][side] for side in (0, 1))
        assert measured > 50_000
        assert abs(predicted - measured) <= 0.05 * measured


def test_masks_whose_numbers_shapes_depend_on():
    """Of zeros, no mask selects anything, and no matrix has an inverse."""

    class Pictures(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.patches = nn.Embedding(10, 6), nn.Linear(5, 6)
            self.mixed = nn.Parameter(torch.eye(6))

        def forward(self, ids: Tensor, patches: Tensor) -> Tensor:
            h = self.words(ids).clone()
            h[ids == 7] = self.patches(patches).flatten(0, 1)
            return (h @ torch.linalg.inv(self.mixed)).square().mean()

    ids = torch.tensor([[1, 7, 7, 3], [7, 2, 7, 0]])
    plan = meshwright.plan(Pictures(), (ids, torch.randn(2, 2, 5)), mesh=2, mode="data_parallel")
    assert plan.content["memory"]["activations"] >= 2 * 4 * 6 * 4
    assert meshwright.verify(Pictures(), (ids, torch.randn(2, 2, 5)), plan).passed


def test_writes_that_name_their_arguments():
    """As those of a slice do, with places or a mask."""
    tensor, write = torch.zeros(4, 3, requires_grad=True), torch.ops.aten.index_put.default
    with UnreadMasks():
        placed = write(self=tensor, indices=[torch.tensor([1, 3])], values=torch.ones(2, 3))
        masked = write(self=tensor, indices=[torch.ones(4, dtype=torch.bool)], values=torch.ones(2, 3))
    assert placed.sum() == 6
    assert masked.shape == (4, 3)


def test_packed_rows_and_weights_of_classes():
    """The weights of the targets that count have a shape without numbers; the step ran on zeros, and no row is so
    short."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.head = nn.GRU(5, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, rows: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
            packed = pack_padded_sequence(rows, lengths.cpu(), batch_first=True, enforce_sorted=False)
            weights = rows.new_tensor([0.2, 1.0, 3.0])
            return functional.cross_entropy(self.head(self.network(packed)[1][-1]), labels, weight=weights)

    batch = torch.randn(4, 7, 5), torch.tensor([7, 2, 5, 1]), torch.tensor([0, 2, -100, 1])
    plan = meshwright.plan(Packed(), batch, mesh=2, mode="data_parallel")
    assert meshwright.verify(Packed(), batch, plan).passed


def test_a_search_for_anomalies_changes_nothing(gpt, monkeypatch):
    """autograd would look at numbers after every operator; without any, the step would run on zeros."""
    expected, program = trace(program_of(gpt), OptimizerSettings()), program_of(gpt)
    modes = []
    run = Trace.run
    monkeypatch.setattr(Trace, "run", lambda one: modes.append(_get_current_dispatch_mode()) or run(one))
    with torch.autograd.set_detect_anomaly(True):
        assert trace(program, OptimizerSettings()) == expected
    assert [type(mode) for mode in modes] == [FakeTensorMode]


def test_micro_batches_under_way_add_their_activations(gpt):
    traced = trace(program_of(gpt), OptimizerSettings())
    one = memory(traced, OptimizerSettings())
    actions = [Action("forward", number, 0) for number in range(3)] + [Action("backward", n, 0) for n in range(3)]
    three = group_memory({0: traced}, (tuple(actions),), 0, OptimizerSettings())
    assert three.activations == 3 * one.activations
    assert three.peaks["backward"] == one.peaks["backward"] + 2 * one.activations
    assert three.peaks["update"] == one.peaks["update"]


def test_stages_of_one_group_stand_together(gpt):
    traced = trace(program_of(gpt), OptimizerSettings())
    one = memory(traced, OptimizerSettings())
    schedule = tuple(
        (*(Action("forward", 0, stage) for stage in mine), *(Action("backward", 0, stage) for stage in mine[::-1]))
        for mine in ((0, 2), (1, 3))
    )
    both = group_memory(dict.fromkeys(range(4), traced), schedule, 0, OptimizerSettings())
    assert (both.persistent, both.activations) == (2 * one.persistent, 2 * one.activations)
    assert both.peaks["update"] == 2 * one.peaks["update"]
    more = max(one.activations, traced.gradients)  # of stage 0 before the other's backward, or of that one behind it
    assert both.peaks["backward"] == one.peaks["backward"] + one.persistent + more


def test_parts_of_flat_groups():
    group = FlatGroup({"a": 6, "b": 2, "c": 8}, 2, 8)
    assert group.touched() == 8
    assert FlatGroup({"a": 6, "b": 4, "c": 6}, 2, 8).touched() == 10


@pytest.mark.parametrize(("stage", "engine"), [*product((1, 2, 3), ("deepspeed", "native"))])
def test_a_sharded_optimizer_keeps_its_part(gpt, stage, engine):
    plan = make_plan(gpt.graph, Request("data_parallel", 4))
    program = lower(gpt.graph, plan, LoweringOptions(sharded_optimizer=True, partial_loss=True))
    settings = OptimizerSettings(stage, adamw, engine=engine)
    found = memory(trace(program, settings), settings)
    elements = sum(source.spec.elements for source in gpt.graph.of_kind("parameter"))
    copies = 2 if engine == "native" else 3  # DeepSpeed keeps masters of fp32 weights, too
    assert found.optimizer == pytest.approx(elements / 4 * 4 * copies, rel=0.01)
    assert found.parameters == pytest.approx(4 * elements / (4 if stage == 3 else 1), rel=0.01)


PARTS = {"parameters": 10, "gradients": 10, "optimizer": 20, "activations": 5, "buffers": 0}


@pytest.mark.parametrize(
    ("largest", "settings", "advice"),
    [
        (
            "activations",
            OptimizerSettings(),
            "parallel.recompute=auto, more train.accumulate, parallel.offload.activations.to=",
        ),
        (
            "activations",
            OptimizerSettings(split=True),
            "parallel.pipeline.schedule=1f1b, which stores less, parallel.rec",
        ),
        ("optimizer", OptimizerSettings(), "parallel.zero.stage=1, sliced weights (parallel.strategies), more ranks"),
        ("optimizer", OptimizerSettings(1), "parallel.offload.optimizer=host, sliced weights"),
        ("gradients", OptimizerSettings(1), "parallel.zero.stage=2, sliced weights"),
        ("parameters", OptimizerSettings(3), "parallel.offload.parameters=host, sliced weights"),
        ("buffers", OptimizerSettings(3), "a smaller parallel.zero.options.reduce_bucket_size, more ranks"),
    ],
)
def test_a_plan_that_does_not_fit_suggests_a_remedy(largest, settings, advice):
    parts = PARTS | {largest: 3 * 2**20}
    needed = Memory(**parts, persistent=0, peaks={"forward": 1, "backward": 2**22}, host=0, disk=0)
    text = over(needed, 2**21, settings, recomputes=False)
    assert text.startswith("parallel.memory_limit = 2 MiB per rank, but the plan needs 4 MiB at once, in backward (")
    assert f"The largest part is {largest}: choose {advice}" in text


def test_work_that_is_repeated_costs_time(gpt):
    settings = OptimizerSettings(factory=adamw)
    plans = [
        make_plan(gpt.graph, Request("data_parallel", 2, recompute=one)) for one in (None, RecomputeRequest("full"))
    ]
    plain, full = (
        step_cost(
            gpt.graph, plan, lower(gpt.graph, plan, LoweringOptions(partial_loss=True)), cluster(2), settings
        ).compute
        for plan in plans
    )
    assert plain < full < 4 / 3 * plain  # a third, less the operators outside the layers
