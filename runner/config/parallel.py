"""The section `parallel`: how a run is parallelised."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BeforeValidator,
    Field,
    StrictBool,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from runner.config.section import REQUIRED, Arguments, Count, Glob, Section, by_path, refusal, setting
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

UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip


def _bytes(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():  # 16e9
        return int(value)
    if not isinstance(value, str):
        return value
    matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*|\s*\d+\s*", value)
    if matched is not None and matched[2] is None:  # from a variable of the environment
        return int(value)
    if matched is None or matched[2] not in UNITS:
        raise refusal(
            f"parallel.memory_limit = {value!r} is no number of bytes; write one such as 80GB, 512MiB or 1000000 "
            f"(units {', '.join(UNITS)}), or null for no limit.",
            "parallel.memory_limit",
        )
    return int(float(matched[1]) * UNITS[matched[2]])


WRITTEN = WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]})
Bytes = Annotated[int, Field(strict=True, ge=1), BeforeValidator(_bytes), WRITTEN]


class JoinedCalls(Section):
    """Which collectives of one kind become one call: `auto`; of at most `size` megabytes (`config`); cut at positions
    (`index`, `config`: a list); or `none` of them."""

    mode: Literal["auto", "size", "index", "none"] = setting(
        "auto", "auto; size: calls of at most config MB; index: cut at the positions in config; none: a call per tensor"
    )
    config: Annotated[float, Field(gt=0, allow_inf_nan=False)] | tuple[Count, ...] | None = setting(
        None, "MB with mode size, a list of positions with mode index"
    )

    @property
    def bytes(self) -> int | None:
        """The maximum bytes of one call; None if not configured."""
        assert not isinstance(self.config, tuple)
        return None if self.config is None else max(int(self.config * 2**20), 1)


class CommFusion(Section):
    """Buckets in which collectives of one kind are fused."""

    all_reduce: JoinedCalls = setting(JoinedCalls(), "All-reduces of gradients and of a plan")
    all_gather: JoinedCalls = setting(JoinedCalls(), "All-gathers of a plan")
    reduce_scatter: JoinedCalls = setting(JoinedCalls(), "Reduce-scatters of a plan")

    @model_validator(mode="after")
    def _configs_fit_modes(self) -> CommFusion:
        for name, joined in self:
            key, config = f"parallel.comm_fusion.{name}", joined.config
            if joined.mode == "index" and name != "all_reduce":
                raise refusal(
                    f"{key}.mode = 'index' is not allowed: only all_reduce, the sum of gradients, has positions to cut "
                    "at. Allowed here: auto, size, none.",
                    f"{key}.mode",
                )
            match joined.mode:
                case "size":
                    fits, wanted = isinstance(config, float), "a number of megabytes above 0, e.g. 25"
                case "index":
                    fits = isinstance(config, tuple) and all(a < b for a, b in pairwise(config))
                    wanted = "a list of increasing positions in the order in which backward completes the gradients, "
                    wanted += "e.g. [4, 8]"
                case _:
                    fits, wanted = config is None, "nothing (null)"
            if not fits:
                shown = list(config) if isinstance(config, tuple) else "null" if config is None else config
                raise refusal(
                    f"{key}.config = {shown} does not fit {key}.mode = {joined.mode!r}, which takes {wanted}; change "
                    "one of the two.",
                    f"{key}.config",
                    f"{key}.mode",
                )
        return self


Offloaded = Literal["none", "host", "disk"]


class ActivationOffload(Section):
    """Activations that wait for backward elsewhere than on the device."""

    to: Offloaded = setting("none", "Where activations wait for backward")
    modules: tuple[Glob, ...] = setting((), "Globs of modules; []: all")
    larger_than: float = setting(0.0, "Smaller tensors stay on the device", unit="MB", ge=0, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _written_out(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise refusal(
                f"parallel.offload.activations = {value!r}: it has several keys; write "
                f"parallel.offload.activations.to={value}.",
                "parallel.offload.activations",
            )
        return value


class OffloadForm(Section):
    """States that are stored elsewhere than on the device."""

    optimizer: Offloaded = setting("none", "Where optimizer states are stored; host with ZeRO 1-3, disk with ZeRO 3")
    parameters: Offloaded = setting("none", "Where parameters are stored between uses, with ZeRO 3")
    activations: ActivationOffload = setting(ActivationOffload(), "Tensors that autograd saves for backward")
    folder: str | None = setting(None, "Folder on the disk to use; null: the run folder", min_length=1)

    @property
    def on_disk(self) -> bool:
        return "disk" in (self.optimizer, self.parameters, self.activations.to)


Recomputed = Literal["none", "full", "selective", "auto"]


Globs = Annotated[tuple[Glob, ...], Field(min_length=1)]


class RecomputeForm(Section):
    """What backward recomputes instead of storing: none, full, selective (operators that are cheap to compute)
    or a list of kinds of operators, inside `modules` (null: every repeated layer); with auto each of the modules is
    treated as one of the first three, so that parallel.memory_limit is kept. Repeating collectives is up to
    `communication` (null: with full they are repeated, else kept)."""

    operators: Recomputed | Globs = setting(
        "none",
        "none, full, selective (cheap operators), a list of kinds such as [gelu], or auto: to fit the memory limit",
    )
    modules: Globs | None = setting(None, "Globs of modules; null: every repeated layer")
    communication: Literal["recompute", "keep"] | None = setting(
        None, "Repeat collectives in backward or keep their results; null: recompute with full, else keep"
    )
    slice_inputs: StrictBool = setting(
        False, "Each rank stores a shard of a module's inputs and gathers the others in backward"
    )

    @field_validator("operators", mode="before")
    @classmethod
    def _operators_known(cls, operators: Any) -> Any:
        options = get_args(Recomputed)
        if isinstance(operators, str) and operators not in options:
            raise refusal(
                f"parallel.recompute.operators = {operators!r} is not allowed.{allowed(operators, options)} Or a "
                "list of kinds of operators such as [gelu, layer_norm].",
                "parallel.recompute.operators",
            )
        return operators


Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "auto"]
DEALT = ("interleaved_1f1b", "zero_bubble")
"""The schedules in which a rank may have several stages."""


class Pipeline(Section):
    """`stages` of the model, one after the other, each on its own share of the ranks; with `virtual_stages`, so many
    times as many, dealt out round robin or, under zbv and where auto finds it faster, in a V."""

    stages: Literal["auto"] | Annotated[int, Field(strict=True, ge=2)] | None = setting(
        None, "Stages, each on world_size / stages ranks, which parallel.mesh describes; auto; null: no pipeline"
    )
    virtual_stages: Count | None = setting(
        None, "Stages of each rank, dealt out round robin, by zbv in a V; null: 2 with interleaved_1f1b or zbv, else 1"
    )
    micro_batches: Literal["auto"] | Count | None = setting(
        None,
        "Micro-batches in the pipeline at once, of averaged losses; auto; null: twice the stages (auto with them)",
    )
    schedule: Schedule = setting(
        "1f1b",
        "Order of forward and backward passes; interleaved_1f1b, zero_bubble and zbv idle less; auto: made for the "
        "predicted times of the stages and the memory of a rank",
    )
    cuts: Literal["auto"] | dict[str, Annotated[int, Field(strict=True, ge=0)]] = setting(
        "auto", "auto: balanced; or {module.path: stage, ...}"
    )

    @field_validator("cuts", mode="before")
    @classmethod
    def _cuts(cls, value: Any) -> Any:
        """Flatten the nested keys that a dotted key on the command line builds."""
        return by_path(value, "parallel.pipeline.cuts")

    @model_validator(mode="after")
    def _stages_fit(self) -> Pipeline:
        if self.stages is None or self.stages == "auto":
            return self
        if self.micro_batches != "auto" and self.parts < self.stages:
            raise refusal(
                f"parallel.pipeline.micro_batches = {self.micro_batches} is less than parallel.pipeline.stages = "
                f"{self.stages}: some stages would never work at the same time; take {self.stages} or more (twice as "
                "many is a good start).",
                "parallel.pipeline.micro_batches",
                "parallel.pipeline.stages",
            )
        if self.cuts == {}:
            raise refusal(
                "parallel.pipeline.cuts names no module; write auto, or {module.path: stage, ...}.",
                "parallel.pipeline.cuts",
            )
        count = self.stages * self.virtual
        for path, stage in self.cuts.items() if isinstance(self.cuts, dict) else ():
            if stage >= count:
                product = f"parallel.pipeline.stages = {self.stages}"
                if self.virtual > 1:
                    product = f"parallel.pipeline.stages x virtual_stages = {self.stages} x {self.virtual} = {count}"
                raise refusal(
                    f"parallel.pipeline.cuts: {path} = {stage}, but {product} has the stages 0 to {count - 1}.",
                    "parallel.pipeline.cuts",
                    "parallel.pipeline.stages",
                )
        dealt = self.schedule in DEALT or (self.schedule == "auto" and self.virtual > 1)
        if dealt and not self.open and self.parts % max(1, self.parts // self.stages):
            raise refusal(
                f"parallel.pipeline.schedule = {self.schedule!r} sends parallel.pipeline.micro_batches = {self.parts} "
                f"through the stages in {self.parts // self.stages} groups of one size, into which they do not divide; "
                f"take a multiple of parallel.pipeline.stages = {self.stages}.",
                "parallel.pipeline.micro_batches",
                "parallel.pipeline.stages",
            )
        return self

    @property
    def open(self) -> bool:
        """Whether the number of stages or of micro-batches is still to be decided."""
        return "auto" in (self.stages, self.micro_batches)

    @property
    def known(self) -> int | None:
        """The number of stages; None without a pipeline, or if still undecided."""
        return None if self.stages == "auto" else self.stages

    @property
    def virtual(self) -> int:
        """The number of stages of each rank."""
        return self.virtual_stages or (2 if self.schedule in ("interleaved_1f1b", "zbv") else 1)

    @property
    def parts(self) -> int:
        """Micro-batches of one pipeline pass; 1 without a pipeline, or if still undecided."""
        if self.known is None or self.micro_batches == "auto":
            return 1
        return self.micro_batches or 2 * self.known


Mode = Literal["stand_alone", "data_parallel", "semi_auto", "auto", "hybrid", "parameter_server"]
Search = Literal["sharding_propagation", "dynamic_programming", "recursive_programming"]
ExportTarget = Literal["torch", "parallelize_module", "torchtitan", "autoparallel", "transformers", "deepspeed"]
DatasetStrategy = Literal["data_parallel", "full_batch"]
SHORT = {"recompute": "operators", "zero": "stage", "pipeline": "stages"}
"""Sections that may be one value, and the key whose value it is; the other keys then have their defaults."""


class LayoutMatrix(Section):
    """A device matrix with a name for each of its axes; ranks are numbered row by row."""

    device_matrix: Annotated[tuple[Count, ...], Field(min_length=1)] = setting(REQUIRED, "Devices along each axis")
    axes: tuple[AxisName, ...] = setting(REQUIRED, "Names of the axes")


class Zero(Section):
    """ZeRO's stage, its engine and DeepSpeed's own options."""

    stage: Literal["auto"] | Annotated[int, Field(strict=True, ge=0, le=3)] = setting(
        0, "0, 1, 2, 3, or auto: jointly optimised with all that is auto, the fastest that fits into memory"
    )
    engine: Literal["auto", "deepspeed", "native"] = setting(
        "auto",
        "native: our own gathers and reduce-scatters, in any precision; deepspeed; auto: native where nothing else in "
        "the config needs DeepSpeed",
    )
    options: Arguments = setting(
        {},
        "Options of DeepSpeed's zero_optimization; native knows reduce_bucket_size and "
        "stage3_model_persistence_threshold, the elements that stay complete at stage 3 (left out: as many as "
        "parallel.memory_limit allows, none without a limit)",
    )

    @property
    def known(self) -> int:
        """The stage; 0 if still undecided."""
        return 0 if self.stage == "auto" else self.stage


class Server(Section):
    """Servers that hold parameters and optimizer states, and workers that pull and push. Rank 0 coordinates; the next
    `servers` ranks serve, with several hosts the first ones of each in turn; the others work."""

    servers: Count = setting(1, "Ranks that hold the parameters and optimizer states, each an equal part of them")
    workers: Count | None = setting(
        None, "Slices of a batch, and ranks that compute them; null: all ranks but rank 0 and the servers"
    )
    consistency: Literal["sync", "bounded", "async"] = setting(
        "sync",
        "sync: a step is one update of all slices, as on one device; bounded: each slice updates on arrival, at most "
        "staleness steps ahead of the slowest; async: as far ahead as it gets",
    )
    staleness: int | None = setting(
        None, "Of bounded: how many steps the fastest worker may be ahead of the slowest", unit="steps", strict=True,
        ge=0,
    )  # fmt: skip
    parameters: Globs | None = setting(
        None,
        "Globs of the parameters that servers hold, such as embeddings; workers keep the others, and add up their "
        "gradients in every step; null: all",
    )
    replicas: int = setting(
        0, "Further servers that hold each part, and take over where one is killed", strict=True, ge=0, le=1
    )

    cache_rows: int = setting(
        0, "Rows of each embedding table that a worker keeps; of these only the changed ones are pulled again",
        unit="rows", strict=True, ge=0,
    )  # fmt: skip

    @model_validator(mode="after")
    def _replicas_elsewhere(self) -> Server:
        if self.replicas and self.servers == 1:
            raise refusal(
                "parallel.server.replicas = 1 keeps each part on a second server, but parallel.server.servers = 1; "
                "take 2 servers or more, or replicas=0.",
                "parallel.server.replicas",
                "parallel.server.servers",
            )
        return self

    @property
    def ahead(self) -> int | None:
        """The number of steps by which slices may be handed out early; None for any number."""
        return {"sync": 0, "bounded": self.staleness, "async": None}[self.consistency]

    def working(self, world_size: int) -> int:
        """The number of workers among `world_size` ranks."""
        return world_size - 1 - self.servers


class Parallel(Section):
    """The parallel mode, and the slices that the user fixes."""

    mode: Mode = setting(
        "stand_alone",
        "stand_alone, data_parallel, semi_auto, auto, hybrid or parameter_server; parallel=MODE chooses it",
    )
    search: Search = setting("sharding_propagation", "Algorithm of mode auto for operators without a strategy")
    for_target: ExportTarget | None = setting(
        None, "Search only layouts that this target of an export can say (configured ones stay); null: any"
    )
    mesh: Annotated[dict[AxisName, Count], Field(min_length=1)] | None = setting(
        None, "{axis: size}, outermost first; null: as the strategies need it, or searched"
    )
    strategies: dict[str, StrategyForm] = setting({}, "Operator path: [[2, 4], [4, 1]] or {in: [...], out: [...]}")
    layouts: dict[str, LayoutMatrix] = setting({}, "NAME: {device_matrix: [2, 2, 2], axes: [dp, sp, mp]}")
    set_data_parallel: tuple[Glob, ...] = setting(
        (), "Globs of modules that stay data parallel, but for operators in strategies"
    )
    dataset_strategy: DatasetStrategy | tuple[OperandForm, ...] = setting(
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
    context_parallel: Literal["auto", "gather", "ring"] = setting(
        "auto",
        "Keys and values of attention sliced along the sequence: all-gathered, or passed around a ring; auto: around a "
        "ring where no other plan keeps the memory limit",
    )
    copies: Count = setting(
        1, "Batch splits: parts of the batch of a step, one of which computes while another communicates"
    )
    batch_rows: tuple[Count, ...] = setting(
        (),
        "Rows of a micro-batch on each rank, such as [5, 5, 2]; []: equal, or by the speeds of cluster.groups",
        unit="rows",
    )
    recompute: RecomputeForm = setting(RecomputeForm(), "Activation checkpointing; recompute=full sets operators")
    memory_limit: Bytes | None = setting(
        None, "Refuse plans that need more per rank; also a string such as 80GB", unit="bytes"
    )
    offload: OffloadForm = setting(OffloadForm(), "Offload to host memory or disk")
    place: dict[Glob, Literal["host"]] = setting({}, "Module or operator (globs): host")
    pipeline: Pipeline = setting(Pipeline(), "Pipeline parallelism; pipeline=4 sets stages")
    server: Server = setting(Server(), "Servers and workers of mode parameter_server")
    plan: str | None = setting(
        None,
        "A plan.json, or the folder of the run that wrote it, instead of strategies, dataset_strategy, mesh and search",
        min_length=1,
    )
    plan_cache: str | None = setting(
        "auto",
        "Folder of searched plans and of graphs of `run plan`; auto: the user's cache folder, null: none",
        min_length=1,
    )
    dump_ir: StrictBool | Annotated[str, Field(min_length=1)] = setting(
        False, "Write the program of every rank before and after slicing: true (ir/ in the run folder), or a folder"
    )

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
        if not isinstance(value, str):
            return read_operands(value, "parallel.dataset_strategy", "input")
        if value not in (options := get_args(DatasetStrategy)):
            raise refusal(
                f"parallel.dataset_strategy = {value!r} is not allowed.{allowed(value, options)} Or one entry per "
                "input, e.g. [[2, 1], [1, 1]].",
                "parallel.dataset_strategy",
            )
        return value

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
        left = self.zero_or_pipeline_open or self.pipeline.stages is not None
        if self.recompute.operators == "auto" and self.memory_limit is None and not left:
            raise refusal(
                "parallel.recompute.operators = 'auto' recomputes what parallel.memory_limit demands, but that is "
                "null; give a limit per rank such as parallel.memory_limit=16GB, or choose none, full or selective.",
                "parallel.recompute.operators",
                "parallel.memory_limit",
            )
        return self

    @property
    def elastic(self) -> bool:
        """Whether ranks other than rank 0 may be killed, and come back, while the others go on."""
        return self.mode == "parameter_server"

    @property
    def open(self) -> bool:
        """Whether any key is left to the joint optimisation of ZeRO, pipeline and recompute."""
        return self.recompute.operators == "auto" or self.zero_or_pipeline_open

    @property
    def zero_or_pipeline_open(self) -> bool:
        """Whether the ZeRO stage or the pipeline is left to it."""
        return self.zero.stage == "auto" or self.pipeline.open

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
