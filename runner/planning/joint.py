"""Joint optimisation of the keys that `auto` leaves open (ZeRO stage, pipeline stages, micro-batches, recompute)
together with the plan, before preparation.

Invariant: the prepared config holds every decision, so ranks, checkpoints and reports never see an open key. The plan
keeps the decision in its `search`, under `decided`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from runner.build import pretrained
from runner.build.modules import DTYPES, captured_from_shapes, cast
from runner.build.optimizers import optimizer_factory
from runner.config.schema import Config
from runner.data.loader import flatten_batch, global_batch
from runner.errors import ConfigError
from runner.planning import capacity, lowering
from runner.planning.clusters import cluster_of, device_of
from runner.planning.datasets import datasets, order_of
from runner.planning.estimate import Estimate, MemoryBounds, Programs, estimate, settings_of
from runner.planning.memory_limit import FewestLayers, SearchBudget
from runner.planning.prepare import Accept, Prepared, accept_any, check_model, prepare
from runner.planning.sources import cache_folder, request_of, wanted_recompute
from runner.run_folder.plan_file import read_content
from strategies.capture import Captured, Objective
from strategies.core.errors import StrategyError, TooLarge
from strategies.core.gc_paused import gc_paused
from strategies.core.graph import OperatorGraph
from strategies.core.plan import Plan, Recompute
from strategies.core.request import RecomputeRequest, Request
from strategies.cost.cluster import Cluster
from strategies.cost.lower_bounds import step_lower_bound
from strategies.lowering.device_placement import on_host
from strategies.lowering.recompute import recomputed, repeated_layers
from strategies.memory.repeated_blocks import Traces
from strategies.optimizer.settings import OptimizerSettings
from strategies.optimizer.updates import OptimizerFactory
from strategies.planner import plan_cache
from strategies.planner.plan_file import check_form
from strategies.planner.planner import Planning
from strategies.rules import rule_of
from strategies.rules.sharding import Sharding
from strategies.runtime import compiled
from strategies.search.algorithms import with_cost
from strategies.search.joint import AGAIN, Bound, Choice, Priced, decide
from strategies.search.problem import Problem, plan_bytes

ZERO = (0, 1, 2, 3)
SMALLER_PLANS = 4
"""How often a plan that is too large is searched again for less memory, at most."""
WORTH = 0.005
"""Of the seconds: what another plan must gain."""
EVERY = 5.0
"""Seconds between lines of progress."""


def prepare_decided(
    config: Config, folder: Path | None, say: Callable[[str], None] = print, accept: Accept = accept_any
) -> Prepared:
    """`prepare`, after the joint optimisation of open keys.

    Raises:
        ConfigError, StrategyError: as `prepare`, and if no choice fits into the memory of a rank.
    """
    device, world_size = device_of(config)
    capacity.check_processes(config, world_size)
    capacity.check_model(config, device, world_size)
    if not config.parallel.open:
        return prepare(config, folder, say, accept=accept)
    if config.parallel.plan is not None:
        return prepare(decided(config, _decided_in(config.parallel.plan)), folder, say, accept=accept)
    decision = JointDecision(config, say)
    decision.check(accept)
    plan = decision.plan()
    return prepare(decided(config, plan.search["decided"]), folder, say, plan, accept)


def decided(config: Config, content: Mapping[str, Any]) -> Config:
    """The config with the decision in plan.json's `search.decided`. Raises ConfigError as `with_choice`."""
    return with_choice(config, choice_of(content), content.get("modules"))


def choice_of(content: Mapping[str, Any]) -> Choice:
    """The choice in plan.json's `search.decided`, or in its `runner_up`."""
    return Choice(content["stages"], content["zero"], content["micro_batches"], content["recompute"])


def _decided_in(name: str) -> dict[str, Any]:
    """The decision stored in a saved plan. Raises ConfigError and StrategyError."""
    content = read_content(Path(name))
    check_form(content, f"parallel.plan = {name!r}")
    found: dict[str, Any] | None = content["search"].get("decided")
    if found is None:
        raise ConfigError(
            "MW422",
            f"parallel.plan = {name!r} was made with parallel.zero.stage and parallel.pipeline given, so they cannot "
            "be auto here, nor parallel.recompute of a pipeline; give all as in the run that made it.",
        )
    return found


def with_choice(config: Config, choice: Choice, modules: Sequence[str] | None = None) -> Config:
    """The config with `choice` for the keys that are open.

    Args:
        config: with `auto` for some keys.
        choice: values for all of them.
        modules: the modules to recompute; None for all that may be.

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
        section = {"operators": choice.recompute} | ({} if modules is None else {"modules": list(modules)})
        parallel["recompute"] = "none" if choice.recompute == "none" else parallel["recompute"] | section
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        raise ConfigError("MW205", *(one["msg"] for one in error.errors())) from None


@dataclass(frozen=True)
class _Search:
    """A request, and its plan or the error. `sizes` are the bytes of a rank in the search's memory model, by ZeRO
    stage."""

    request: Request
    plan: Plan | None
    error: StrategyError | None
    sizes: dict[int, float] = field(default_factory=dict)

    def answers(self, request: Request) -> bool:
        if self.plan is None or request.memory_limit is None:
            return self.plan is not None and self.request.memory_limit is None
        more = self.request.memory_limit is None or request.memory_limit <= self.request.memory_limit
        needed = self.plan.search.get("bytes", math.inf)
        return more and request.zero_stage == self.request.zero_stage and needed <= request.memory_limit

    def refuses(self, request: Request) -> bool:
        """Only a limit makes a search fail at one stage and not at others."""
        if request.memory_limit is None or self.request.memory_limit is None:
            return self.request.memory_limit is None
        return request.zero_stage <= self.request.zero_stage and request.memory_limit <= self.request.memory_limit


@dataclass(frozen=True)
class Searches:
    """The plans of one graph on one number of ranks, each searched once.

    Invariant: a reused result equals that of a separate search: the best plan for a larger budget that fits a smaller
    one is the best for the smaller; and if no plan fits, none fits at a lower ZeRO stage or for a smaller budget. But
    without a limit all ZeRO stages share the plan of stage 0: theirs are within a hundredth, except in pipelines, where
    ZeRO 1 may lose a twentieth.
    """

    graph: OperatorGraph
    cluster: Cluster
    done: list[_Search] = field(default_factory=list)
    planning: list[Planning] = field(default_factory=list)
    """Of all requests, which differ in ZeRO stage, limit and recompute; empty before the first."""
    recomputes: dict[RecomputeRequest | None, Recompute | None] = field(default_factory=dict)

    @cached_property
    def rules(self) -> Mapping[str, Sharding]:
        """The sharding rules of all operators, by id."""
        return {operator.id: rule_of(operator, self.graph) for operator in self.graph.operators}

    def plan(self, request: Request, budget: int | None) -> Plan:
        """The best plan within `budget` bytes, with the recompute of `request`. Raises StrategyError."""
        plain = replace(request, recompute=None, memory_limit=budget, runner_up=False)
        search = next((one for one in self.done if one.answers(plain)), None)
        if search is None:
            for one in self.done:
                if one.error is not None and one.refuses(plain):
                    raise one.error
            search = self._search(replace(plain, zero_stage=0) if budget is None else plain)
        plan = search.plan
        assert plan is not None
        if "bytes" in plan.search and search.request.zero_stage != plain.zero_stage:
            plan = replace(plan, search={**plan.search, "bytes": self._bytes(search, plain.zero_stage)})
        return self.recomputing(plan, request)

    def recomputing(self, plan: Plan, request: Request) -> Plan:
        """`plan` with the recompute of `request`."""
        wanted = request.recompute
        if wanted not in self.recomputes:
            self.recomputes[wanted] = None if wanted is None else recomputed(self.graph, self.rules, wanted)
        return replace(plan, recompute=self.recomputes[wanted])

    def _search(self, request: Request) -> _Search:
        try:
            if not self.planning:
                self.planning.append(Planning(self.graph, request, self.cluster))
            search = _Search(request, self.planning[0].plan(request.zero_stage, request.memory_limit), None)
        except StrategyError as error:
            self.done.append(_Search(request, None, error))
            raise
        self.done.append(search)
        return search

    def _bytes(self, search: _Search, stage: int) -> float:
        """Bytes of a rank at another ZeRO stage, in the search's memory model."""
        plan = search.plan
        assert plan is not None
        if stage not in search.sizes:
            planned = {operator.id: plan.operators[operator.name] for operator in self.graph.operators}
            outputs = {id: one.outputs for id, one in planned.items() if one.outputs is not None}
            problem = Problem(
                self.graph, plan.mesh, self.rules, {}, {}, outputs, stage, search.request.optimizer_state_factor
            )
            search.sizes[stage] = plan_bytes(problem, {id: one.assignment for id, one in planned.items()})
        return search.sizes[stage]


Capture = tuple[Objective, Captured, list[Tensor]]
"""A model, what was captured of it, and its batch entries."""


@dataclass(frozen=True)
class JointDecision:
    """The search for the fastest choice within the memory of a rank. Models are captured from shapes, once per number
    of rows that a micro-batch may have."""

    config: Config
    say: Callable[[str], None]
    programs: Programs = field(default_factory=Programs)
    traces: Traces = field(default_factory=Traces)
    captures: dict[int, Capture] = field(default_factory=dict)
    """By rows of a micro-batch."""
    capturing: list[float] = field(default_factory=list)
    """Seconds of every capture, which are no part of those of the search."""
    searches: dict[tuple[int, int], Searches] = field(default_factory=dict)
    """By rows and stages."""
    estimates: dict[Choice, Estimate] = field(default_factory=dict)
    """Of the fastest plan of each choice."""
    settings_by_choice: dict[Choice, OptimizerSettings] = field(default_factory=dict)
    """Of choices without recompute, which changes nothing."""
    budgets: dict[tuple[int, int], SearchBudget] = field(default_factory=dict)
    """By stages and ZeRO stage."""

    def check(self, accept: Accept) -> None:
        """Reject early what `prepare` would reject after the search. Raises ConfigError."""
        config = self.config
        if config.train.compile:
            compiled.check(self.device)
        objective, captured, _ = self.captured(self.rows)
        check_model(config, objective.model)
        if config.model.weights is not None:
            pretrained.locate(config.model, objective.model)
        accept(captured.graph, frozenset(objective.model.state_dict()))

    def plan(self) -> Plan:
        """The best plan, with the decision in its `search`; from the plan cache where it is there."""
        folder = cache_folder(self.config.parallel.plan_cache, self.say)
        parallel = self.config.parallel
        inputs = (self.config.data.batch_size, self.config.train, self.config.optimizer, parallel, self.device)
        key = plan_cache.key_of(self.captured(self.rows)[1].graph, self._open_request, self.cluster, inputs)
        if folder is not None and (cached := plan_cache.load(folder, key, self.say)) is not None:
            return replace(cached, search={**cached.search, "loaded_from": "the plan cache"})
        started = time.perf_counter() - sum(self.capturing)
        with gc_paused():
            decision = decide(self.bounds, self.limit, self._evaluate_aloud())
        seconds = round(time.perf_counter() - sum(self.capturing) - started, 4)
        plan, cost = decision.priced.plan, decision.priced.seconds
        search = with_cost(plan.search, cost, self.bounds[decision.choice].seconds)
        plan = replace(plan, search={**search, "seconds": seconds, "decided": decision.to_json()})
        if folder is not None:
            plan_cache.store(folder, key, plan, self.say)
        return plan

    @cached_property
    def device(self) -> str:
        return device_of(self.config)[0]

    @cached_property
    def ranks(self) -> int:
        return device_of(self.config)[1]

    @cached_property
    def cluster(self) -> Cluster:
        return cluster_of(self.config, self.device, self.ranks)

    @cached_property
    def limit(self) -> int:
        """Bytes of a rank: the configured limit, else the memory of a device."""
        return self.config.parallel.memory_limit or self.cluster.memory

    @cached_property
    def batch(self) -> tuple[list[str], list[Tensor]]:
        """Names and tensors of a step's batch."""
        training, _, collate = datasets(self.config)
        order = order_of(self.config, len(training))
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
            self.captures[rows] = captured_from_shapes(self.config, names, own, self.say)
            on_host(self.captures[rows][1].graph, self.config.parallel.place)
            self.capturing.append(time.perf_counter() - started)
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
        recomputes = AGAIN if section.operators == "auto" else (kinds,)
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
        found = step_lower_bound(graph, self.cluster, repeated)
        bounds = {}
        for choice in self.choices:
            if parallel.pipeline.stages == "auto" and len(repeated) % choice.stages:
                continue  # a stage boundary would cut a layer
            if parallel.recompute.operators == "auto" and choice.recompute != "none" and not repeated:
                continue
            ranks, again = self.ranks // choice.stages, choice.recompute == "full"
            settings = self._settings(choice)
            bounds[choice] = Bound(
                self.config.train.accumulate * found.seconds(
                    choice.stages, ranks, choice.micro_batches, self.rows // self._rows(choice),
                    again=again, waits=parallel.pipeline.schedule in ("gpipe", "1f1b"),
                ),
                found.persistent(choice.stages, ranks, settings, sliced=parallel.mode != "data_parallel"),
            )  # fmt: skip
        if not bounds:
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
        if key not in self.settings_by_choice:
            config, graph = with_choice(self.config, choice), self.captured(self.rows)[1].graph
            self.settings_by_choice[key] = replace(settings_of(config, graph, self.device), factory=self._factory)
        return self.settings_by_choice[key]

    @cached_property
    def _open_request(self) -> Request:
        """The request with all open keys undecided."""
        return request_of(self.config, self.ranks)

    def _request(self, choice: Choice, modules: Sequence[str] | None = None) -> Request:
        return replace(
            self._open_request,
            world_size=self.ranks // choice.stages,
            zero_stage=choice.zero,
            overlap_gradients=choice.stages == 1 and self._open_request.overlap_gradients,
            micro_batches=lowering.pipeline_slots(self.config.train.accumulate, choice.stages, choice.micro_batches),
            recompute=wanted_recompute(with_choice(self.config, choice, modules).parallel.recompute),
        )

    def searched(self, choice: Choice) -> Searches:
        """The searches that `choice` shares with choices of the same number of rows and stages."""
        rows = self._rows(choice)
        if (rows, choice.stages) not in self.searches:
            self.searches[rows, choice.stages] = Searches(self.captured(rows)[1].graph, self.cluster)
        return self.searches[rows, choice.stages]

    def best_plan(self, choice: Choice, budget: int | None) -> Plan:
        """The best plan of a choice within `budget` bytes of the search. Raises StrategyError."""
        return self.searched(choice).plan(self._request(choice), budget)

    def estimate(self, choice: Choice, plan: Plan, modules: Sequence[str] | None = None) -> Estimate:
        """The estimate of a plan of a choice that recomputes `modules`."""
        objective, captured, tensors = self.captured(self._rows(choice))
        config = with_choice(self.config, choice, modules)
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

        First lower bounds, from choices with the same plan but without ZeRO or recompute. Then plans, each without and
        then with its bytes: the fastest, with as few recomputed layers as keep the limit or with all, then those found
        for less memory. Raises StrategyError where there is none.
        """
        plan, floor = self.best_plan(choice, None), 0
        stored = replace(choice, recompute="none")
        if (plain := replace(stored, zero=0)) in self.bounds and choice.zero:
            yield Priced(plan, self.fastest(plain).seconds_with_zero(self._settings(choice)), None)
        if stored in self.bounds and stored != choice:
            floor = max(self.memory_bounds(stored).recomputed)
            if floor <= self.limit:
                yield Priced(plan, self.fastest(stored).seconds, None)
                yield from self._recomputing_few(choice, plan)
            yield Priced(plan, self.fastest(stored).seconds_with_recompute(plan.recompute), None)
        price = self.fastest(choice)
        if not price.is_traced:
            yield Priced(plan, price.seconds, None)
        floor = max(floor, *self.memory_bounds(choice).least)
        yield Priced(plan, price.seconds, floor if floor > self.limit else price.peak_within(self.limit))
        if "bytes" in plan.search:
            yield from self._within_less(choice, plan)

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
        budgets = self.budgets.setdefault((choice.stages, choice.zero), SearchBudget(self.limit, 1 / choice.stages))
        likely = self.memory_bounds(choice).likely or self.fastest(choice).likely
        seen, best, too_large = [(plan.search["bytes"], max(likely))], None, self.fastest(choice).seconds
        for _ in range(SMALLER_PLANS):
            if best is not None and best.seconds <= (1 + WORTH) * too_large:
                break
            try:
                smaller = self.smaller_plan(choice, budgets.next(seen), seen)
            except StrategyError:
                break  # no other plan is small enough
            if smaller is None or smaller.search["bytes"] in dict(seen):
                break
            price = self.estimate(choice, smaller)
            if best is None:
                yield Priced(smaller, price.seconds, None)
            elif price.seconds >= best.seconds:
                break
            lower = max(price.bounds(None).least)
            size = price.peak_within(self.limit) if lower <= self.limit else lower
            seen.append((smaller.search["bytes"], size if lower <= self.limit else max(price.likely)))
            if size <= self.limit:
                best = Priced(smaller, price.seconds, size)
            else:
                too_large = max(too_large, price.seconds)
                if best is None:
                    yield Priced(smaller, price.seconds, size)
        if best is not None:
            yield best

    def smaller_plan(self, choice: Choice, budget: int | None, seen: Sequence[tuple[float, int]]) -> Plan | None:
        """The best plan within `budget`, or if that is too little the smallest of all; None where nothing is left to
        try. Raises StrategyError."""
        if budget is None and min(seen)[1] <= self.limit:
            return None  # near the limit
        try:
            return self.best_plan(choice, 1 if budget is None else budget)
        except TooLarge as refused:
            return self.best_plan(choice, math.ceil(refused.smallest))

    def _recomputing_few(self, choice: Choice, plan: Plan) -> Iterator[Priced]:
        """`plan`, which recomputes all modules that it may, with as few of them as keep the limit; nothing where that
        takes none or all of them."""
        wanted, stored = plan.recompute, replace(choice, recompute="none")
        none = self.fastest(stored)
        layers = none.layers(wanted)
        if wanted is None or len(wanted.modules) < 2:
            return

        def bound(every: Sequence[int]) -> Priced:
            """A lower bound, where groups that recompute every layer need at least these bytes."""
            first = FewestLayers(self.limit, layers, self.memory_bounds(stored).least, every, measured=True)
            modules = tuple(first.lower_bound)
            return Priced(plan, none.seconds_with_recompute(replace(wanted, modules=modules)), None)

        if max(self.memory_bounds(stored).least) > self.limit:  # before the savings of recompute are known
            yield bound(self.memory_bounds(stored).recomputed)
        if max(self.memory_bounds(choice).least) > self.limit:
            return
        if not self.memory_bounds(stored).likely:
            yield bound(self.memory_bounds(choice).least)
        without = self.memory_bounds(stored).likely or none.peaks
        if max(without) <= self.limit:
            return
        yield bound(self.memory_bounds(choice).least)
        every = self.memory_bounds(choice).likely or self.fastest(choice).peaks
        if max(every) > self.limit:
            return
        yield bound(self.memory_bounds(choice).least)
        fewest = FewestLayers(self.limit, layers, without, every, measured=none.is_traced)
        best: Priced | None = None
        while (names := fewest.next()) is not None and names != {*wanted.modules}:
            modules = tuple(name for name in wanted.modules if name in names)
            partly = self.searched(choice).recomputing(plan, self._request(choice, modules))
            price = self.estimate(choice, partly, modules)
            best = Priced(partly, price.seconds, price.peak, modules) if fewest.update(price.peaks) else None
        if best is not None:
            yield replace(best, bytes=None)
            yield best
