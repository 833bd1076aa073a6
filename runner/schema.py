"""Types and limits of a config: what `Config` holds is complete, right as far as a config alone can tell, and frozen.

Defaults live in `conf/`, never here: a key that is missing is an error, and so is a key that is not known. A rule that
ties several keys together stands in the section that holds them, or in `Config` where they are in different sections.
`Config.model_validate_json(config.model_dump_json())` gives an equal config; ranks get theirs that way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import prod
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StrictBool, field_validator, model_validator

from runner.errors import allowed
from runner.forms import (
    AxisName,
    Count,
    Glob,
    OperandForm,
    Place,
    Section,
    StrategyForm,
    check_counts,
    check_layouts,
    read_operands,
    read_strategies,
    refusal,
)
from runner.offload_form import OffloadForm
from runner.pipelining import Pipeline


def _dotted(name: str) -> str:
    words = name.split(".")
    if len(words) < 2 or not all(word.isidentifier() for word in words):
        raise ValueError("is not a dotted name; write package.module.Name")
    return name


def _metric(name: str) -> str:
    if name != "accuracy" and "." not in name:
        raise ValueError(f"is neither accuracy nor a dotted name.{allowed(name, ['accuracy', 'package.module.Name'])}")
    return name if name == "accuracy" else _dotted(name)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield prefix, value
        return
    for key, inner in value.items():
        yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)


Dotted = Annotated[str, AfterValidator(_dotted)]
Metric = Annotated[str, AfterValidator(_metric)]
Arguments = dict[str, Any]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

Verb = Literal["train", "plan", "verify", "explain"]
Mode = Literal["stand_alone", "data_parallel", "semi_auto", "auto", "hybrid"]
Search = Literal["sharding_propagation"]
NOTHING = {"set_data_parallel": "[]", "place": "{}"}
"""How to drop a key of `parallel` that is not dropped by null."""
DATASETS = ("data_parallel", "full_batch")
RECOMPUTED = ("none", "full", "selective")
LATER_SEARCHES = ("dynamic_programming", "recursive_programming")


class OptionallyBuilt(Section):
    """Something made by calling a dotted name with keyword arguments, or nothing at all."""

    target: Dotted | None
    args: Arguments


class Model(Section):
    """What is trained: `target` called with `args`, or made from a `config` as models of transformers are; with the
    weights of a file whose names are changed by the pairs (pattern, replacement) of `rename`, one after the other."""

    target: Dotted
    args: Arguments
    config: Arguments | None
    weights: Annotated[str | None, Field(min_length=1)]
    rename: tuple[tuple[str, str], ...]

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

    @model_validator(mode="after")
    def _something_to_rename(self) -> Model:
        if self.rename and self.weights is None:
            raise refusal(
                "model.rename changes the names in the files of model.weights, but model.weights is null; give it too.",
                "model.rename",
            )
        return self


class Data(Section):
    target: Dotted
    args: Arguments
    path: str | None
    batch_size: Annotated[Count, Field(description="Samples of one optimizer step over all ranks and micro-batches.")]
    collate: Dotted | None
    collate_args: Arguments

    @model_validator(mode="after")
    def _collate_args_are_used(self) -> Data:
        if self.collate_args and self.collate is None:
            raise refusal(
                f"data.collate_args = {self.collate_args} is given but data.collate = null would ignore it; name the "
                "function in data.collate, or drop the arguments.",
                "data.collate_args",
                "data.collate",
            )
        return self


class ParameterGroup(Section):
    match: Annotated[tuple[Glob, ...], Field(min_length=1, description="Globs of parameter names.")]
    args: Arguments


class Scheduler(Section):
    target: Dotted | None
    args: Arguments
    per: Literal["step", "epoch"]


class Optimizer(Section):
    target: Dotted
    args: Arguments
    groups: tuple[ParameterGroup, ...]
    freeze: tuple[Glob, ...]
    scheduler: Scheduler


class Train(Section):
    steps: Count | None
    epochs: Count | None
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)]
    precision: Literal["fp32", "fp64", "bf16"]
    accumulate: Count
    clip: Positive | None
    random: Literal["fast", "exact"]
    compile: StrictBool
    resume: Annotated[str | None, Field(description="null, auto (the newest checkpoint of the run) or a path.")]
    log_every: Count

    @model_validator(mode="after")
    def _one_length(self) -> Train:
        if self.steps is not None and self.epochs is not None:
            raise refusal(
                f"train.steps = {self.steps} and train.epochs = {self.epochs} cannot both be given; "
                "drop one with train.steps=null or train.epochs=null.",
                "train.steps",
                "train.epochs",
            )
        return self


class Evaluate(Section):
    metric: Annotated[Metric | None, Field(description="null, accuracy, or a dotted name.")]
    every: Count | None
    args: Arguments
    batch_size: Count | None


class Checkpoint(Section):
    every: Count | None
    at_end: StrictBool
    keep: Count | None


class NamedMatrix(Section):
    """A device matrix with a name for each of its axes; ranks are numbered row by row."""

    device_matrix: Annotated[tuple[Count, ...], Field(min_length=1)]
    axes: tuple[AxisName, ...]


class Zero(Section):
    stage: Annotated[int, Field(strict=True, ge=0, le=3)]
    options: Arguments


class Joined(Section):
    """Which collectives of one kind become one call: `auto`; of at most `size` megabytes (`config`); cut at positions
    (`index`, `config`: a list); or `none` of them."""

    mode: Literal["auto", "size", "index", "none"]
    config: Annotated[float, Field(gt=0, allow_inf_nan=False)] | tuple[Count, ...] | None

    @property
    def bytes(self) -> int | None:
        """The most that one call may carry; None where it is not said."""
        assert not isinstance(self.config, tuple)
        return None if self.config is None else max(int(self.config * 2**20), 1)


class CommFusion(Section):
    all_reduce: Joined
    all_gather: Joined
    reduce_scatter: Joined

    @model_validator(mode="after")
    def _configs_fit_modes(self) -> CommFusion:
        for name in type(self).model_fields:
            joined: Joined = getattr(self, name)
            key, config = f"parallel.comm_fusion.{name}", joined.config
            if joined.mode == "index" and name != "all_reduce":
                raise refusal(
                    f"{key}.mode = 'index' is not allowed: only all_reduce, the sum of gradients, has positions to cut "
                    "at. Allowed here: auto, size, none.",
                    f"{key}.mode",
                )
            fits = {
                "size": isinstance(config, float),
                "index": isinstance(config, tuple) and all(a < b for a, b in pairwise(config)),
            }.get(joined.mode, config is None)
            if not fits:
                wanted = {
                    "size": "a number of megabytes above 0, e.g. 25",
                    "index": "a list of increasing positions in the order in which backward completes the gradients, "
                    "e.g. [4, 8]",
                }.get(joined.mode, "nothing (null)")
                shown = list(config) if isinstance(config, tuple) else "null" if config is None else config
                raise refusal(
                    f"{key}.config = {shown} does not fit {key}.mode = {joined.mode!r}, which takes {wanted}; change "
                    "one of the two.",
                    f"{key}.config",
                    f"{key}.mode",
                )
        return self


class Recompute(Section):
    """What is computed again in backward instead of stored: none, full, selective (operators that are cheap to compute)
    or a list of kinds of operators, inside `modules` (null: every repeated layer). Repeating collectives is up to
    `communication` (null: with full they are repeated, else kept)."""

    operators: Literal["none", "full", "selective"] | Annotated[tuple[Glob, ...], Field(min_length=1)]
    modules: Annotated[tuple[Glob, ...], Field(min_length=1)] | None
    communication: Literal["recompute", "keep"] | None
    slice_inputs: StrictBool

    @field_validator("operators", mode="before")
    @classmethod
    def _operators_known(cls, operators: Any) -> Any:
        if operators == "auto":
            raise refusal(
                "parallel.recompute.operators = 'auto' (as much as a memory limit asks for) comes later; choose none, "
                "full, selective or kinds of operators such as [gelu, layer_norm].",
                "parallel.recompute.operators",
            )
        if isinstance(operators, str) and operators not in RECOMPUTED:
            raise refusal(
                f"parallel.recompute.operators = {operators!r} is not allowed.{allowed(operators, RECOMPUTED)} Or a "
                "list of kinds of operators such as [gelu, layer_norm].",
                "parallel.recompute.operators",
            )
        return operators

    @model_validator(mode="after")
    def _something_to_recompute(self) -> Recompute:
        given = {
            "modules": self.modules is not None,
            "communication": self.communication is not None,
            "slice_inputs": self.slice_inputs,
        }
        for name in (name for name, unused in given.items() if unused and self.operators == "none"):
            raise refusal(
                f"parallel.recompute.{name} is given but parallel.recompute.operators = 'none' would ignore it; choose "
                f"full, selective or kinds of operators, or drop parallel.recompute.{name}.",
                f"parallel.recompute.{name}",
                "parallel.recompute.operators",
            )
        return self


class Parallel(Section):
    mode: Mode
    search: Search
    mesh: Annotated[dict[AxisName, Count], Field(min_length=1)] | None
    strategies: dict[str, StrategyForm]
    layouts: dict[str, NamedMatrix]
    set_data_parallel: tuple[Glob, ...]
    dataset_strategy: Literal["data_parallel", "full_batch"] | tuple[OperandForm, ...]
    zero: Zero
    comm_fusion: CommFusion
    comm_overlap: Annotated[StrictBool, Field(description="Whether gradients are added while backward still runs.")]
    recompute: Recompute
    offload: OffloadForm
    place: dict[Glob, Literal["host"]]
    pipeline: Pipeline
    dump_ir: StrictBool

    @field_validator("mode", mode="before")
    @classmethod
    def _mode_available(cls, mode: Any) -> Any:
        if mode == "parameter_server":
            raise refusal(
                "parallel.mode = 'parameter_server' is not available yet; until then data_parallel is the nearest.",
                "parallel.mode",
            )
        return mode

    @field_validator("search", mode="before")
    @classmethod
    def _search_available(cls, search: Any) -> Any:
        if search in LATER_SEARCHES:
            raise refusal(
                f"parallel.search = {search!r} comes later; for now the one search is sharding_propagation.",
                "parallel.search",
            )
        return search

    @field_validator("recompute", mode="before")
    @classmethod
    def _recompute_in_short(cls, value: Any) -> Any:
        """`recompute=full` says all there is to say."""
        if not isinstance(value, str):
            return value
        return {"operators": value, "modules": None, "communication": None, "slice_inputs": False}

    @field_validator("strategies", mode="before")
    @classmethod
    def _strategies(cls, value: Any) -> dict[str, StrategyForm]:
        return read_strategies(value)

    @field_validator("place", mode="before")
    @classmethod
    def _place_by_path(cls, value: Any) -> Any:
        """`parallel.place.layers.0=host` on the command line builds nested keys."""
        return dict(_flat("", value)) if isinstance(value, Mapping) else value

    @field_validator("dataset_strategy", mode="before")
    @classmethod
    def _dataset_strategy(cls, value: Any) -> Any:
        if isinstance(value, str):
            if value not in DATASETS:
                raise refusal(
                    f"parallel.dataset_strategy = {value!r} is not allowed.{allowed(value, DATASETS)} Or one entry per "
                    "input, e.g. [[2, 1], [1, 1]].",
                    "parallel.dataset_strategy",
                )
            return value
        return read_operands(value, "parallel.dataset_strategy", "input")

    @model_validator(mode="after")
    def _layouts_hold_together(self) -> Parallel:
        for name, layout in self.layouts.items():
            key = f"parallel.layouts.{name}"
            if len(layout.axes) != len(layout.device_matrix) or len(set(layout.axes)) != len(layout.axes):
                raise refusal(
                    f"{key}: axes = {list(layout.axes)} must name each of the {len(layout.device_matrix)} axes of "
                    f"device_matrix = {list(layout.device_matrix)} once.",
                    key,
                )
        check_layouts(self.operands(), {name: layout.axes for name, layout in self.layouts.items()})
        return self

    @model_validator(mode="after")
    def _mode_uses_what_is_given(self) -> Parallel:
        searched = self.mode in ("semi_auto", "auto")
        given = {
            "strategies": bool(self.strategies) and not searched,
            "set_data_parallel": bool(self.set_data_parallel) and not searched,
            "mesh": self.mesh is not None and self.mode in ("stand_alone", "data_parallel"),
            "place": bool(self.place) and self.mode in ("stand_alone", "hybrid"),
        }
        for name, unused in given.items():
            if unused:
                key, nothing = f"parallel.{name}", NOTHING.get(name, "null")
                others = "data_parallel, semi_auto" if name == "place" else "semi_auto"
                raise refusal(
                    f"{key} is given but parallel.mode = {self.mode!r} would ignore it; choose mode {others} or "
                    f"auto, or drop it with {key}={nothing}.",
                    key,
                    "parallel.mode",
                )
        return self

    @model_validator(mode="after")
    def _dataset_strategy_fits_mode(self) -> Parallel:
        sliced = self.dataset_strategy != "data_parallel"
        if sliced and (self.mode == "data_parallel" or (self.mode == "stand_alone" and not self._full_batch)):
            given = "full_batch" if self._full_batch else "a strategy per input"
            raise refusal(
                f"parallel.dataset_strategy: {given} is not allowed with parallel.mode = {self.mode!r}; it needs mode "
                "semi_auto, auto or hybrid. Allowed here: data_parallel.",
                "parallel.dataset_strategy",
                "parallel.mode",
            )
        return self

    @model_validator(mode="after")
    def _zero_is_used(self) -> Parallel:
        if self.zero.stage and self.mode == "stand_alone":
            raise refusal(
                f"parallel.zero.stage = {self.zero.stage} needs ranks to divide the optimizer over, but parallel.mode "
                "= 'stand_alone' has one process; choose another mode or parallel.zero.stage=0.",
                "parallel.zero.stage",
                "parallel.mode",
            )
        if self.zero.options and not self.zero.stage:
            raise refusal(
                f"parallel.zero.options = {self.zero.options} is given but parallel.zero.stage = 0, which is done "
                "without DeepSpeed, would ignore it; choose stage 1, 2 or 3, or drop the options.",
                "parallel.zero.options",
                "parallel.zero.stage",
            )
        return self

    @model_validator(mode="after")
    def _fusion_is_used(self) -> Parallel:
        fusion, key = self.comm_fusion, "parallel.comm_fusion"
        kinds = {"all_reduce": fusion.all_reduce, "all_gather": fusion.all_gather}
        kinds["reduce_scatter"] = fusion.reduce_scatter
        for name, joined in kinds.items():
            own = self.mode == "stand_alone" or (self.mode == "hybrid" and name != "all_reduce")
            if own and joined.mode in ("size", "index"):
                why = "has one process" if self.mode == "stand_alone" else "leaves such calls to the module"
                raise refusal(
                    f"{key}.{name}.mode = {joined.mode!r} joins collectives of a plan, but parallel.mode = "
                    f"{self.mode!r} {why}; choose another mode or {key}.{name}.mode=auto.",
                    f"{key}.{name}.mode",
                    "parallel.mode",
                )
        if fusion.all_reduce.mode == "index" and self.zero.stage:
            raise refusal(
                f"{key}.all_reduce.mode = 'index' cuts the sum of gradients that parallel.zero.stage = 0 makes, but "
                f"with stage {self.zero.stage} DeepSpeed cuts it by size; choose mode size or auto, or "
                "parallel.zero.stage=0.",
                f"{key}.all_reduce.mode",
                "parallel.zero.stage",
            )
        return self

    @model_validator(mode="after")
    def _recompute_has_a_plan(self) -> Parallel:
        if self.recompute.operators != "none" and self.mode in ("stand_alone", "hybrid"):
            raise refusal(
                f"parallel.recompute.operators = {_told(self.recompute.operators)} is a property of a plan, but "
                f"parallel.mode = {self.mode!r} runs the module as it is; choose data_parallel, semi_auto or auto "
                "(data_parallel with world_size=1 for one process), or parallel.recompute.operators=none.",
                "parallel.recompute.operators",
                "parallel.mode",
            )
        return self

    @model_validator(mode="after")
    def _recomputed_or_moved(self) -> Parallel:
        moved = {"place": bool(self.place), "offload.activations.to": self.offload.activations.to != "none"}
        for key in (key for key, given in moved.items() if given and self.recompute.operators != "none"):
            raise refusal(
                f"parallel.recompute.operators = {_told(self.recompute.operators)} and parallel.{key} both decide "
                "where what backward needs comes from, and cannot be combined yet; drop one of them.",
                "parallel.recompute.operators",
                f"parallel.{key}",
            )
        return self

    @model_validator(mode="after")
    def _offload_has_its_stage(self) -> Parallel:
        """DeepSpeed would take the first two without a word, and offload less than they say or nothing."""
        stage, moved = self.zero.stage, self.offload
        needs = {
            "optimizer": (moved.optimizer, {"none": 0, "host": 1, "disk": 3}[moved.optimizer]),
            "parameters": (moved.parameters, {"none": 0, "host": 3, "disk": 3}[moved.parameters]),
        }
        for name, (where, least) in needs.items():
            if stage < least:
                raise refusal(
                    f"parallel.offload.{name} = {where!r} needs parallel.zero.stage = {'1, 2 or ' * (least == 1)}3, "
                    f"but it is {stage}; choose that stage or parallel.offload.{name}="
                    f"{'host' if stage and name == 'optimizer' else 'none'}.",
                    f"parallel.offload.{name}",
                    "parallel.zero.stage",
                )
        return self

    @model_validator(mode="after")
    def _offload_is_said_once(self) -> Parallel:
        ways = {"offload_optimizer": "optimizer", "offload_param": "parameters", "sub_group_size": "optimizer"}
        for option, name in ways.items():
            where = getattr(self.offload, name)
            if option in self.zero.options and where != "none" and (option != "sub_group_size" or where == "disk"):
                raise refusal(
                    f"parallel.zero.options.{option} and parallel.offload.{name} = {where!r} both say how to offload; "
                    "keep one of them.",
                    "parallel.zero.options",
                    f"parallel.offload.{name}",
                )
        return self

    @model_validator(mode="after")
    def _pipeline_fits(self) -> Parallel:
        if self.pipeline.stages is None:
            return self
        stages = f"parallel.pipeline.stages = {self.pipeline.stages}"
        if self.mode in ("stand_alone", "hybrid"):
            raise refusal(
                f"{stages} cuts the operators of a plan, but parallel.mode = {self.mode!r} runs the module as it is; "
                "choose mode data_parallel, semi_auto or auto, or drop it with parallel.pipeline.stages=null.",
                "parallel.pipeline.stages",
                "parallel.mode",
            )
        if self.zero.stage:
            raise refusal(
                f"{stages} works with parallel.zero.stage = 0 only, not {self.zero.stage}: DeepSpeed's engine averages "
                "over the whole world, while every stage holds parameters of its own. Use parallel.zero.stage=0, or "
                "parallel.pipeline.stages=null.",
                "parallel.zero.stage",
                "parallel.pipeline.stages",
            )
        others = {
            "recompute.operators": self.recompute.operators != "none",
            "place": bool(self.place),
            "offload.activations.to": self.offload.activations.to != "none",
        }
        for key in (key for key, given in others.items() if given):
            raise refusal(
                f"{stages} cannot be combined with parallel.{key} yet; drop one of them.",
                "parallel.pipeline.stages",
                f"parallel.{key}",
            )
        return self

    @property
    def _full_batch(self) -> bool:
        return self.dataset_strategy == "full_batch"

    def operands(self) -> list[tuple[Place, OperandForm]]:
        """Every operand form of this config with its place: those of the strategies and those of the dataset."""
        inputs = () if isinstance(self.dataset_strategy, str) else self.dataset_strategy
        forms = [(Place("parallel.dataset_strategy", f"input {n}"), form) for n, form in enumerate(inputs)]
        for path, strategy in self.strategies.items():
            forms += strategy.operands(f"parallel.strategies.{path}")
        return forms

    def meshes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Every mesh and device matrix that is given, with its dotted key. All must have the same number of devices."""
        mesh = [] if self.mesh is None else [("parallel.mesh", tuple(self.mesh.values()))]
        matrices = [(f"parallel.layouts.{name}", layout.device_matrix) for name, layout in self.layouts.items()]
        return mesh + matrices


class Launch(Section):
    timeout: Annotated[Positive, Field(description="Seconds that a collective may take before its rank is given up.")]
    threads: Annotated[Count, Field(description="Threads of torch in each rank.")]


class Verify(Section):
    steps: Count
    tolerance: Positive | None
    reference: OptionallyBuilt


class Report(Section):
    tensorboard: StrictBool
    progress: Literal["auto", True, False]


class Job(Section):
    name: Verb


class Config(Section):
    """All that a job needs to know. `world_size` null means: as many ranks as there are devices at hand."""

    world_size: Count | None
    device: Literal["auto", "cpu", "cuda"]
    model: Model
    loss: OptionallyBuilt
    data: Data
    optimizer: Optimizer
    train: Train
    evaluate: Evaluate
    checkpoint: Checkpoint
    parallel: Parallel
    launch: Launch
    verify: Verify
    report: Report
    job: Job

    @model_validator(mode="after")
    def _training_ends(self) -> Config:
        if self.job.name == "train" and self.train.steps is None and self.train.epochs is None:
            raise refusal(
                "train.steps and train.epochs are both null; say how long to train, e.g. train.steps=100 or "
                "train.epochs=10.",
                "train.steps",
            )
        return self

    @model_validator(mode="after")
    def _micro_batches(self) -> Config:
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
        return self

    @property
    def parts(self) -> int:
        """Micro-batches of one optimizer step: those of accumulation, each cut into those of the pipeline."""
        return self.train.accumulate * self.parallel.pipeline.parts

    @model_validator(mode="after")
    def _pipeline_alone(self) -> Config:
        stages, asked = self.parallel.pipeline.stages, self.evaluate
        if stages is None:
            return self
        if self.world_size is not None and self.world_size % stages:
            raise refusal(
                f"world_size = {self.world_size} cannot be divided among parallel.pipeline.stages = {stages}; every "
                f"stage has as many ranks as the others, so take a multiple of {stages}.",
                "world_size",
                "parallel.pipeline.stages",
            )
        if self.train.compile:
            raise refusal(
                f"train.compile = true and parallel.pipeline.stages = {stages} do not go together yet; choose one of "
                "them.",
                "train.compile",
                "parallel.pipeline.stages",
            )
        if asked.metric is not None or asked.every is not None or asked.batch_size is not None or asked.args:
            raise refusal(
                f"evaluate asks for evaluation, which does not run through parallel.pipeline.stages = {stages} "
                "yet; set evaluate.metric=null, evaluate.every=null, evaluate.batch_size=null and evaluate.args={}.",
                "evaluate.metric",
                "parallel.pipeline.stages",
            )
        return self

    @model_validator(mode="after")
    def _compiled_program(self) -> Config:
        mode = self.parallel.mode
        if self.train.compile and mode in ("stand_alone", "hybrid"):
            raise refusal(
                f"train.compile = true compiles the program that a plan gives each rank, but parallel.mode = {mode!r} "
                "runs the module as it is; choose another mode (data_parallel with world_size=1 for one process).",
                "train.compile",
                "parallel.mode",
            )
        return self

    @model_validator(mode="after")
    def _compiled_or_recomputed(self) -> Config:
        if self.train.compile and self.parallel.recompute.operators != "none":
            raise refusal(
                "train.compile = true cannot be combined with parallel.recompute.operators = "
                f"{_told(self.parallel.recompute.operators)}: the compiler decides by itself what backward computes "
                "again. Choose train.compile=false or parallel.recompute.operators=none.",
                "train.compile",
                "parallel.recompute.operators",
            )
        return self

    @model_validator(mode="after")
    def _compiled_or_placed(self) -> Config:
        if self.train.compile and self.parallel.place:
            raise refusal(
                f"train.compile = true compiles for one device, but parallel.place = {self.parallel.place} runs parts "
                "of the program on the host; drop one of them.",
                "train.compile",
                "parallel.place",
            )
        return self

    @model_validator(mode="after")
    def _compiled_or_offloaded(self) -> Config:
        where = self.parallel.offload.activations.to
        if self.train.compile and where != "none":
            raise refusal(
                "train.compile = true lets the compiler choose what is kept for backward, so "
                f"parallel.offload.activations.to = {where!r} cannot take it away; drop one of them.",
                "train.compile",
                "parallel.offload.activations.to",
            )
        return self

    @model_validator(mode="after")
    def _zero_precision(self) -> Config:
        if self.train.precision == "fp64" and self.parallel.zero.stage:
            raise refusal(
                f"train.precision = 'fp64' cannot be kept with parallel.zero.stage = {self.parallel.zero.stage}: "
                "DeepSpeed holds the master weights of stages 1-3 in fp32. Use parallel.zero.stage=0 or "
                "train.precision=fp32.",
                "train.precision",
                "parallel.zero.stage",
            )
        return self

    @model_validator(mode="after")
    def _devices_agree(self) -> Config:
        if self.parallel.mode == "stand_alone" and self.world_size not in (None, 1):
            raise refusal(
                f"world_size = {self.world_size}, but parallel.mode = 'stand_alone' is one process; set world_size=1 "
                "or choose another mode.",
                "world_size",
                "parallel.mode",
            )
        stages = self.parallel.pipeline.stages
        known: list[tuple[str, tuple[int, ...]]] = []
        if self.world_size is not None and stages is None:
            known = [("world_size", (self.world_size,))]
        elif self.world_size is not None and stages is not None:
            known = [("world_size / parallel.pipeline.stages", (self.world_size // stages,))]
        known += self.parallel.meshes()
        for key, shape in known[1:]:
            first, expected = known[0][0], prod(known[0][1])
            if prod(shape) != expected:
                raise refusal(
                    f"{key} = {list(shape)} has {prod(shape)} devices, but {first} = {_shown(known[0][1])} has "
                    f"{expected}; they must be equal.",
                    key,
                    first,
                )
        if known:
            check_counts(self.parallel.operands(), prod(known[0][1]))
        return self


def _told(operators: str | tuple[str, ...]) -> str:
    return repr(operators) if isinstance(operators, str) else str(list(operators))


def _shown(shape: tuple[int, ...]) -> str:
    return str(shape[0]) if len(shape) == 1 else str(list(shape))
