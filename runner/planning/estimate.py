"""Estimates of the step time and the memory per rank of a plan: the single source of these numbers for the search, the
joint optimisation and every report.

The plans of one joint optimisation differ little, so `Programs` and `Traces` cache lowered, cut and traced programs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from types import MappingProxyType
from typing import Any

from runner.build import callbacks, optimizers
from runner.build.modules import offload_of
from runner.config.schema import Config
from runner.planning import lowering
from runner.planning.batch_rows import EqualRanks, kinds_of
from runner.planning.memory_limit import MODES, Mode, RecomputedLayers, pareto_front
from runner.planning.served_memory import of_server, of_worker
from runner.planning.slices import SlicedProgram, sliced
from runner.planning.sources import wanted_recompute
from strategies.core.graph import ITEM_BYTES, OperatorGraph, Ref
from strategies.core.mesh import Mesh
from strategies.core.plan import Plan, Recompute
from strategies.core.program import LoweringOptions, Program
from strategies.cost.cluster import Cluster
from strategies.cost.lower_bounds import step_lower_bound
from strategies.cost.roofline import Work, operator_work
from strategies.cost.server import Servers, served
from strategies.cost.step import (
    StepCost,
    calling_seconds,
    lower_bound_with_zero,
    need_of,
    norm_seconds,
    recomputed_by_module,
    recomputed_seconds,
    step_cost,
    works_of,
)
from strategies.lowering.lowering import lower
from strategies.lowering.pipeline import Stage, recompute_in
from strategies.lowering.pipeline_schedule import Owners, Schedule, owners_of, peak_activations, split_stages, stages_of
from strategies.lowering.pipeline_timeline import StageTimes
from strategies.lowering.recompute import recomputed
from strategies.memory.estimate import Outline, outline, stored_by_module, stored_lower_bound
from strategies.memory.parts import Memory, group_memory, memory
from strategies.memory.repeated_blocks import Traces
from strategies.memory.trace import Traced
from strategies.memory.zero import complete_bytes
from strategies.optimizer.settings import BUCKET, MASTER, OptimizerSettings, own_sizes, persisting
from strategies.optimizer.sharding import sharded_buckets, staying
from strategies.planner.description import cost_of_stages, stage_times
from strategies.planner.step_certificate import StepEvaluation, StepSavings
from strategies.rules import rule_of

ID = 8
"""Bytes of the id, the version or the position of a row."""
FILLED = 4
"""Traces of steps with more or fewer complete parameters, at most."""
WORTH = 0.005
"""Of the seconds: what more complete parameters must save."""
TYPICAL_STORED = 1.5
"""Bytes stored for backward, relative to their lower bound (a 7B llama on 8 devices: 1.3 to 1.8)."""


def settings_of(config: Config, graph: OperatorGraph, device: str) -> OptimizerSettings:
    """The optimizer step that follows backward, for the estimate of time and memory."""
    sources = graph.of_kind("parameter")
    names, trainable = [source.name for source in sources], [source.name for source in sources if source.trainable]
    options, native = lowering.deepspeed_options(config), config.zero_engine == "native"
    bucket, complete = own_sizes(options) if native else (options.get(BUCKET), persisting(options))
    return OptimizerSettings(
        config.parallel.zero.known,
        optimizers.optimizer_factory(config.optimizer),
        optimizers.parameter_groups(names, trainable, config.optimizer),
        config.parts,
        lowering.bucket_cut(config),
        lowering.overlaps_backward(config) and config.parallel.pipeline.known is None,
        bucket,
        offload_of(config, None),
        device,
        config.zero_engine,
        complete,
        copies=callbacks.copies(config),
    )


@dataclass(frozen=True)
class Programs:
    """A `Lower` that lowers and cuts plans that differ only in recompute once. Keys hold the `id()` of the operators of
    a plan, so that plan is kept beside the result."""

    programs: dict[Hashable, tuple[Plan, Program]] = field(default_factory=dict)
    cuts: dict[Hashable, tuple[Plan, tuple[Stage, ...]]] = field(default_factory=dict)
    work: dict[Hashable, tuple[Plan, list[Work]]] = field(default_factory=dict)

    def __call__(
        self,
        graph: OperatorGraph,
        plan: Plan,
        options: LoweringOptions,
        open_axes: Mapping[str, Iterable[str]] = MappingProxyType({}),
        **stage: Any,
    ) -> Program:
        if plan.recompute is not None and plan.recompute.slices_inputs:  # storage then depends on the program
            return lower(graph, plan, options, open_axes=open_axes, **stage)
        axes = tuple((name, tuple(own)) for name, own in open_axes.items())
        key = id(plan.operators), plan.mesh, options, axes
        if key not in self.programs:
            program = lower(graph, replace(plan, recompute=None), options, open_axes=open_axes, **stage)
            self.programs[key] = plan, program
        return replace(self.programs[key][1], recompute=plan.recompute)

    def works(self, graph: OperatorGraph, plan: Plan, cluster: Cluster) -> list[Work]:
        """`works_of`, computed once per plan and cluster."""
        key = id(plan.operators), plan.mesh, cluster
        if key not in self.work:
            self.work[key] = plan, works_of(graph, plan, cluster)
        return self.work[key][1]

    def stages(self, config: Config, graph: OperatorGraph, plan: Plan, owners: Owners) -> tuple[Stage, ...]:
        """`lowering.cut_of`, computed once per plan. Where devices are equal, stages are the same for all owners."""
        devices = owners if config.cluster.groups else len(owners)
        key = id(plan.operators), lowering.training_options(config), lowering.pipeline_groups(config), devices
        if key not in self.cuts:
            self.cuts[key] = plan, lowering.cut_of(config, graph, replace(plan, recompute=None), owners)
        return tuple(
            replace(stage, plan=replace(stage.plan, recompute=recompute_in(stage.graph.operators, plan.recompute)))
            for stage in self.cuts[key][1]
        )


@dataclass(frozen=True)
class MemoryBounds:
    """Bytes of a rank, for every group of ranks.

    Attributes:
        least: a lower bound.
        likely: an estimate; None where nothing similar was traced.
        recomputed: a lower bound where everything that backward needs is recomputed.
    """

    least: Sequence[int]
    likely: Sequence[int] | None
    recomputed: Sequence[int]


@dataclass(frozen=True)
class StageEstimate:
    """A pipeline stage, or the complete step without a pipeline: its program and its standalone cost."""

    graph: OperatorGraph
    plan: Plan
    program: Program
    works: Sequence[Work]
    cost: StepCost
    cluster: Cluster
    """With the devices of its own ranks."""


@dataclass(frozen=True)
class KindEstimate:
    """The step of the ranks of one kind."""

    kind: EqualRanks
    part: StageEstimate


@dataclass(frozen=True)
class Estimate:
    """The estimate of a step whose `parts` are run by groups of ranks in the order of `schedule`; without a pipeline
    there is one part, one group, and no `stages`. Memory is traced on demand, see `memories`."""

    parts: Sequence[StageEstimate]
    stages: Sequence[Stage]
    schedule: Schedule | None
    settings: OptimizerSettings
    cluster: Cluster
    traces: Traces
    traced: dict[int, Memory] = field(default_factory=dict)
    """By group of ranks."""
    servers: Servers | None = None
    """The parameter servers, where there are any."""
    served: frozenset[str] = frozenset()
    """The names of the parameters that they hold."""
    kinds: Sequence[KindEstimate] = ()
    """The kinds of ranks with different slices of the batch, where there are any: `parts` is then that of the slowest,
    and `cluster` describes its devices."""

    def with_settings(self, settings: OptimizerSettings) -> Estimate:
        """The estimate of the same programs without a pipeline, with another optimizer step."""
        parts = [
            replace(one, cost=step_cost(one.graph, one.plan, one.program, one.cluster, settings, one.works))
            for one in self.parts
        ]
        return replace(self, parts=parts, settings=settings, traced={})

    @property
    def completing(self) -> list[tuple[int, int]]:
        """What `complete` may be at stage 3, and the bytes that a rank then keeps beside its parts: at our own one
        bucket after the other, as far as that saves gathers, at DeepSpeed's parameters of one size after the other."""
        program, settings = self.parts[0].program, self.settings
        if not settings.native:
            sizes = sorted(complete_bytes(program).values())
            return [(elements, sum(more for size, more in sizes if size <= elements)) for elements in dict(sizes)]
        buckets = sharded_buckets(program, [group["names"] for group in settings.groups_for(program)], settings.limit)
        steps, size = [], 0
        for number, elements in staying(buckets):
            bucket = buckets[number]
            size += (bucket.elements - bucket.part) * ITEM_BYTES[bucket.dtype]
            if bucket is not buckets[-1] or settings.accumulate > 1:
                steps.append((elements, size))
        return steps

    @property
    def may_fill(self) -> bool:
        """Whether parameters may stay complete at stage 3: not with ranks of several kinds, nor beside offload."""
        offload = self.settings.offload
        kept = {offload.optimizer, offload.parameters, offload.activations} == {"none"}
        return self.settings.stage == 3 and kept and not self.kinds

    def filling(self, size: int, limit: int) -> Estimate:
        """The estimate with as many elements complete at stage 3 as `limit` bytes of a rank hold, where that saves
        time. Without them it needs `size`, and with them about what is added to its parts: less where what is complete
        is not gathered where it needs most, more where a larger bucket is gathered ahead instead. So a few steps are
        traced, each with what the one before left."""
        steps = self.completing
        room, fits, low, high = limit - size, self, 0, len(steps)
        for _ in range(FILLED):
            number = min(sum(more <= room for _, more in steps), high)
            if number <= low:
                break
            more = self.with_settings(replace(self.settings, complete=steps[number - 1][0]))
            if more.seconds > (1 - WORTH * bool(low)) * fits.seconds:
                break
            room += limit - more.peak
            if more.peak <= limit:
                low, fits = number, more
            else:
                high = number - 1
        return fits

    @property
    def groups(self) -> int:
        return 1 if self.schedule is None else len(self.schedule)

    @property
    def owners(self) -> Owners:
        """The group of ranks that runs every part."""
        return (0,) if self.schedule is None else owners_of(self.schedule)

    @cached_property
    def seconds(self) -> float:
        """Estimated seconds of a step."""
        return self._step([part.cost for part in self.parts])

    def _step(self, costs: Sequence[StepCost]) -> float:
        """Seconds of a step whose parts have these `costs`."""
        if self.schedule is None:
            return costs[0].total
        by_part = [cost.to_json() for cost in costs]
        accumulate = self.settings.accumulate
        return float(cost_of_stages(self.stages, by_part, self.schedule, accumulate, self.cluster)["total"])

    @property
    def stage_times(self) -> list[StageTimes]:
        """The passes of every stage."""
        costs = [part.cost.to_json() for part in self.parts]
        return stage_times(self.stages, costs, self.owners, self.settings.accumulate, self.cluster)

    def _traced(self, number: int, split: bool) -> Traced:
        """The trace of a part, whose backward may be `split`."""
        return self.traces.of(self.parts[number].program, replace(self.settings, split=split))

    def stored_by(self, number: int) -> tuple[int, int]:
        """Bytes that a micro-batch stores in a stage for backward, and between its two halves, by tracing its
        program."""
        traced = self._traced(number, split=number > 0)
        return memory(traced, self.settings).activations, traced.between

    def memory(self, group: int) -> Memory:
        """The memory of a rank of a group, by tracing its programs; with parameter servers that of a worker."""
        if group not in self.traced:
            numbers = stages_of(group, self.owners)
            apart = frozenset() if self.schedule is None else split_stages(self.schedule[group])
            traces = {number: self._traced(number, split=number in apart) for number in numbers}
            if self.servers is not None:
                self.traced[group] = of_worker(memory(traces[0], self.settings), self.servers)
            elif self.schedule is None:
                self.traced[group] = memory(traces[0], self.settings)
            else:
                self.traced[group] = group_memory(traces, self.schedule, group, self.settings)
        return self.traced[group]

    @property
    def server_memory(self) -> int:
        """Bytes of a parameter server."""
        assert self.servers is not None
        return of_server(memory(self.traces.of(self.parts[0].program, self.settings), self.settings), self.servers)

    @property
    def memories(self) -> list[Memory]:
        """The memory of a rank of every group."""
        return [self.memory(group) for group in range(self.groups)]

    @property
    def is_traced(self) -> bool:
        return len(self.traced) == self.groups

    @property
    def peaks(self) -> list[int]:
        """Peak bytes of a rank of every group."""
        return [one.peak for one in self.memories]

    def limits(self, limit: int | None) -> list[int]:
        """The most bytes of a rank of every group: `limit`, or the memory of its device."""
        return [limit or part.cluster.memory for part in self.parts[: self.groups]]

    @property
    def peak(self) -> int:
        """Peak bytes, the maximum over ranks."""
        return max(self.peaks)

    @property
    def peaks_once(self) -> list[int]:
        """Peak bytes of a rank of every group but in backward, which runs recomputed layers for the second time."""
        return [max(size for phase, size in one.peaks.items() if phase != "backward") for one in self.memories]

    def peaks_within(self, limits: Sequence[int]) -> list[int]:
        """Peak bytes of a rank of every group; 0 of those that are left once one exceeds its limit. Likely candidates
        are traced first, to skip the other groups."""
        peaks = [0] * self.groups
        for group in sorted(range(self.groups), key=lambda group: limits[group] - self.likely[group]):
            peaks[group] = self.memory(group).peak
            if peaks[group] > limits[group]:
                break
        return peaks

    def of_group(self, group: int) -> Sequence[StageEstimate]:
        return [self.parts[number] for number in stages_of(group, self.owners)]

    @cached_property
    def outlines(self) -> list[Outline]:
        """Memory outlines of every group, without a trace."""
        return [
            Outline.together([outline(part.program, self.settings) for part in self.of_group(group)])
            for group in range(self.groups)
        ]

    @cached_property
    def stored(self) -> list[int]:
        """A lower bound of the bytes that every group stores for backward, from shapes and layouts."""
        if self.settings.offload.activations != "none":
            return [0] * self.groups
        by_part = [stored_lower_bound(part.graph, part.plan) for part in self.parts]
        return (
            by_part if self.schedule is None else [int(peak_activations(actions, by_part)) for actions in self.schedule]
        )

    def with_stored(self, share: float) -> list[int]:
        """A lower bound of the bytes of every group that stores `share` of `stored` for backward."""
        return [one.least(int(share * stored)) for one, stored in zip(self.outlines, self.stored, strict=True)]

    @property
    def likely(self) -> list[int]:
        """An estimate of the bytes of every group without a trace."""
        pairs = zip(self.outlines, self.stored, strict=True)
        return [one.likely(int(TYPICAL_STORED * stored)) for one, stored in pairs]

    def seconds_with_zero(self, settings: OptimizerSettings) -> float:
        """A lower bound of the seconds of this plan, which has no ZeRO, with the ZeRO stage of `settings`. The slowest
        stage of a pipeline may then be another one, so all get the shortest update."""
        costs = [lower_bound_with_zero(part.cost, part.program, part.cluster, settings) for part in self.parts]
        shortest = min(cost.optimizer for cost in costs)
        return self._step([replace(cost, optimizer=shortest) for cost in costs])

    def seconds_with_recompute(self, recompute: Recompute | None) -> float:
        """A lower bound of the seconds of this plan, which recomputes nothing, with `recompute`."""
        costs = []
        for part in self.parts:
            own = recompute_in(part.graph.operators, recompute)
            seconds = self.settings.accumulate * recomputed_seconds(part.graph, part.works, own)
            costs.append(replace(part.cost, recomputed=seconds))
        return self._step(costs)

    def recompute_fronts(self, by_mode: Mapping[Mode, Recompute]) -> list[list[RecomputedLayers]]:
        """What every group may recompute of this plan, which recomputes nothing, by estimates without a trace."""
        fronts = []
        for group in range(self.groups):
            layers: dict[str, dict[Mode, tuple[float, float]]] = defaultdict(dict)
            for part, mode in product(self.of_group(group), MODES):
                own = recompute_in(part.graph.operators, by_mode[mode])
                if own is None:
                    continue
                before = stored_by_module(part.graph, part.plan, own)
                behind = stored_by_module(part.graph, replace(part.plan, recompute=own), own)
                for path, seconds in recomputed_by_module(part.graph, part.works, own).items():
                    saves = max(before[path] - behind[path], float(mode == "full"))
                    if mode == "full" or 0 < saves < layers[path]["full"][1]:
                        layers[path][mode] = round(seconds, 9), saves
            fronts.append(pareto_front(layers))
        return fronts

    def bounds(self, similar: Estimate | None) -> MemoryBounds:
        """Memory bounds of every group, without tracing this plan.

        Args:
            similar: a traced estimate with the same forward, but for what is gathered: during and after that, a rank
                holds equally many bytes besides persistent state. There are no gradients before the first backward;
                with several micro-batches the peak may be in a later one.
        """
        if self.is_traced:
            recomputed = []
            for one in self.memories:
                phases = one.peaks.items()
                recomputed.append(max(size - one.activations * (phase != "update") for phase, size in phases))
            return MemoryBounds(self.peaks, self.peaks, recomputed)
        recomputed = self.with_stored(0)
        if similar is None:
            return MemoryBounds(self.with_stored(1.0), None, recomputed)
        lower, likely = [], []
        for own, one in zip(self.outlines, similar.memories, strict=True):
            forward = 0 if self.settings.accumulate > 1 else one.peaks["forward"] - one.persistent
            lower.append(max(own.persistent + forward, own.least(one.activations)))
            likely.append(max(lower[-1], own.persistent + own.gathered + one.peak - one.persistent))
        return MemoryBounds(lower, likely, recomputed)


def estimate(
    config: Config,
    in_step: tuple[OperatorGraph, Plan],
    settings: OptimizerSettings,
    cluster: Cluster,
    programs: Programs,
    traces: Traces,
    schedule: Schedule | None = None,
) -> Estimate:
    """The estimate of a step.

    Args:
        config: without open keys.
        in_step: graph and plan, as `lowering.training_step` returns them.
        settings: as `settings_of` returns it.
        cluster: the machine for which the cost is estimated.
        programs: the cache of lowered programs.
        traces: the cache of memory traces.
        schedule: of a pipeline; None: the first that `lowering.schedules_of` returns.

    Raises:
        StrategyError: the plan cannot be lowered or cut.
    """
    if in_step[1].batch_rows:
        return _of_kinds(config, in_step, settings, programs, traces)
    stages: tuple[Stage, ...] = ()
    owners: Owners = (0,)
    lowered: tuple[Program, ...]
    if config.parallel.pipeline.known is None:
        pairs, lowered = [in_step], (lowering.training_program(config, *in_step, programs),)
    else:
        schedule = schedule or lowering.schedules_of(config)[0]
        owners = owners_of(schedule)
        stages = programs.stages(config, *in_step, owners)
        pairs = [(stage.graph, stage.plan) for stage in stages]
        lowered = lowering.pipeline_programs(config, stages, owners, lowering.training_options(config), programs)
    parts, of_slice = [], sliced(config, *in_step) if config.parallel.elastic else None
    servers = None if of_slice is None else servers_of(config, in_step[0], of_slice)
    served_names = frozenset[str]() if of_slice is None else frozenset(of_slice.elements)
    for group, (graph, plan), program in zip(owners, pairs, lowered, strict=True):
        own = cluster.of_group(group, plan.mesh.size)
        works = programs.works(graph, plan, own)
        cost = step_cost(graph, plan, program, own, settings, works)
        if servers is not None:
            cost = served(cost, servers, own)
        parts.append(StageEstimate(graph, plan, program, works, cost, own))
    return Estimate(parts, stages, schedule, settings, cluster, traces, servers=servers, served=served_names)


def _of_kinds(
    config: Config, in_step: tuple[OperatorGraph, Plan], settings: OptimizerSettings, programs: Programs, traces: Traces
) -> Estimate:
    """The estimate of a step with slices of different sizes: all ranks wait for the slowest."""
    (graph, plan), kinds = in_step, []
    for kind in kinds_of(config, plan, settings.device):
        program = lowering.training_program(config, graph, kind.plan, programs)
        works = programs.works(graph, kind.plan, kind.cluster)
        cost = step_cost(graph, kind.plan, program, kind.cluster, settings, works)
        kinds.append(KindEstimate(kind, StageEstimate(graph, kind.plan, program, works, cost, kind.cluster)))
    slowest = max(kinds, key=lambda one: one.part.cost.total)
    return Estimate([slowest.part], (), None, settings, slowest.kind.cluster, traces, kinds=kinds)


def servers_of(config: Config, graph: OperatorGraph, of_slice: SlicedProgram) -> Servers:
    """The servers of mode parameter_server. Of a table each id of a slice may name another row."""
    section = config.parallel.server
    item = next(one.spec.item_bytes for one in graph.of_kind("parameter") if one.name in of_slice.elements)
    wide = max(item, MASTER)
    dense = sum(count for name, count in of_slice.elements.items() if name not in of_slice.widths)
    pull, push, summed = dense * item, dense * wide, dense * wide
    for table in of_slice.tables:
        shapes = [of_slice.entries[entry].spec.shape for entry in table.entries]
        named = config.train.accumulate * sum(map(math.prod, shapes))
        rows, of_all = min(named // of_slice.slices, table.rows), min(named, table.rows)
        pull += rows * (table.width * item + ID * (section.cache_rows > 0))
        push += rows * (table.width * wide + ID * (2 + (section.cache_rows > 0)))
        summed += of_all * (table.width * wide + ID)
    sync = section.consistency == "sync"
    served, kept = (sum(one.values()) * wide for one in (of_slice.elements, of_slice.kept))
    halves = item < wide
    return Servers(section.servers, of_slice.slices, section.replicas, pull, push, summed, sync, served, kept, halves)


def step_price(
    config: Config,
    graph: OperatorGraph,
    training_step: Callable[[Plan], tuple[OperatorGraph, Plan]],
    device: str,
    ranks: int,
    cluster: Cluster,
) -> StepEvaluation:
    """The cost function by which the search estimates plans of `graph`, the same as for `run plan`. `training_step`
    returns graph and plan of a step."""
    settings, programs, traces = settings_of(config, graph, device), Programs(), Traces()

    def seconds(plan: Plan) -> float:
        return estimate(config, training_step(plan), settings, cluster, programs, traces).seconds

    parallel, groups = config.parallel, lowering.pipeline_groups(config)
    if groups > 1 or parallel.copies > 1:
        waits = parallel.pipeline.schedule in ("gpipe", "1f1b") and groups > 1
        bound = step_lower_bound(graph, cluster.fastest, ())
        floor = bound.seconds(groups, ranks // groups, parallel.pipeline.parts, 1, again=False, waits=waits)
        return StepEvaluation(seconds, floor=config.train.accumulate * floor)
    cut = settings.cut
    used = {ref for operator in graph.operators if operator.id in graph.returning for ref in operator.operands}
    count = sum(source.trainable and Ref(source.id) in used for source in graph.of_kind("parameter"))
    constant = calling_seconds(count, cluster, settings)
    if settings.stage and not settings.native and ranks > 1:
        constant += norm_seconds(Mesh((("all", ranks),)), cluster)
    if (wanted := wanted_recompute(parallel.recompute)) is not None:
        rules = {operator.id: rule_of(operator, graph) for operator in graph.operators}
        recompute, alone = recomputed(graph, rules, wanted), Mesh((("alone", 1),))
        works = [operator_work(rules[operator.id], {}, operator, graph, alone, cluster) for operator in graph.operators]
        constant += config.parts * recomputed_seconds(graph, works, recompute) / ranks
    savings = StepSavings(
        overlapped=parallel.comm_async and not config.train.compile,
        joined=bool(lowering.fused_bytes(config)),
        bucket=0 if cut.at is not None else None if cut.size is None else max(cut.size, 1),
        optimizer_bytes=need_of(settings).moved,
        constant=constant,
    )
    return StepEvaluation(seconds, savings)
