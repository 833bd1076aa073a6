"""A rank's slices of global tensors: of parameters, buffers and constants by name, and of the entries of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from strategies.core.graph import Source
from strategies.core.program import Program
from strategies.runtime.transfer import cut


def as_owned(source: Source, piece: Tensor) -> Tensor:
    """`piece` as a module owns it: an nn.Parameter where `source` is a parameter."""
    return nn.Parameter(piece, source.trainable) if source.kind == "parameter" else piece


def slices_of(
    tensors: Mapping[str, Tensor], program: Program, rank: int, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Copies of the slices of unsharded `tensors` by name, parameters as nn.Parameter."""
    found = {}
    for source in program.tensors.values():
        piece = cut(tensors[source.name].detach(), program.layouts[source.id], program.mesh, rank)
        found[source.name] = as_owned(source, piece.to(device))
    return found


def entries_of(batch: Sequence[Tensor], program: Program, rank: int) -> list[Tensor]:
    """Copies of the slices of the entries of an unsharded batch, in the order of `program.inputs`."""
    return [
        cut(tensor, program.layouts[source.id], program.mesh, rank)
        for source, tensor in zip(program.inputs, batch, strict=True)
    ]
