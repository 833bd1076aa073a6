"""Where the plan of a run comes from: the file of `parallel.plan`, the plan cache, or the planner.

A file decides everything that a plan holds; of the config only the recompute it asks for comes on top.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from runner import home
from runner.config.schema import Config
from runner.planning.stored import read_content
from strategies.core.graph import OperatorGraph
from strategies.core.plan import Plan
from strategies.core.request import Request
from strategies.cost.cluster import Cluster
from strategies.lowering.recompute import recomputed
from strategies.planner import plan_cache
from strategies.planner.plan_file import read_plan
from strategies.planner.planner import make_plan
from strategies.rules import rule_of
from strategies.search.cheapest import StepPrice, priced_at

EVERY = 10.0
"""Seconds between lines of progress."""


def planned(
    config: Config,
    graph: OperatorGraph,
    request: Request,
    cluster: Cluster,
    price: StepPrice,
    say: Callable[[str], None],
) -> Plan:
    """The plan of `graph` for `cluster`, the cheapest by `price`; `search["loaded_from"]` says where it was found, if
    it was not made now.

    Raises ConfigError for a file that cannot be read, StrategyError for one that does not fit and for a request that
    the planner refuses.
    """
    if config.parallel.plan is not None:
        return _from_file(Path(config.parallel.plan), graph, request)
    folder = cache_folder(config.parallel.plan_cache, say)
    if folder is None:
        with telling(say, graph, request):
            return make_plan(graph, request, cluster, price)
    key = plan_cache.key_of(graph, request, cluster, _priced_by(config))
    if (found := plan_cache.load(folder, key, say)) is not None:
        return _loaded(found, "the plan cache")
    with telling(say, graph, request):
        plan = make_plan(graph, request, cluster, price)
    plan_cache.store(folder, key, plan, say)
    return plan


def _priced_by(config: Config) -> tuple[object, ...]:
    """What the seconds of a plan's step follow from beside graph, request and cluster."""
    parallel, train = config.parallel, config.train
    ways = parallel.comm_fusion, parallel.comm_overlap, parallel.comm_async, parallel.copies, parallel.reduce_precision
    step = train.accumulate, train.compile, train.precision, train.random
    return *ways, parallel.zero, parallel.pipeline, parallel.place, config.optimizer, *step, config.data.batch_size


@contextmanager
def telling(say: Callable[[str], None], graph: OperatorGraph, request: Request) -> Iterator[None]:
    """Says every few seconds how long a search takes already."""
    done, started = threading.Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(EVERY):
            seconds = time.monotonic() - started
            say(f"searching: {len(graph.operators)} operators on {request.world_size} ranks, {seconds:.0f} s so far")

    teller = threading.Thread(target=tell, name="searching", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def cache_folder(wanted: str | None, say: Callable[[str], None]) -> Path | None:
    """The folder of the plan cache; `auto` is in that of the user, and None, which is said, for a user without one."""
    if wanted != "auto":
        return None if wanted is None else Path(wanted)
    folder = home.cache()
    if folder is None:
        say("plan cache: none, as there is no home folder here; parallel.plan_cache or XDG_CACHE_HOME can name one")
        return None
    return folder / "plans"


def _from_file(file: Path, graph: OperatorGraph, request: Request) -> Plan:
    plan = read_plan(read_content(file), graph, request.world_size, f"parallel.plan = {str(file)!r}")
    if request.recompute is not None:
        rules = {operator.id: rule_of(operator, graph) for operator in graph.operators}
        plan = replace(plan, recompute=recomputed(graph, rules, request.recompute))
    return _loaded(replace(plan, search=priced_at(plan.search, None)), str(file))


def _loaded(plan: Plan, where: str) -> Plan:
    return replace(plan, search={**plan.search, "loaded_from": where})
