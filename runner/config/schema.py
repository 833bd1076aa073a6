"""The config: types, limits, defaults, units and meaning of every key, here and in the sections imported below.

The files in `conf/`, the reference page, the JSON Schema and `--help` repeat them and are generated from here by
`runner.config.generate`. A `Config` is frozen, and valid as far as can be checked without model and machine. A rule
about several keys is in the section that holds them, or in `Config` if they are in different sections.
`Config.model_validate_json(config.model_dump_json())` gives an equal config; ranks get theirs that way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from math import prod
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, field_validator, model_validator

from runner.config import exclusive
from runner.config.cluster import NODE, ClusterForm
from runner.config.launch import Launch
from runner.config.parallel import ExportTarget, Parallel
from runner.config.section import (
    REQUIRED,
    Arguments,
    Count,
    Dotted,
    Glob,
    Positive,
    Ranks,
    Section,
    dotted,
    refusal,
    setting,
)
from runner.config.strategy_syntax import check_counts
from runner.errors import allowed


def _named(name: str, known: Iterable[str]) -> str:
    """`name`, one of `known` or dotted. Raises ValueError."""
    if name in known:
        return name
    if "." not in name:
        raise ValueError(f"is no dotted name.{allowed(name, [*known, 'package.module.Name'])}")
    return dotted(name)


def _from_name(value: Any) -> Any:
    """A name alone is short for its target."""
    return {"target": value} if isinstance(value, str) else value


Metric = Annotated[str, AfterValidator(lambda name: _named(name, ("accuracy",)))]


CALLBACKS = {
    "early_stopping": "runner.training.callbacks.early_stopping.EarlyStopping",
    "ema": "runner.training.callbacks.ema.Ema",
    "histograms": "runner.training.callbacks.histograms.Histograms",
    "monitor": "runner.training.callbacks.monitor.Monitor",
    "nan_watch": "runner.training.callbacks.nan_watch.NanWatch",
    "profiler": "runner.training.callbacks.profiler.Profiler",
    "time_left": "runner.training.callbacks.time_left.TimeLeft",
}
"""Callbacks that ship with the project, with their dotted names."""


class CallbackForm(Section):
    """A callback: `target` called with `args`."""

    target: Annotated[str, AfterValidator(lambda name: _named(name, CALLBACKS))] = setting(
        REQUIRED, f"{', '.join(CALLBACKS)}, or the dotted name of a class or function"
    )
    args: Arguments = setting({}, "Keyword arguments of target")


class Train(Section):
    """The length of a training, and its numbers."""

    steps: Count | None = setting(None, "Optimizer steps to train; give steps or epochs", unit="steps")
    epochs: Count | None = setting(None, "Passes over the dataset; give steps or epochs", unit="epochs")
    seed: int = setting(0, "Seed of initial weights, data order and random operators", strict=True, ge=0, lt=2**63)
    precision: Literal["fp32", "fp64", "bf16", "fp16", "bf16_autocast"] = setting(
        "fp32", "Precision of training; bf16_autocast: fp32 parameters, torch.autocast in bf16"
    )
    loss_scale: Positive | None = setting(None, "Loss scale of fp16; null: dynamic")
    accumulate: Count = setting(
        1, "Micro-batches of one optimizer step (gradient accumulation), whose losses are averaged"
    )
    clip: Positive | None = setting(None, "Maximum norm of the gradient; null: no clipping")
    random: Literal["fast", "exact"] = setting("fast", "exact: random operators draw the numbers of a single process")
    compile: StrictBool = setting(False, "Pass each rank's program through torch.compile")
    measure_memory: StrictBool = setting(
        False, "Count each rank's tensors (on CPUs in the first 5 steps), into memory.json"
    )
    resume: str | None = setting(None, "auto (the newest checkpoint of the run) or the path of a checkpoint")
    log_every: Count = setting(10, "Interval of lines in the log", unit="steps")
    callbacks: tuple[
        Annotated[CallbackForm, BeforeValidator(_from_name, json_schema_input_type=str | CallbackForm)], ...
    ] = setting((), "Called during training: [early_stopping, {target: package.module.Name, args: {}}, ...]")


class MetricForm(Section):
    """A metric: a function (output, target, ...) -> number, averaged over all rows, with further arguments `args`; or a
    class that is made with `args` and has `update`, `compute` and `reset`, as metrics of torchmetrics have."""

    target: Metric = setting(REQUIRED, "accuracy, or the dotted name of a function or class")
    args: Arguments = setting({}, "Keyword arguments of target")
    name: str | None = setting(None, "Name in the results; null: the last word of target", min_length=1)
    inputs: Dotted | None = setting(
        None, "Function (output, target, ...) -> arguments of the metric; null: output and targets as the loss has them"
    )


class Evaluate(Section):
    """Evaluations on held-out data."""

    metric: Metric | None = setting(None, "accuracy, or the dotted name of a function or class")
    metrics: tuple[Annotated[MetricForm, BeforeValidator(_from_name, json_schema_input_type=str | MetricForm)], ...] = (
        setting((), "More metrics: [accuracy, {target: torchmetrics.AUROC, args: {task: binary}, name: auroc}, ...]")
    )
    every: Count | None = setting(None, "Interval of evaluations; null: after every epoch, or the run", unit="steps")
    args: Arguments = setting({}, "Arguments of the dataset that differ from data.args; path: instead of data.path")
    batch_size: Count | None = setting(None, "Samples of one batch over all ranks; null: of a micro-batch of training")

    @property
    def wanted(self) -> bool:
        """Whether evaluation is configured."""
        return bool(self.every_metric or self.every is not None or self.batch_size is not None or self.args)

    @property
    def every_metric(self) -> tuple[MetricForm, ...]:
        """All metrics, `metric` first."""
        return (*(() if self.metric is None else (MetricForm(target=self.metric),)), *self.metrics)


class CheckpointForm(Section):
    """The interval of checkpoints, and which of them stay."""

    every: Count | None = setting(None, "Save every N steps", unit="steps")
    minutes: Positive | None = setting(
        None, "Save when this much time has passed since the last checkpoint", unit="minutes"
    )
    best: str | None = setting(
        None, "Save at the best value so far of a metric of evaluate, such as loss", min_length=1
    )
    best_mode: Literal["min", "max"] | None = setting(
        None, "Which value of best is better; null: min of a loss, else max"
    )
    at_end: StrictBool = setting(True, "Save after the last step")
    keep: Count | None = setting(None, "Number of newest checkpoints to keep, and the best one; null: all")
    form: Literal["sharded", "merged", "both"] = setting(
        "sharded", "sharded: a file per rank; merged: one file of full weights for torch and transformers; both"
    )
    background: StrictBool = setting(False, "Train on while files are written")
    copies: Count = setting(1, "Ranks on which each replicated tensor is stored")


class PredictedRows(Section):
    """The rows to predict: of the run's own dataset, with other `args` or another `path`; of a JSONL file `path`; or
    of another dataset."""

    target: Dotted | None = setting(None, "Another dataset; null: data.target")
    args: Arguments = setting({}, "Arguments that differ from data.args and evaluate.args; all arguments of target")
    path: str | None = setting(
        None, "Another path for the dataset, or a .jsonl file with a sample per line; null: data.path"
    )
    collate: Dotted | None = setting(
        None, "Function from samples to a batch; null: data.collate with data.target, else stack"
    )
    collate_args: Arguments = setting({}, "Further keyword arguments of collate")

    @property
    def lines(self) -> bool:
        """Whether the rows are the lines of a file."""
        return self.target is None and self.path is not None and self.path.endswith(".jsonl")


class Predict(Section):
    """The verb predict."""

    checkpoint: str | None = setting(
        None, "A checkpoint or run folder, written under any plan; null: model.weights", min_length=1
    )
    average: str | None = setting(
        None, "The callback whose average of the weights to take, such as ema; null: the weights", min_length=1
    )
    data: PredictedRows = setting(PredictedRows(), "The rows to predict")
    rows: Count | None = setting(None, "Number of rows, from the first; null: all")
    batch_size: Count | None = setting(None, "Samples of one batch over all ranks; null: as in evaluation")
    format: Literal["jsonl", "safetensors"] = setting("jsonl", "Format of the predictions")


class Calibrate(Section):
    """The verb calibrate."""

    file: str = setting(
        "cluster.yaml", "File for the description of this machine; cluster.file=FILE reads it", min_length=1
    )
    seconds: float = setting(
        60.0, "Time limit of the command; unmeasured values stay as in cluster", unit="seconds", ge=8,
        allow_inf_nan=False,
    )  # fmt: skip
    force: StrictBool = setting(False, "Overwrite a file that calibrate has not written; also --force")


class Explain(Section):
    """The verb explain."""

    operator: Glob | None = setting(None, "Operators to explain, as in parallel.strategies; null: a table of all")
    slices: Glob | None = setting(
        None, "Parameters, buffers, batch entries or operators whose slices on every rank to show; also --slices NAME"
    )


class Export(Section):
    """The verb export."""

    target: ExportTarget = setting(
        "torch",
        "Format of the plan; torch: a Python file of plain torch; parallelize_module: a short one of torch's styles of "
        "modules; torchtitan: one with its ShardingConfigs; "
        "autoparallel: JSON of placements; transformers: JSON of a DistributedConfig; deepspeed: JSON of its config, "
        "with AutoTP",
    )
    file: str | None = setting(None, "File to write; null: in the run folder", min_length=1)
    allow_changes: StrictBool = setting(False, "Export also a plan that the target lays out otherwise in part")


Verb = Literal["train", "launch", "plan", "tune", "verify", "explain", "export", "predict", "calibrate"]


class Loss(Section):
    """The loss: `target` called with `args`, or what the model returns."""

    target: Dotted | None = setting(None, "Dotted name of a loss class or function; null: the model returns its loss")
    args: Arguments = setting({}, "Keyword arguments of target")


class Reference(Section):
    """The module on one device with which a module of mode hybrid is compared."""

    target: Dotted | None = setting(None, "Dotted name of the module on one device, for mode hybrid")
    args: Arguments = setting({}, "Keyword arguments of target")


class Model(Section):
    """The trained model: `target` called with `args`, or made from a `config` as models of transformers are; with the
    weights of a file whose names are changed by the pairs (pattern, replacement) of `rename`, one after the other; what
    `new` names is not read."""

    target: Dotted = setting(REQUIRED, "Dotted name of a model class or function, such as package.module.Class")
    args: Arguments = setting({}, "Keyword arguments of target")
    config: Arguments | None = setting(None, "For models of transformers: keys of their config class")
    weights: str | None = setting(
        None,
        "Pretrained weights: a .safetensors or torch file, an index of several, or a folder of these",
        min_length=1,
    )
    rename: tuple[tuple[str, str], ...] = setting(
        (), "[[pattern, replacement], ...] for the names in weights; a tensor whose name becomes empty is left out"
    )
    new: tuple[Glob, ...] = setting(
        (), "Globs of parameters and buffers that keep their initial values whatever weights hold: ['classifier.*']"
    )

    @field_validator("rename")
    @classmethod
    def _patterns(cls, pairs: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        for pattern, replacement in pairs:
            try:
                re.compile(pattern)
                re.sub(pattern, replacement, "")
            except re.error as error:
                raise ValueError(
                    f"holds {pattern!r} -> {replacement!r}, which is no regular expression: {error}"
                ) from None
        return pairs


class Data(Section):
    """The dataset, and how batches are made of it."""

    target: Dotted = setting(REQUIRED, "Dotted name of a map-style dataset class or function")
    args: Arguments = setting({}, "Keyword arguments of target")
    path: str | None = setting(None, "Where the data is, if the dataset takes a path")
    batch_size: Count = setting(32, "Samples of one optimizer step over all ranks and micro-batches", unit="samples")
    shuffle: bool = setting(True, "Another order of the rows in every epoch, from train.seed")
    drop_last: bool = setting(True, "Leave out the last batch of an epoch if it is short")
    collate: Dotted | None = setting(None, "Function from a list of samples to a batch; null: stack the samples")
    collate_args: Arguments = setting({}, "Further keyword arguments of collate")
    unbatched: tuple[str | int, ...] = setting(
        (), "Batch entries that are one tensor for all rows, such as [w] for forward(x, w)"
    )
    workers: Annotated[int, Field(strict=True, ge=0)] | Literal["auto"] = setting(
        "auto", "Processes that read ahead for each rank; auto: as many as keep up, 0 where reading takes no time"
    )
    prefetch: Count = setting(2, "Micro-batches that each worker reads ahead")
    pin_memory: StrictBool = setting(True, "Copy batches to a GPU from page-locked memory, while it computes")
    persistent_workers: StrictBool = setting(True, "Keep the workers over epochs; false: new ones, with new datasets")


class ParameterGroup(Section):
    """Options of the optimizer for some parameters."""

    match: tuple[Glob, ...] = setting(REQUIRED, "Globs of parameter names", min_length=1)
    args: Arguments = setting(REQUIRED, "Options of these parameters, such as {weight_decay: 0}")


class Scheduler(Section):
    """The learning rate scheduler."""

    target: Dotted | None = setting(None, "Dotted name such as torch.optim.lr_scheduler.StepLR; null: constant")
    args: Arguments = setting({}, "Keyword arguments of target")
    per: Literal["step", "epoch"] = setting("step", "When the learning rate changes")
    metric: str | None = setting(
        None, "The result of every evaluation that ReduceLROnPlateau follows; null: loss", min_length=1
    )


DEFAULT_OPTIMIZER, DEFAULT_RATE, OPEN_RATE = "torch.optim.SGD", 0.01, {"lr": "auto"}


class Optimizer(Section):
    """The optimizer, its parameter groups and its scheduler."""

    target: Dotted = setting(DEFAULT_OPTIMIZER, "Dotted name of an optimizer class")
    args: Arguments = setting(
        OPEN_RATE,
        "Keyword arguments of target; a recipe adds to them. lr: auto is 0.01 for the default target, else left out",
    )
    groups: tuple[ParameterGroup, ...] = setting(
        (),
        "[{match: ['*.bias'], args: {weight_decay: 0}}, ...]; the first match counts; parameters that match none are "
        "the first group of the optimizer, as for lists such as max_lr",
    )
    freeze: tuple[Glob, ...] = setting((), "Globs of parameters that are not trained")
    scheduler: Scheduler = setting(Scheduler(), "Learning rate scheduler")

    @model_validator(mode="before")
    @classmethod
    def _rate(cls, given: Any) -> Any:
        """The arguments without `lr: auto`."""
        args = given.get("args", OPEN_RATE) if isinstance(given, Mapping) else None
        if not isinstance(args, Mapping) or args.get("lr") != "auto":
            return given
        rate = {"lr": DEFAULT_RATE} if given.get("target", DEFAULT_OPTIMIZER) == DEFAULT_OPTIMIZER else {}
        return {**given, "args": {name: value for name, value in args.items() if name != "lr"} | rate}


class Verify(Section):
    """The verb verify."""

    steps: Count = setting(3, "Optimizer steps to compare", unit="steps")
    tolerance: Positive | None = setting(
        None, "Relative tolerance; null: by precision, or 3 times the distance of one process from a finer one"
    )
    reference: Reference = setting(Reference(), "What to compare a hybrid module with")


class Tune(Section):
    """The verb tune."""

    plans: Count = setting(4, "Plans to try, the best of the search first")
    steps: Count = setting(10, "Optimizer steps to time with each plan", unit="steps")


class Report(Section):
    """What shows the metrics of a run."""

    loggers: tuple[Literal["csv", "tensorboard", "wandb", "mlflow"], ...] = setting(
        (), "What receives metrics beside metrics.jsonl; W&B and MLflow write into the run folder"
    )
    tensorboard: StrictBool = setting(False, "The same as loggers=[tensorboard]")
    progress: Literal["auto", True, False] = setting("auto", "Progress bar; auto: if the output is a terminal")

    @property
    def every_logger(self) -> tuple[str, ...]:
        """The names of all loggers, each once."""
        return tuple(dict.fromkeys((*self.loggers, *(("tensorboard",) if self.tensorboard else ()))))


class RunFolder(Section):
    """What a new run does with the folder of an earlier one."""

    overwrite: StrictBool = setting(
        False, "Start over in the folder of an earlier run, and remove its checkpoints and metrics"
    )


class Job(Section):
    """The verb that the command runs."""

    name: Verb = setting("train", "The verb of the command; `run VERB` sets it")


class Config(Section):
    """All that a job needs to know. `world_size` null means: as many ranks as there are devices at hand."""

    world_size: Ranks | None = setting(None, "Ranks; null: one per available device, 8 processes on CPU")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto: cuda if there is a GPU for every rank, else cpu")
    model: Model = setting(REQUIRED, "The trained model")
    loss: Loss = setting(Loss(), "The minimised loss")
    data: Data = setting(REQUIRED, "What it is trained on")
    optimizer: Optimizer = setting(Optimizer(), "Optimizer, parameter groups and learning rate schedule")
    train: Train = setting(Train(), "Length, precision and numerics of training")
    evaluate: Evaluate = setting(Evaluate(), "Measurements on held-out data; set metric, every, batch_size or args")
    checkpoint: CheckpointForm = setting(CheckpointForm(), "When and how a run is saved")
    predict: Predict = setting(Predict(), "`run predict`: which weights on which rows")
    parallel: Parallel = setting(Parallel(), "How the run is sharded over its ranks; parallel=MODE chooses a group")
    cluster: ClusterForm = setting(ClusterForm(), "The machine whose costs are predicted; cluster=NAME chooses one")
    launch: Launch = setting(Launch(), "What starts the ranks, and where; launch=NAME chooses a launcher")
    verify: Verify = setting(Verify(), "`run verify`: comparison with one process")
    explain: Explain = setting(Explain(), "`run explain`: what to explain")
    export: Export = setting(Export(), "`run export`: a plan for another trainer")
    calibrate: Calibrate = setting(Calibrate(), "`run calibrate`: measurement of this machine")
    tune: Tune = setting(Tune(), "`run tune`: measurement of the best plans")
    report: Report = setting(Report(), "What a run shows of its progress")
    run: RunFolder = setting(RunFolder(), "What a run does with the folder of an earlier one")
    job: Job = setting(Job(), "The verb")

    @model_validator(mode="after")
    def _keys_go_together(self) -> Config:
        exclusive.check(self)
        return self

    @model_validator(mode="after")
    def _ranks_divide(self) -> Config:
        wanted, stages = self.launch.ranks, self.parallel.pipeline.known
        if wanted is not None and self.world_size not in (None, wanted):
            raise refusal(
                f"world_size = {self.world_size}, but the hosts or devices of the launch have {wanted} ranks; they "
                "must be equal (world_size=null takes those of the launch).",
                "world_size",
                "launch.devices" if self.launch.devices else "launch.hosts",
            )
        if self.data.batch_size % self.train.accumulate:
            raise refusal(
                f"train.accumulate = {self.train.accumulate} must divide data.batch_size = {self.data.batch_size} "
                "into micro-batches of one size.",
                "train.accumulate",
                "data.batch_size",
            )
        if self.data.batch_size % self.parts:
            raise refusal(
                f"data.batch_size = {self.data.batch_size} cannot be divided into train.accumulate = "
                f"{self.train.accumulate} times parallel.pipeline.micro_batches = {self.parallel.pipeline.parts} equal "
                f"parts; take a multiple of {self.parts}, or other micro_batches.",
                "parallel.pipeline.micro_batches",
                "data.batch_size",
            )
        if rows := self.parallel.batch_rows:
            size, ranks = self.data.batch_size // self.train.accumulate, self.world_size or len(rows)
            if sum(rows) != size or len(rows) != ranks:
                raise refusal(
                    f"parallel.batch_rows = {list(rows)} are {sum(rows)} rows on {len(rows)} ranks, but a micro-batch "
                    f"has {size} (data.batch_size / train.accumulate) and there are {ranks} ranks (world_size); one "
                    "number per rank, which add up to a micro-batch, is right.",
                    "parallel.batch_rows",
                    "data.batch_size",
                )
        if groups := self.cluster.groups:
            devices = sum(group.devices for group in groups)
            if self.world_size not in (None, devices):
                raise refusal(
                    f"cluster.groups have {devices} devices, but world_size = {self.world_size}; they must be equal.",
                    "cluster.groups",
                    "world_size",
                )
            if self.has_uneven_rows and self.data.batch_size // self.train.accumulate < devices:
                raise refusal(
                    f"cluster.groups have {devices} devices, but a micro-batch has "
                    f"{self.data.batch_size // self.train.accumulate} rows (data.batch_size / train.accumulate), and "
                    "every rank needs one; take a larger data.batch_size.",
                    "cluster.groups",
                    "data.batch_size",
                )
        if stages is not None and self.world_size is not None and self.world_size % stages:
            raise refusal(
                f"world_size = {self.world_size} cannot be divided among parallel.pipeline.stages = {stages}; every "
                f"stage has as many ranks as the others, so take a multiple of {stages}.",
                "world_size",
                "parallel.pipeline.stages",
            )
        return self

    @property
    def server_ranks(self) -> tuple[int, ...]:
        """The ranks that serve in mode parameter_server: the first one after rank 0 of each host in turn, then the
        second ones, and so on."""
        servers = self.parallel.server.servers
        hosts = [[rank for rank in host.ranks if rank] for host in self.launch.hosts] or [[*range(1, servers + 1)]]
        in_turn = [rank for ranks in zip_longest(*hosts) for rank in ranks if rank is not None]
        return tuple(in_turn[:servers])

    def _with_workers(self) -> Config:
        """Check the number of ranks of mode parameter_server."""
        server, key = self.parallel.server, "parallel.server"
        if self.world_size is None and server.workers is None:
            raise refusal(
                f"parallel.mode = 'parameter_server' needs the number of workers: set {key}.workers=N, or world_size = "
                "1 + servers + workers.",
                f"{key}.workers",
                "world_size",
            )
        workers = server.workers or server.working(self.world_size or 0)
        ranks = 1 + server.servers + workers
        if workers < 1 or self.world_size not in (None, ranks):
            raise refusal(
                f"world_size = {self.world_size} is not rank 0, which coordinates, + {key}.servers = {server.servers} "
                f"+ {key}.workers = {'null' if server.workers is None else server.workers}; take "
                f"world_size={1 + server.servers + max(workers, 1)}, or null with a number of workers.",
                "world_size",
                f"{key}.workers",
            )
        if self.data.batch_size % (self.train.accumulate * workers):
            raise refusal(
                f"data.batch_size = {self.data.batch_size} cannot be divided into slices for {workers} workers "
                f"(train.accumulate = {self.train.accumulate} of each); take a multiple of "
                f"{self.train.accumulate * workers}.",
                "data.batch_size",
                f"{key}.workers",
            )
        return self

    @property
    def has_uneven_rows(self) -> bool:
        """Whether ranks have different numbers of rows. A pipeline has stages of different lengths instead, and other
        modes equal slices."""
        parallel = self.parallel
        by_speed = parallel.mode == "data_parallel" and parallel.pipeline.stages is None and bool(self.cluster.groups)
        return by_speed or bool(parallel.batch_rows)

    @property
    def parts(self) -> int:
        """Micro-batches of one optimizer step: those of accumulation, each cut into those of the pipeline."""
        return self.train.accumulate * self.parallel.pipeline.parts

    @property
    def zero_engine(self) -> Literal["deepspeed", "native"]:
        """The engine of ZeRO."""
        if self.parallel.zero.engine != "auto":
            return self.parallel.zero.engine
        return "native" if exclusive.needs_deepspeed(self) is None else "deepspeed"

    @model_validator(mode="after")
    def _devices_agree(self) -> Config:
        if self.parallel.mode == "stand_alone" and self.world_size not in (None, 1):
            raise refusal(
                f"world_size = {self.world_size}, but parallel.mode = 'stand_alone' is one process; set world_size=1 "
                "or choose another mode.",
                "world_size",
                "parallel.mode",
            )
        if self.parallel.elastic:
            return self._with_workers()
        if self.parallel.pipeline.stages == "auto":
            return self  # a mesh is that of a stage; each candidate is checked against it
        stages, machine, known = self.parallel.pipeline.known or 1, self.cluster.machine, self.parallel.meshes()
        planned = self.job.name in ("plan", "explain", "export") and self.parallel.mode != "stand_alone"
        if self.world_size is not None:
            key = "world_size" if self.parallel.pipeline.known is None else "world_size / parallel.pipeline.stages"
            known = [(key, (self.world_size // stages,)), *known]
        elif machine is not None and planned:  # for all devices of a cluster that is only described
            for key, shape in known:
                if (devices := prod(shape) * stages) != machine.devices:
                    raise refusal(
                        f"{key} = {list(shape)} has {devices} devices, but world_size = null takes all "
                        f"{machine.devices} of cluster = {self.cluster.name!r}; set world_size={devices}, or {key} for "
                        "all of them.",
                        key,
                        "world_size",
                    )
        for key, shape in known[1:]:
            first, expected = known[0][0], prod(known[0][1])
            if prod(shape) != expected:
                axes = [*(self.parallel.mesh or {})]
                more = len(axes) > 1 and key == "parallel.mesh"
                merged = f" The axes of a recipe stay; ~parallel.mesh.{axes[-1]} drops one." if more else ""
                raise refusal(
                    f"{key} = {list(shape)} has {prod(shape)} devices, but {first} = {_shown(known[0][1])} has "
                    f"{expected}; they must be equal.{merged}",
                    key,
                    first,
                )
        ranks = prod(known[0][1]) * stages if known else 1
        if machine is not None and ranks > machine.devices:
            raise refusal(
                f"{known[0][0]} = {_shown(known[0][1])} needs {ranks} devices, but cluster = "
                f"{self.cluster.name!r} has {machine.devices}; choose a larger cluster"
                f"{' (cluster.nodes)' * (NODE in machine.levels)} or fewer ranks (world_size={machine.devices}).",
                known[0][0],
                "cluster.nodes",
            )
        if known:
            key = "world_size" if self.world_size is None else known[0][0]
            check_counts(self.parallel.operands(), prod(known[0][1]), key)
        return self


def _shown(shape: tuple[int, ...]) -> str:
    return str(shape[0]) if len(shape) == 1 else str(list(shape))
