"""The plan of a run: the planner's request, and where the plan comes from: the file of `parallel.plan`, the plan
cache, or a search.

A file decides everything that a plan holds; only the recompute of the config is applied on top.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from runner import home
from runner.build import callbacks, optimizers
from runner.config.parallel import RecomputeForm
from runner.config.schema import Config
from runner.planning import lowering
from runner.run_folder.plan_file import read_content
from strategies.core.graph import OperatorGraph
from strategies.core.plan import Plan
from strategies.core.request import NamedDims, NamedMatrix, Operand, OperatorStrategy, RecomputeRequest, Request
from strategies.cost.cluster import Cluster
from strategies.cost.step import MASTER
from strategies.lowering.recompute import recomputed
from strategies.planner import plan_cache
from strategies.planner.module_styles import AUTOTP, FOR_TRANSFORMERS, OF_TORCH
from strategies.planner.plan_file import read_plan
from strategies.planner.planner import make_plan
from strategies.planner.step_certificate import StepEvaluation, with_cost
from strategies.rules import rule_of
from strategies.runtime.dtensors import GATHERED, unknown

STYLES_OF = {"deepspeed": AUTOTP, "parallelize_module": OF_TORCH, "transformers": FOR_TRANSFORMERS}
"""Targets of an export that slice modules, by the styles that they have."""
UNSLICED_OF = dict.fromkeys(("torch", "autoparallel"), GATHERED) | {
    "torchtitan": {name: dims for name, dims in GATHERED.items() if name != "cross_entropy_loss"}
}
"""Dims that the operators of a target do not slice; torchtitan computes its loss on slices of classes."""
EVERY = 10.0
"""Seconds between lines of progress."""


def request_of(config: Config, world_size: int) -> Request:
    """The planner's request for the `world_size` ranks of one pipeline group."""
    parallel = config.parallel

    def operand(form: Any) -> Operand:
        return tuple(form) if isinstance(form, tuple) else NamedDims(form.layout, form.dims)

    def side(forms: Any) -> tuple[Operand, ...] | None:
        return None if forms is None else tuple(operand(form) for form in forms)

    dataset, limit, need = parallel.dataset_strategy, parallel.memory_limit, optimizers.need_of(config.optimizer)
    groups = lowering.pipeline_groups(config)
    return Request(
        "data_parallel" if parallel.mode == "parameter_server" else parallel.mode,
        world_size,
        parallel.search,
        tuple(parallel.mesh.items()) if parallel.mesh else None,
        {path: OperatorStrategy(side(form.inputs), side(form.outputs)) for path, form in parallel.strategies.items()},
        {name: NamedMatrix(matrix.device_matrix, matrix.axes) for name, matrix in parallel.layouts.items()},
        parallel.set_data_parallel,
        dataset if isinstance(dataset, str) else side(dataset) or (),
        wanted_recompute(parallel.recompute),
        zero_stage=parallel.zero.known,
        zero_engine=config.zero_engine,
        optimizer_state_factor=need.kept / MASTER + callbacks.copies(config),
        optimizer_bytes=need.moved,
        overlap_gradients=lowering.overlaps_backward(config) and not parallel.pipeline.known,
        micro_batches=lowering.pipeline_slots(config.train.accumulate, groups, parallel.pipeline.parts),
        memory_limit=None if limit is None else limit * groups,  # a rank holds only its stages
        unsliced=UNSLICED_OF.get(parallel.for_target or "", {}),
        styles=STYLES_OF.get(parallel.for_target or ""),
        ring=parallel.context_parallel == "ring",
        borders=parallel.for_target == "torchtitan",
        unbatched=tuple(sorted(map(str, config.data.unbatched))),
    )


def for_target(request: Request, graph: OperatorGraph, device: str) -> Request:
    """The request for a graph: a target that gathers for some operators does so for all that DTensor does not know."""
    if not request.unsliced:
        return request
    return replace(request, unsliced={**request.unsliced, **dict.fromkeys(unknown(graph, device), ("all",))})


def wanted_recompute(section: RecomputeForm) -> RecomputeRequest | None:
    """The request for recompute; None for `auto`, which needs a plan first."""
    if section.operators == "none" or section.operators == "auto":
        return None
    return RecomputeRequest(section.operators, section.modules, section.communication, section.slice_inputs)


def planned(
    config: Config,
    graph: OperatorGraph,
    request: Request,
    cluster: Cluster,
    price: StepEvaluation,
    say: Callable[[str], None],
) -> Plan:
    """The plan of `graph` for `cluster`, the cheapest by `price`; `search["loaded_from"]` names its source, if it was
    loaded.

    Raises ConfigError for a file that cannot be read, StrategyError for one that does not fit and for a request that
    the planner rejects.
    """
    if config.parallel.plan is not None:
        return from_file(Path(config.parallel.plan), graph, request)
    make = partial(make_plan, graph, request, cluster, price)
    return cached(config.parallel.plan_cache, graph, request, cluster, _priced_by(config), say, make)


def cached(
    wanted: str | None,
    graph: OperatorGraph,
    request: Request,
    cluster: Cluster,
    inputs: tuple[object, ...],
    say: Callable[[str], None],
    make: Callable[[], Plan],
) -> Plan:
    """The plan of the cache that is `wanted` (as in `parallel.plan_cache`), else one that `make` searches, which is
    stored there. `inputs` are those of the search besides graph, request and cluster."""
    folder = home.plan_cache(wanted, say)
    here = Path(__file__).parent
    key = "" if folder is None else plan_cache.key_of(graph, request, cluster, inputs, plan_cache.code_of(here))
    if folder is not None and (plan := plan_cache.load(folder, key, say, Plan.from_json)) is not None:
        return _loaded(plan, "the plan cache")
    with search_progress(say, graph, request):
        plan = make()
    if folder is not None:
        plan_cache.store(folder, key, plan.to_json(), say)
    return plan


def _priced_by(config: Config) -> tuple[object, ...]:
    """The inputs of a step's cost estimate besides graph, request and cluster."""
    parallel, train = config.parallel, config.train
    collectives = parallel.comm_fusion, parallel.comm_overlap, parallel.comm_async, parallel.copies
    step = train.accumulate, train.compile, train.precision, train.random
    return (
        *(*collectives, parallel.reduce_precision, parallel.zero, parallel.pipeline, parallel.place, config.optimizer),
        *(*step, config.data.batch_size),
    )


@contextmanager
def search_progress(say: Callable[[str], None], graph: OperatorGraph, request: Request) -> Iterator[None]:
    """Report every few seconds how long the search has taken so far."""
    done, started = threading.Event(), time.monotonic()

    def report() -> None:
        while not done.wait(EVERY):
            seconds = time.monotonic() - started
            say(f"searching: {len(graph.operators)} operators on {request.world_size} ranks, {seconds:.0f} s so far")

    thread = threading.Thread(target=report, name="searching", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def from_file(file: Path, graph: OperatorGraph, request: Request) -> Plan:
    """The plan of `parallel.plan` with the recompute of `request`. Raises as `planned`."""
    plan = read_plan(read_content(file), graph, request.world_size, f"parallel.plan = {str(file)!r}")
    plan = with_recompute(plan, graph, request)
    return _loaded(replace(plan, search=with_cost(plan.search, None)), str(file))


def with_recompute(plan: Plan, graph: OperatorGraph, request: Request) -> Plan:
    """A plan that was not searched, with the recompute of `request`."""
    if request.recompute is None:
        return plan
    rules = {operator.id: rule_of(operator, graph) for operator in graph.operators}
    return replace(plan, recompute=recomputed(graph, rules, request.recompute))


def _loaded(plan: Plan, where: str) -> Plan:
    return replace(plan, search={**plan.search, "loaded_from": where})
