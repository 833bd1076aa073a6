"""Keys that exclude or need each other, and keys without effect: two tables, which `Config`, the command and the page
docs/reference/exclusive_keys.md read.

A rule is broken where both of its keys have values of the kinds that it names, and so have the keys of `where`. What
takes arithmetic (sizes that must divide each other, strategies that must fit a mesh) is checked in the sections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from runner.config.section import refusal

LONGEST = 200
"""Characters of a value in a message."""


@dataclass(frozen=True)
class ValueKind:
    """A kind of values: what the reference calls it, and whether a value is one of them."""

    text: str
    holds: Callable[[Any], bool]


def _is_given(value: Any) -> bool:
    return value is not None and value is not False and not (isinstance(value, list | tuple | Mapping) and not value)


GIVEN = ValueKind("given", _is_given)
UNSET = ValueKind("not given", lambda value: not _is_given(value))
ON, OFF = ValueKind("`true`", lambda value: value is True), ValueKind("`false`", lambda value: value is False)
NUMBER = ValueKind("a number", lambda value: isinstance(value, int))
ABOVE_0 = ValueKind("above 0", lambda value: value > 0)
SOME = ValueKind("a number above 0", lambda value: isinstance(value, int) and value > 0)
ABOVE_1 = ValueKind("above 1", lambda value: value is not None and value > 1)
NATIVE_OPTIONS = ("reduce_bucket_size", "stage3_model_persistence_threshold")
OTHER_OPTIONS = ValueKind(
    f"with others than {' and '.join(f'`{name}`' for name in NATIVE_OPTIONS)}",
    lambda value: any(name not in NATIVE_OPTIONS for name in value or ()),
)
ROWS = ValueKind("a .jsonl file", lambda value: isinstance(value, str) and value.endswith(".jsonl"))


def any_of(*values: Any) -> ValueKind:
    """The values that equal one of `values`."""
    return ValueKind(" or ".join(f"`{value}`" for value in values), lambda value: value in values)


def none_of(*values: Any) -> ValueKind:
    """The values that equal none of `values`."""
    return ValueKind(f"other than {' and '.join(f'`{value}`' for value in values)}", lambda value: value not in values)


@dataclass(frozen=True)
class Rule:
    """Two incompatible keys.

    Attributes:
        first, of_first: A key and the kind of its values.
        second, of_second: The other key and the kind of its values.
        why: Why they do not go together, a clause.
        remedy: What to do, an imperative.
        where: Further keys with the kinds of values on which the rule depends.
    """

    first: str
    of_first: ValueKind
    second: str
    of_second: ValueKind
    why: str
    remedy: str
    where: tuple[tuple[str, ValueKind], ...] = ()

    def breaks(self, values: Any) -> bool:
        """Whether a config, or a mapping composed for one, breaks the rule."""
        conditions = ((self.first, self.of_first), (self.second, self.of_second), *self.where)
        return all(kind.holds(value_of(values, key)) for key, kind in conditions)

    def paragraph(self, values: Any) -> str:
        """The error paragraph for a config that breaks the rule."""
        first, second = (f"{key} = {shown(value_of(values, key))}" for key in (self.first, self.second))
        return f"{first} does not go with {second}: {self.why}; {self.remedy}."

    def notice(self, values: Any) -> str:
        """The line about a config where the first key has no effect."""
        first, second = (f"{key} = {shown(value_of(values, key))}" for key in (self.first, self.second))
        return f"{first} has no effect with {second}: {self.why}; {self.remedy}."


AS_WRITTEN = any_of("stand_alone", "hybrid")
"""Modes that run the user's module without a plan."""
NO_PLAN = "this mode runs the module without a plan"
A_MODE = "choose parallel.mode data_parallel, semi_auto or auto"
SHARDED = any_of(1, 2, 3)
JOBS = ("kubernetes", "skypilot")
"""Launchers that submit a job."""
SERVER, ON_WORKERS = "parameter_server", "workers run the plain program"
WITHOUT_LAYOUTS = ("stand_alone", "data_parallel", SERVER)
MODE, STAGE, STAGES = "parallel.mode", "parallel.zero.stage", "parallel.pipeline.stages"
ENGINE = "parallel.zero.engine"
FUSION, OFFLOAD, PIPELINE = "parallel.comm_fusion", "parallel.offload", "parallel.pipeline"
RECOMPUTE, CUTS = "parallel.recompute.operators", "parallel.pipeline.cuts"
COMPILE, ACTIVATIONS = "train.compile", "parallel.offload.activations.to"
UNEVEN = ("parallel.batch_rows", "cluster.groups")
BY_SPEED = ((MODE, any_of("data_parallel")), (STAGES, UNSET))
"""Where ranks have as many rows as their devices are fast; elsewhere slices are equal."""
EVALUATION = ("metric", "metrics", "every", "args", "batch_size")
DEEPSPEED_ONLY = (
    ("parallel.zero.options", OTHER_OPTIONS, "the options are DeepSpeed's", "drop them"),
    (f"{OFFLOAD}.optimizer", none_of("none"), "it keeps states on the device", f"{OFFLOAD}.optimizer=none"),
    (f"{OFFLOAD}.parameters", none_of("none"), "it keeps them on the device", f"{OFFLOAD}.parameters=none"),
    (ACTIVATIONS, none_of("none"), "both decide what autograd saves", f"{ACTIVATIONS}=none"),
    (COMPILE, ON, "a compiled module saves parameters where no hook sees them", f"{COMPILE}=false"),
    (MODE, any_of("hybrid"), "which parameters a module's own code uses is not known", "another mode"),
)
"""What our own engine of ZeRO lacks: key, kind of values, why, what to do without it."""
EACH_DECIDES = "the ranks of every stage of a pipeline would decide for themselves which steps overflow"

RULES: tuple[Rule, ...] = (
    # model and data
    Rule("model.rename", GIVEN, "model.weights", UNSET,
         "it changes the names in the files of model.weights", "give model.weights too"),
    Rule("model.new", GIVEN, "model.weights", UNSET,
         "without model.weights everything begins at its initial values", "give model.weights too, or drop model.new"),
    Rule("data.collate_args", GIVEN, "data.collate", UNSET,
         "they are arguments of data.collate", "name the function in data.collate, or drop the arguments"),
    *(Rule("data.unbatched", GIVEN, f"evaluate.{name}", GIVEN,
           "evaluation counts rows in every entry", "leave evaluate out") for name in EVALUATION),
    Rule("data.unbatched", GIVEN, "job.name", any_of("predict"),
         "run predict counts rows in every entry", "predict with another model or dataset"),
    Rule("data.unbatched", GIVEN, "data.drop_last", OFF,
         "a short last batch is cut out of every entry", "use data.drop_last=true"),
    Rule("data.unbatched", GIVEN, "parallel.copies", ABOVE_1,
         "copies of the batch are cut out of every entry", "use parallel.copies=1"),
    # training, evaluation and prediction
    Rule("train.steps", GIVEN, "train.epochs", GIVEN,
         "both say how long to train", "drop one with train.steps=null or train.epochs=null"),
    Rule("train.steps", UNSET, "train.epochs", UNSET,
         "one of them says how long to train", "set train.steps=100 or train.epochs=10, for example",
         where=(("job.name", any_of("train", "launch")),)),
    Rule("train.loss_scale", GIVEN, "train.precision", none_of("fp16"),
         "only fp16 needs a scale", "choose train.precision=fp16 or train.loss_scale=null"),
    Rule("checkpoint.best_mode", GIVEN, "checkpoint.best", UNSET,
         "it says which value of that metric is better", "name a metric of evaluate, such as checkpoint.best=loss"),
    Rule("checkpoint.best", GIVEN, "evaluate.every", UNSET, "nothing is evaluated that could find the best",
         "set evaluate.every (steps) or evaluate.metric, or checkpoint.best=null",
         where=tuple((f"evaluate.{name}", UNSET) for name in EVALUATION if name != "every")),
    Rule("predict.checkpoint", UNSET, "model.weights", UNSET, "there are no trained weights to predict with",
         "write `run predict +recipe=NAME checkpoint=PATH` with a checkpoint or the folder of a run",
         where=(("job.name", any_of("predict")),)),
    Rule("predict.average", GIVEN, "predict.checkpoint", UNSET, "only a checkpoint keeps an average",
         "name the checkpoint, or drop predict.average"),
    Rule("predict.data.args", GIVEN, "predict.data.path", ROWS, "a file of rows takes no arguments",
         "drop one of them, or name the dataset in predict.data.target", where=(("predict.data.target", UNSET),)),
    Rule("predict.data.collate_args", GIVEN, "predict.data.collate", UNSET,
         "they are arguments of predict.data.collate", "name the function there, or drop the arguments"),
    # launch
    Rule("launch.min_ranks", GIVEN, "launch.max_restarts", any_of(0),
         "a run goes on with fewer ranks when it is restarted", "set launch.max_restarts too"),
    Rule("launch.max_ranks", GIVEN, "launch.min_ranks", UNSET,
         "a run that never continues with fewer ranks has none to take back", "set launch.min_ranks too"),
    Rule("launch.standby", GIVEN, "launch.hosts", UNSET,
         "a spare host takes the place of one of them", "name the hosts of the run in launch.hosts"),
    Rule("launch.standby", GIVEN, "launch.max_restarts", any_of(0),
         "a lost host is replaced when the run is restarted", "set launch.max_restarts too"),
    Rule("launch.rescue", ON, "launch.launcher", none_of("local"),
         "other launchers stop the survivors of a failure at once", "choose launch=local or launch.rescue=false"),
    *(Rule("launch.launcher", any_of("local"), f"launch.{name}", GIVEN, "it starts all ranks on this machine",
           "choose launch=torchrun, mpirun, slurm, deepspeed or rank_table (nodes: slurm, kubernetes, skypilot)")
      for name in ("hosts", "nodes")),
    Rule("launch.devices", GIVEN, "launch.launcher", none_of("local"), "they are those of this machine",
         "choose launch=local, or give the devices in launch.rank_table=FILE.json"),
    Rule("launch.launcher", any_of("rank_table"), "launch.hosts", UNSET,
         "it must know the hosts", "give launch.rank_table=FILE.json (or launch.hosts)"),
    Rule("launch.launcher", any_of("deepspeed"), "launch.hosts", UNSET,
         "it must know the hosts", "give launch.hostfile=FILE (or launch.hosts)"),
    Rule("launch.nodes", GIVEN, "launch.launcher", none_of("slurm", *JOBS),
         "only Slurm, Kubernetes and SkyPilot find the hosts themselves", "name them in launch.hosts"),
    Rule("launch.launcher", any_of("kubernetes"), "launch.image", UNSET, "a pod runs an image",
         "set launch.image to one that holds Meshwright and your project"),
    *(Rule(f"launch.{name}", GIVEN, "launch.launcher", none_of(*launchers), "nothing else uses it", "drop it")
      for name, launchers in (("image", JOBS), ("claim", JOBS[:1]), ("accelerator", JOBS[1:]))),
    *(Rule("launch.launcher", any_of(*JOBS), f"launch.{name}", GIVEN, "the nodes of a job have no names before it runs",
           "set launch.nodes") for name in ("hosts", "standby")),
    *(Rule("launch.launcher", any_of(*JOBS), f"launch.{name}", GIVEN, "a job has as many nodes after a restart",
           "drop it") for name in ("min_ranks", "max_ranks")),
    *(Rule(f"launch.{name}", GIVEN, "launch.launcher", none_of("rank_table"), "it starts a part of a rank table",
           "choose launch=rank_table") for name in ("host", "rank")),
    Rule("launch.host", GIVEN, "launch.rank", GIVEN, "both say what to start here", "drop one of them"),
    *(Rule(f"launch.{name}", GIVEN, "launch.port", UNSET, "parts that are started one by one must know where to meet",
           "set launch.port, everywhere the same, e.g. launch.port=29400") for name in ("host", "rank")),
    Rule("launch.dry_run", ON, "job.name", none_of("train", "launch"),
         "it prints how training would be started", "use the verb train or launch"),
    Rule("launch.launcher", none_of("local"), "job.name", any_of("verify", "calibrate"),
         "these verbs run on this machine", "use launch=local"),
    Rule("launch.launcher", any_of(*JOBS), "job.name", any_of("predict", "tune"),
         "only training is submitted", "use launch=local, or run the command where the job runs"),
    # pipeline
    *(Rule(f"{PIPELINE}.{name}", kind, STAGES, UNSET, "there is no pipeline, which would ignore it",
           "set parallel.pipeline.stages=N") for name, kind in (
               ("micro_batches", GIVEN), ("virtual_stages", GIVEN), ("cuts", none_of("auto")))),
    Rule(CUTS, none_of("auto"), STAGES, any_of("auto"), "cuts name stages by number, but 'auto' leaves open how many "
         "there are", "say how many stages, or choose parallel.pipeline.cuts=auto"),
    Rule(f"{PIPELINE}.schedule", any_of("gpipe", "1f1b"), f"{PIPELINE}.virtual_stages", ABOVE_1,
         "the schedule has one stage per rank",
         "choose schedule interleaved_1f1b, zero_bubble or zbv, or virtual_stages=1", where=((STAGES, NUMBER),)),
    Rule(f"{PIPELINE}.schedule", any_of("zbv"), f"{PIPELINE}.virtual_stages", none_of(2),
         "its V has two stages per rank", "choose virtual_stages=2, or schedule zero_bubble or auto",
         where=((STAGES, NUMBER), (f"{PIPELINE}.virtual_stages", GIVEN))),
    Rule(f"{PIPELINE}.schedule", any_of("interleaved_1f1b"), f"{PIPELINE}.virtual_stages", any_of(1),
         "that is 1f1b that stores more activations", "choose virtual_stages=2 or more, or schedule 1f1b",
         where=((STAGES, NUMBER),)),
    # recompute and offload
    *(Rule(f"parallel.recompute.{name}", GIVEN, RECOMPUTE, any_of("none"), "nothing is recomputed that needs it",
           f"choose full, selective or kinds of operators, or drop parallel.recompute.{name}")
      for name in ("modules", "communication", "slice_inputs")),
    *(Rule(f"{OFFLOAD}.activations.{name}", kind, ACTIVATIONS, any_of("none"), "no activation is offloaded",
           "choose host or disk, or drop it") for name, kind in (("modules", GIVEN), ("larger_than", ABOVE_0))),
    Rule(f"{OFFLOAD}.folder", GIVEN, f"{OFFLOAD}.optimizer", none_of("disk"), "nothing is offloaded to a disk",
         "set optimizer, parameters or activations.to to disk, or drop the folder",
         where=((f"{OFFLOAD}.parameters", none_of("disk")), (ACTIVATIONS, none_of("disk")))),
    # capabilities of the mode
    *(Rule(f"parallel.{name}", GIVEN, MODE, none_of("semi_auto", "auto"), "this mode would ignore it",
           f"choose mode semi_auto or auto, or drop it with parallel.{name}={nothing}")
      for name, nothing in (("strategies", "null"), ("set_data_parallel", "[]"))),
    Rule("parallel.mesh", GIVEN, MODE, any_of("stand_alone", "data_parallel"), "this mode would ignore it",
         "choose mode semi_auto or auto, or drop it with parallel.mesh=null"),
    *(Rule(f"parallel.{name}", GIVEN, MODE, AS_WRITTEN, "this mode would ignore it",
           f"{A_MODE}, or drop it with parallel.{name}={nothing}")
      for name, nothing in (("place", "{}"), ("plan", "null"))),
    *(Rule("parallel.dataset_strategy", kind, MODE, any_of(mode), "the mode decides how batches are sharded",
           "choose mode semi_auto, auto or hybrid. Allowed here: data_parallel") for kind, mode in (
               (none_of("data_parallel"), "data_parallel"), (none_of("data_parallel", "full_batch"), "stand_alone"))),
    Rule(STAGE, none_of(0), MODE, any_of("stand_alone"), "ZeRO needs ranks to shard the optimizer over, but this mode "
         "has one process", "choose another mode or parallel.zero.stage=0"),
    Rule(STAGE, any_of("auto"), MODE, any_of("hybrid"), "the decision needs the prediction of a plan, which this "
         "mode lacks", "choose parallel.zero.stage=0, 1, 2 or 3, or mode data_parallel, semi_auto or auto"),
    *(Rule(f"{FUSION}.{name}.mode", any_of("size", "index"), MODE, any_of("stand_alone"), "this mode has one process",
           f"choose another mode or {FUSION}.{name}.mode=auto")
      for name in ("all_reduce", "all_gather", "reduce_scatter")),
    *(Rule(f"{FUSION}.{name}.mode", any_of("size", "index"), MODE, any_of("hybrid"),
           "this mode leaves such calls to the module", f"choose another mode or {FUSION}.{name}.mode=auto")
      for name in ("all_gather", "reduce_scatter")),
    Rule(RECOMPUTE, none_of("none"), MODE, AS_WRITTEN, NO_PLAN, f"{A_MODE} (data_parallel with world_size=1 for one "
         "process), or parallel.recompute.operators=none"),
    Rule("parallel.copies", ABOVE_1, MODE, AS_WRITTEN, NO_PLAN, f"{A_MODE}, or parallel.copies=1"),
    Rule("parallel.memory_limit", GIVEN, MODE, AS_WRITTEN, NO_PLAN, f"{A_MODE}, or parallel.memory_limit=null"),
    Rule(STAGES, GIVEN, MODE, AS_WRITTEN, NO_PLAN, f"{A_MODE}, or drop it with parallel.pipeline.stages=null"),
    # servers
    *(Rule(key, kind, MODE, any_of(SERVER), why, remedy) for key, kind, why, remedy in (
        (STAGE, none_of(0), "its servers hold the optimizer states", "choose parallel.zero.stage=0"),
        (STAGES, GIVEN, "every worker computes the entire model", "drop it with parallel.pipeline.stages=null"),
        (RECOMPUTE, none_of("none"), ON_WORKERS, "choose parallel.recompute.operators=none"),
        (ACTIVATIONS, none_of("none"), ON_WORKERS, "choose parallel.offload.activations.to=none"),
        ("parallel.copies", ABOVE_1, ON_WORKERS, "choose parallel.copies=1"),
        ("parallel.place", GIVEN, ON_WORKERS, "drop it with parallel.place={}"),
        ("parallel.mesh", GIVEN, "parallel.server says how many ranks work", "drop it with parallel.mesh=null"),
        ("parallel.plan", GIVEN, "every worker computes the entire model", "drop it with parallel.plan=null"),
        ("parallel.memory_limit", GIVEN, "there is nothing to search", "drop it with parallel.memory_limit=null"),
        ("parallel.dataset_strategy", none_of("data_parallel"), "a batch is divided by rows", "drop it"),
        *((f"{FUSION}.{name}.mode", any_of("size", "index"), "nothing is reduced between workers",
           f"use {FUSION}.{name}.mode=auto") for name in ("all_reduce", "all_gather", "reduce_scatter")),
        (COMPILE, ON, ON_WORKERS, "choose train.compile=false"),
        ("train.measure_memory", ON, "only ranks of one program are measured", "use train.measure_memory=false"),
        ("train.callbacks", GIVEN, "servers hold the weights that a callback sees", "drop them"),
        ("data.drop_last", OFF, "a short batch has no equal slices", "use data.drop_last=true"),
        ("data.unbatched", GIVEN, "a batch is divided by rows", "choose another mode"),
        ("data.workers", SOME, "a worker is given the next slice when it is done with one", "use data.workers=auto"),
        ("device", any_of("cuda"), "workers compute on CPUs", "use device=cpu"),
        ("launch.launcher", none_of("local", "rank_table"), "other launchers end all ranks when one ends",
         "use launch=local or launch=rank_table"),
        *((f"launch.{name}", GIVEN, "one command starts all servers and workers", "drop it")
          for name in ("host", "rank")),
        *((f"launch.{name}", GIVEN, "ranks that are killed are replaced", "drop it")
          for name in ("min_ranks", "max_ranks", "standby")),
        ("launch.rescue", ON, "the state is on the servers, not on rank 0", "use launch.rescue=false"),
        ("job.name", any_of("calibrate"), "it is a way to train", "use parallel=data_parallel"))),
    *(Rule(f"parallel.server.{name}", kind, MODE, none_of(SERVER), "there are no servers",
           "choose parallel=parameter_server, or drop all with ~parallel.server") for name, kind in (
               ("workers", GIVEN), ("servers", ABOVE_1), ("consistency", none_of("sync")), ("replicas", ABOVE_0),
               ("cache_rows", ABOVE_0), ("parameters", GIVEN))),
    Rule("parallel.server.parameters", GIVEN, "parallel.server.consistency", none_of("sync"),
         "the gradients of parameters that workers keep are added up once per step of all workers",
         "choose consistency=sync, or parameters=null"),
    Rule("train.precision", any_of("fp16"), "parallel.server.consistency", none_of("sync"),
         "a step that overflows is skipped, which takes a step of all workers",
         "choose consistency=sync, or train.precision=bf16"),
    Rule("job.name", any_of("verify"), "parallel.server.consistency", none_of("sync"),
         "workers apply gradients of older weights, which one process does not", "choose consistency=sync to verify"),
    Rule("parallel.server.staleness", GIVEN, "parallel.server.consistency", none_of("bounded"),
         "only bounded workers have a bound", "choose consistency=bounded, or staleness=null"),
    Rule("parallel.server.staleness", UNSET, "parallel.server.consistency", any_of("bounded"),
         "it is the bound", "set parallel.server.staleness=N"),
    *(Rule(f"checkpoint.{name}", GIVEN, "parallel.server.consistency", any_of("bounded", "async"),
           "slices are handed out ahead, up to the next save, so its step must be known", "use checkpoint.every")
      for name in ("minutes", "best")),
    # slices of different sizes
    Rule("parallel.batch_rows", GIVEN, MODE, none_of("data_parallel"), "only slices of the batch have different sizes",
         "choose parallel=data_parallel"),
    Rule("parallel.batch_rows", GIVEN, STAGES, GIVEN, "micro-batches pass through every stage",
         f"drop it with {STAGES}=null"),
    Rule("cluster.groups", GIVEN, MODE, any_of("stand_alone", "hybrid", SERVER), "no plan says what which device does",
         A_MODE),
    Rule("cluster.groups", GIVEN, STAGES, any_of("auto"), "the joint optimisation knows equal slices alone",
         f"choose a number of stages, {STAGES}=null, or another parallel.mode", ((MODE, any_of("data_parallel")),)),
    *(Rule(first, GIVEN, f"launch.{name}", GIVEN, "the devices are those of ranks that stay", "drop it")
      for first in UNEVEN for name in ("min_ranks", "max_ranks")),
    *(Rule(first, GIVEN, key, kind, why, remedy, BY_SPEED) for first in UNEVEN for key, kind, why, remedy in (
        ("parallel.copies", ABOVE_1, "a batch split has equal slices", "choose parallel.copies=1"),
        (STAGE, any_of("auto"), "the joint optimisation knows equal slices alone", f"choose {STAGE}=0, 1, 2 or 3"),
        (RECOMPUTE, any_of("auto"), "the joint optimisation knows equal slices alone", "choose none or full"),
        ("parallel.memory_limit", GIVEN, "every kind of device has a limit of its own, the memory of its description",
         "drop it with parallel.memory_limit=null"),
        ("data.unbatched", GIVEN, "ranks have different numbers of rows", "use equal slices"),
        (COMPILE, ON, "ranks would compile programs of different shapes", "choose train.compile=false"))),
    Rule("parallel.batch_rows", GIVEN, "cluster.groups", GIVEN, "both say how many rows a rank has", "drop one"),
    # ZeRO
    Rule("parallel.zero.options", GIVEN, STAGE, any_of(0), "stage 0 runs without DeepSpeed, which the options are for",
         "choose stage 1, 2 or 3, or drop the options"),
    Rule(f"parallel.zero.options.{NATIVE_OPTIONS[1]}", GIVEN, STAGE, any_of(1, 2), "parameters stay complete there",
         "choose stage 3, or drop it"),
    Rule(f"{FUSION}.all_reduce.mode", any_of("index"), STAGE, SHARDED, "ZeRO cuts its reductions by size",
         "choose mode size or auto, or parallel.zero.stage=0"),
    Rule(f"{OFFLOAD}.optimizer", any_of("host"), STAGE, any_of(0), "optimizer states are offloaded by ZeRO 1, 2 or 3",
         "choose such a parallel.zero.stage or parallel.offload.optimizer=none"),
    Rule(f"{OFFLOAD}.optimizer", any_of("disk"), STAGE, any_of(0, 1, 2), "only ZeRO 3 offloads to a disk",
         "choose parallel.zero.stage=3, or parallel.offload.optimizer=none (host with ZeRO 1 and 2)"),
    Rule(f"{OFFLOAD}.parameters", any_of("host", "disk"), STAGE, any_of(0, 1, 2), "only ZeRO 3 offloads parameters",
         "choose parallel.zero.stage=3 or parallel.offload.parameters=none"),
    *(Rule(f"parallel.zero.options.{option}", GIVEN, f"{OFFLOAD}.{name}", kind, "both say how to offload",
           "choose one of them") for option, name, kind in (
               ("offload_optimizer", "optimizer", none_of("none")), ("offload_param", "parameters", none_of("none")),
               ("sub_group_size", "optimizer", any_of("disk")))),
    Rule(STAGES, GIVEN, STAGE, any_of(2, 3), "stages 2 and 3 shard the gradients of every micro-batch (3 also gathers "
         "its weights), and a pipeline has several at once", f"choose {STAGE}=1, or {STAGES}=null"),
    Rule(f"{FUSION}.all_reduce.mode", any_of("index"), STAGES, GIVEN,
         "every stage has its own gradients, so there are no positions to cut at", "choose mode auto or size"),
    Rule("train.precision", any_of("fp64"), STAGE, SHARDED, "DeepSpeed holds the master weights in fp32",
         "choose train.precision=fp32, or parallel.zero.engine=auto", where=((ENGINE, any_of("deepspeed")),)),
    *(Rule("train.precision", any_of("fp64"), key, kind, "ZeRO needs DeepSpeed for it, which holds the master "
           "weights in fp32", f"choose train.precision=fp32, or {remedy}",
           where=((ENGINE, any_of("auto")), (STAGE, SHARDED))) for key, kind, _, remedy in DEEPSPEED_ONLY),
    Rule(ENGINE, any_of("native"), STAGE, any_of(0), "optimizer states are sharded by ZeRO 1, 2 or 3",
         f"choose {ENGINE}=auto, or {STAGE}=1, 2 or 3"),
    *(Rule(ENGINE, any_of("native"), key, kind, why, f"choose {ENGINE}=auto, or {remedy}")
      for key, kind, why, remedy in DEEPSPEED_ONLY),
    Rule("train.precision", any_of("fp16"), STAGE, SHARDED, EACH_DECIDES,
         f"use {ENGINE}=auto or train.precision=bf16", where=((STAGES, NUMBER), (ENGINE, any_of("deepspeed")))),
    *(Rule("train.precision", any_of("fp16"), key, kind, f"ZeRO needs DeepSpeed for it, with which {EACH_DECIDES}",
           f"use train.precision=bf16, or {remedy}",
           where=((STAGES, NUMBER), (ENGINE, any_of("auto")), (STAGE, SHARDED)))
      for key, kind, _, remedy in DEEPSPEED_ONLY),
    # torch.compile
    Rule(COMPILE, ON, f"{PIPELINE}.schedule", any_of("zero_bubble", "zbv"),
         "a compiled backward of a stage cannot be split",
         "choose schedule 1f1b or interleaved_1f1b, or train.compile=false", where=((STAGES, NUMBER),)),
    Rule(COMPILE, ON, MODE, AS_WRITTEN, "the program of a plan is compiled, and this mode has none",
         "choose another mode (data_parallel with world_size=1 for one process)"),
    Rule(COMPILE, ON, RECOMPUTE, none_of("none"), "the compiler decides itself what backward recomputes",
         "choose train.compile=false or parallel.recompute.operators=none"),
    Rule(COMPILE, ON, "parallel.context_parallel", any_of("ring"), "the compiler cannot look into blocks of a ring",
         "choose train.compile=false or parallel.context_parallel=gather"),
    Rule(COMPILE, ON, "parallel.place", GIVEN, "a compiled program is for one device", "drop one of them"),
    Rule(COMPILE, ON, ACTIVATIONS, none_of("none"), "the compiler decides itself which tensors are saved for backward",
         "drop one of them"),
)  # fmt: skip


SOURCES: tuple[Rule, ...] = (
    Rule("cluster.file", GIVEN, "cluster.machine", GIVEN, "both describe the machine", "drop one of them"),
    *(Rule(f"launch.{first}", GIVEN, f"launch.{second}", GIVEN, "both say where the ranks run", "drop one of them")
      for first, second in (("hosts", "hostfile"), ("hosts", "rank_table"), ("hostfile", "rank_table"))),
)  # fmt: skip
"""Rules for the composed config, before files that some keys name replace other keys."""

SCHEDULER, DROP = "optimizer.scheduler", "or drop it"
WITHOUT_EFFECT: tuple[Rule, ...] = (
    *(Rule(f"{SCHEDULER}.{name}", kind, f"{SCHEDULER}.target", UNSET, "the learning rate is constant",
           f"name a scheduler there, {DROP}") for name, kind in (
               ("args", GIVEN), ("per", none_of("step")), ("metric", GIVEN))),
    Rule("loss.args", GIVEN, "loss.target", UNSET, "the model returns its loss", f"name a loss there, {DROP}"),
    *(Rule(f"data.{name}", kind, "data.workers", any_of(0), "each rank reads its rows itself",
           f"choose data.workers=auto, {DROP}") for name, kind in (
               ("prefetch", none_of(2)), ("persistent_workers", OFF))),
    Rule("checkpoint.copies", ABOVE_1, "checkpoint.form", any_of("merged"), "one file has every tensor once",
         f"choose checkpoint.form=sharded or both, {DROP}"),
    Rule("parallel.search", none_of("sharding_propagation"), MODE, none_of("auto"), "only mode auto searches",
         f"choose parallel=auto, {DROP}"),
    Rule("parallel.layouts", GIVEN, MODE, any_of(*WITHOUT_LAYOUTS), "nothing names a layout",
         f"choose parallel.mode semi_auto, auto or hybrid, {DROP}"),
    *(Rule(f"parallel.{name}", kind, MODE, any_of("stand_alone", "hybrid", *more), why, f"{A_MODE}, {DROP}")
      for name, kind, more, why in (
          ("for_target", GIVEN, (), NO_PLAN), ("dump_ir", GIVEN, (), NO_PLAN),
          ("context_parallel", any_of("ring"), ("data_parallel", SERVER), "no sequence is sliced"))),
    Rule("parallel.for_target", GIVEN, MODE, any_of("semi_auto"), "it limits what is searched",
         f"choose parallel=auto, {DROP}"),
    Rule("parallel.reduce_precision", none_of("auto"), "train.precision", any_of("fp32", "fp64"),
         "nothing below fp32 is reduced", f"choose train.precision bf16, fp16 or bf16_autocast, {DROP}"),
    Rule(f"{PIPELINE}.schedule", none_of("1f1b"), STAGES, UNSET, "there is no pipeline", f"set {STAGES}=N, {DROP}"),
    Rule(ENGINE, any_of("deepspeed"), STAGE, any_of(0), "optimizer states are sharded by ZeRO 1, 2 or 3",
         f"choose {STAGE}=1, 2 or 3, {DROP}"),
    Rule("verify.reference.target", GIVEN, MODE, none_of("hybrid"), "your unchanged module is the reference",
         f"choose parallel.mode=hybrid, {DROP}"),
    Rule("launch.devices", GIVEN, "device", any_of("cpu"), "ranks on CPUs have no devices",
         f"choose device=cuda, {DROP}"),
)  # fmt: skip
"""Rules whose first key has no effect beside the second: the command says so and goes on."""


def check(config: BaseModel) -> None:
    """Raise the refusal of the first rule that a config breaks."""
    for rule in RULES:
        if rule.breaks(config):
            raise refusal(rule.paragraph(config), rule.first, rule.second)


def notices(config: BaseModel) -> list[str]:
    """A line for every key that has no effect."""
    lines = [rule.notice(config) for rule in WITHOUT_EFFECT if rule.breaks(config)]
    named = {getattr(operand, "layout", None) for _, operand in value_of(config, "parallel").operands()}
    if value_of(config, MODE) not in WITHOUT_LAYOUTS:
        for name in value_of(config, "parallel.layouts"):
            if name not in named:
                lines.append(f"parallel.layouts.{name} has no effect: no strategy names it; name it in one, {DROP}.")
    return lines


def needs_deepspeed(config: BaseModel) -> str | None:
    """The first key for which ZeRO needs DeepSpeed, with its value; None if there is none."""
    wanted = ((key, value) for key, kind, *_ in DEEPSPEED_ONLY if kind.holds(value := value_of(config, key)))
    return next((f"{key}={shown(value)}" for key, value in wanted), None)


def value_of(values: Any, path: str) -> Any:
    """The value of a dotted key in a config or nested mapping; None where it has none."""
    for name in path.split("."):
        values = values.get(name) if isinstance(values, Mapping) else getattr(values, name, None)
    return values


def shown(value: Any) -> str:
    """A value as YAML would write it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, BaseModel) and type(value).__str__ is BaseModel.__str__:
        value = value.model_dump(exclude_defaults=True)
    if isinstance(value, list | tuple):
        text = f"[{', '.join(map(shown, value))}]"
    elif isinstance(value, Mapping):
        text = f"{{{', '.join(f'{key}: {shown(inner)}' for key, inner in value.items())}}}"
    else:
        text = str(value) if isinstance(value, BaseModel) else repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
