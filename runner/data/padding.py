"""Batches of samples that differ in length: every sample is padded to the length for which the model is captured.

The invariant: row r of a batch depends on sample r alone, so ranks that collate different rows get parts of one batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import default_collate

from runner.errors import ConfigError


def pad(
    samples: Sequence[Mapping[str, Any]], length: int, values: Mapping[str, float], mask: str | None = None
) -> dict[str, Tensor]:
    """A batch in which the entries named in `values` are right-padded in their first dim to `length`.

    `values` are the padding values: {input_ids: 0, labels: -100}, -100 being what losses ignore. Other entries
    are stacked unchanged. `mask` adds an int64 entry [samples, length] of that name, 1 for the sample and 0 for
    padding, as attention_mask is for models of transformers.
    Raises ConfigError: an entry that the samples do not have, is no tensor with a dim, or is longer than `length`.
    """
    batch: dict[str, Tensor] = {}
    for name in samples[0]:
        entries = [sample[name] for sample in samples]
        batch[name] = (
            torch.stack([_filled(name, entry, length, values[name]) for entry in entries])
            if name in values
            else default_collate(entries)
        )
    for name in values:
        if name not in batch:
            has = ", ".join(samples[0])
            raise ConfigError("MW315", f"data.collate_args.values names {name!r}, but a sample has the entries {has}.")
    if mask is not None:
        first = next(iter(values))
        ones = [_filled(mask, torch.ones(len(sample[first]), dtype=torch.int64), length, 0) for sample in samples]
        batch[mask] = torch.stack(ones)
    return batch


def _filled(name: str, entry: Any, length: int, value: float) -> Tensor:
    tensor = torch.as_tensor(entry)
    if tensor.dim() == 0:
        raise ConfigError(
            "MW315", f"data.collate_args.values names {name!r}, which is a single number and has no length."
        )
    if len(tensor) > length:
        raise ConfigError(
            "MW315",
            f"a sample's {name!r} has length {len(tensor)}, data.collate_args.length is {length}; choose a greater "
            "length, or shorter samples in the dataset.",
        )
    return functional.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, length - len(tensor)), value=value)
