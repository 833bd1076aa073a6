"""Speech of random numbers, of several lengths, for models of transformers that mask it at random (SpecAugment)."""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLES = 160


class Speech:
    """Rows of `SAMPLES` numbers, the last of them padding in every other row, with one of two labels."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        length = SAMPLES - 40 * (row % 2)
        inside = torch.arange(SAMPLES) < length
        values = torch.randn(SAMPLES, generator=torch.Generator().manual_seed(row)) * inside
        return {"input_values": values, "attention_mask": inside.long(), "labels": torch.tensor(row // 2 % 2)}
