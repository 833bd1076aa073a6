"""What the parent does once per run: build data and model, capture, plan, write the initial weights. The ranks get the
result.

What can be wrong with the user's model, loss, data, optimizer or strategies is found here, before any rank starts, and
ends as one paragraph (exit code 2).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.build import huggingface, optimizers, pretrained, targets
from runner.build.modules import captured_from_shapes, objective
from runner.build.offload import check_modules
from runner.build.precision import DTYPES, cast, check_half
from runner.build.scores import Structure, scores, tried
from runner.config.recompute import Recompute
from runner.config.schema import Config
from runner.data import prediction_rows as predicted
from runner.data.description import UNSEEN, Description, check_read, described
from runner.data.loader import Collate, MapDataset, Order, build_dataset, flatten_batch, whole_batch
from runner.data.unbatched import Unbatched, unbatched
from runner.errors import ConfigError
from runner.planning import communication, copies
from runner.planning import pipeline as pipelining
from runner.planning.clusters import cluster_of
from runner.planning.devices import DESCRIBING, device_of
from runner.planning.memory_limit import check_stages, first_within, within_limit
from runner.planning.programs import Lower
from runner.planning.sources import planned
from strategies.capture import Objective, capture, run_once
from strategies.core.errors import StrategyError
from strategies.core.graph import OperatorGraph
from strategies.core.plan import Plan
from strategies.core.program import LoweringOptions, Program
from strategies.core.request import NamedDims, NamedMatrix, Operand, OperatorStrategy, RecomputeRequest, Request, check
from strategies.cost.step import MASTER
from strategies.lowering.device_placement import on_host, place
from strategies.lowering.fusion import fuse
from strategies.lowering.lowering import lower, random_ordinals
from strategies.lowering.pipeline.cutting import Stage, cut
from strategies.lowering.pipeline.stage_assignment import as_trained
from strategies.optimizer.buckets import buckets
from strategies.optimizer.updates import check_kind
from strategies.planner.planner import follow
from strategies.runtime import compiled
from strategies.runtime import initial_weights as weights
from strategies.search.cheapest import priced_at

WEIGHTS = "initial.pt"
TRAINING = ("train", "verify")
"""Jobs that take steps."""


@dataclass(frozen=True)
class Evaluation:
    """The evaluation graph of one batch size, its plan, how the model's output is made of the graph's results, and its
    stages in a pipeline."""

    graph: OperatorGraph
    plan: Plan
    structure: Structure
    stages: tuple[Stage, ...] = ()


@dataclass(frozen=True)
class Short:
    """The last micro-batch of an epoch where it has fewer rows (`data.drop_last=false`): the training graph of so many
    rows under the same plan, and its stages in a pipeline. Graph and plan are None as in `Prepared`."""

    rows: int
    graph: OperatorGraph | None = None
    plan: Plan | None = None
    stages: tuple[Stage, ...] = ()


Trial = tuple[int, Mapping[str, Tensor], Structure]
"""Rows of an evaluated batch, its entries that the model takes, and how the output is made of results."""


@dataclass(frozen=True)
class Prepared:
    """What a rank needs beside its number; plain data. `graph` and `plan` are None for modes that run the user's module
    itself.

    `names` and `shapes` describe the global micro-batch, `targets` the entries that only the loss takes; `evaluations`
    are by rows.
    """

    config: Config
    world_size: int
    device: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    targets: tuple[str, ...]
    rows: int
    graph: OperatorGraph | None
    plan: Plan | None
    evaluations: dict[int, Evaluation]
    digest: str
    steps: int
    """The number of the last optimizer step, counted from 1."""
    stages: tuple[Stage, ...] = ()
    """Those of a pipeline, made from the step; none without one."""
    step: tuple[OperatorGraph, Plan] | None = None
    """What a training step computes: graph and plan, with an operator per copy of the batch where there are several."""
    evaluated: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The entries of an evaluated batch, with their shapes but for the rows: those of training, or of what is
    predicted."""
    published: frozenset[str] | None = None
    """The names in the model's state dict."""
    described: str | None = None
    """The config.json of a model of transformers."""
    data: Description = UNSEEN
    """What every rank must find, too."""
    single_draws: bool = False
    """Whether a module that runs alone in fp64 draws the random numbers of fp32."""
    short: Short | None = None
    """The short last micro-batch of an epoch, where there is one."""

    def identity(self) -> dict[str, Any]:
        """What a checkpoint remembers of its run, as `runner.checkpoint.check` takes it."""
        plan = {} if self.plan is None else self.plan.to_json()
        config = self.config.model_dump(mode="json")
        return {"plan": plan, "config": config, "fingerprint": self.digest, "samples": self.data.training}


def datasets(config: Config) -> tuple[MapDataset, MapDataset | None, Collate | None]:
    """Training data, evaluation data (None where nothing under `evaluate` asks for one), and the user's collate."""
    name, given = config.data.collate, config.data.collate_args
    collate: Collate | None = None if name is None else targets.bound(name, given, "data.collate")
    if config.data.unbatched:
        collate = Unbatched(frozenset(map(str, config.data.unbatched)), collate)
    training = build_dataset(config.data.target, config.data.args, config.data.path, what="data")
    if not config.evaluate.wanted:
        return training, None, collate
    args = config.data.args | config.evaluate.args
    return training, build_dataset(config.data.target, args, config.data.path, what="data"), collate


def order_of(config: Config, length: int) -> Order:
    """The batches of training data of `length` rows. Raises ConfigError for fewer rows than one batch."""
    data = config.data
    return Order(length, data.batch_size, config.train.seed, data.shuffle, data.drop_last)


def micro_rows(config: Config) -> int:
    """Rows of one micro-batch over all ranks."""
    return config.data.batch_size // config.parts


def evaluation_rows(config: Config) -> int:
    """Rows of one batch of an evaluation, or of a prediction."""
    wanted = config.predict.batch_size if config.job.name == "predict" else None
    return wanted or config.evaluate.batch_size or micro_rows(config)


def request_of(config: Config, world_size: int) -> Request:
    """The planner's request, from the config."""
    parallel = config.parallel

    def operand(form: Any) -> Operand:
        return tuple(form) if isinstance(form, tuple) else NamedDims(form.layout, form.dims)

    def side(forms: Any) -> tuple[Operand, ...] | None:
        return None if forms is None else tuple(operand(form) for form in forms)

    dataset, limit, need = parallel.dataset_strategy, parallel.memory_limit, optimizers.need_of(config.optimizer)
    return Request(
        parallel.mode,
        world_size,
        parallel.search,
        tuple(parallel.mesh.items()) if parallel.mesh else None,
        {path: OperatorStrategy(side(form.inputs), side(form.outputs)) for path, form in parallel.strategies.items()},
        {name: NamedMatrix(matrix.device_matrix, matrix.axes) for name, matrix in parallel.layouts.items()},
        parallel.set_data_parallel,
        dataset if isinstance(dataset, str) else side(dataset) or (),
        wanted_recompute(parallel.recompute),
        stage=parallel.zero.known,
        states=need.kept / MASTER,
        moved=need.moved,
        overlaps=communication.overlapped(config) and not parallel.pipeline.known,
        turns=pipelining.turns(config.train.accumulate, pipelining.groups_of(config), parallel.pipeline.parts),
        memory_limit=None if limit is None else limit * pipelining.groups_of(config),  # each stage keeps its part
    )


def wanted_recompute(given: Recompute) -> RecomputeRequest | None:
    """The planner's request for recompute, from the config."""
    if given.operators == "none" or given.operators == "auto":  # auto is decided when there is a plan
        return None
    return RecomputeRequest(given.operators, given.modules, given.communication, given.slice_inputs)


Accept = Callable[[OperatorGraph, frozenset[str]], None]
"""Told the graph of a step and the names in the model's state dict before a plan is searched; may refuse them."""


def accept_any(graph: OperatorGraph, published: frozenset[str]) -> None:
    """Refuses nothing."""


def prepare(
    config: Config,
    folder: Path | None,
    say: Callable[[str], None] = print,
    plan: Plan | None = None,
    accept: Accept = accept_any,
) -> Prepared:
    """Build, capture and plan; with a folder, also write the initial weights there for the ranks. A `plan` that was
    decided on before is not searched again; nothing in `config` is open. Everything that can be refused without a plan
    is, before one is searched.

    Raises ConfigError and StrategyError for anything wrong with model, loss, data, strategies or devices.
    """
    from runner.planning.estimate import price_for  # which lowers plans as this file says

    device, world_size = device_of(config)
    if config.train.compile:
        compiled.check(device)
    if config.parallel.mode not in ("stand_alone", "hybrid") and plan is None and config.parallel.plan is None:
        check(request_of(config, world_size // pipelining.groups_of(config)))
    training, evaluating, collate = datasets(config)
    evaluated_with = collate
    if config.job.name == "predict":
        evaluating, evaluated_with = predicted.dataset(config)
    order = order_of(config, len(training))
    rows = micro_rows(config)
    first = order.rows(0)[:rows]
    names, tensors = flatten_batch(whole_batch(training, collate, first, config.train.seed, 0))
    if unknown := sorted(unbatched(collate) - {*names}):
        raise ConfigError(
            "MW316",
            f"data.unbatched = [{', '.join(map(str, config.data.unbatched))}]: a batch has no {unknown[0]!r}; it has "
            f"{', '.join(names)}.",
        )
    tensors = cast(tensors, DTYPES[config.train.precision])
    if order.dropped and (config.train.epochs or (config.train.steps or 0) > order.steps_per_epoch):
        say(
            f"data: {order.dropped} of {len(training)} samples fill no whole batch of {config.data.batch_size}; "
            "every epoch drops as many."
        )
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    data = _described(config, training, evaluating, collate, shapes, first[0], say)
    only_planned = config.job.name in ("plan", "explain") and config.parallel.mode not in ("stand_alone", "hybrid")
    if only_planned:
        evaluating = None
        step, captured, tensors = captured_from_shapes(config, names, tensors, say)
    else:
        step, captured = objective(config, names), None
    check_training(config, step.model)
    check_modules(config, step.model)
    if not only_planned:
        check_half(config, step, tensors, device)
    targeted = tuple(name for name in names if name in step.targets)
    stored = pretrained.locate(config.model, step.model) if config.model.weights is not None else {}
    told = digest(config.model.target, config.model.args, config.model.config, config.loss, shapes)
    steps = config.train.steps or (config.train.epochs or 0) * order.steps_per_epoch
    evaluated = names, tensors
    if config.job.name == "predict" and evaluating is not None:
        evaluated = flatten_batch(whole_batch(evaluating, evaluated_with, range(1)))
        predicted.check_names(evaluated[0], names, targeted)
    entries = {name: tuple(tensor.shape[1:]) for name, tensor in zip(*evaluated, strict=True)}
    prepared = Prepared(config, world_size, device, names, shapes, targeted, rows, None, None, {}, told, steps)
    held = frozenset(step.model.state_dict())
    prepared = replace(prepared, published=held, described=huggingface.described(step.model), evaluated=entries)
    last = order.rows(order.steps_per_epoch - 1)[-(order.short % rows) :] if order.short % rows else []
    prepared = replace(prepared, data=data, short=Short(len(last)) if last and config.job.name in TRAINING else None)
    if config.parallel.mode == "hybrid":
        _check_mesh(config, world_size)
        if folder is not None:
            weights.write(folder / WEIGHTS, {}, stored)
        return prepared
    graph: OperatorGraph | None = None
    trials: list[Trial] = []
    evaluations: dict[int, Evaluation] = {}
    stages: tuple[Stage, ...] = ()
    in_step: tuple[OperatorGraph, Plan] | None = None
    if config.parallel.mode == "stand_alone":
        run_once(step, tensors)
        if evaluating is not None:
            trials = _trials(config, step, evaluating, evaluated_with)
        own = (*step.named_parameters(), *step.named_buffers())
        values = {name.removeprefix("model."): tensor.detach() for name, tensor in own}
    else:
        captured = captured or capture(step, tensors, training=True)
        graph, values = captured.graph, dict(captured.tensors)
        on_host(graph, config.parallel.place)
        pipelining.check_ranks(config, world_size)
        copies.own_rows(config)
        accept(graph, held)
        if evaluating is not None:
            trials = _trials(config, step, evaluating, evaluated_with)
        decided = plan is not None
        request = request_of(config, world_size // pipelining.groups_of(config))
        of_step, cluster = partial(copies.of_step, config, step, tensors, graph), cluster_of(config, device, world_size)
        price = price_for(config, graph, of_step, device, world_size, cluster)
        search = partial(planned, config, graph, cluster=cluster, price=price, say=say)
        plan = plan or search(request)
        in_step = of_step(plan)
        stages = pipelining.stages_of(config, *in_step, options_of(config))
        if stages:
            programs = pipelining.programs_of(config, stages, options_of(config))
            check_stages(config, graph, plan, device, programs, pipelining.schedule_of(config))
        elif not decided:
            fit = partial(
                within_limit, config, graph, device=device, lowered=lambda one: lowered(config, *of_step(one))
            )
            fitted = first_within(plan, request, fit, search if config.parallel.plan is None else None)
            if fitted != plan:
                if fitted.recompute != plan.recompute and fitted.search["cost"] is not None:
                    fitted = replace(fitted, search=priced_at(fitted.search, price.seconds(fitted)))
                plan, in_step = fitted, of_step(fitted)
        deciding = plan.to_json() | {"search": None}
        del deciding["recompute"]  # it changes no number
        told = digest(graph.signature(), json.dumps(deciding), [list(one.graph.by_name) for one in stages])
        if prepared.short is not None:
            batch = whole_batch(training, collate, last, config.train.seed, 0)
            batch_tensors = cast(flatten_batch(batch, names)[1], DTYPES[config.train.precision])
            prepared = replace(prepared, short=_short(config, step, batch_tensors, plan, stages, order, say))
    if plan is not None:
        evaluations, more = _evaluations(config, step, plan, stages, trials)
        values = more | values
    if folder is not None:
        weights.write(folder / WEIGHTS, values, stored)
    return replace(prepared, graph=graph, plan=plan, evaluations=evaluations, digest=told, stages=stages, step=in_step)


def _described(
    config: Config,
    training: MapDataset,
    evaluating: MapDataset | None,
    collate: Collate | None,
    shapes: Sequence[Sequence[int]],
    row: int,
    say: Callable[[str], None],
) -> Description:
    """The description of the data. Raises ConfigError for a `read` that returns something else."""
    seed = config.train.seed
    if collate is None:
        check_read(training, row, shapes, seed)
    found, again = (described(training, evaluating, collate, row=row, shapes=shapes, seed=seed) for _ in range(2))
    if found.sample != again.sample:
        say(
            f"warning: data: row {row} of {config.data.target} is another sample each time it is read, although the "
            "global generators of random, numpy.random and torch begin at the same numbers; ranks that read the same "
            "row see different ones, and `run verify` differs. Draw from the global generators, not from one without a "
            "seed or one that goes on."
        )
        return replace(again, sample=None)
    return again


def _short(
    config: Config,
    step: Objective,
    tensors: Sequence[Tensor],
    plan: Plan,
    stages: Sequence[Stage],
    order: Order,
    say: Callable[[str], None],
) -> Short:
    """The training graph of a short micro-batch of `tensors`, whose operators and tensors are sliced as in `plan`
    wherever so few rows can be. Raises ConfigError for a model that cannot train on them."""
    rows = len(tensors[0])
    try:
        graph = capture(step, tensors, training=True).graph
        own, options = replace(follow(plan, graph), recompute=plan.recompute), options_of(config)
        parts: tuple[Stage, ...] = ()
        if stages:
            parts = cut(graph, own, as_trained(graph, stages), random_ordinals(graph, own, options))
    except (ConfigError, StrategyError) as error:
        raise ConfigError(
            "MW325",
            f"data.drop_last = false: an epoch ends with a batch of {order.short} samples, of which a micro-batch has "
            f"{rows}, and the model cannot train on it: {error} Choose a data.batch_size that divides the "
            f"{order.length} samples, or data.drop_last=true.",
        ) from error
    slices = max((plan.mesh.product(axes) for layout in own.inputs.values() for axes in layout.dims[:1]), default=1)
    say(
        f"data: the last batch of an epoch has {order.short} samples; "
        + (f"{slices} slices of the last {rows}" if slices > 1 else f"every rank computes the last {rows}")
        + " (data.drop_last=false)."
    )
    return Short(rows, graph, own, parts)


def short_lower(reductions: Mapping[int, Mapping[str, tuple[str, ...]]]) -> Lower:
    """`lower`, for graphs whose gradients must be left open over the axes that those of another program are: by the
    graph's identity."""

    def opened(graph: OperatorGraph, plan: Plan, options: LoweringOptions, **given: Any) -> Program:
        wanted = reductions[id(graph)]
        found = lower(graph, plan, options, **given | {"open_axes": wanted})
        if found.reductions != wanted:
            raise StrategyError(
                "MW325",
                "data.drop_last = false: a short last batch would add up gradients over other ranks than the others; "
                "use data.drop_last=true, or a data.batch_size that divides the samples.",
            )
        return found

    return opened


def _check_mesh(config: Config, world_size: int) -> None:
    """A hybrid run has no planner that would notice. Raises ConfigError."""
    mesh = config.parallel.mesh
    if mesh is not None and math.prod(mesh.values()) != world_size:
        raise ConfigError(
            "MW407",
            f"parallel.mesh = {dict(mesh)} has {math.prod(mesh.values())} devices, but there are {world_size} ranks "
            f"(world_size); set world_size={math.prod(mesh.values())} or another mesh.",
        )


def check_training(config: Config, model: nn.Module) -> None:
    """Make optimizer, scheduler and metric once, so that a wrong config starts no rank. Raises ConfigError."""
    names = [name for name, _ in model.named_parameters()]
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {key: value for key, value in group.items() if key != "names"} | {"params": [nn.Parameter(torch.zeros(1, 1))]}
        for group in optimizers.parameter_groups(names, trainable, config.optimizer)
    ]
    factory = optimizers.optimizer_factory(config.optimizer)
    if groups:
        made = factory(groups)
        if config.parallel.mode not in ("stand_alone", "hybrid"):
            check_kind(made)
        optimizers.check_scheduler(config.optimizer.scheduler, made)
    if config.evaluate.metric is not None and config.loss.target is None:
        raise ConfigError(
            "MW322",
            f"evaluate.metric = {config.evaluate.metric!r} compares outputs with a target, but loss.target is null, so "
            "no entry of a sample is known to be the target. Name the loss, or leave evaluate.metric null.",
        )
    scores(config.evaluate.metric, None)


def _trials(config: Config, step: Objective, dataset: MapDataset, collate: Collate | None) -> list[Trial]:
    """One evaluated batch of each number of rows that there will be; loss and metric are tried on it. Raises
    ConfigError."""
    rows = min(evaluation_rows(config), len(dataset))
    found: list[Trial] = []
    for size in sorted({rows, len(dataset) % rows} - {0}):
        whole = whole_batch(dataset, collate, range(size), config.train.seed)
        names, batch = flatten_batch(whole)
        if config.job.name != "predict":
            if {*names} != {*step.names}:
                raise ConfigError(
                    "MW316",
                    f"evaluate.args: the samples have the entries {', '.join(names)}, those of training "
                    f"{', '.join(step.names)}.",
                )
            names, batch = flatten_batch(whole, step.names)
        entries = dict(zip(names, cast(batch, DTYPES[config.train.precision]), strict=True))
        structure = tried(step, entries, scores(config.evaluate.metric, step.loss))
        found.append((size, {name: entries[name] for name in names if name not in step.targets}, structure))
    return found


def _evaluations(
    config: Config, step: Objective, plan: Plan, stages: Sequence[Stage], trials: Sequence[Trial]
) -> tuple[dict[int, Evaluation], dict[str, Tensor]]:
    """Evaluation graphs by rows, and the tensors in them. A short last batch has a graph of its own: filling it up
    would change what models that mix rows return."""
    tensors: dict[str, Tensor] = {}
    found: dict[int, Evaluation] = {}
    for size, entries, structure in trials:
        model = Objective(step.model, None, [*entries], (), step.autocast)
        seen = capture(model, [*entries.values()], training=False)
        own, options = follow(plan, seen.graph), evaluation_options(config)
        parts = pipelining.evaluation_stages(stages, seen.graph, own, options)
        found[size] = Evaluation(seen.graph, own, structure, parts)
        tensors |= seen.tensors
    return found, tensors


def options_of(config: Config) -> LoweringOptions:
    """How the training graph is lowered."""
    return replace(evaluation_options(config), sharded_optimizer=config.parallel.zero.known > 0, partial_loss=True)


def lowered(config: Config, graph: OperatorGraph, plan: Plan, lower: Lower = lower) -> Program:
    """The program of a training step. Raises StrategyError for what cannot be asked of this one."""
    program = fuse(_placed(config, graph, plan, options_of(config), lower), communication.joined(config))
    buckets(program, communication.cut(config))
    return communication.beside_computation(program, graph, plan, config)


def lowered_evaluation(config: Config, graph: OperatorGraph, plan: Plan) -> Program:
    """The program of an evaluation step, which may lack some of what parallel.place names."""
    return _placed(config, graph, plan, evaluation_options(config), lower)


def _placed(config: Config, graph: OperatorGraph, plan: Plan, options: LoweringOptions, lower: Lower) -> Program:
    return place(lower(graph, plan, options), on_host(graph, config.parallel.place, strict=False))


def evaluation_options(config: Config) -> LoweringOptions:
    """How an evaluation graph is lowered."""
    return LoweringOptions(config.train.random == "exact", wide_sums=wide_sums(config))


def wide_sums(config: Config) -> bool:
    """Whether ranks add up values below fp32 in fp32. A GPU has fast products for such values only, and adds up a
    rank's own part in fp32 there; so does a machine that is only described, if that is what its flops say."""
    wanted, machine = config.parallel.reduce_precision, config.cluster.machine
    if wanted != "auto":
        return wanted == "fp32"
    if machine is not None and config.job.name in DESCRIBING:
        return machine.flops.get("bfloat16", 0.0) <= machine.flops["float32"]
    return device_of(config)[0] == "cpu"


def digest(*parts: object) -> str:
    """A short hash of what all ranks must agree on."""
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()[:16]
