"""Joint optimisation of the keys that `auto` leaves open (ZeRO stage, pipeline stages, micro-batches, recompute)
together with the plan, before preparation.

Invariant: the prepared config holds every decision, so ranks, checkpoints and reports never see an open key. The plan
keeps the decision in its `search`, under `decided`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from runner.build import pretrained
from runner.build.captures import Captures
from runner.build.modules import DTYPES, captured_from_shapes, cast
from runner.build.optimizers import optimizer_factory
from runner.config.schema import Config
from runner.data.loader import flatten_batch, global_batch
from runner.errors import ConfigError
from runner.planning import capacity, lowering
from runner.planning.clusters import cluster_of, device_of
from runner.planning.datasets import datasets, order_of
from runner.planning.estimate import Estimate, MemoryBounds, Programs, estimate, settings_of, step_price
from runner.planning.memory_limit import MODES, Mode, RecomputeSelection, SearchBudget
from runner.planning.prepare import Accept, Prepared, accept_any, check_model, prepare
from runner.planning.slow_code import noticed
from runner.planning.sources import cached, for_target, from_file, request_of, wanted_recompute
from runner.run_folder.plan_file import read_content
from strategies.capture import Captured, Objective
from strategies.core.errors import StrategyError, TooLarge
from strategies.core.gc_paused import gc_paused
from strategies.core.graph import OperatorGraph
from strategies.core.plan import Plan, Recompute
from strategies.core.request import RecomputeRequest, Request
from strategies.cost.cluster import Cluster
from strategies.cost.lower_bounds import step_lower_bound
from strategies.cost.problem import Problem
from strategies.lowering.device_placement import on_host
from strategies.lowering.pipeline_schedule import split_stages
from strategies.lowering.recompute import recomputed, repeated_layers
from strategies.memory.estimate import plan_bytes
from strategies.memory.parts import over
from strategies.memory.repeated_blocks import Traces
from strategies.optimizer.settings import COMPLETE, PERSISTING, OptimizerSettings, keeps
from strategies.optimizer.updates import OptimizerFactory
from strategies.planner.plan_file import check_form
from strategies.planner.planner import Planning, SlicedModules, planning_of
from strategies.planner.step_certificate import StepEvaluation, with_cost
from strategies.rules import rule_of
from strategies.runtime import compiled
from strategies.runtime.tensor_files import StoredTensor
from strategies.search.joint import AGAIN, KEEPING, Bound, Choice, Decision, Priced, decide

ZERO = (0, 1, 2, 3)
SMALLER_PLANS = 4
"""Other plans for less memory than one that is too large, at most; twice as many searches, some of which repeat one."""
BUDGET_SHARES = (1.0, 0.85, 0.7, 0.5, 0.0)
"""Of the limit: budgets of a search where no plan that was measured before keeps it; at last the smallest plan."""
CLOSE_SHARES = (*(1 - step / 20 for step in range(13)), 0.0)
"""The same, where nothing but the plan is open: a traced peak need not fall with the search's estimate."""
TRACED = 6
"""Plans that a refusal traces at most."""
FEW = 0.5
"""Share of the limit: a budget of less is only searched behind that of the limit."""
WORTH = 0.005
"""Of the seconds: what another plan must gain."""
EVERY = 5.0
"""Seconds between lines of progress."""


def prepare_decided(
    config: Config,
    folder: Path | None,
    say: Callable[[str], None] = print,
    accept: Accept = accept_any,
    resumed: Mapping[str, StoredTensor] = MappingProxyType({}),
    earlier: Captures | None = None,
) -> Prepared:
    """`prepare`, after the joint optimisation of open keys and of the plan within `parallel.memory_limit`. Without one
    DeepSpeed's stage 3 may fill the memory of a device, as it does by its own defaults.

    Raises:
        ConfigError, StrategyError: as `prepare`, and if no choice fits into the memory of a rank.
    """
    with noticed(say):
        return _prepare_decided(config, folder, say, accept, resumed, earlier)


def _prepare_decided(
    config: Config,
    folder: Path | None,
    say: Callable[[str], None],
    accept: Accept,
    resumed: Mapping[str, StoredTensor],
    earlier: Captures | None,
) -> Prepared:
    device, world_size = device_of(config)
    capacity.check_processes(config, world_size)
    capacity.check_model(config, device, world_size)
    if config.parallel.plan is not None and config.parallel.context_parallel == "auto":
        config = config if _search_in(config.parallel.plan).get("context_parallel") is None else with_ring(config)
    parallel, plan = config.parallel, None
    if parallel.plan is not None and parallel.zero_or_pipeline_open:
        config = with_choice(config, replace(choice_of(_decided_in(parallel.plan)), recompute="none"))
    elif parallel.open or parallel.memory_limit is not None:
        config, plan = _decided(config, say, accept, earlier)
        if parallel.open:
            config = with_choice(config, choice_of(plan.search["decided"]), plan.recompute)
    search = plan.search if plan is not None else {} if parallel.plan is None else _search_in(parallel.plan)
    prepared = prepare(with_complete(config, search.get("complete", 0)), folder, say, plan, accept, resumed, earlier)
    zero = prepared.config.parallel.zero
    fills = zero.known == 3 and prepared.config.zero_engine == "deepspeed" and not keeps(zero.options)
    return _filling(prepared) if fills and plan is None and parallel.plan is None else prepared


def _filling(prepared: Prepared) -> Prepared:
    """`prepared` with as many parameters complete at stage 3 as the memory of a device holds, and that at hand."""
    config, plan = prepared.config, prepared.plan
    if prepared.graph is None or plan is None or prepared.step is None or config.train.compile:
        return prepared
    cluster = cluster_of(config, prepared.device, prepared.world_size)
    settings = settings_of(config, prepared.graph, prepared.device)
    with gc_paused():
        found = estimate(config, prepared.step, settings, cluster, Programs(), Traces(), prepared.schedule)
        here = capacity.room_of_a_rank(config, prepared.device, prepared.world_size)
        limit = int(min(found.limits(None)[0], here))
        filled = found.filling(found.peak, limit) if found.may_fill else found
    if filled is found:
        return prepared
    complete = filled.settings.complete
    search = {**with_cost(plan.search, filled.seconds), "complete": complete}
    return replace(prepared, config=with_complete(config, complete), plan=replace(plan, search=search))


def with_complete(config: Config, elements: int) -> Config:
    """The config with the elements that stay complete at stage 3 as an option, unless it is given."""
    zero = config.parallel.zero
    if not elements or zero.known != 3 or keeps(zero.options):
        return config
    name = COMPLETE if config.zero_engine == "native" else PERSISTING[0]
    section = zero.model_copy(update={"options": {**zero.options, name: elements}})
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"zero": section})})


def _decided(
    config: Config, say: Callable[[str], None], accept: Accept, earlier: Captures | None
) -> tuple[Config, Plan]:
    """The best plan, and the config: with keys and values around a ring where no plan keeps the limit otherwise. Blocks
    that are not fused on GPUs are slower than the cost model says, so the ring is not chosen for its seconds."""
    decision = JointDecision(config, say, earlier=earlier)
    decision.check(accept)
    try:
        return config, decision.plan()
    except StrategyError as error:
        if error.code not in ("MW501", "MW502") or not decision.may_pass_blocks:
            raise
    say("plan: no plan that gathers keys and values keeps the memory limit; trying parallel.context_parallel=ring")
    config = with_ring(config)
    around = JointDecision(config, say, decision.captures, earlier)
    plan = around.plan()
    return config, replace(plan, search={**plan.search, "context_parallel": "ring"})


def with_ring(config: Config) -> Config:
    """The config with `parallel.context_parallel` decided as ring."""
    parallel = config.parallel.model_copy(update={"context_parallel": "ring"})
    return config.model_copy(update={"parallel": parallel})


def choice_of(content: Mapping[str, Any]) -> Choice:
    """The choice in plan.json's `search.decided`, or in its `runner_up`."""
    return Choice(content["stages"], content["zero"], content["micro_batches"], content["recompute"])


def _modes(recompute: Recompute, graph: OperatorGraph) -> str:
    """How layers are recomputed: full, selective, or `full and selective`."""
    selective = {recompute.region(graph.by_name[name].path) for name in recompute.kept}
    modes = [mode for mode, some in (("full", {*recompute.modules} - selective), ("selective", selective)) if some]
    return " and ".join(modes)


def _decided_in(name: str) -> dict[str, Any]:
    """The decision stored in a saved plan. Raises ConfigError and StrategyError."""
    found: dict[str, Any] | None = _search_in(name).get("decided")
    if found is None:
        raise ConfigError(
            "MW422",
            f"parallel.plan = {name!r} was made with parallel.zero.stage and parallel.pipeline given, so they cannot "
            "be auto here; give both as in the run that made it.",
        )
    return found


def _search_in(name: str) -> dict[str, Any]:
    """How a saved plan was found. Raises ConfigError and StrategyError."""
    content = read_content(Path(name))
    check_form(content, f"parallel.plan = {name!r}")
    search: dict[str, Any] = content["search"]
    return search


def with_choice(config: Config, choice: Choice, recompute: Recompute | None = None) -> Config:
    """The config with `choice` for the keys that are open.

    Args:
        config: with `auto` for some keys.
        choice: values for all of them.
        recompute: of the plan, if that is known.

    Raises:
        ConfigError: the sections of that config exclude each other.
    """
    content = config.model_dump()
    parallel, staged = content["parallel"], choice.stages > 1
    if config.parallel.zero.stage == "auto":
        parallel["zero"] |= {"stage": choice.zero}
    if config.parallel.pipeline.open:
        parts = choice.micro_batches if staged else None
        parallel["pipeline"] |= {"stages": choice.stages if staged else None, "micro_batches": parts}
    if config.parallel.recompute.operators == "auto":
        mode = "selective" if choice.recompute == "selective" else "full"
        section = parallel["recompute"] | {"operators": mode}
        if recompute is not None:
            handling = "keep" if recompute.keeps_communication else "recompute"
            section |= {"modules": list(recompute.modules), "communication": handling}
        parallel["recompute"] = "none" if choice.recompute == "none" else section
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        raise ConfigError("MW205", *(one["msg"] for one in error.errors())) from None


class Searches:
    """The plans of one graph on one number of ranks, each searched once.

    Without a limit all ZeRO stages share the plan of stage 0: theirs are within a hundredth, except in pipelines, where
    ZeRO 1 may lose a twentieth. With a `step_cost`, that of the only stage that is searched, plans are compared by
    their steps and get a certificate.
    """

    def __init__(self, graph: OperatorGraph, cluster: Cluster, step_cost: StepEvaluation | None) -> None:
        self.graph, self.cluster, self.step_cost = graph, cluster, step_cost
        self.rules = {operator.id: rule_of(operator, graph) for operator in graph.operators}
        self.planning: Planning | SlicedModules | None = None
        self.plans: dict[tuple[int, int | None], Plan | StrategyError] = {}  # by ZeRO stage and budget
        self.recomputes: dict[RecomputeRequest | None, Recompute | None] = {None: None}
        self.sizes: dict[tuple[int, int], float] = {}  # by `id()` of a plan's operators and ZeRO stage

    def plan(self, request: Request, budget: int | None) -> Plan:
        """The best plan within `budget` bytes, with the recompute of `request`. Raises StrategyError."""
        stage = 0 if budget is None and self.step_cost is None else request.zero_stage
        if (stage, budget) not in self.plans:
            try:
                if self.planning is None:
                    plain = replace(request, recompute=None, memory_limit=None, runner_up=self.step_cost is not None)
                    self.planning = planning_of(self.graph, plain, self.cluster, self.step_cost)
                self.plans[stage, budget] = self.planning.plan(stage, budget)
            except StrategyError as error:
                self.plans[stage, budget] = error
        plan = self.plans[stage, budget]
        if isinstance(plan, StrategyError):
            raise plan
        if "bytes" in plan.search and stage != request.zero_stage:
            plan = replace(plan, search={**plan.search, "bytes": self.bytes(plan, request)})
        return replace(plan, recompute=self.recompute(request.recompute))

    def by_rows(self, request: Request) -> Plan:
        """The plan that slices the batch alone, but for what the request gives. Raises StrategyError."""
        given = replace(request, mode="semi_auto", recompute=None, memory_limit=None)
        plan = planning_of(self.graph, given, self.cluster).plan(request.zero_stage, None)
        return replace(plan, recompute=self.recompute(request.recompute))

    def recompute(self, wanted: RecomputeRequest | None) -> Recompute | None:
        """What a request means for the graph."""
        if wanted is not None and wanted not in self.recomputes:
            self.recomputes[wanted] = recomputed(self.graph, self.rules, wanted)
        return self.recomputes[wanted]

    def bytes(self, plan: Plan, request: Request) -> float:
        """Bytes of a rank in the search's memory model, at the ZeRO stage of `request`."""
        key = id(plan.operators), request.zero_stage
        if key not in self.sizes:
            planned = {operator.id: plan.operators[operator.name] for operator in self.graph.operators}
            outputs = {id: one.outputs for id, one in planned.items() if one.outputs is not None}
            problem = Problem(
                self.graph, plan.mesh, self.rules, {}, {}, outputs, request.zero_stage, request.optimizer_state_factor
            )
            self.sizes[key] = plan_bytes(problem, {id: one.assignment for id, one in planned.items()})
        return self.sizes[key]


Capture = tuple[Objective, Captured, list[Tensor]]
"""A model, what was captured of it, and its batch entries."""


class JointDecision:
    """The search for the fastest choice within the memory of a rank. Models are captured from shapes, once per number
    of rows that a micro-batch may have; `captures` are those that are there already, by that number."""

    def __init__(
        self,
        config: Config,
        say: Callable[[str], None],
        captures: Mapping[int, Capture] | None = None,
        earlier: Captures | None = None,
    ) -> None:
        self.config, self.say, self.earlier = config, say, earlier
        self.device, self.ranks = device_of(config)
        self.cluster = cluster_of(config, self.device, self.ranks)
        self.limit = config.parallel.memory_limit or self.cluster.fastest.memory  # of any rank
        self.programs, self.traces = Programs(), Traces()
        self.captures: dict[int, Capture] = dict(captures or {})  # by rows of a micro-batch
        self.capturing = 0.0  # seconds, which are no part of those of the search
        self.searches: dict[tuple[int, int], Searches] = {}  # by rows and stages
        self.estimates: dict[Choice, Estimate] = {}  # of the fastest plan of each choice
        self.settings: dict[Choice, OptimizerSettings] = {}  # of choices without recompute, which changes nothing
        self.budgets: dict[tuple[int, int], SearchBudget] = {}  # by stages and ZeRO stage
        self.needs: list[tuple[int, Estimate]] = []  # what every plan needs at least, and its estimate

    def check(self, accept: Accept) -> None:
        """Reject early what `prepare` would reject after the search. Raises ConfigError."""
        config = self.config
        if config.train.compile:
            compiled.check(self.device)
        if not config.parallel.zero_or_pipeline_open:
            lowering.rows_per_split(config)
        objective, captured, _ = self.captured(self.rows)
        check_model(config, objective)
        if config.model.weights is not None:
            pretrained.locate(config.model, objective.model)
        accept(captured.graph, frozenset(objective.model.state_dict()))

    def plan(self) -> Plan:
        """The best plan, with the decision in its `search`; from the plan cache where it is there."""
        config, graph = self.config, self.captured(self.rows)[1].graph
        inputs = (config.data.batch_size, config.train, config.optimizer, config.parallel, self.device)
        cache = None if config.parallel.plan is not None else config.parallel.plan_cache
        return cached(cache, graph, self._open_request, self.cluster, inputs, self.say, self._made)

    @property
    def may_pass_blocks(self) -> bool:
        """Whether attentions may have their keys and values around a ring instead of gathered."""
        config = self.config
        if config.parallel.context_parallel != "auto" or config.train.compile:
            return False
        graph = self.captured(self.rows)[1].graph
        return any(rule_of(operator, graph).gathered for operator in graph.operators)

    def _made(self) -> Plan:
        started = time.perf_counter() - self.capturing
        with gc_paused():
            decision = self._with_own_plan(self._decide())
        seconds = round(time.perf_counter() - self.capturing - started, 4)
        decision, complete = self._with_complete(decision)
        plan, cost = decision.priced.plan, decision.priced.seconds
        search: dict[str, Any] = {**plan.search}
        if complete:
            search = {**with_cost(search, cost, self.bounds[decision.choice].seconds), "complete": complete}
        elif search["cost"] is None or not math.isclose(search["cost"], cost, rel_tol=1e-12):
            search = with_cost(search, cost, None if self.only else self.bounds[decision.choice].seconds)
        if self.config.parallel.open:
            search |= {"seconds": seconds, "decided": decision.to_json()}
            if decision.priced.modules is not None and plan.recompute is not None:
                search["decided"]["recompute"] = _modes(plan.recompute, self.searched(decision.choice).graph)
        return replace(plan, search=search)

    def _with_own_plan(self, decision: Decision) -> Decision:
        """The decision, with a faster plan that is made for its stage of ZeRO: all stages share the plan of stage 0
        where it keeps the limit, but gathers of parameters that hide behind work favour other layouts at stage 3."""
        choice, priced, parallel = decision.choice, decision.priced, self.config.parallel
        if choice.zero != 3 or parallel.mode != "auto" or parallel.plan is not None:
            return decision
        try:
            own = replace(self.best_plan(choice, min(self.limits(choice))), recompute=priced.plan.recompute)
        except StrategyError:
            return decision
        price = self.estimate(choice, own)
        if price.seconds >= (1 - WORTH) * priced.seconds or (size := self._peak(choice, price)) > self.limit:
            return decision
        return replace(decision, priced=replace(priced, plan=own, seconds=price.seconds, bytes=size))

    def _with_complete(self, decision: Decision) -> tuple[Decision, int]:
        """The decision, and `OptimizerSettings.complete`: as much as the memory that is left holds."""
        choice, priced, config = decision.choice, decision.priced, self.config
        if choice.zero != 3 or keeps(config.parallel.zero.options) or config.train.compile:
            return decision, 0
        found = self.estimate(choice, priced.plan)
        assert priced.bytes is not None
        filled = found.filling(priced.bytes, self.limits(choice)[0]) if found.may_fill else found
        if filled is found:
            return decision, 0
        priced = replace(priced, seconds=filled.seconds, bytes=filled.peak)
        return replace(decision, priced=priced), filled.settings.complete

    def _decide(self) -> Decision:
        """Raises StrategyError; where only recompute could be chosen, with the parts of the plan that needs least."""
        try:
            return decide(self.bounds, self.limit, self._evaluate_aloud())
        except StrategyError as error:
            if error.code != "MW502" or not self.only:
                raise
            smallest = self._smallest()
            pairs = zip(smallest.memories, self.limits(max(self.bounds)), strict=True)
            needed, limit = max(pairs, key=lambda pair: pair[0].peak - pair[1])
            every = self.config.parallel.recompute.operators == "auto"
            again = smallest.parts[0].plan.recompute is not None
            split = any(map(split_stages, smallest.schedule or ()))
            settings = replace(smallest.settings, split=split)
            text = over(needed, limit, settings, recomputes=again, all_of_it=every)
            if not self.config.parallel.open:
                raise StrategyError("MW501", text) from None
            raise StrategyError("MW502", text) from None

    def _smallest(self) -> Estimate:
        """The plan that needs least of those that were tried and the fastest one; few are traced, those that may need
        least first."""
        found = self.fastest(max(self.bounds))
        for least, one in sorted(self.needs, key=lambda need: need[0])[:TRACED]:
            if least >= found.peak:
                break
            found = min(found, one, key=lambda each: each.peak)
        return found

    def limits(self, choice: Choice) -> list[int]:
        """Bytes of a rank of every group, whose devices may differ."""
        groups = ((group, self.ranks // choice.stages) for group in range(choice.stages))
        return [self.config.parallel.memory_limit or self.cluster.of_group(*group).memory for group in groups]

    def _most(self, choice: Choice, sizes: Sequence[int]) -> int:
        """The most of the bytes of every group; where one exceeds its own limit, as many beyond the limit of all."""
        excess = max(size - limit for size, limit in zip(sizes, self.limits(choice), strict=True))
        return self.limit + excess if excess > 0 else max(sizes)

    @cached_property
    def only(self) -> bool:
        """Whether all choices have the same ZeRO stage and pipeline."""
        return len({replace(choice, recompute="none") for choice in self.choices}) == 1

    @cached_property
    def batch(self) -> tuple[list[str], list[Tensor]]:
        """Names and tensors of a step's batch."""
        training, _, collate = datasets(self.config)
        order = order_of(self.config, training)
        rows = self.config.data.batch_size // self.config.train.accumulate
        first = order.rows(0)[:rows]
        names, tensors = flatten_batch(global_batch(training, collate, first, self.config.train.seed, 0))
        return list(names), cast(tensors, DTYPES[self.config.train.precision])

    @cached_property
    def rows(self) -> int:
        """The most rows of a micro-batch."""
        return max(self._rows(choice) for choice in self.choices)

    def _rows(self, choice: Choice) -> int:
        return self.config.data.batch_size // (self.config.train.accumulate * choice.micro_batches)

    def captured(self, rows: int) -> Capture:
        """The model with `rows` rows in a micro-batch."""
        if rows not in self.captures:
            started = time.perf_counter()
            names, tensors = self.batch
            total = len(tensors[0])
            own = [one[:rows] if one.dim() and len(one) == total else one for one in tensors]
            self.captures[rows] = captured_from_shapes(self.config, names, own, self.say, self.earlier)
            on_host(self.captures[rows][1].graph, self.config.parallel.place)
            self.capturing += time.perf_counter() - started
        return self.captures[rows]

    @cached_property
    def choices(self) -> list[Choice]:
        """All choices that the config allows. If none is valid, raises the error of the first."""
        allowed, refused = [], None
        for choice in self._every():
            try:
                lowering.check_ranks(with_choice(self.config, choice), self.ranks)
                allowed.append(choice)
            except ConfigError as error:
                refused = refused or error
        if not allowed:
            raise refused or ConfigError("MW410", "parallel: nothing is left to decide.")
        return allowed

    def _every(self) -> Iterator[Choice]:
        parallel, parts = self.config.parallel, self.config.data.batch_size // self.config.train.accumulate
        section, pipeline = parallel.recompute, parallel.pipeline
        zeros = ZERO if parallel.zero.stage == "auto" else (parallel.zero.stage,)
        kinds = section.operators if isinstance(section.operators, str) else str(list(section.operators))
        recomputes: Sequence[str] = (kinds,)
        if section.operators == "auto":
            recomputes = [again for again in AGAIN if section.communication is None or not again.endswith(KEEPING)]
        if pipeline.stages == "auto":
            several = [count for count in range(1, self.ranks + 1) if self.ranks % count == 0]
        else:
            several = [pipeline.stages or 1]
        for stages in several:
            doubled = [stages << power for power in range(parts.bit_length()) if parts % (stages << power) == 0]
            if stages == 1:
                counts = [1]
            elif isinstance(pipeline.micro_batches, int):
                counts = [pipeline.micro_batches]
            else:
                counts = doubled if "auto" in (pipeline.stages, pipeline.micro_batches) else [2 * stages]
            yield from (Choice(stages, *rest) for rest in product(zeros, counts, recomputes))

    @cached_property
    def bounds(self) -> dict[Choice, Bound]:
        """Lower bounds of all choices that the model has layers for. Raises StrategyError if there are none."""
        parallel, graph = self.config.parallel, self.captured(self.rows)[1].graph
        repeated = repeated_layers(graph, parallel.recompute.modules)
        found = step_lower_bound(graph, self.cluster.fastest, repeated)
        bounds = {}
        for choice in self.choices:
            if parallel.pipeline.stages == "auto" and len(repeated) % choice.stages:
                continue  # a stage boundary would cut a layer
            if parallel.recompute.operators == "auto" and choice.recompute != "none" and not repeated:
                continue
            if parallel.zero.stage == "auto" and choice.zero and graph.written:
                continue  # the optimizer's own copies would not follow
            ranks, again = self.ranks // choice.stages, parallel.recompute.operators == "full"
            settings = self._settings(choice)
            bounds[choice] = Bound(
                self.config.train.accumulate * found.seconds(
                    choice.stages, ranks, choice.micro_batches, self.rows // self._rows(choice),
                    again=again, waits=parallel.pipeline.schedule in ("gpipe", "1f1b"),
                ),
                found.persistent(choice.stages, ranks, settings, sliced=parallel.mode != "data_parallel"),
            )  # fmt: skip
        if not bounds:
            lowering.check_written(with_choice(self.config, self.choices[-1]), graph)
            raise StrategyError(
                "MW431",
                f"parallel.pipeline.stages = auto, but neither 1 nor a divisor of {self.ranks} ranks divides the "
                f"{len(repeated)} repeated layers of the model; say how many stages.",
            )
        return bounds

    @cached_property
    def _factory(self) -> OptimizerFactory:
        """One for all choices, so that the optimizer is tried once."""
        return optimizer_factory(self.config.optimizer)

    def _settings(self, choice: Choice) -> OptimizerSettings:
        key = replace(choice, recompute="none")
        if key not in self.settings:
            config, graph = with_choice(self.config, choice), self.captured(self.rows)[1].graph
            self.settings[key] = replace(settings_of(config, graph, self.device), factory=self._factory)
        return self.settings[key]

    @cached_property
    def _open_request(self) -> Request:
        """The request with all open keys undecided."""
        return for_target(request_of(self.config, self.ranks), self.captured(self.rows)[1].graph, self.device)

    def _request(self, choice: Choice) -> Request:
        return replace(
            self._open_request,
            world_size=self.ranks // choice.stages,
            zero_stage=choice.zero,
            overlap_gradients=choice.stages == 1 and self._open_request.overlap_gradients,
            micro_batches=lowering.pipeline_slots(self.config.train.accumulate, choice.stages, choice.micro_batches),
            recompute=self._wanted(choice.recompute),
        )

    def _wanted(self, again: str) -> RecomputeRequest | None:
        """The request for what a choice recomputes."""
        section = self.config.parallel.recompute
        if section.operators != "auto":
            return wanted_recompute(section)
        if again == "none":
            return None
        handling = "keep" if again.endswith(KEEPING) else section.communication
        mode: Mode = "selective" if again == "selective" else "full"
        return RecomputeRequest(mode, section.modules, handling, section.slice_inputs)

    def searched(self, choice: Choice) -> Searches:
        """The searches that `choice` shares with choices of the same number of rows and stages."""
        rows = self._rows(choice)
        if (rows, choice.stages) not in self.searches:
            objective, captured, tensors = self.captured(rows)
            step_cost = None
            if self.only:
                config = with_choice(self.config, replace(choice, recompute="none"))
                in_step = partial(lowering.training_step, config, objective, tensors, captured.graph)
                step_cost = step_price(config, captured.graph, in_step, self.device, self.ranks, self.cluster)
            self.searches[rows, choice.stages] = Searches(captured.graph, self.cluster, step_cost)
        return self.searches[rows, choice.stages]

    def best_plan(self, choice: Choice, budget: int | None) -> Plan:
        """The best plan of a choice within `budget` bytes of the search. Raises StrategyError."""
        searches, request, file = self.searched(choice), self._request(choice), self.config.parallel.plan
        if file is None:
            return searches.plan(request, budget)
        plan = from_file(Path(file), searches.graph, request)
        if self.config.parallel.recompute.operators == "auto":
            plan = replace(plan, recompute=searches.recompute(request.recompute))
        return replace(plan, search={key: value for key, value in plan.search.items() if key != "bytes"})

    def estimate(self, choice: Choice, plan: Plan) -> Estimate:
        """The estimate of a plan of a choice."""
        objective, captured, tensors = self.captured(self._rows(choice))
        config = with_choice(self.config, choice)
        in_step = lowering.training_step(config, objective, tensors, captured.graph, plan)
        return estimate(config, in_step, self._settings(choice), self.cluster, self.programs, self.traces)

    def fastest(self, choice: Choice) -> Estimate:
        """The estimate of a choice's fastest plan, regardless of memory."""
        if choice not in self.estimates:
            self.estimates[choice] = self.estimate(choice, self.best_plan(choice, None))
        return self.estimates[choice]

    def _evaluate_aloud(self) -> Callable[[Choice], Iterator[Priced]]:
        """`evaluate`, with a line of progress every few seconds."""
        count, reported = 0, time.monotonic()

        def evaluate(choice: Choice) -> Iterator[Priced]:
            nonlocal count, reported
            count += 1
            for priced in self.evaluate(choice):
                if time.monotonic() - reported > EVERY:
                    self.say(f"deciding: {count} of {len(self.bounds)} choices evaluated; now {choice}")
                    reported = time.monotonic()
                yield priced

        return evaluate

    def evaluate(self, choice: Choice) -> Iterator[Priced]:
        """Yield cost estimates of a choice, increasingly exact, as `decide` requests them.

        First lower bounds, from choices with the same plan but without ZeRO or recompute. Then plans: the fastest, with
        as few recomputed layers as keep the limit or with all, without and then with its bytes, and those found for
        less memory. Raises StrategyError where there is none.
        """
        plan, floor = self.best_plan(choice, None), 0
        stored, repeats = replace(choice, recompute="none"), replace(choice, recompute="full")
        if (plain := replace(stored, zero=0)) in self.bounds and choice.zero:
            yield Priced(plan, self.fastest(plain).seconds_with_zero(self._settings(choice)), None)
        if stored in self.bounds and stored != choice:
            floor = self._most(choice, self.memory_bounds(stored).recomputed)
            if floor <= self.limit:
                yield Priced(plan, self.fastest(stored).seconds, None)
                if choice.recompute.startswith("full"):
                    yield from self._recomputing_some(choice, plan)
            yield Priced(plan, self.fastest(stored).seconds_with_recompute(plan.recompute), None)
        price = self.fastest(choice)
        if choice.recompute.endswith(KEEPING) and price.seconds == self.fastest(repeats).seconds:
            return  # no collectives to keep
        if not price.is_traced:
            yield Priced(plan, price.seconds, None)
        floor = max(floor, self._most(choice, self.memory_bounds(choice).least))
        yield Priced(plan, price.seconds, floor if floor > self.limit else self._peak(choice, price))
        if self.config.parallel.mode == "auto" and self.config.parallel.plan is None:
            yield from self._within_less(choice, plan)

    def _peak(self, choice: Choice, estimated: Estimate) -> int:
        """`_most` of the traced peaks, or of those up to the first that exceeds its limit."""
        return self._noted(self._most(choice, estimated.peaks_within(self.limits(choice))), estimated)

    def _noted(self, size: int, estimated: Estimate) -> int:
        """`size`, noted for a refusal."""
        self.needs.append((size, estimated))
        return size

    def memory_bounds(self, choice: Choice) -> MemoryBounds:
        """Memory bounds of a choice's fastest plan without tracing it. ZeRO stages share that plan, and
        its forward unless parameters are gathered there."""
        known = (self.estimates.get(replace(choice, zero=stage)) for stage in ZERO[:3])
        similar = next((one for one in known if one is not None and one.is_traced), None)
        return self.fastest(choice).bounds(similar)

    def _within_less(self, choice: Choice, plan: Plan) -> Iterator[Priced]:
        """Plans found for less memory than `plan`, the fastest, needs; the last one keeps the limit, if one does. After
        one that does, plans between it and those that are too large are tried. Plans whose lower bound exceeds the
        limit are not traced."""
        budgets = self.budgets.setdefault(
            (choice.stages, choice.zero), SearchBudget(min(self.limits(choice)), 1 / choice.stages)
        )
        likely = self.memory_bounds(choice).likely or self.fastest(choice).likely
        request, searches = self._request(choice), self.searched(choice)
        seen, tried = [(searches.bytes(plan, request), self._most(choice, likely))], [plan.operators]
        best, kept, too_large = None, 0, self.fastest(choice).seconds
        for _ in range(2 * SMALLER_PLANS):
            if len(tried) > SMALLER_PLANS or (best is not None and best.seconds <= (1 + WORTH) * too_large):
                break
            budget = self._budget(choice, budgets, seen)
            try:
                smaller = self.smaller_plan(choice, budget, seen)
            except StrategyError:
                break  # no other plan is small enough
            if smaller is None:
                break
            if smaller.operators in tried:
                if best is None or budget is None:
                    break
                seen.append((budget, kept))  # no other plan is between the best one and this budget
                continue
            tried.append(smaller.operators)
            estimated = searches.bytes(smaller, request)
            price = self.estimate(choice, smaller)
            if best is not None and price.seconds >= best.seconds:
                seen.append((estimated, kept))
                continue
            lower = self._most(choice, price.bounds(None).least)
            size = self._peak(choice, price) if lower <= self.limit else self._noted(lower, price)
            seen.append((estimated, size if lower <= self.limit else self._most(choice, price.likely)))
            if size <= self.limit:
                best, kept = Priced(smaller, price.seconds, size), size
            else:
                too_large = max(too_large, price.seconds)
                if best is None:
                    yield Priced(smaller, price.seconds, size)
        by_rows = self._by_rows(choice, math.inf if best is None else best.seconds)
        if best is None:  # propagation has other plans within other budgets, which need not be near one another
            best = self._within_shares(choice, tried, None if by_rows is None else SMALLER_PLANS)
        if found := [one for one in (best, by_rows) if one is not None]:
            yield min(found, key=lambda one: one.seconds)

    def _by_rows(self, choice: Choice, seconds: float) -> Priced | None:
        """The plan that slices the batch alone, if it keeps the limit and takes less than `seconds`: a traced peak need
        not follow the search's estimate, and the plans that it finds within budgets may need more."""
        request, searches = self._request(choice), self.searched(choice)
        if request.by_module:
            return None
        try:
            plan = searches.by_rows(request)
            search = {**self.best_plan(choice, None).search, "bytes": searches.bytes(plan, request)}
            return self._fitting(choice, replace(plan, search=search), seconds)
        except StrategyError:  # what the request gives leaves no such plan
            return None

    def _budget(self, choice: Choice, budgets: SearchBudget, seen: Sequence[tuple[float, int]]) -> int | None:
        """The bytes of the next search. Where plans so far leave few or none, those of the limit come before smaller
        plans, which may be far slower."""
        budget, (least, size) = budgets.next(seen), min(seen)
        limit = min(self.limits(choice))
        few = size > self.limit and (budget is None or budget < FEW * limit)
        return limit if few and limit < least else budget

    def _within_shares(self, choice: Choice, tried: list[Any], most: int | None) -> Priced | None:
        """The first plan that keeps the limit of those found within shares of it, of the first `most` of these; `tried`
        ones do not."""
        for share in (CLOSE_SHARES if len(self.bounds) == 1 else BUDGET_SHARES)[:most]:
            try:
                plan = self.smaller_plan(choice, max(int(share * min(self.limits(choice))), 1), ())
            except StrategyError:
                return None
            if plan is not None and plan.operators not in tried:
                tried.append(plan.operators)
                if (priced := self._fitting(choice, plan)) is not None:
                    return priced
        return None

    def _fitting(self, choice: Choice, plan: Plan, seconds: float = math.inf) -> Priced | None:
        """A plan with its seconds and bytes, if it keeps the limit and takes less than `seconds`."""
        price = self.estimate(choice, plan)
        if price.seconds >= seconds:
            return None
        lower = self._most(choice, price.bounds(None).least)
        size = self._peak(choice, price) if lower <= self.limit else self._noted(lower, price)
        return Priced(plan, price.seconds, size) if size <= self.limit else None

    def smaller_plan(self, choice: Choice, budget: int | None, seen: Sequence[tuple[float, int]]) -> Plan | None:
        """The best plan within `budget`, or if that is too little the smallest of all; None where nothing is left to
        try. Raises StrategyError."""
        if budget is None and min(seen)[1] <= self.limit:
            return None  # near the limit
        try:
            return self.best_plan(choice, 1 if budget is None else budget)
        except TooLarge as refused:
            return self.best_plan(choice, math.ceil(refused.smallest))

    def recompute_by_mode(self, choice: Choice) -> dict[Mode, Recompute]:
        """What a choice that recomputes all layers in full may recompute instead, by mode."""
        wanted, searches = self._wanted(choice.recompute), self.searched(choice)
        assert wanted is not None
        made = {mode: searches.recompute(replace(wanted, operators=mode)) for mode in MODES}
        return {mode: one for mode, one in made.items() if one is not None}

    def mixed(self, choice: Choice, modes: Mapping[str, Mode]) -> Recompute:
        """The recompute of layers by their `modes`, communicating as in `choice`."""
        by_mode, operators = self.recompute_by_mode(choice), self.searched(choice).graph.by_name
        full = by_mode["full"]
        kept = (
            name
            for name in by_mode["selective"].kept
            if modes.get(full.region(operators[name].path) or "") == "selective"
        )
        return replace(full, modules=tuple(path for path in full.modules if path in modes), kept=tuple(kept))

    def _recomputing_some(self, choice: Choice, plan: Plan) -> Iterator[Priced]:
        """`plan`, which recomputes all layers in full, with as little recompute as keeps the limit; nothing where that
        takes none or all of it."""
        stored = replace(choice, recompute="none")
        none = self.fastest(stored)
        fronts, limits = none.recompute_fronts(self.recompute_by_mode(choice)), self.limits(choice)

        def bound(every: Sequence[int]) -> Priced:
            """A lower bound, where groups that recompute every layer need at least these bytes."""
            first = RecomputeSelection(limits, fronts, self.memory_bounds(stored).least, every, measured=True)
            return Priced(plan, none.seconds_with_recompute(self.mixed(choice, first.lower_bound)), None)

        if (
            self._most(choice, self.memory_bounds(stored).least) > self.limit
        ):  # before the savings of recompute are known
            yield bound(self.memory_bounds(stored).recomputed)
        if self._most(choice, self.memory_bounds(choice).least) > self.limit:
            return
        if not self.memory_bounds(stored).likely:
            yield bound(self.memory_bounds(choice).least)
        without = self.memory_bounds(stored).likely or none.peaks
        if self._most(choice, without) <= self.limit:
            return
        yield bound(self.memory_bounds(choice).least)
        every = self.memory_bounds(choice).likely or self.fastest(choice).peaks
        if self._most(choice, every) > self.limit:
            return
        if self.fastest(choice).is_traced:
            every = self.fastest(choice).peaks_once
        yield bound(every)
        selection = RecomputeSelection(limits, fronts, without, every, measured=none.is_traced)
        best: Priced | None = None
        while (modes := selection.next()) is not None and (recompute := self.mixed(choice, modes)) != plan.recompute:
            if best is None:  # a trace takes ten times as long as the estimate, which counts repeated collectives too
                least = replace(plan, recompute=self.mixed(choice, selection.lower_bound))
                yield Priced(plan, self.estimate(choice, least).seconds, None)
            partly = replace(plan, recompute=recompute if modes else None)
            price = self.estimate(choice, partly)
            if selection.update(price.peaks):
                best = Priced(partly, price.seconds, price.peak, recompute.modules)
        if best is not None:
            yield replace(best, bytes=None)
            yield best
