"""The memory of a deep model extrapolated from few repetitions equals that of a complete trace."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import nn

from models.gpt import GPT
from models.llama import Llama
from models.losses import NextTokenLoss
from strategies.capture import Objective, capture
from strategies.core.graph import OperatorGraph
from strategies.core.program import LoweringOptions, Program
from strategies.core.request import RecomputeRequest, Request
from strategies.lowering.lowering import lower, random_ordinals
from strategies.lowering.overlap import overlap
from strategies.lowering.pipeline import cut, in_stages, stage_programs
from strategies.lowering.recompute import recomputed
from strategies.memory import repeated_blocks as repeating
from strategies.memory.parts import memory
from strategies.memory.repeated_blocks import (
    SLACK,
    Traces,
    program_signature,
    repeated_blocks,
    trace_repeated,
    truncated,
)
from strategies.memory.trace import Trace, Traced, on_shapes, trace
from strategies.optimizer import sharded, sharding
from strategies.optimizer.buckets import buckets
from strategies.optimizer.settings import OptimizerSettings
from strategies.optimizer.sharded import ShardedUpdates
from strategies.optimizer.sharding import ShardedBucket
from strategies.optimizer.updates import BucketLimits
from strategies.planner.planner import make_plan
from strategies.rules import rule_of
from strategies.runtime.gathering import GatheredParameters, Gathering
from strategies.runtime.live_tensors import Live

TOKENS = torch.zeros(8, 16, dtype=torch.int64, device="meta")
DEPTH = {"llama": 7, "gpt": 8}


@cache
def graph_of(name: str, layers: int, dtype: torch.dtype) -> OperatorGraph:
    with torch.device("meta"):
        made: nn.Module = Llama(64, 16, 32, layers, 4, 2, 64) if name == "llama" else GPT(64, 16, 32, layers, 4, 0.1)
    step = Objective(made.to(dtype), NextTokenLoss(), ("0", "1"), ("1",))
    return capture(step, (TOKENS, TOKENS), training=True).graph


def program_of(
    name: str, again: str | None, stage: int, layers: int | None = None, dtype: torch.dtype = torch.float32
) -> Program:
    """Data parallel on 2 x tensor parallel on 2, redistributions overlapped with computation."""
    graph = graph_of(name, layers or DEPTH[name], dtype)
    plan = make_plan(graph, Request("auto", 4, "dynamic_programming", mesh=(("a", 2), ("b", 2))))
    if again is not None:
        rules = {operator.id: rule_of(operator, graph) for operator in graph.operators}
        plan = replace(plan, recompute=recomputed(graph, rules, RecomputeRequest(again)))  # type: ignore[arg-type]
    return overlap(
        lower(graph, plan, LoweringOptions(partial_loss=True, sharded_optimizer=stage > 0)), by_unit=stage == 3
    )


@pytest.fixture
def contracted_only(monkeypatch):
    """A trace of all repetitions fails."""

    def refuse(program: Program, settings: OptimizerSettings) -> None:
        raise AssertionError("the complete program was traced")

    monkeypatch.setattr(repeating, "trace", refuse)


@pytest.mark.few(1)
@pytest.mark.parametrize("again", [None, "selective", "full"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("name", "accumulate", "dtype"),
    [pytest.param("llama", 1, torch.bfloat16, marks=pytest.mark.slow), ("gpt", 2, torch.float32)],
    ids=["llama", "gpt"],
)
def test_memory_is_that_of_the_full_program(contracted_only, name, accumulate, dtype, stage, again):
    program = program_of(name, again, stage, dtype=dtype)
    settings = OptimizerSettings(stage, torch.optim.AdamW, accumulate=accumulate)
    assert trace_repeated(program, settings) == trace(program, settings)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("bucket", [100, 3000, 9000, 40000])
def test_buckets_of_zero_are_added_up_where_they_are_full(contracted_only, stage, bucket):
    program = program_of("llama", None, stage)
    settings = OptimizerSettings(stage, torch.optim.AdamW, bucket=bucket)
    assert trace_repeated(program, settings) == trace(program, settings)


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_a_gradient_larger_than_a_bucket_waits_where_it_comes_first(contracted_only, stage):
    """That of the output layer, which takes most of the memory."""
    with torch.device("meta"):
        step = Objective(Llama(512, 4, 64, 7, 4, 2, 64), NextTokenLoss(), ("0", "1"), ("1",))
    tokens = TOKENS[:4, :4]
    graph = capture(step, (tokens, tokens), training=True).graph
    options = LoweringOptions(partial_loss=True, sharded_optimizer=True)
    program = lower(graph, make_plan(graph, Request("data_parallel", 4)), options)
    settings = OptimizerSettings(stage, torch.optim.AdamW, bucket=20000)
    assert trace_repeated(program, settings) == trace(program, settings)


@pytest.mark.few(1)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("again", [None, pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "bucket"), [("llama", 1000), ("gpt", 9000), ("gpt", 100)])
def test_layers_with_buckets_of_their_own_are_predicted(contracted_only, name, bucket, again, accumulate):
    """In the native stage 3, with the gather of the next bucket under way."""
    program = program_of(name, again, 3)
    settings = OptimizerSettings(3, torch.optim.AdamW, accumulate=accumulate, bucket=bucket, engine="native")
    assert trace_repeated(program, settings) == trace(program, settings)


class SecondPass(Trace):
    """The second micro-batch, which gathers ahead in the order of the first."""

    def _gathering(self, buckets: Iterable[GatheredParameters]) -> Gathering:
        return Gathering(buckets)

    def _begin(self) -> ShardedUpdates:
        updates = super()._begin()
        assert isinstance(updates, ShardedUpdates)
        self._forward()
        self._backward(updates)
        updates.forget()
        self.communicator.sent.clear()
        self.exchanging.sent.clear()
        self.phases.clear()
        return updates


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "bucket", "complete", "accumulate", "again"),
    [
        ("llama", 1000, 9000, 1, "full"), ("gpt", 100, 0, 1, None), ("gpt", 9000, 0, 2, "selective"),
    ],
)  # fmt: skip
def test_one_pass_counts_what_a_second_gathers_ahead(name, bucket, complete, accumulate, again):
    program = program_of(name, again, 3)
    settings = OptimizerSettings(
        3, torch.optim.AdamW, accumulate=accumulate, bucket=bucket, complete=complete, engine="native"
    )
    second = on_shapes(program, settings, lambda program, need: SecondPass(program, settings, need).run())
    assert trace(program, settings) == second


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "again", "bucket", "accumulate", "dtype"),
    [
        ("llama", None, 1000, 1, torch.bfloat16),
        pytest.param("gpt", "full", 9000, 2, torch.float32, marks=pytest.mark.slow),
        pytest.param("llama", "selective", 3000, 1, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_one_trace_counts_all_that_may_stay_complete(monkeypatch, name, again, bucket, accumulate, dtype):
    program, traces, run, count = program_of(name, again, 3, dtype=dtype), Traces(), Trace.run, [0]
    settings = OptimizerSettings(3, torch.optim.AdamW, accumulate=accumulate, bucket=bucket, engine="native")

    def counted(self) -> Traced:
        count[0] += 1
        return run(self)

    groups = [group["names"] for group in settings.groups_for(program)]
    steps = [elements for _, elements in sharding.staying(sharding.sharded_buckets(program, groups, bucket))]
    assert len(steps) >= 4
    for complete in (steps[0], steps[len(steps) // 2], steps[-1]):
        some = replace(settings, complete=complete)
        true = trace(program, some)
        with monkeypatch.context() as patched:
            patched.setattr(Trace, "run", counted)
            assert traces.of(program, some) == true
    assert count[0] == 1


@pytest.mark.slow
def test_plans_that_recompute_other_layers_share_what_was_traced(contracted_only, monkeypatch):
    graph = graph_of("llama", 18, torch.float32)
    plan = make_plan(graph, Request("data_parallel", 4))
    rules = {operator.id: rule_of(operator, graph) for operator in graph.operators}
    recompute = recomputed(graph, rules, RecomputeRequest("full"))
    settings = OptimizerSettings(3, torch.optim.AdamW, bucket=1000, engine="native")
    traces, run, count = Traces(), Trace.run, [0]

    def counted(self) -> Traced:
        count[0] += 1
        return run(self)

    for again in (9, 8, 10):
        part = replace(plan, recompute=replace(recompute, modules=recompute.modules[:again]))
        program = lower(graph, part, LoweringOptions(partial_loss=True, sharded_optimizer=True))
        alone = trace_repeated(program, settings)
        with monkeypatch.context() as patched:
            patched.setattr(Trace, "run", counted)
            assert traces.of(program, settings) == alone
    assert count[0] == 4


@pytest.mark.few(1)
@pytest.mark.parametrize(("stage", "overlap", "accumulate"), [(1, True, 2), (1, False, 2), (2, True, 1)])
def test_layers_that_stay_complete_are_predicted(contracted_only, stage, overlap, accumulate):
    """In the native stages 1 and 2."""
    program = program_of("llama", None, 3)
    settings = OptimizerSettings(
        stage, torch.optim.AdamW, accumulate=accumulate, overlap=overlap, bucket=1000, engine="native"
    )
    assert trace_repeated(program, settings) == trace(program, settings)


def test_few_layers_are_cut_as_the_complete_model_is(contracted_only, monkeypatch):
    """Where those of fewer layers would be smaller."""
    limits, cut_into = [], sharded.sharded_buckets

    def noted(
        program: Program, groups: Sequence[Sequence[str]], limit: int | None, stage: int, complete: int
    ) -> tuple[ShardedBucket, ...]:
        limits.append(limit)
        return cut_into(program, groups, limit, stage, complete)

    monkeypatch.setattr(sharding, "SMALLEST", 1)
    monkeypatch.setattr(sharding, "LARGEST", 40000)
    monkeypatch.setattr(sharded, "sharded_buckets", noted)
    program, settings = program_of("gpt", None, 3), OptimizerSettings(3, torch.optim.AdamW, engine="native")
    assert trace_repeated(program, settings).zero
    assert len(limits) > 1 and set(limits) == {40000}


@pytest.mark.few(1)
@pytest.mark.parametrize("bucket", [9400, 25000, None])
def test_a_bucket_of_several_layers_asks_for_a_complete_trace(bucket):
    program = program_of("llama", None, 3)
    settings = OptimizerSettings(3, torch.optim.AdamW, bucket=bucket, engine="native")
    assert trace_repeated(program, settings) == trace(program, settings)


@pytest.mark.slow
def test_a_bucket_during_backward_is_slightly_overestimated(contracted_only):
    graph = graph_of("llama", DEPTH["llama"], torch.float32)
    program = lower(graph, make_plan(graph, Request("data_parallel", 4)), LoweringOptions(partial_loss=True))
    settings = OptimizerSettings(0, torch.optim.AdamW, cut=BucketLimits(5000), overlap=True)
    found, true = (memory(one(program, settings), settings) for one in (trace_repeated, trace))
    assert replace(found, peaks={}) == replace(true, peaks={})
    assert true.peaks["backward"] <= found.peaks["backward"] <= (1 + SLACK) * true.peaks["backward"]
    apart = memory(trace(program, replace(settings, cut=BucketLimits(0))), settings)
    joined = [4 * one.elements for one in buckets(program, settings.cut) if len(one.names) > 1]
    assert found.peaks["backward"] - apart.peaks["backward"] == max(joined)
    assert found.peaks["forward"] == true.peaks["forward"]


def test_programs_that_repetitions_cannot_predict_are_traced():
    """A fused bucket is a large part of so small a model."""
    program, settings = program_of("gpt", None, 0), OptimizerSettings(0, overlap=True)
    assert trace_repeated(program, settings) == trace(program, settings)


class Averaged(nn.Module):
    """A layer with the average of its weights in a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.register_buffer("average", torch.zeros(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.average.lerp_(self.layer.weight, 0.1)
        return x + torch.tanh(self.layer(x)) + x @ self.average


def test_new_values_of_buffers_wait_for_the_end_of_forward():
    """Here they are most of what forward takes, so the complete program is traced."""
    rows = torch.zeros(4, 64, device="meta")
    with torch.device("meta"):
        net = nn.Sequential(*(Averaged(64) for _ in range(8)))
    graph = capture(Objective(net, nn.MSELoss(), ("0", "1"), ("1",)), (rows, rows), training=True).graph
    program = lower(graph, make_plan(graph, Request("data_parallel", 2)), LoweringOptions(partial_loss=True))
    assert repeated_blocks(replace(program, updates=())) is not None
    found = trace_repeated(program, OptimizerSettings())
    assert found == trace(program, OptimizerSettings())
    assert found.peaks["forward"] >= 8 * 4 * 64 * 64


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.9, 0.8])
def test_layers_of_two_plans_are_predicted_from_more_repetitions(contracted_only, share):
    """The code after the last repetition may start inside it, where a memory limit changes later layers."""
    graph = graph_of("llama", 14, torch.bfloat16)
    request = Request("auto", 4, "dynamic_programming", mesh=(("a", 4),))
    limit = int(share * make_plan(graph, request).search["bytes"])
    plan = make_plan(graph, replace(request, memory_limit=limit))
    program, settings = overlap(lower(graph, plan, LoweringOptions(partial_loss=True))), OptimizerSettings(0)
    assignments = {(re.sub(r"\d+", "", name), str(one.assignment)) for name, one in plan.operators.items()}
    assert len(assignments) > len({name for name, _ in assignments})
    assert trace_repeated(program, settings) == trace(program, settings)


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("again", [8, 7])
def test_two_runs_of_layers_are_predicted(contracted_only, monkeypatch, again, stage):
    """Some layers are recomputed and as many are not: neither are all of one kind traced nor all of the other."""
    traced = []
    build = repeating.Trace.__init__

    def counted(self, program: Program, *args) -> None:
        traced.append(len(program.instructions))
        build(self, program, *args)

    graph = graph_of("llama", 15, torch.float32)
    plan = make_plan(graph, Request("data_parallel", 4))
    rules = {operator.id: rule_of(operator, graph) for operator in graph.operators}
    recompute = recomputed(graph, rules, RecomputeRequest("full"))
    plan = replace(plan, recompute=replace(recompute, modules=recompute.modules[:again]))
    program = lower(graph, plan, LoweringOptions(partial_loss=True, sharded_optimizer=stage > 0))
    settings = OptimizerSettings(stage, torch.optim.AdamW)
    complete = trace(program, settings)
    monkeypatch.setattr(repeating.Trace, "__init__", counted)
    assert trace_repeated(program, settings) == complete
    assert max(traced) < len(program.instructions) / 2


@pytest.mark.slow
@pytest.mark.parametrize("again", [None, "full"])
def test_calls_do_not_grow_with_the_layers(contracted_only, monkeypatch, again):
    calls, dispatch = [0], Live.__torch_dispatch__

    def counted(self, func, types, args=(), kwargs=None):
        calls[0] += 1
        return dispatch(self, func, types, args, kwargs)

    monkeypatch.setattr(Live, "__torch_dispatch__", counted)
    seen = []
    for layers in (8, 12):
        calls[0] = 0
        trace_repeated(program_of("llama", again, 2, layers), OptimizerSettings(2, torch.optim.AdamW))
        seen.append(calls[0])
    assert seen[0] == seen[1] > 0


@pytest.mark.slow
def test_a_truncated_program_is_that_of_a_model_with_fewer_layers():
    deep, small = program_of("gpt", None, 0, 9), program_of("gpt", None, 0, 3)
    part = repeated_blocks(deep)
    assert part is not None and part.count in (8, 9)
    found = truncated(deep, part, part.count - 6)
    assert [type(one) for one in found.instructions] == [type(one) for one in small.instructions]
    assert {s.name: s.spec for s in found.sources if s.kind == "parameter"}.keys() != {s.name for s in deep.sources}
    assert trace(found, OptimizerSettings()) == trace(small, OptimizerSettings())


def test_layers_of_other_widths_are_no_repetition():
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = [8, 8, 8, 8, 9, 8, 8, 8, 8]
            self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).relu()
            return x

    x = torch.zeros(4, 8)
    graph = capture(Objective(Uneven(), nn.MSELoss(), ("0", "1"), ("1",)), (x, x), training=True).graph
    program = lower(graph, make_plan(graph, Request("data_parallel", 2)), LoweringOptions(partial_loss=True))
    assert repeated_blocks(program) is None


@pytest.mark.slow
def test_equivalent_programs_are_traced_once(monkeypatch):
    """Stages of one model; a separate optimizer group makes a stage different."""
    graph = graph_of("llama", 8, torch.float32)
    plan = make_plan(graph, Request("data_parallel", 2))
    stages = cut(
        graph, plan, in_stages(graph, 4, "auto", 1), random_ordinals(graph, LoweringOptions(partial_loss=True))
    )
    programs = stage_programs(stages, range(4), LoweringOptions(partial_loss=True))
    plain = OptimizerSettings(0, torch.optim.AdamW, accumulate=4)
    name = programs[2].trainable_names[0]
    others = [one for program in programs for one in program.trainable_names if one != name]
    apart = replace(plain, groups=[{"names": [name]}, {"names": others}])
    one_by_one = [trace_repeated(program, plain) for program in programs]
    traced, once = [], repeating.trace_repeated

    def counted(program: Program, settings: OptimizerSettings, **others):
        traced.append(program)
        return once(program, settings, **others)

    monkeypatch.setattr(repeating, "trace_repeated", counted)
    assert [found.of(program, plain) for found in [Traces()] for program in programs] == one_by_one
    assert [id(one) for one in traced] == [id(programs[number]) for number in (0, 1, 3)]
    traced.clear()
    with monkeypatch.context() as patched:
        patched.setattr(OptimizerSettings, "groups_for", lambda self, program: self.groups)
        for found in [Traces()]:
            [found.of(program, apart) for program in programs]
    assert len(traced) == 4


def test_program_signatures_ignore_only_names():
    """At any depth, shapes, layouts, recompute and reductions change the signature; names do not."""
    program = program_of("llama", None, 0)
    assert program_signature(program) == program_signature(program_of("llama", None, 0))
    others = [program_of("llama", "full", 0), program_of("llama", None, 1), program_of("llama", None, 0, 8)]
    others += [program_of("llama", None, 0, dtype=torch.bfloat16), replace(program, outputs=program.outputs[:0])]
    others.append(replace(program, instructions=program.instructions[:-1]))
    assert len({program_signature(one) for one in (program, *others)}) == 1 + len(others)
