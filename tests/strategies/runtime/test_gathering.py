"""Parameters that nothing has gathered."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from strategies.runtime.gathering import GatheredParameters


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool]
)
def test_no_dtype_reads_as_old_values(dtype: torch.dtype) -> None:
    parameter, communicator = nn.Parameter(torch.ones(4).to(dtype), requires_grad=False), cast(Any, None)
    GatheredParameters([(parameter, 0)], parameter.detach()[:2].clone(), 2, communicator, None, 0)
    assert parameter.shape == (4,) and parameter.dtype == dtype
    assert (parameter.isnan() | (parameter != 1)).all()
