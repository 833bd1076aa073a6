"""Features of a run, as words of the command line with the words that each of them requires; for tests of all pairs.

Features of one family exclude each other because they set the same key.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from test_combinations import ALONG, GPT

BASE = (
    *(word for word in GPT if not word.startswith(("data.batch_size", "train.clip"))),
    "data.batch_size=32",
    "train.steps=2",
)


@dataclass(frozen=True)
class Feature:
    """`words` enable the feature; `needs` come first, so that another feature may override them."""

    family: str
    words: tuple[str, ...]
    needs: tuple[str, ...] = ()


STAGES = ("parallel.pipeline.stages=2", "parallel.pipeline.micro_batches=4")
STRATEGIES = "parallel.strategies={layers.*.attention.q_proj.matmul: [[1, 1, 1], [1, 2]]}"
SEQUENCE = f"parallel.strategies={{{ALONG}: {[[1, 1, 2, 1]] * 3}}}"
"""Attention whose keys and values are sliced with the queries."""
GROUPS = "cluster.groups=[{devices: 3}, {devices: 1, speed: 0.5}]"
MODE = ("parallel=data_parallel",)
RESTARTS = "launch.max_restarts=1"
HOSTS = "launch.hosts=['a:2', 'b:2']"


def _schedule(name: str) -> Feature:
    return Feature("pipeline", (*STAGES, f"parallel.pipeline.schedule={name}"))


def _set(key: str, value: object, *needs: str) -> Feature:
    return Feature(key, (f"{key}={value}",), needs)


FEATURES: dict[str, Feature] = {
    "1f1b": _schedule("1f1b"),
    "interleaved": _schedule("interleaved_1f1b"),
    "zero bubble": _schedule("zero_bubble"),
    "zbv": _schedule("zbv"),
    "gpipe": _schedule("gpipe"),
    "recompute full": _set("parallel.recompute.operators", "full"),
    "recompute selective": _set("parallel.recompute.operators", "selective"),
    "recompute auto": Feature(
        "parallel.recompute.operators", ("parallel.recompute.operators=auto", "parallel.memory_limit=1GB")
    ),
    "sliced inputs": _set("parallel.recompute.slice_inputs", "true", "parallel.recompute.operators=full"),
    "ZeRO-1": _set("parallel.zero.stage", 1),
    "ZeRO-2": _set("parallel.zero.stage", 2),
    "ZeRO-3": _set("parallel.zero.stage", 3),
    "native": Feature("parallel.zero.stage", ("parallel.zero.stage=3", "parallel.zero.engine=native")),
    "DeepSpeed": Feature("parallel.zero.stage", ("parallel.zero.stage=3", "parallel.zero.engine=deepspeed")),
    "states on the host": _set("parallel.offload.optimizer", "host", "parallel.zero.stage=1"),
    "states on a disk": _set("parallel.offload.optimizer", "disk", "parallel.zero.stage=3"),
    "parameters on the host": _set("parallel.offload.parameters", "host", "parallel.zero.stage=3"),
    "parameters on a disk": _set("parallel.offload.parameters", "disk", "parallel.zero.stage=3"),
    "activations on the host": _set("parallel.offload.activations.to", "host"),
    "activations on a disk": _set("parallel.offload.activations.to", "disk"),
    "place": _set("parallel.place", "{tokens: host}"),
    "copies": _set("parallel.copies", 2),
    "ring": _set("parallel.context_parallel", "ring"),
    "no comm_async": _set("parallel.comm_async", "false"),
    "no comm_overlap": _set("parallel.comm_overlap", "false"),
    "no fusion": Feature(
        "fusion", tuple(f"parallel.comm_fusion.{kind}.mode=none" for kind in ("all_reduce", "all_gather"))
    ),
    "compile": _set("train.compile", "true"),
    "fp64": _set("train.precision", "fp64"),
    "bf16": _set("train.precision", "bf16"),
    "fp16": _set("train.precision", "fp16"),
    "bf16_autocast": _set("train.precision", "bf16_autocast"),
    "accumulate": _set("train.accumulate", 2),
    "clip": _set("train.clip", 0.5),
    "evaluation": _set("evaluate.every", 1),
    "stand_alone": Feature("mode", ("parallel=stand_alone", "world_size=1")),
    "data_parallel": Feature("mode", ("parallel=data_parallel",)),
    "uneven": Feature("mode", ("parallel=data_parallel", GROUPS)),
    "groups": Feature("mode", ("parallel=semi_auto", STRATEGIES, GROUPS)),
    "sequence": Feature("mode", ("parallel=auto", SEQUENCE)),
    "semi_auto": Feature("mode", ("parallel=semi_auto", STRATEGIES)),
    "auto": Feature("mode", ("parallel=auto", STRATEGIES)),
    "hybrid": Feature("mode", ("parallel=hybrid",)),
    "parameter_server": Feature("mode", ("parallel=parameter_server", "parallel.server.servers=1", "world_size=4")),
    "reduced": Feature(
        "mode",
        (
            *("parallel=parameter_server", "parallel.server.servers=2", "parallel.server.replicas=1", "world_size=5"),
            "parallel.server.parameters=['tokens.*']",
        ),
    ),
    "async": Feature("mode", ("parallel=parameter_server", "parallel.server.consistency=async", "world_size=4")),
    "fewer ranks": Feature("launch.min_ranks", ("launch.min_ranks=2",), (RESTARTS,)),
    "growing": Feature("launch.min_ranks", ("launch.min_ranks=2", "launch.max_ranks=4"), (RESTARTS,)),
    "rescue": _set("launch.rescue", "true", RESTARTS),
    "spare host": Feature(
        "launch.launcher", ("launch.launcher=rank_table", HOSTS, "launch.standby=['c:2']"), (RESTARTS,)
    ),
    "several hosts": Feature("launch.launcher", ("launch.launcher=torchrun", HOSTS)),
}
PAIRS = [(a, b) for a, b in combinations(FEATURES, 2) if FEATURES[a].family != FEATURES[b].family]


def together(*names: str) -> tuple[str, ...]:
    """The words that enable all of these features, in the order of the list."""
    features = [one for name, one in FEATURES.items() if name in names]
    needs = [word for one in features for word in one.needs]
    return (*MODE, *needs, *(word for one in features for word in one.words))
