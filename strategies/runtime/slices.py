"""Slices of tensors: one rank's slice of a global tensor, and the padding of dims that do not divide evenly.

Invariant: the padding beyond the end of a dim is zero when a tensor is sliced and dropped when slices are concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strategies.core.layout import Layout
from strategies.core.mesh import Mesh


def cut(tensor: Tensor, layout: Layout, mesh: Mesh, rank: int) -> Tensor:
    """The slice of a global tensor on `rank`: a copy of shape `layout.local_shape`, zeros in the padding."""
    block = layout.block(tensor.shape, mesh, rank)
    piece = tensor[tuple(slice(*bounds) for bounds in block)]
    wanted = layout.local_shape(tensor.shape, mesh)
    return piece.clone() if tuple(piece.shape) == wanted else filled(piece, wanted)


def filled(piece: Tensor, shape: Sequence[int]) -> Tensor:
    """`piece` at the beginning of every dim of a tensor of zeros of `shape`; itself where it has that shape."""
    if tuple(piece.shape) == tuple(shape):
        return piece
    result = piece.new_zeros(tuple(shape))
    result[tuple(slice(size) for size in piece.shape)] = piece
    return result


def resized(tensor: Tensor, dim: int, length: int | None) -> Tensor:
    """`tensor` with `dim` of the given length: zeros are added at its end, or the end is dropped (a view). None keeps
    the length."""
    have = tensor.shape[dim] if tensor.dim() else 1
    if length is None or length == have:
        return tensor
    if length < have:
        return tensor.narrow(dim, 0, length)
    shape = list(tensor.shape)
    shape[dim] = length - have
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def padded(tensor: Tensor, dim: int, n: int, index: int) -> Tensor:
    """Slice `index` of `n` in a tensor of zeros, n times as large along `dim`."""
    shape = list(tensor.shape)
    shape[dim] *= n
    wide = tensor.new_zeros(shape)
    wide.narrow(dim, index * tensor.shape[dim], tensor.shape[dim]).copy_(tensor)
    return wide
