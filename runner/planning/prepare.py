"""Preparation, once per run before ranks start: build data and model, capture, plan, write the initial weights.

Errors in the user's model, loss, data, optimizer or strategies are detected here and end as one paragraph (exit code
2).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from runner.build import adapters, huggingface, optimizers, pretrained
from runner.build.callbacks import followed
from runner.build.captures import Captures
from runner.build.modules import DTYPES, captured_from_shapes, cast, cast_named, check_half, check_modules, objective
from runner.build.outputs import row_names
from runner.build.scores import Structure, scores, try_evaluation
from runner.build.targets import resolve
from runner.checkpoint import Companions
from runner.config.schema import Config
from runner.data.description import UNSEEN, Description, check_read, described
from runner.data.loader import Collate, MapDataset, flatten_batch, global_batch, mixes_rows
from runner.data.order import Order, spread
from runner.data.row_seeds import EVALUATION
from runner.data.streams import Stream
from runner.data.unbatched import unbatched
from runner.errors import ConfigError, allowed
from runner.planning import lowering
from runner.planning.batch_rows import with_batch_rows
from runner.planning.clusters import DESCRIBING, cluster_of, device_of
from runner.planning.counted import (
    AddedRows,
    Counted,
    Divisor,
    InitialTensors,
    check_weighed,
    counted,
    each_counted,
    mean_weights,
    nonlinear_in_means,
    unknown_division,
    unknown_labels,
)
from runner.planning.coupled_rows import BATCH_NORM, coupled, row_sums
from runner.planning.datasets import (
    check_prediction_names,
    datasets,
    evaluation_rows,
    micro_batch_rows,
    order_of,
    prediction_data,
)
from runner.planning.estimate import Programs, estimate, settings_of, step_price
from runner.planning.micro_batches import apart
from runner.planning.neighbours import check_neighbours
from runner.planning.schedules import synthesised
from runner.planning.slices import sliced
from runner.planning.sources import for_target, planned, request_of
from runner.planning.vocabulary import check_vocabulary
from strategies.capture import Captured, Objective, capture, check_decided, check_kept, run_once
from strategies.capture.model import UnseenMeans
from strategies.core.errors import StrategyError, closest
from strategies.core.graph import Operator, OperatorGraph, Ref
from strategies.core.layout import Layout
from strategies.core.plan import OperatorPlan, Plan
from strategies.core.request import check
from strategies.lowering.device_placement import on_host
from strategies.lowering.pipeline import Stage
from strategies.lowering.pipeline_schedule import Owners, Schedule, as_text, owners_of
from strategies.memory.repeated_blocks import Traces
from strategies.optimizer.elementwise import check_elementwise, flattened
from strategies.optimizer.state import check_goes_on
from strategies.optimizer.updates import check_kind
from strategies.planner.planner import follow
from strategies.planner.step_certificate import with_cost
from strategies.rules.registry import RULES
from strategies.runtime import compiled
from strategies.runtime import initial_weights as weights
from strategies.runtime.tensor_files import StoredTensor

WEIGHTS = "initial.pt"
LOADED = "model.weights, or the checkpoint that is resumed,"
TRAINING = ("train", "verify")
"""Jobs that take steps."""
UNWEIGHED = (
    "train: no weights for the means of the loss ({}); where micro-batches have different numbers of labels that "
    "count, their losses are not those of one batch."
)


@dataclass(frozen=True)
class Evaluation:
    """The evaluation graph of one batch size, its plan, how the model's output is made of the graph's results, its
    stages in a pipeline, the values by which its forward has decided, and what its loss counts, if it has one."""

    graph: OperatorGraph
    plan: Plan
    structure: Structure
    stages: tuple[Stage, ...] = ()
    decided: Mapping[str, Tensor] = field(default_factory=dict)
    counted: Counted | Divisor | None = None


@dataclass(frozen=True)
class Short:
    """The last micro-batch of an epoch where it has fewer rows (`data.drop_last=false`): the training graph for that
    number of rows under the same plan, and its stages in a pipeline. Graph and plan are None as in `Prepared`."""

    rows: int
    graph: OperatorGraph | None = None
    plan: Plan | None = None
    stages: tuple[Stage, ...] = ()


Trial = tuple[int, Mapping[str, Tensor], Structure, frozenset[str]]
"""Rows of an evaluated batch, its entries that the model takes, how the output is made of results, and which of its
tensors have a value for each row."""


@dataclass(frozen=True)
class Prepared:
    """Everything that a rank needs besides its number, as plain data.

    Attributes:
        names: the entries of a batch.
        shapes: of the global micro-batch, by entry.
        targets: the entries that only the loss takes.
        rows: of a global micro-batch.
        graph, plan: None for modes that run the user's module itself.
        evaluations: by rows of a batch.
        digest: the fingerprint that ranks and checkpoints compare.
        steps: the number of the last optimizer step, counted from 1.
        stages: of a pipeline, made from `step`; none without one.
        schedule: what every group of ranks of a pipeline runs in which order.
        step: graph and plan of a training step, with an operator per batch split where there are several.
        evaluated: the entries of an evaluated or predicted batch, with their shapes but for the rows.
        published: the names in the model's state dict.
        companions: what the library of the model needs beside merged weights.
        data: the description of the data, which every rank must match.
        single_draws: whether a module that runs alone in fp64 draws the random numbers of fp32.
        nudged: the precision in which the weights of a module that runs alone are neighbouring numbers, and of which
            number these are.
        short: the short last micro-batch of an epoch, where there is one.
        together: whether the collate needs all rows of a batch, because it makes rows of several samples.
        counted: what the loss divides by, where micro-batches or the batches of an evaluation may differ in it.
        means: the divisor of each mean of the loss (None: unknown), where every micro-batch has a weight for each of
            them; empty where micro-batches count by the entire loss.
        row_names: the tensors of a predicted output that have a value for each row; None where that is not known.
        floating: the entries of training that are floating-point numbers; integers under their names, as lines of JSON
            may have, are cast.
        default_dtype: torch's, which the file of the model may set; data is made in it on every rank, too.
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
    stages: tuple[Stage, ...] = ()
    schedule: Schedule | None = None
    step: tuple[OperatorGraph, Plan] | None = None
    evaluated: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    published: frozenset[str] | None = None
    companions: Companions = field(default_factory=Companions)
    data: Description = UNSEEN
    single_draws: bool = False
    nudged: tuple[str, int] | None = None
    short: Short | None = None
    counted: Counted | Divisor | AddedRows | None = None
    means: tuple[Counted | Divisor | None, ...] = ()
    together: bool = False
    row_names: frozenset[str] | None = None
    floating: frozenset[str] = frozenset()
    default_dtype: torch.dtype = torch.float32

    @property
    def owners(self) -> Owners:
        """The group of ranks that runs every stage of a pipeline; without one, that of all ranks."""
        return (0,) if self.schedule is None else owners_of(self.schedule)

    def identity(self) -> dict[str, Any]:
        """The properties of the run that a checkpoint stores, as `runner.checkpoint.check` takes them."""
        plan = {} if self.plan is None else self.plan.to_json()
        config = self.config.model_dump(mode="json")
        return {"plan": plan, "config": config, "fingerprint": self.digest, "samples": self.data.training}


Accept = Callable[[OperatorGraph, frozenset[str]], None]
"""Called with the graph of a step and the names in the model's state dict before a plan is searched; raises ConfigError
to refuse them, as for a checkpoint of another model."""


def accept_any(graph: OperatorGraph, published: frozenset[str]) -> None:
    """Accept every model."""


def prepare(
    config: Config,
    folder: Path | None,
    say: Callable[[str], None] = print,
    plan: Plan | None = None,
    accept: Accept = accept_any,
    resumed: Mapping[str, StoredTensor] = MappingProxyType({}),
    earlier: Captures | None = None,
) -> Prepared:
    """Build, capture and plan. Everything that can be rejected without a plan is rejected before the search.

    Args:
        config: with nothing left to the joint decision.
        folder: where the initial weights are written for the ranks; None to write none.
        say: prints notices for the user.
        plan: the plan of a joint decision, which is not searched again.
        accept: may reject the model.
        resumed: the tensors of model and loss in the checkpoint from which training goes on.
        earlier: captures of earlier commands, for plans of described clusters.

    Raises:
        ConfigError, StrategyError: something is wrong with model, loss, data, strategies or devices.
    """
    device, world_size = device_of(config)
    planless = config.parallel.mode in ("stand_alone", "hybrid")
    if config.train.compile:
        compiled.check(device)
    if not planless and plan is None and config.parallel.plan is None:
        check(request_of(config, lowering.planned_ranks(config, world_size)))
    if config.model.target is not None:
        resolve(config.model.target, "model.target")  # whose file may set torch's default dtype
    training, evaluating, collate = datasets(config)
    if evaluating is not None and config.job.name == "train" and not config.evaluate.args:
        say("evaluate: the rows of training, as evaluate.args is empty; give it the arguments of other data.")
    evaluation_collate = collate
    if config.job.name == "predict":
        evaluating, evaluation_collate = prediction_data(config)
    order, rows = order_of(config, training), micro_batch_rows(config)
    first = order.rows(0)[:rows]
    names, tensors = flatten_batch(global_batch(training, collate, first, config.train.seed, 0))
    _check_unbatched(config, collate, names)
    tensors = cast(tensors, DTYPES[config.train.precision])
    trains = config.job.name != "predict"
    if trains and order.dropped and (config.train.epochs or (config.train.steps or 0) > order.steps_per_epoch):
        say(
            f"data: {order.dropped} of {len(training)} samples fill no complete batch of {config.data.batch_size}; "
            "every epoch drops as many."
        )
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    floating = frozenset(name for name, tensor in zip(names, tensors, strict=True) if tensor.is_floating_point())
    together, job, seed = False, config.job.name, config.train.seed
    if collate is not None and world_size > 1 and job in (*TRAINING, "launch"):
        steps = () if isinstance(training, Stream) else spread(order.steps_per_epoch)
        together = mixes_rows(training, collate, [first, *(order.rows(step)[:rows] for step in steps)], seed, 0)
    elif evaluation_collate is not None and world_size > 1 and job == "predict" and evaluating is not None:
        size, length = evaluation_rows(config), len(evaluating)
        numbers = () if isinstance(evaluating, Stream) else spread(-(-length // size))
        tried = [range(number * size, min((number + 1) * size, length)) for number in (0, *numbers)]
        together = mixes_rows(evaluating, evaluation_collate, tried, seed, EVALUATION)
    if together:
        given = f", of which it gets one of {config.parts} at a time" if config.parts > 1 else ""
        say(f"data: data.collate makes rows from several samples, so every rank reads complete micro-batches{given}.")
    data = _described(config, training, evaluating, collate, shapes, first[0], say)
    captured = None
    if config.job.name in DESCRIBING and not planless:
        evaluating = None
        step, captured, tensors = captured_from_shapes(config, names, tensors, say, earlier)
        check_model(config, step, order)
    else:
        step = objective(config, names, say)
        check_model(config, step, order)
        check_half(config, step, tensors, device)
    if config.job.name in (*TRAINING, "launch") and config.parallel.mode != "hybrid":
        check_neighbours(step, names, tensors, training)
    targeted = tuple(name for name in names if name in step.targets)
    stored = pretrained.locate(config.model, step.model) if config.model.weights is not None else {}
    evaluated = names, tensors
    if config.job.name == "predict" and evaluating is not None:
        evaluated = flatten_batch(global_batch(evaluating, evaluation_collate, range(1)))
        check_prediction_names(evaluated[0], names, targeted)
    last = order.rows(order.steps_per_epoch - 1)[-(order.short % rows) :] if order.short % rows else []
    several = config.job.name in TRAINING and config.parts > 1
    values: Mapping[str, Tensor]
    trials: list[Trial] = []

    def last_rows() -> list[Tensor]:
        batch = global_batch(training, collate, last, config.train.seed, 0)
        return cast(flatten_batch(batch, names)[1], DTYPES[config.train.precision])

    def first_two() -> Sequence[Sequence[Tensor]]:
        """The first two micro-batches, where rows can be read again and are of one shape; else the first."""
        second = order.rows(0)[rows : 2 * rows]
        if isinstance(training, Stream) or together or len(second) < rows:
            return [tensors]
        batch = flatten_batch(global_batch(training, collate, second, seed, 0), names)[1]
        other = cast(batch, DTYPES[config.train.precision])
        return [tensors, other] if [one.shape for one in other] == [*shapes] else [tensors]

    prepared = Prepared(
        *(config, world_size, device, names, shapes, targeted, rows),
        graph=None,
        plan=None,
        evaluations={},
        digest=digest(config.model.target, config.model.args, config.model.config, config.loss, shapes),
        steps=_steps(config, order),
        evaluated={name: tuple(tensor.shape[1:]) for name, tensor in zip(*evaluated, strict=True)},
        published=frozenset(step.model.state_dict()),
        companions=_companions(step.model),
        data=data,
        short=Short(len(last)) if last and config.job.name in TRAINING else None,
        together=together,
        floating=floating,
        default_dtype=torch.get_default_dtype(),
    )
    if config.parallel.mode == "hybrid":
        _check_mesh(config, world_size)
        values = {}
    elif config.parallel.mode == "stand_alone":
        prepared = _tried_alone(
            *(prepared, step, tensors, training, several, {**stored, **resumed}, first_two, unbatched(collate), say)
        )
        if prepared.short is not None:
            try:
                run_once(step, last_rows())
            except StrategyError as error:
                raise _too_short(order, len(last), error) from error
        if evaluating is not None:
            trials = _trials(config, step, evaluating, evaluation_collate, floating)
        named = (*step.named_parameters(), *step.named_buffers())
        values = {name.removeprefix("model."): tensor.detach() for name, tensor in named}
    else:
        captured = captured or capture(step, tensors, training=True)
        graph = captured.graph
        check_vocabulary(graph, training)
        files = {**stored, **resumed}
        initial = InitialTensors(captured.tensors, files)
        check_decided(captured.decided, InitialTensors(captured.decided, files), LOADED)
        if evaluating is not None and not config.parallel.elastic:
            prepared = replace(prepared, counted=counted(graph, initial))
        on_host(graph, config.parallel.place)
        check_described(config, graph)
        lowering.check_ranks(config, world_size)
        lowering.rows_per_split(config)
        accept(graph, frozenset(step.model.state_dict()))
        trials = [] if evaluating is None else _trials(config, step, evaluating, evaluation_collate, floating)
        if several:
            prepared = _with_counts(prepared, step, tensors, graph, initial, first_two, unbatched(collate), say)
        prepared = with_plan(prepared, step, tensors, graph, plan, say)
        plan, stages = prepared.plan, prepared.stages
        assert prepared.graph is not None and plan is not None
        graph = prepared.graph
        known: Mapping[str, Tensor] = captured.tensors
        if prepared.short is not None:
            batch_tensors = last_rows()
            if count := len(prepared.means):
                batch_tensors += mean_weights([1.0] * count, config.train.precision)
            own = step.weighed(count) if count else step
            short, known = _short(config, own, batch_tensors, captured.tensors, graph, plan, stages, order, say)
            prepared = replace(prepared, short=short)
        evaluations, known = _evaluations(config, step, graph, plan, stages, trials, known, files)
        for evaluation in evaluations.values():
            check_decided(evaluation.decided, InitialTensors(evaluation.decided, files), LOADED)
            check_kept(captured.decided, evaluation.graph)
        values = known
        prepared = replace(prepared, evaluations=evaluations)
    if config.job.name == "predict" and evaluating is not None and trials:
        found = _row_names(config, step, evaluating, evaluation_collate, trials, floating)
        prepared = replace(prepared, row_names=found)
    if folder is not None:
        weights.write(folder / WEIGHTS, values, stored)
    return prepared


def _tried_alone(
    prepared: Prepared,
    step: Objective,
    tensors: Sequence[Tensor],
    training: MapDataset,
    several: bool,
    stored: Mapping[str, StoredTensor],
    first_two: Callable[[], Sequence[Sequence[Tensor]]],
    without_rows: Collection[str],
    say: Callable[[str], None],
) -> Prepared:
    """Run a module that is not planned once; with what its loss divides by, where there are `several` micro-batches."""
    captured = None
    if several or hasattr(training, "vocabulary"):
        with suppress(StrategyError):  # a module that is no graph: all micro-batches count the same
            captured = capture(step, tensors, training=True)
    if captured is not None:
        check_vocabulary(captured.graph, training)
    run_once(step, tensors)
    if captured is None or not several:
        return prepared
    graph, initial = captured.graph, InitialTensors(captured.tensors, stored)
    prepared = _with_counts(prepared, step, tensors, graph, initial, first_two, without_rows, say)
    try:
        if prepared.means:
            weighed, entries, _, means = _weighed(step, tensors, graph, prepared.means, prepared.config.train.precision)
            run_once(weighed, entries)
            prepared = replace(prepared, means=means)
    except StrategyError as error:
        if not isinstance(prepared.counted, Divisor):
            say(UNWEIGHED.format(error))
        prepared = replace(prepared, means=())
    return prepared


def _with_counts(
    prepared: Prepared,
    step: Objective,
    tensors: Sequence[Tensor],
    graph: OperatorGraph,
    initial: Mapping[str, Tensor],
    first_two: Callable[[], Sequence[Sequence[Tensor]]],
    without_rows: Collection[str],
    say: Callable[[str], None],
) -> Prepared:
    """`prepared` with what its loss counts in the micro-batches of a step. Says why what a step makes of their losses
    is not that of one batch, where it is not."""
    divided, unlabelled = unknown_division(graph, initial), unknown_labels(graph, initial)
    nonlinear, together = next(iter(nonlinear_in_means(graph)), None), coupled(graph, without_rows)
    sums, alone = _row_sums(step, tensors, graph, without_rows)
    added = bool(sums) and alone and divided is None and (together is None or together.op == BATCH_NORM)
    counts = AddedRows() if added else counted(graph, initial)
    prepared = replace(prepared, counted=counts, means=each_counted(graph, initial))
    differs = "so the loss of several micro-batches may differ from that of one batch."
    if divided is not None:
        say(
            f"train: the loss divides by a number that the batch decides, at {divided.where}; micro-batches count by "
            "their rows, not by that number. The sum of a mask is known, and a cross-entropy with ignore_index."
        )
    elif unlabelled is not None:
        say(
            f"train: the labels of {unlabelled.where} do not follow from the batch row by row, so micro-batches count "
            "by their rows there, not by the labels that count."
        )
    elif nonlinear is not None:
        say(f"train: the loss is no sum of means: {nonlinear.op} at {nonlinear.where} takes one, {differs}")
    elif together is not None:
        say(f"train: {together.where} takes the rows of a micro-batch together, {differs}")
    elif sums and not added:
        say(
            f"train: a term of the loss adds up rows, at {sums[0].where}, and others do not; that of several "
            "micro-batches is their mean, which is less than that of one batch. Divide by the number of rows."
        )
    elif (found := apart(step, graph, first_two, counts, prepared.means, without_rows)) is not None:
        say(
            f"train: the loss of two micro-batches in one is {found[0]:.6g}, and {found[1]:.6g} where each counts for "
            "itself: something takes their rows together, or divides by a number of them."
        )
    return prepared


def _row_sums(
    step: Objective, tensors: Sequence[Tensor], graph: OperatorGraph, without_rows: Collection[str]
) -> tuple[list[Operator], bool]:
    """The terms of the loss that add up rows, and whether all do. Where terms have factors, the graph of twice as many
    rows says whether these follow from the number of rows, as those of a mean do."""
    sums, alone = row_sums(graph, without_rows)
    again = sums
    if any(one.factors for one in sums):
        pairs = zip(step.names, tensors, strict=True)
        twice = [one if name in without_rows or not one.dim() else torch.cat([one, one]) for name, one in pairs]
        try:
            again, _ = row_sums(capture(step, twice, training=True).graph, without_rows)
        except StrategyError:  # a model for one size
            again = []
    if len(again) != len(sums):
        return [one.operator for one in sums if not one.factors], False
    kept = [one.operator for one, other in zip(sums, again, strict=True) if one.factors == other.factors]
    return kept, alone and len(kept) == len(sums)


def _check_unbatched(config: Config, collate: Collate | None, names: Sequence[str]) -> None:
    """Raises ConfigError where data.unbatched names what a batch does not have."""
    if unknown := sorted(unbatched(collate) - {*names}):
        raise ConfigError(
            "MW316",
            f"data.unbatched = [{', '.join(map(str, config.data.unbatched))}]: a batch has no {unknown[0]!r}; it has "
            f"{', '.join(names)}.",
        )


def check_described(config: Config, graph: OperatorGraph) -> None:
    """Raises ConfigError where the cluster describes an operator of torch that does not exist; of other libraries only
    those that the model uses are known."""
    known = RULES.keys() | {operator.op for operator in graph.operators}
    for name in () if config.cluster.machine is None else config.cluster.machine.operators:
        if name not in known and "::" not in name and not hasattr(torch.ops.aten, name):
            raise ConfigError(
                "MW204",
                f"cluster.machine.operators.{name}: torch has no operator of that name, so it would change no cost."
                f"{closest(name, sorted(known))}",
            )


def _companions(module: nn.Module) -> Companions:
    found = adapters.companions(module)
    return found if found.texts else huggingface.companions(module)


def with_plan(
    prepared: Prepared,
    step: Objective,
    tensors: Sequence[Tensor],
    graph: OperatorGraph,
    plan: Plan | None,
    say: Callable[[str], None],
) -> Prepared:
    """`prepared` with the training graph, its plan, the graph and plan of a step, pipeline stages and fingerprint.

    Args:
        prepared: for a config with nothing left to the joint decision.
        step: model and loss.
        tensors: a global micro-batch.
        graph: that of `step`.
        plan: of a joint decision; None: the file, the cache or a search decides.
        say: prints notices for the user.

    Raises:
        ConfigError, StrategyError: as `prepare`.
    """
    config, device, world_size = prepared.config, prepared.device, prepared.world_size
    lowering.check_written(config, graph)
    step_of = partial(lowering.training_step, config, step, tensors, graph)
    if plan is None:
        cluster = cluster_of(config, device, world_size)
        price = step_price(config, graph, step_of, device, world_size, cluster)
        request = for_target(request_of(config, lowering.planned_ranks(config, world_size)), graph, device)
        plan = planned(config, graph, request, cluster, price, say)
    plan = with_batch_rows(config, graph, plan, settings_of(config, graph, device))
    prepared = _with_readable_counts(prepared, plan, say)
    if prepared.means:
        try:
            weighed, entries, graph, means = _weighed(step, tensors, graph, prepared.means, config.train.precision)
            plan, prepared = _extended(plan, graph), replace(prepared, means=means)
            step_of = partial(lowering.training_step, config, weighed, entries, graph)
        except StrategyError as error:
            if not isinstance(prepared.counted, Divisor):  # by which all of the loss divides
                say(UNWEIGHED.format(error))
            prepared = replace(prepared, means=())
    in_step = step_of(plan)
    if config.parallel.elastic:
        sliced(config, *in_step)
    stages: tuple[Stage, ...] = ()
    schedule = None
    if config.parallel.pipeline.known is not None:
        schedule = lowering.schedules_of(config)[0]
        if config.parallel.pipeline.schedule == "auto":
            schedule, plan = _with_schedule(prepared, graph, plan, in_step)
        stages = lowering.cut_of(config, *in_step, owners_of(schedule))
    without_search = plan.to_json() | {"search": None}
    del without_search["recompute"]  # it changes no number
    made = (
        [as_text(actions) for actions in schedule] if schedule and config.parallel.pipeline.schedule == "auto" else []
    )
    names = [list(stage.graph.by_name) for stage in stages]
    fingerprint = digest(graph.signature(), json.dumps(without_search), names, *made)
    return replace(prepared, graph=graph, plan=plan, digest=fingerprint, stages=stages, schedule=schedule, step=in_step)


def _with_readable_counts(prepared: Prepared, plan: Plan, say: Callable[[str], None]) -> Prepared:
    """`prepared` without counts of classes that are computed from blocks of which no rank has complete rows."""
    layouts = [plan.inputs[name].dims for name in prepared.names]
    own = prepared.counted if prepared.counted is not None and prepared.counted.readable(layouts) else None
    means = [one if one is not None and one.readable(layouts) else None for one in prepared.means]
    if (own, *means) != (prepared.counted, *prepared.means):
        say(
            "train: labels of a mean of the loss are computed from entries of which ranks hold different rows, or "
            "parts of rows; micro-batches count by their rows in that mean, not by the labels that count."
        )
    return replace(prepared, counted=own, means=tuple(means) if any(means) else ())


def _weighed(
    step: Objective,
    tensors: Sequence[Tensor],
    graph: OperatorGraph,
    means: Sequence[Counted | Divisor | None],
    precision: str,
) -> tuple[Objective, list[Tensor], OperatorGraph, tuple[Counted | Divisor | None, ...]]:
    """The objective whose means take weights, its entries, its graph, and what its means count: a forward may compute
    some that it does not use, and these count nothing. Raises StrategyError if it computes others than `graph`."""

    def tried(count: int) -> tuple[Objective, list[Tensor], OperatorGraph]:
        weighed, entries = step.weighed(count), [*tensors, *mean_weights([1.0] * count, precision)]
        return weighed, entries, capture(weighed, entries, training=True, like=graph).graph

    try:
        weighed, entries, own = tried(len(means))
    except UnseenMeans as error:
        if error.seen < len(means):
            raise
        weighed, entries, own = tried(error.seen)
    names = weighed.inputs[len(weighed.names) :]
    inputs = {source.name: Ref(source.id) for source in own.of_kind("input")}
    used = [name for name in names if own.users.get(inputs[name])]
    if len(used) != len(means):
        raise UnseenMeans(len(used), len(means))
    check_weighed(own, graph, used)
    each = dict(zip(used, means, strict=True))
    return weighed, entries, own, tuple(each.get(name) for name in names)


def _extended(plan: Plan, graph: OperatorGraph) -> Plan:
    """`plan` for a graph with the weights of means."""
    operators = {name: plan.operators.get(name, OperatorPlan({}, "default")) for name in graph.by_name}
    inputs = {source.name: plan.inputs.get(source.name, Layout.replicated(0)) for source in graph.of_kind("input")}
    return replace(plan, operators=operators, inputs=inputs)


def _with_schedule(
    prepared: Prepared, graph: OperatorGraph, plan: Plan, in_step: tuple[OperatorGraph, Plan]
) -> tuple[Schedule, Plan]:
    """A schedule for the times of the plan's stages, and the plan with the cost that it has under that."""
    config = prepared.config
    cluster = cluster_of(config, prepared.device, prepared.world_size)
    settings = settings_of(config, graph, prepared.device)
    known = cluster, Programs(), Traces()
    steps = [estimate(config, in_step, settings, *known, schedule) for schedule in lowering.schedules_of(config)]
    step = synthesised(config, steps, steps[0].limits(config.parallel.memory_limit))
    assert step.schedule is not None
    return step.schedule, replace(plan, search=with_cost(plan.search, step.seconds))


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
    once, twice = (described(training, evaluating, collate, row=row, shapes=shapes, seed=seed) for _ in range(2))
    if once.sample != twice.sample:
        say(
            f"warning: data: row {row} of {config.data.target} is another sample each time it is read, although the "
            "global generators of random, numpy.random and torch begin at the same numbers; ranks that read the same "
            "row see different ones, and `run verify` differs. Draw from the global generators, not from one without a "
            "seed or one that goes on."
        )
        return replace(twice, sample=None)
    return twice


def _too_short(order: Order, rows: int, error: ConfigError | StrategyError) -> ConfigError:
    return ConfigError(
        "MW325",
        f"data.drop_last = false: an epoch ends with a batch of {order.short} samples, of which a micro-batch has "
        f"{rows}, and the model cannot train on it: {error} Choose a data.batch_size that divides the {order.length} "
        "samples, or data.drop_last=true.",
    )


def _short(
    config: Config,
    step: Objective,
    tensors: Sequence[Tensor],
    known: Mapping[str, Tensor],
    trained: OperatorGraph,
    plan: Plan,
    stages: Sequence[Stage],
    order: Order,
    say: Callable[[str], None],
) -> tuple[Short, Mapping[str, Tensor]]:
    """The training graph of a short micro-batch of `tensors`, whose operators and tensors are sliced as in `plan`,
    that of the graph `trained`, wherever so few rows can be; and the `known` tensors with those of this graph.

    Raises ConfigError for a model that cannot train on them.
    """
    rows = len(tensors[0])
    try:
        graph, known = _with_known(capture(step, tensors, training=True, like=trained), known, rows)
        own = replace(follow(plan, graph), recompute=plan.recompute)
        own_stages = lowering.stages_as(config, stages, graph, own)
    except (ConfigError, StrategyError) as error:
        raise _too_short(order, rows, error) from error
    slices = max((plan.mesh.product(axes) for layout in own.inputs.values() for axes in layout.dims[:1]), default=1)
    say(
        f"data: the last batch of an epoch has {order.short} samples; "
        + (f"{slices} slices of the last {rows}" if slices > 1 else f"every rank computes the last {rows}")
        + " (data.drop_last=false)."
    )
    return Short(rows, graph, own, own_stages), known


def _with_known(
    captured: Captured, known: Mapping[str, Tensor], rows: int
) -> tuple[OperatorGraph, Mapping[str, Tensor]]:
    """A graph of another number of rows, and the `known` tensors with its own. A constant whose value depends on the
    number of rows (`torch.tensor(len(x))`) has a name that ends in it."""
    renamed = {
        source.name: f"{source.name}.{rows}_rows"
        for source in captured.graph.of_kind("constant")
        if (before := known.get(source.name)) is not None and not _is_same(before, captured.tensors[source.name])
    }
    sources = tuple(
        replace(source, name=renamed.get(source.name, source.name)) if source.kind == "constant" else source
        for source in captured.graph.sources
    )
    tensors = {renamed.get(name, name): tensor for name, tensor in captured.tensors.items()}
    return replace(captured.graph, sources=sources), {**tensors, **known}


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _check_mesh(config: Config, world_size: int) -> None:
    """Check the mesh of a hybrid run, which no planner validates. Raises ConfigError."""
    mesh = config.parallel.mesh
    if mesh is not None and math.prod(mesh.values()) != world_size:
        raise ConfigError(
            "MW407",
            f"parallel.mesh = {dict(mesh)} has {math.prod(mesh.values())} devices, but there are {world_size} ranks "
            f"(world_size); set world_size={math.prod(mesh.values())} or another mesh.",
        )


def _steps(config: Config, order: Order) -> int:
    return config.train.steps or (config.train.epochs or 0) * order.steps_per_epoch


def check_model(config: Config, step: Objective, order: Order | None = None) -> None:
    """Make optimizer, scheduler and metric once, and look for offloaded modules, so that a wrong config starts no rank;
    the scheduler of a run in `order` up to its end. Raises ConfigError."""
    parameters = {name.removeprefix("model."): parameter for name, parameter in step.named_parameters()}
    names, trainable = [*parameters], [name for name, parameter in parameters.items() if parameter.requires_grad]
    named = optimizers.parameter_groups(names, trainable, config.optimizer)
    groups = [
        {key: value for key, value in group.items() if key != "names"} | {"params": [nn.Parameter(torch.zeros(1, 1))]}
        for group in named
    ]
    factory = optimizers.optimizer_factory(config.optimizer)
    if groups:
        made = factory(groups)
        if config.checkpoint.every or config.checkpoint.at_end:
            optimizers.check_storable(factory)
        if config.launch.max_restarts or config.train.resume is not None:
            check_goes_on(made)
        if config.parallel.mode not in ("stand_alone", "hybrid"):
            check_kind(made)
        stage = config.parallel.zero.known
        if config.parallel.elastic or stage:
            what = flattened(stage) if stage else "servers hold slices of flattened parameters"
            shapes = {name: parameter.shape for name, parameter in parameters.items()}
            check_elementwise(factory, named, shapes, torch.device("cpu"), what)
        per, ends = config.optimizer.scheduler.per, 1
        if order is not None:
            ends = _steps(config, order) // (1 if per == "step" else order.steps_per_epoch)
        optimizers.check_scheduler(config.optimizer.scheduler, made, _evaluates_before_the_end(config), ends)
    if config.evaluate.every_metric and config.loss.target is None:
        raise ConfigError(
            "MW322",
            f"evaluate.metric = {config.evaluate.every_metric[0].target!r} compares outputs with a target, but "
            "loss.target is null, so no entry of a sample is known to be the target. Name the loss, or leave "
            "evaluate.metric null.",
        )
    scores(config.evaluate.every_metric, None)
    if followed(config) and not _evaluates_before_the_end(config):
        raise ConfigError(
            "MW842",
            f"{next(iter(followed(config)))} follows a result of the evaluations, but nothing is evaluated before the "
            "end; set evaluate.every (steps).",
        )
    check_modules(config, step.model)


def _evaluates_before_the_end(config: Config) -> bool:
    """Whether there are evaluations that training could follow; without an interval or epochs there is one, at the end
    of the run."""
    return config.evaluate.wanted and (config.evaluate.every is not None or config.train.epochs is not None)


def _trials(
    config: Config, step: Objective, dataset: MapDataset, collate: Collate | None, floating: Collection[str]
) -> list[Trial]:
    """One evaluated batch of each number of rows that there will be; loss and metric are tried on it. Raises
    ConfigError."""
    rows = min(evaluation_rows(config), len(dataset))
    trials: list[Trial] = []
    for size in sorted({rows, len(dataset) % rows} - {0}):
        batch = global_batch(dataset, collate, range(size), config.train.seed)
        names, entry_tensors = flatten_batch(batch)
        if config.job.name != "predict":
            if {*names} != {*step.names}:
                raise ConfigError(
                    "MW316",
                    f"evaluate.args: the samples have the entries {', '.join(names)}, those of training "
                    f"{', '.join(step.names)}.",
                )
            names, entry_tensors = flatten_batch(batch, step.names)
        entries = cast_named(dict(zip(names, entry_tensors, strict=True)), DTYPES[config.train.precision], floating)
        measured = scores(config.evaluate.every_metric, step.loss)
        what = "predict.data" if config.job.name == "predict" else "evaluate"
        structure, output = try_evaluation(step, entries, measured, what)
        decided = {
            "checkpoint.best": config.checkpoint.best,
            "optimizer.scheduler.metric": config.optimizer.scheduler.metric,
            **followed(config),
        }
        trains = config.job.name in ("train", "launch")
        for key, name in decided.items() if {*step.names} <= {*entries} and trains else ():
            if name is not None and name not in (found := measured.results()):
                raise ConfigError(
                    "MW614", f"{key} = {name!r} is not what an evaluation of this run finds.{allowed(name, found)}"
                )
        taken = {name: entries[name] for name in names if name not in step.targets}
        trials.append((size, taken, structure, row_names(output, size)))
    return trials


def _row_names(
    config: Config,
    step: Objective,
    dataset: MapDataset,
    collate: Collate | None,
    trials: Sequence[Trial],
    floating: Collection[str],
) -> frozenset[str]:
    """The tensors of a predicted output that have a value for each row: whose dim 0 is the number of rows in batches of
    two numbers of rows, as a state of two layers has a dim of two."""
    found = frozenset.intersection(*(names for _, _, _, names in trials))
    if len(trials) == 1 and found:
        size, taken, _, _ = trials[0]
        batch = flatten_batch(global_batch(dataset, collate, [*range(size), 0], config.train.seed))
        entries = {name: tensor for name, tensor in zip(*batch, strict=True) if name in taken}
        entries = cast_named(entries, DTYPES[config.train.precision], floating)
        with suppress(ConfigError):  # a model for batches of one size
            found &= row_names(try_evaluation(step, entries, scores((), None), "predict.data")[1], size + 1)
    return found


def _evaluations(
    config: Config,
    step: Objective,
    trained: OperatorGraph,
    plan: Plan,
    stages: Sequence[Stage],
    trials: Sequence[Trial],
    known: Mapping[str, Tensor],
    stored: Mapping[str, StoredTensor],
) -> tuple[dict[int, Evaluation], Mapping[str, Tensor]]:
    """Evaluation graphs by rows, and the `known` tensors with those in them, some of which are in files. A short last
    batch has a separate graph: padding it would change the results of models that mix rows."""
    evaluations: dict[int, Evaluation] = {}
    for size, entries, structure, _ in trials:
        model = Objective(step.model, None, [*entries], (), step.autocast)
        seen = capture(model, [*entries.values()], training=False, like=trained)
        graph, known = _with_known(seen, known, size)
        own = follow(plan, graph)
        own_stages = lowering.evaluation_stages(config, stages, graph, own)
        counts = counted(graph, InitialTensors(known, stored)) if step.loss is None else None
        evaluations[size] = Evaluation(graph, own, structure, own_stages, seen.decided, counts)
    return evaluations, known


def digest(*parts: object) -> str:
    """A short hash of everything that all ranks must agree on."""
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()[:16]
