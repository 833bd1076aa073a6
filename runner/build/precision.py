"""What `train.precision` means for tensors, and where it is unsupported.

Invariant: verification compares with one process in the same precision, so both use this file.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runner.config.schema import Config
from runner.errors import ConfigError
from strategies.capture import Objective, run_once
from strategies.core.errors import StrategyError

DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "bf16_autocast": torch.float32,
}
"""Of parameters and batches."""
AUTOCAST = {"bf16_autocast": torch.bfloat16}
"""In which autocast runs a model."""


def cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Floating-point batch entries in the precision of training."""
    return [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors]


def check_half(config: Config, step: Objective, tensors: Sequence[Tensor], device: str) -> None:
    """Raises ConfigError where an operator of the model has no fp16 on this device."""
    if config.train.precision != "fp16" or device != "cpu":
        return
    try:
        run_once(step, tensors, backward=True)
    except StrategyError as error:
        if "Half" not in str(error):  # torch's name for it, in any message
            raise
        raise ConfigError(
            "MW324",
            f"train.precision = fp16 cannot be used with this model on a CPU, where torch lacks an operator in fp16: "
            f"{error} Use train.precision=bf16 or bf16_autocast.",
        ) from error
