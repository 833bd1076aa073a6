"""What `auto` leaves open beside the plan (ZeRO's stage, a pipeline's stages and micro-batches, recompute) is decided
here, before anything is prepared with it.

Invariant: what is prepared has a config that holds everything that was decided, so ranks, checkpoints and reports need
not know that something was open. The plan tells the decision in its `search`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path

from torch import Tensor

from runner.build import pretrained
from runner.build.modules import captured_from_shapes
from runner.build.offload import check_modules
from runner.build.optimizers import optimizer_factory
from runner.build.precision import DTYPES, cast
from runner.config.schema import Config
from runner.data.loader import flatten_batch, whole_batch
from runner.errors import ConfigError
from runner.planning import capacity, copies, sources
from runner.planning import pipeline as pipelining
from runner.planning.clusters import cluster_of
from runner.planning.devices import device_of
from runner.planning.estimate import Price, Sizes, price_of
from runner.planning.fewest_recomputed import Fewest
from runner.planning.joint_choice import decided, of_file, with_choice
from runner.planning.limit_search import Rooms
from runner.planning.memory_limit import settings_of
from runner.planning.prepare import (
    Accept,
    Prepared,
    accept_any,
    check_training,
    datasets,
    order_of,
    prepare,
    request_of,
    wanted_recompute,
)
from runner.planning.programs import Programs
from runner.planning.progress import Progress
from runner.planning.searched_plans import Searches
from strategies.capture import Captured, Objective
from strategies.core.errors import StrategyError, TooLarge
from strategies.core.gc_paused import gc_paused
from strategies.core.plan import Plan
from strategies.core.request import Request
from strategies.cost.cluster import Cluster
from strategies.cost.lower_bounds import least
from strategies.lowering.device_placement import on_host
from strategies.lowering.recompute import repeated_layers
from strategies.memory.repeated_blocks import Traces
from strategies.optimizer.settings import OptimizerSettings
from strategies.optimizer.updates import OptimizerFactory
from strategies.planner import plan_cache
from strategies.runtime import compiled
from strategies.search.cheapest import priced_at
from strategies.search.joint import AGAIN, Bound, Choice, Priced, decide

ZERO = (0, 1, 2, 3)
NARROWER = 4
"""How often a plan that is too large is searched anew with less room, at most."""
WORTH = 0.005
"""Of the seconds: what another plan must gain."""


def prepare_decided(
    config: Config, folder: Path | None, say: Callable[[str], None] = print, accept: Accept = accept_any
) -> Prepared:
    """`prepare`, with what is left open decided first. Raises ConfigError and StrategyError as that does, and where
    nothing fits."""
    device, world_size = device_of(config)
    capacity.check_processes(config, world_size)
    capacity.check_model(config, device, world_size)
    if not config.parallel.open:
        return prepare(config, folder, say, accept=accept)
    if config.parallel.plan is not None:
        return prepare(decided(config, of_file(config.parallel.plan)), folder, say, accept=accept)
    deciding = Deciding(config, say)
    deciding.check(accept)
    plan = deciding.plan()
    return prepare(decided(config, plan.search["decided"]), folder, say, plan, accept)


@dataclass(frozen=True)
class Deciding:
    """One decision. The models are captured from shapes, once per number of rows that a micro-batch may have."""

    config: Config
    say: Callable[[str], None]
    programs: Programs = field(default_factory=Programs)
    traces: Traces = field(default_factory=Traces)

    def check(self, accept: Accept) -> None:
        """Refuse what `prepare` would refuse after the search."""
        config = self.config
        if config.train.compile:
            compiled.check(self.device)
        step, captured, _ = self._captured(self.rows)
        check_training(config, step.model)
        check_modules(config, step.model)
        if config.model.weights is not None:
            pretrained.locate(config.model, step.model)
        accept(captured.graph, frozenset(step.model.state_dict()))

    def plan(self) -> Plan:
        """The best plan, with the decision in its `search`; from the plan cache where it is there."""
        folder = sources.cache_folder(self.config.parallel.plan_cache, self.say)
        parallel = self.config.parallel
        asked = (self.config.data.batch_size, self.config.train, self.config.optimizer, parallel, self.device)
        key = plan_cache.key_of(self._captured(self.rows)[1].graph, self._open, self.cluster, asked)
        if folder is not None and (found := plan_cache.load(folder, key, self.say)) is not None:
            return replace(found, search={**found.search, "loaded_from": "the plan cache"})
        started = time.perf_counter() - sum(self._capturing)
        with gc_paused():
            decision = decide(self.bounds, self.limit, self._aloud)
        seconds = round(time.perf_counter() - sum(self._capturing) - started, 4)
        plan, cost = decision.priced.plan, decision.priced.seconds
        told = priced_at(plan.search, cost, self.bounds[decision.choice].seconds)
        plan = replace(plan, search={**told, "seconds": seconds, "decided": decision.to_json()})
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
        """Bytes of a rank: what is asked for, else what a device has."""
        return self.config.parallel.memory_limit or self.cluster.memory

    @cached_property
    def batch(self) -> tuple[list[str], list[Tensor]]:
        """Names and tensors of a step's batch."""
        training, _, collate = datasets(self.config)
        order = order_of(self.config, len(training))
        rows = self.config.data.batch_size // self.config.train.accumulate
        first = order.rows(0)[:rows]
        names, tensors = flatten_batch(whole_batch(training, collate, first, self.config.train.seed, 0))
        return list(names), cast(tensors, DTYPES[self.config.train.precision])

    @cached_property
    def rows(self) -> int:
        """The most rows of a micro-batch."""
        return max(self._rows(choice) for choice in self.choices)

    @cached_property
    def _seen(self) -> dict[int, tuple[Objective, Captured, list[Tensor]]]:
        return {}

    @cached_property
    def _capturing(self) -> list[float]:
        """Seconds of every capture."""
        return []

    @cached_property
    def _searches(self) -> dict[tuple[int, int], Searches]:
        """By rows and stages."""
        return {}

    def _rows(self, choice: Choice) -> int:
        return self.config.data.batch_size // (self.config.train.accumulate * choice.micro_batches)

    def _captured(self, rows: int) -> tuple[Objective, Captured, list[Tensor]]:
        if rows not in self._seen:
            started = time.perf_counter()
            names, tensors = self.batch
            whole = len(tensors[0])
            own = [one[:rows] if one.dim() and len(one) == whole else one for one in tensors]
            self._seen[rows] = captured_from_shapes(self.config, names, own, self.say)
            on_host(self._seen[rows][1].graph, self.config.parallel.place)
            self._capturing.append(time.perf_counter() - started)
        return self._seen[rows]

    def captures(self) -> dict[int, tuple[Objective, Captured, list[Tensor]]]:
        """The models of all choices, by rows of a micro-batch."""
        for rows in sorted({self._rows(choice) for choice in self.choices}):
            self._captured(rows)
        return self._seen

    @cached_property
    def choices(self) -> list[Choice]:
        """All that the config allows. Raises the error of the first one if none is."""
        found, refused = [], None
        for choice in self._every():
            try:
                pipelining.check_ranks(with_choice(self.config, choice), self.ranks)
                found.append(choice)
            except ConfigError as error:
                refused = refused or error
        if not found:
            raise refused or ConfigError("MW410", "parallel: nothing is left to decide.")
        return found

    def _every(self) -> Iterator[Choice]:
        parallel, parts = self.config.parallel, self.config.data.batch_size // self.config.train.accumulate
        wanted, pipeline = parallel.recompute, parallel.pipeline
        zeros = ZERO if parallel.zero.stage == "auto" else (parallel.zero.stage,)
        ways = AGAIN if wanted.operators == "auto" else (wanted.told.strip("'"),)
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
            yield from (Choice(stages, *rest) for rest in product(zeros, counts, ways))

    @cached_property
    def bounds(self) -> dict[Choice, Bound]:
        """Of all choices that the model has layers for. Raises StrategyError if there are none."""
        parallel, graph = self.config.parallel, self._captured(self.rows)[1].graph
        repeated = repeated_layers(graph, parallel.recompute.modules)
        found = least(graph, self.cluster, repeated)
        bounds = {}
        for choice in self.choices:
            if parallel.pipeline.stages == "auto" and len(repeated) % choice.stages:
                continue  # a layer would be cut
            if parallel.recompute.operators == "auto" and choice.recompute != "none" and not repeated:
                continue
            ranks, again = self.ranks // choice.stages, choice.recompute == "full"
            settings = self._settings(choice)
            bounds[choice] = Bound(
                self.config.train.accumulate * found.seconds(
                    choice.stages, ranks, choice.micro_batches, self.rows // self._rows(choice),
                    again=again, waits=parallel.pipeline.schedule in ("gpipe", "1f1b"),
                ),
                found.held(choice.stages, ranks, settings, sliced=parallel.mode != "data_parallel"),
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

    @cached_property
    def _settings_by_choice(self) -> dict[Choice, OptimizerSettings]:
        """Of choices that compute nothing again, which changes nothing."""
        return {}

    def _settings(self, choice: Choice) -> OptimizerSettings:
        key = replace(choice, recompute="none")
        if key not in self._settings_by_choice:
            config, graph = with_choice(self.config, choice), self._captured(self.rows)[1].graph
            self._settings_by_choice[key] = replace(settings_of(config, graph, self.device), factory=self._factory)
        return self._settings_by_choice[key]

    @cached_property
    def _open(self) -> Request:
        """What is asked before anything is decided."""
        return request_of(self.config, self.ranks)

    def _request(self, choice: Choice, modules: Sequence[str] | None = None) -> Request:
        again = wanted_recompute(with_choice(self.config, choice, modules).parallel.recompute)
        turns = pipelining.turns(self.config.train.accumulate, choice.stages, choice.micro_batches)
        ranks, alone = self.ranks // choice.stages, choice.stages == 1
        overlaps = alone and self._open.overlaps
        return replace(self._open, world_size=ranks, stage=choice.zero, overlaps=overlaps, turns=turns, recompute=again)

    def _plan(self, choice: Choice, room: int | None) -> Plan:
        """The best plan of a choice that keeps `room` bytes. Raises StrategyError."""
        rows, request = self._rows(choice), self._request(choice)
        key = rows, choice.stages
        if key not in self._searches:
            self._searches[key] = Searches(self._captured(rows)[1].graph, self.cluster)
        return self._searches[key].plan(request, room)

    @cached_property
    def _prices(self) -> dict[Choice, Price]:
        """Of the fastest plans."""
        return {}

    def _price(self, choice: Choice, plan: Plan, modules: Sequence[str] | None = None) -> Price:
        step, captured, tensors = self._captured(self._rows(choice))
        config = with_choice(self.config, choice, modules)
        in_step = copies.of_step(config, step, tensors, captured.graph, plan)
        return price_of(config, in_step, self._settings(choice), self.cluster, self.programs, self.traces)

    def _fastest(self, choice: Choice) -> Price:
        """The price of a choice's fastest plan."""
        if choice not in self._prices:
            self._prices[choice] = self._price(choice, self._plan(choice, None))
        return self._prices[choice]

    @cached_property
    def _progress(self) -> Progress:
        return Progress(self.say, len(self.bounds))

    def _aloud(self, choice: Choice) -> Iterator[Priced]:
        """`look`, and tell what is looked at where that takes long."""
        self._progress.looked += 1
        for one in self.look(choice):
            self._progress.tell(choice)
            yield one

    def look(self, choice: Choice) -> Iterator[Priced]:
        """What a choice takes, as `decide` asks for it: no less than choices with the same plan and no ZeRO, or nothing
        computed again; then its plans, first the fastest, in as few layers again as keep the limit or in all, then
        those for less room, each without and then with its bytes. Raises StrategyError where there is none."""
        plan, floor = self._plan(choice, None), 0
        stored = replace(choice, recompute="none")
        if (plain := replace(stored, zero=0)) in self.bounds and choice.zero:
            yield Priced(plan, self._fastest(plain).with_zero(self._settings(choice)), None)
        if stored in self.bounds and stored != choice:
            floor = max(self._sizes(stored).bare)
            if floor <= self.limit:
                yield Priced(plan, self._fastest(stored).seconds, None)
                yield from self._in_few(choice, plan)
            yield Priced(plan, self._fastest(stored).again(plan.recompute), None)
        price = self._fastest(choice)
        if not price.counted:
            yield Priced(plan, price.seconds, None)
        floor = max(floor, *self._sizes(choice).least)
        yield Priced(plan, price.seconds, floor if floor > self.limit else price.within(self.limit))
        if "bytes" in plan.search:
            yield from self._narrower(choice, plan)

    def _sizes(self, choice: Choice) -> Sizes:
        """What is known of the bytes of a choice's fastest plan without a trace for it. Stages of ZeRO have the same
        plan, and the same forward but where its parameters are gathered."""
        known = (self._prices.get(replace(choice, zero=stage)) for stage in ZERO[:3])
        return self._fastest(choice).told(next((one for one in known if one is not None and one.counted), None))

    def _narrower(self, choice: Choice, plan: Plan) -> Iterator[Priced]:
        """Plans for less room than the fastest one, `plan`; the last one keeps the limit, if one does. Between it and
        what is too large others are tried first. What is surely too large is not traced."""
        rooms = self._rooms.setdefault((choice.stages, choice.zero), Rooms(self.limit, 1 / choice.stages))
        likely = self._sizes(choice).likely or self._fastest(choice).likely
        seen, best, beyond = [(plan.search["bytes"], max(likely))], None, self._fastest(choice).seconds
        for _ in range(NARROWER):
            if best is not None and best.seconds <= (1 + WORTH) * beyond:
                break
            room = rooms.next(seen)
            try:
                found = self._small(choice, room, seen)
            except StrategyError:
                break  # no other plan is small enough: what was found is told
            if found is None or found.search["bytes"] in dict(seen):
                break
            price = self._price(choice, found)
            if best is None:
                yield Priced(found, price.seconds, None)
            elif price.seconds >= best.seconds:
                break
            least = max(price.told(None).least)
            size = price.within(self.limit) if least <= self.limit else least
            seen.append((found.search["bytes"], size if least <= self.limit else max(price.likely)))
            if size <= self.limit:
                best = Priced(found, price.seconds, size)
            else:
                beyond = max(beyond, price.seconds)
                if best is None:
                    yield Priced(found, price.seconds, size)
        if best is not None:
            yield best

    def _small(self, choice: Choice, room: int | None, seen: Sequence[tuple[float, int]]) -> Plan | None:
        """The best plan for `room`, or if that is too little the one that keeps least of all; None where nothing is
        left to try. Raises StrategyError."""
        if room is None and min(seen)[1] <= self.limit:
            return None  # near the limit
        try:
            return self._plan(choice, 1 if room is None else room)
        except TooLarge as refused:
            return self._plan(choice, math.ceil(refused.smallest))

    @cached_property
    def _rooms(self) -> dict[tuple[int, int], Rooms]:
        """By stages and stage of ZeRO."""
        return {}

    def _in_few(self, choice: Choice, plan: Plan) -> Iterator[Priced]:
        """`plan`, which computes again in all modules that may be, with as few of them as keep the limit; nothing where
        that takes none or all of them."""
        wanted, stored = plan.recompute, replace(choice, recompute="none")
        none = self._fastest(stored)
        every = none.layers(wanted)
        if wanted is None or len(wanted.modules) < 2:
            return

        def told(least: Sequence[int]) -> Priced:
            """What it takes where all of them need the least bytes; of none, what is known by now."""
            first = Fewest(self.limit, every, self._sizes(stored).least, least, sure=True)
            return Priced(plan, none.again(replace(wanted, modules=tuple(first.at_least))), None)

        if max(self._sizes(stored).least) > self.limit:  # before anybody knows how much is computed again
            yield told(self._sizes(stored).bare)
        if max(self._sizes(choice).least) > self.limit:
            return
        if not self._sizes(stored).likely:
            yield told(self._sizes(choice).least)
        if max(most := self._sizes(stored).likely or none.sizes) <= self.limit:
            return
        yield told(self._sizes(choice).least)
        if max(least := self._sizes(choice).likely or self._fastest(choice).sizes) > self.limit:
            return
        yield told(self._sizes(choice).least)
        fewest, few = Fewest(self.limit, every, most, least, sure=none.counted), None
        while (layers := fewest.next()) is not None and layers != {*wanted.modules}:
            modules = tuple(name for name in wanted.modules if name in layers)
            searches = self._searches[self._rows(choice), choice.stages]
            again = searches.again(plan, self._request(choice, modules))
            price = self._price(choice, again, modules)
            few = Priced(again, price.seconds, price.bytes(), modules) if fewest.told(price.sizes) else None
        if few is not None:
            yield replace(few, bytes=None)
            yield few
