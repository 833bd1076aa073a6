"""Coalesced collectives: flatten the tensors of several into one buffer, call once, split.

The engine and the simulator both pack and unpack with these functions, so tests of the simulator cover the engine.
Invariant: each tensor has the value that a separate collective would give it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from strategies.core.mesh import Mesh
from strategies.core.steps import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Step
from strategies.runtime.slices import resized


def packed(steps: Sequence[Step], tensors: Sequence[Tensor], mesh: Mesh, rank: int) -> Tensor:
    """What `rank` gives to the one collective that stands for `steps`, which are of one kind over the same axes."""
    kind = steps[0].kind
    if kind in (ALL_REDUCE, ALL_GATHER):
        return torch.cat([tensor.reshape(-1) for tensor in tensors])
    assert kind == REDUCE_SCATTER
    cut = [
        resized(tensor, step.dim, step.cut_length(mesh)).chunk(mesh.product(step.axes), step.dim)
        for step, tensor in zip(steps, tensors, strict=True)
    ]
    return torch.cat([pieces[slice_].reshape(-1) for slice_ in _slices(steps[0], mesh, rank) for pieces in cut])


def unpacked(
    steps: Sequence[Step], received: Tensor, shapes: Sequence[Sequence[int]], mesh: Mesh, rank: int
) -> list[Tensor]:
    """The results of all steps from what the collective gave; `shapes` are those of the tensors that were packed."""
    kind, n = steps[0].kind, mesh.product(steps[0].axes)
    if kind == ALL_REDUCE:
        parts = torch.split(received, [math.prod(shape) for shape in shapes])
        return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]
    if kind == REDUCE_SCATTER:
        local = []
        for step, shape in zip(steps, shapes, strict=True):
            length = step.cut_length(mesh) or shape[step.dim]
            local.append((*shape[: step.dim], length // n, *shape[step.dim + 1 :]))
        parts = torch.split(received, [math.prod(shape) for shape in local])
        return [part.view(shape) for part, shape in zip(parts, local, strict=True)]
    assert kind == ALL_GATHER
    by_rank = torch.split(received.view(n, -1), [math.prod(shape) for shape in shapes], 1)
    places = _places(steps[0], mesh, rank)
    results = []
    for step, part, shape in zip(steps, by_rank, shapes, strict=True):
        joined = torch.cat([part[place].view(tuple(shape)) for place in places], step.dim)
        results.append(resized(joined, step.dim, step.joined_length(mesh, step.dim)))
    return results


def elements(steps: Sequence[Step], tensors: Sequence[Tensor], mesh: Mesh) -> int:
    """Elements that a rank sends to others: as many as in calls of their own."""
    n, kind = mesh.product(steps[0].axes), steps[0].kind
    if kind == ALL_REDUCE:
        return sum(-(-2 * (n - 1) * tensor.numel() // n) for tensor in tensors)
    if kind == ALL_GATHER:
        return sum(tensor.numel() * (n - 1) for tensor in tensors)
    return sum(step.elements(mesh) for step in steps)


def _places(step: Step, mesh: Mesh, rank: int) -> list[int]:
    """By slice: the place of the rank that holds it in the process group, which is sorted."""
    order = mesh.group(rank, step.axes)
    return [sorted(order).index(peer) for peer in order]


def _slices(step: Step, mesh: Mesh, rank: int) -> list[int]:
    """By place in the process group: the slice that this rank holds."""
    places = _places(step, mesh, rank)
    return [places.index(place) for place in range(len(places))]
