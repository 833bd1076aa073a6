"""The config of DeepSpeed's engine: defaults that fit this project, then the user's options for ZeRO, checked; and
which parameters it can be given.

Invariant: an option that would make training differ from one device, or that breaks parameters with different replica
groups, is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from strategies.core.errors import StrategyError, closest
from strategies.core.program import Program
from strategies.optimizer.loss_scale import POWER, SMALLEST, WINDOW
from strategies.optimizer.updates import Precision
from strategies.runtime.offload import Offload, Where

LARGEST_BUCKET = 50_000_000
"""Elements; DeepSpeed's own default makes it allocate 2 GB per rank however small the model is."""

OTHER_NUMBERS = "changes the numbers: training would differ from one device"
REFUSED = {
    "stage": "is given by parallel.zero.stage",
    "compute_grad_norm": "cannot be changed: the norm of the gradient is reported and used for clipping",
    "legacy_stage1": "is not supported by DeepSpeed any more",
    "elastic_checkpoint": "is replaced by this project's own checkpoints",
    "parameter_alignment": "pads parameters where checkpoints expect elements",
    "zero_hpz_partition_size": "does not know parameters with different replica groups",
    "zero_quantized_weights": OTHER_NUMBERS,
    "zero_quantized_nontrainable_weights": OTHER_NUMBERS,
    "zero_quantized_gradients": OTHER_NUMBERS,
    "zenflow": OTHER_NUMBERS,
    "cpu_offload": "is an old name; write offload_optimizer: {device: cpu}",
    "cpu_offload_param": "is an old name; write offload_param: {device: cpu}",
    "cpu_offload_use_pin_memory": "is an old name; write offload_optimizer: {device: cpu, pin_memory: true}",
}
"""Options of DeepSpeed that cannot be passed on, and why."""

GATHER_LATE = {
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "memory_efficient_linear": False,
    "override_module_apply": False,
}
"""Stage 3: gather what a module needs when it runs, let go at once, and leave torch's own functions as they are."""


SWAPPED_TOGETHER = 2**22
"""Elements of the optimizer that are in memory at once, besides what no disk takes."""
SMALLEST_ON_DISK = 2**20
"""Bytes. DeepSpeed leaves smaller pieces in memory."""
SWAP_BUFFERS = 6
"""Of the size of `SWAPPED_TOGETHER`: the weights, their gradient, and up to four states (Adam has two)."""


def offload_section(offload: Offload, largest: int, in_flight: int) -> dict[str, Any]:
    """The part of `zero_optimization` that moves states and parameters. `largest` is the number of elements of the
    largest piece of a parameter that one rank holds, `in_flight` the most parameters that one module holds."""
    parameter_buffers = {"buffer_size": largest, "buffer_count": in_flight + 1, "max_in_cpu": 0}
    kinds: dict[str, tuple[Where, dict[str, int]]] = {
        "offload_optimizer": (offload.optimizer, {"buffer_count": SWAP_BUFFERS}),
        "offload_param": (offload.parameters, parameter_buffers),
    }
    section: dict[str, Any] = {"sub_group_size": SWAPPED_TOGETHER} if offload.optimizer == "disk" else {}
    for name, (where, buffers) in kinds.items():
        if where == "host":
            section[name] = {"device": "cpu"}
        elif where == "disk":
            section[name] = {"device": "nvme", "nvme_path": str(offload.place), **buffers}
    return section


def zero_section(
    stage: int, elements: int, options: Mapping[str, Any], model: Any, offload: Mapping[str, Any]
) -> dict[str, Any]:
    """`zero_optimization` of DeepSpeed's config. `elements` are the parameters of one rank, `model` is the pydantic
    model that describes the section, `offload` is an `offload_section`.

    Raises StrategyError for an option that is unknown, refused or of the wrong type.
    """
    known = {
        name: info.alias or field for field, info in model.model_fields.items() for name in (field, info.alias) if name
    }
    for name, value in options.items():
        if objection := _objection(name, value, stage, known):
            raise StrategyError("MW452", f"parallel.zero.options.{name} = {value!r}: {objection}")
        if name.startswith("offload_") and isinstance(value, Mapping) and value.get("device") == "nvme":
            raise StrategyError(
                "MW452",
                f"parallel.zero.options.{name}.device = 'nvme': DeepSpeed 0.19 damages gradients on their way to a "
                "disk, so that training goes wrong without a sign. Use device: cpu, or parallel.offload, which keeps "
                "them in memory.",
            )
    bucket = min(elements + elements % 2, LARGEST_BUCKET)  # DeepSpeed wants an even number
    section = {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    section |= GATHER_LATE if stage == 3 else {}
    section |= dict(offload) | {known[name]: value for name, value in options.items()}
    try:
        model(**section)
    except ValueError as error:
        text = " ".join(str(error).split())
        raise StrategyError("MW452", f"parallel.zero.options: DeepSpeed refuses {dict(options)}: {text}") from error
    return section


def engine_config(
    zero: Mapping[str, Any],
    *,
    clip: float | None,
    accumulate: int,
    precision: Precision,
    loss_scale: float | None = None,
) -> dict[str, Any]:
    """The config for `deepspeed.initialize`. `loss_scale` None selects dynamic loss scaling."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # only for DeepSpeed's own throughput figures
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": clip or 0.0,  # left out, it would be 1.0
        "zero_optimization": dict(zero),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        "steps_per_print": 10**9,
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    if precision == "fp16":
        config["fp16"] = {
            "enabled": True,
            "loss_scale": loss_scale or 0,
            "initial_scale_power": POWER,
            "loss_scale_window": WINDOW,
            "hysteresis": 1,
            "min_loss_scale": SMALLEST,
        }
    if precision in ("bf16", "fp16"):
        if zero["stage"] > 1:  # at stage 1 this would choose another optimizer wrapper, which knows no replica groups
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def _objection(name: str, value: Any, stage: int, known: Mapping[str, str]) -> str:
    """Why an option cannot be passed on, or nothing. `known` gives every name of an option and the one that DeepSpeed's
    documents use."""
    if name in REFUSED:
        return f"{name} {REFUSED[name]}."
    if name not in known:
        return f"DeepSpeed has no such option of ZeRO.{closest(name, sorted(known.keys() - REFUSED.keys()))}"
    if stage < 3 and (known[name].startswith("stage3_") or name == "offload_param"):
        return f"DeepSpeed knows it at stage 3 only; parallel.zero.stage is {stage}."
    if name == "reduce_scatter" and value is not True:
        return "it must stay true, or sliced parameters would get wrong gradients."
    return ""


def check_parameters(
    found: Mapping[str, nn.Parameter], trainable: frozenset[str], stage: int, precision: Precision
) -> None:
    """Raises StrategyError for parameters that DeepSpeed cannot hold, or would not train as one device does."""
    if precision == "fp64" or any(parameter.dtype == torch.float64 for parameter in found.values()):
        raise StrategyError(
            "MW451",
            f"ZeRO stage {stage} cannot train in fp64: DeepSpeed keeps the weights that it updates in fp32, so the "
            "extra digits would be lost. Use parallel.zero.stage=0, or train.precision=fp32.",
        )
    empty = next((name for name, parameter in found.items() if not parameter.numel()), None)
    if empty is not None:
        raise StrategyError(
            "MW451",
            f"DeepSpeed's ZeRO stage {stage} cannot hold {empty}, which has no elements. Use "
            "parallel.zero.engine=native, which offloads nothing (drop parallel.offload), or parallel.zero.stage=0.",
        )
    dtypes = {str(found[name].dtype).removeprefix("torch."): name for name in sorted(trainable)}
    if len(dtypes) > 1:
        shown = " and ".join(f"{name} is {dtype}" for dtype, name in sorted(dtypes.items()))
        raise StrategyError(
            "MW451",
            f"DeepSpeed's ZeRO stage {stage} needs trainable parameters of one dtype, but {shown}. Use "
            "parallel.zero.engine=native, which offloads nothing (drop parallel.offload), or parallel.zero.stage=0.",
        )


def sizes_of(module: nn.Module, program: Program, found: Mapping[str, nn.Parameter]) -> tuple[int, int]:
    """Elements of the largest piece of a parameter that stage 3 leaves to a rank, and the most parameters of one
    module."""
    largest = 0
    for source in program.parameters:
        n = program.mesh.product(program.layouts[source.id].replica_axes(program.mesh))
        largest = max(largest, -(-found[source.name].numel() // n))
    return largest, max(len(unit._parameters) for unit in module.modules())
