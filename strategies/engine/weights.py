"""Initial weights: the parent builds the model once and writes every tensor to one file; ranks map it and copy only
their slices.

So every parallel run starts from exactly the weights of the single-process run with the same seed, whatever order
constructors draw in, and no rank ever holds a whole parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from strategies.engine.program import Program


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write whole tensors by name."""
    torch.save({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)


def read_whole(path: Path) -> dict[str, Tensor]:
    """Every tensor, mapped from the file: nothing is read before it is used."""
    found: dict[str, Tensor] = torch.load(path, mmap=True, weights_only=True)
    return found


def read_slices(path: Path, program: Program, rank: int, device: torch.device | str) -> dict[str, Tensor]:
    """The local slice of every parameter (as nn.Parameter), buffer and constant of `program`, by name."""
    whole, found = read_whole(path), {}
    for source in program.sources:
        if source.kind == "input":
            continue
        tensor = whole[source.name]
        block = program.layouts[source.id].block(tensor.shape, program.mesh, rank)
        piece = tensor[tuple(slice(*bounds) for bounds in block)].clone().to(device)
        found[source.name] = nn.Parameter(piece, source.trainable) if source.kind == "parameter" else piece
    return found
