"""Bags of rows of a table, as many rows in each: a lookup and its reduction.

torch's own operator counts its bags through all indices, which no slice of a batch has. Written out, bags are sliced by
batch, by rows of the table and by columns, and a parameter server sends only the rows that a batch names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """`torch.nn.functional.embedding_bag` of indices [bags, rows in each], written out: [bags, columns]. A bag of
    nothing but padding is 0. Bags of different lengths, and what depends on all indices at once, are left to torch."""
    alone = input.dim() == 2 and input.numel() and weight.is_floating_point() and offsets is None
    weighted = per_sample_weights is not None
    if not alone or max_norm is not None or scale_grad_by_freq or sparse or (weighted and mode != "sum"):
        more: dict[str, Any] = {"include_last_offset": include_last_offset, "padding_idx": padding_idx}
        given = offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights
        return functional.embedding_bag(input, weight, *given, **more)
    rows = functional.embedding(input, weight)
    taken = None
    if padding_idx is not None:
        taken = (input != padding_idx % len(weight)).unsqueeze(-1)
        rows = rows.masked_fill(~taken, -torch.inf if mode == "max" else 0)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if mode == "sum":
        return rows.sum(1)
    if taken is None:
        return rows.mean(1) if mode == "mean" else rows.max(1).values
    if mode == "mean":
        return rows.sum(1) / taken.sum(1).clamp(min=1)
    return rows.max(1).values.masked_fill(~taken.any(1), 0)
