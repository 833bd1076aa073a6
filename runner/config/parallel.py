"""The section `parallel`: how a run is parallelised, and which of its keys are compatible."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, ValidationInfo, field_validator, model_validator

from runner.config.arguments import Arguments
from runner.config.fusion import CommFusion
from runner.config.memory import Bytes
from runner.config.offload import OffloadForm
from runner.config.pipeline import Pipeline
from runner.config.recompute import Recompute
from runner.config.section import REQUIRED, Count, Glob, Section, by_path, refusal, setting
from runner.config.strategy_syntax import (
    AxisName,
    OperandForm,
    Place,
    StrategyForm,
    check_layouts,
    read_operands,
    read_strategies,
)
from runner.errors import allowed

Mode = Literal["stand_alone", "data_parallel", "semi_auto", "auto", "hybrid"]
Search = Literal["sharding_propagation", "dynamic_programming", "recursive_programming"]
DATASETS = ("data_parallel", "full_batch")
SHORT = {"recompute": "operators", "zero": "stage", "pipeline": "stages"}
"""Sections that may be one value, and the key whose value it is; the other keys then have their defaults."""


class NamedMatrix(Section):
    """A device matrix with a name for each of its axes; ranks are numbered row by row."""

    device_matrix: Annotated[tuple[Count, ...], Field(min_length=1)] = setting(REQUIRED, "Devices along each axis")
    axes: tuple[AxisName, ...] = setting(REQUIRED, "Names of the axes")


class Zero(Section):
    stage: Literal["auto"] | Annotated[int, Field(strict=True, ge=0, le=3)] = setting(
        0, "0, 1, 2, 3, or auto: jointly optimised with all that is auto, the fastest that fits into memory"
    )
    options: Arguments = setting({}, "Options passed to DeepSpeed's zero_optimization")

    @property
    def known(self) -> int:
        """The stage; 0 if still undecided."""
        return 0 if self.stage == "auto" else self.stage


class Parallel(Section):
    mode: Mode = setting(
        "stand_alone", "stand_alone, data_parallel, semi_auto, auto or hybrid; parallel=MODE chooses it"
    )
    search: Search = setting("sharding_propagation", "Algorithm of mode auto for operators without a strategy")
    mesh: Annotated[dict[AxisName, Count], Field(min_length=1)] | None = setting(
        None, "{axis: size}, outermost first; null: as the strategies need it, or searched"
    )
    strategies: dict[str, StrategyForm] = setting({}, "Operator path: [[2, 4], [4, 1]] or {in: [...], out: [...]}")
    layouts: dict[str, NamedMatrix] = setting({}, "NAME: {device_matrix: [2, 2, 2], axes: [dp, sp, mp]}")
    set_data_parallel: tuple[Glob, ...] = setting((), "Globs of modules that stay data parallel")
    dataset_strategy: Literal["data_parallel", "full_batch"] | tuple[OperandForm, ...] = setting(
        "data_parallel", "data_parallel, full_batch, or the strategy of each batch entry"
    )
    zero: Zero = setting(Zero(), "ZeRO; zero=2 sets the stage")
    comm_fusion: CommFusion = setting(CommFusion(), "Which collectives are joined into one call")
    reduce_precision: Literal["auto", "fp32", "own"] = setting(
        "auto", "Precision of reductions of values below fp32: fp32, own (half the bytes); auto: own on GPUs"
    )
    comm_overlap: StrictBool = setting(
        True, "Reduce gradients while backward still runs, at ZeRO stage 0 (not in hybrid modules and pipelines)"
    )
    comm_async: StrictBool = setting(
        True, "Start redistributions when their input is ready and wait at the first use (train.compile: at once)"
    )
    copies: Count = setting(
        1, "Batch splits: parts of the batch of a step, one of which computes while another communicates"
    )
    recompute: Recompute = setting(Recompute(), "Activation checkpointing; recompute=full sets operators")
    memory_limit: Bytes | None = setting(
        None, "Refuse plans that need more per rank; also a string such as 80GB", unit="bytes"
    )
    offload: OffloadForm = setting(OffloadForm(), "Offload to host memory or disk")
    place: dict[Glob, Literal["host"]] = setting({}, "Module or operator (globs): host")
    pipeline: Pipeline = setting(Pipeline(), "Pipeline parallelism; pipeline=4 sets stages")
    plan: str | None = setting(
        None, "A plan.json, or the folder of the run that wrote it, instead of strategies and search", min_length=1
    )
    plan_cache: str | None = setting(
        "auto", "Folder of searched plans; auto: the user's cache folder, null: none", min_length=1
    )
    dump_ir: StrictBool | Annotated[str, Field(min_length=1)] = setting(
        False, "Write the program of every rank before and after slicing: true (ir/ in the run folder), or a folder"
    )

    @field_validator("mode", mode="before")
    @classmethod
    def _mode_available(cls, mode: Any) -> Any:
        if mode == "parameter_server":
            raise refusal(
                "parallel.mode = 'parameter_server' is not available yet; until then data_parallel is the nearest.",
                "parallel.mode",
            )
        return mode

    @field_validator(*SHORT, mode="before")
    @classmethod
    def _in_short(cls, value: Any, info: ValidationInfo) -> Any:
        """Expand short forms such as `recompute=full`, `zero=2` or `pipeline=auto`."""
        short = isinstance(value, str | int) and not isinstance(value, bool)
        return {SHORT[info.field_name or ""]: value} if short else value

    @field_validator("strategies", mode="before")
    @classmethod
    def _strategies(cls, value: Any) -> dict[str, StrategyForm]:
        return read_strategies(value)

    @field_validator("place", mode="before")
    @classmethod
    def _place_by_path(cls, value: Any) -> Any:
        """`parallel.place.layers.0=host` on the command line builds nested keys."""
        return by_path(value, "parallel.place")

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
    def _a_limit_has_a_plan(self) -> Parallel:
        if self.recompute.operators == "auto" and self.memory_limit is None and not self.open:
            raise refusal(
                "parallel.recompute.operators = 'auto' recomputes what parallel.memory_limit demands, but that is "
                "null; give a limit per rank such as parallel.memory_limit=16GB, or choose none, full or selective.",
                "parallel.recompute.operators",
                "parallel.memory_limit",
            )
        return self

    @property
    def open(self) -> bool:
        """Whether any key is left to the joint optimisation of ZeRO, pipeline and recompute."""
        staged = self.recompute.operators == "auto" and self.pipeline.stages is not None  # each group needs one
        return self.zero.stage == "auto" or self.pipeline.open or staged

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
