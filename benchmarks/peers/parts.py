"""The comparisons: what ours runs beside each peer, on which models, and what its share of the peer's time may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.cases import Case
from benchmarks.peers.sides import in_parts

FAMILIES = ("gpt", "llama", "vit")
Parallel = Callable[[Case, int], dict[str, Any]]
"""Section `parallel` of ours, by case and ranks."""


@dataclass(frozen=True)
class Size:
    """How large the compared models are; `deep` layers where a pipeline cuts them."""

    width: int = 256
    layers: int = 4
    deep: int = 8
    sequence: int = 128
    rows: int = 16
    micro_batches: int = 8


@dataclass(frozen=True)
class Part:
    """One peer.

    Attributes:
        peer: as the page calls it.
        own: what ours runs, in words.
        parallel: see `Parallel`.
        goal: the largest share of the peer's time.
        pipeline: whether layers are stages, of several micro-batches.
    """

    peer: str
    own: str
    parallel: Parallel
    goal: float
    pipeline: bool = False

    def case(self, family: str, size: Size) -> Case:
        layers = size.deep if self.pipeline else size.layers
        return Case(family, size.width, layers, size.sequence, size.rows, tied=not self.pipeline)


def data_parallel(stage: int, engine: str = "deepspeed") -> Parallel:
    return lambda case, ranks: {"mode": "data_parallel", "zero": {"stage": stage, "engine": engine}}


def megatron(case: Case, mesh: Mapping[str, int]) -> dict[str, Any]:
    """Every layer sliced by columns, then by rows over the axis `tp`; the rest is propagated."""
    data, tensor = mesh.get("dp", 1), mesh["tp"]
    columns, rows = [[data, 1, 1], [1, tensor]], [[data, 1, tensor], [tensor, 1]]
    inner = "[gu]*_proj" if case.family == "llama" else "up_proj"
    return {
        "mode": "auto",
        "mesh": dict(mesh),
        "strategies": {
            "layers.*.attention.[qkv]_proj.matmul": columns,
            "layers.*.attention.o_proj.matmul": rows,
            f"layers.*.feed_forward.{inner}.matmul": columns,
            "layers.*.feed_forward.down_proj.matmul": rows,
        },
        "dataset_strategy": "data_parallel" if data > 1 else "full_batch",
    }


def pipeline(schedule: str, virtual: int) -> Parallel:
    def parallel(case: Case, ranks: int) -> dict[str, Any]:
        stages = ranks * virtual
        first = {f"layers.{own[0]}": number for number, own in enumerate(in_parts(case.layers, stages)) if number}
        cuts = first | {"norm": stages - 1, "head": stages - 1}
        section = {"stages": ranks, "virtual_stages": virtual, "schedule": schedule, "cuts": cuts}
        return {"mode": "data_parallel", "pipeline": section}

    return parallel


PARTS = {
    "ddp": Part("DistributedDataParallel", "data parallel", data_parallel(0), 1.02),
    "fsdp2": Part("FSDP2", "ZeRO 3", data_parallel(3, "native"), 1.00),
    "dtensor": Part(
        "DTensor, parallelize_module", "the same slices", lambda case, ranks: megatron(case, {"tp": ranks}), 0.75
    ),
    "zero1": Part("DeepSpeed, ZeRO 1", "ZeRO 1", data_parallel(1, "native"), 1.02),
    "zero2": Part("DeepSpeed, ZeRO 2", "ZeRO 2", data_parallel(2, "native"), 1.02),
    "zero3": Part("DeepSpeed, ZeRO 3", "ZeRO 3, engine=deepspeed", data_parallel(3), 1.02),
    "zero3_native": Part("DeepSpeed, ZeRO 3", "ZeRO 3", data_parallel(3, "native"), 1.00),
    "1f1b": Part("pipelining, 1F1B", "1f1b", pipeline("1f1b", 1), 1.02, pipeline=True),
    "interleaved": Part(
        "pipelining, interleaved 1F1B", "interleaved_1f1b", pipeline("interleaved_1f1b", 2), 1.02, pipeline=True
    ),
    "zbv": Part("pipelining, ZBV", "zbv", pipeline("zbv", 2), 1.00, pipeline=True),
    "export": Part(
        "the exported torch program",
        "its plan",
        lambda case, ranks: megatron(case, {"dp": 2, "tp": ranks // 2}),
        1.00,
    ),
}
"""By the name that `--only` takes, which is also that of the peer in `sides`."""
