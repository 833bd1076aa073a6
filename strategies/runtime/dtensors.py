"""Layouts as placements of torch's DTensor.

DTensor slices a tensor once per mesh axis, from the first axis to the last, and keeps no padding. A layout whose dims
are sliced by axes in another order, or a dim that several axes slice into unequal parts, is no DTensor; nor is one
whose slices are stripes of the sections of a packed tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from strategies.core.layout import Layout, Stripes, indices
from strategies.core.mesh import Mesh

GATHERED = {
    "scaled_dot_product_attention": (-2,),
    "cross_entropy_loss": (1,),
    "conv1d": (-1,),
    "conv2d": (-2, -1),
    "conv3d": (-3, -2, -1),
}
"""Dims of the first operands (of more than one dim) that the plan may slice and DTensor replicates, by operator."""


def placements(layout: Layout, shape: Sequence[int], mesh: Mesh) -> tuple[Placement, ...] | None:
    """The placement on every axis of the mesh, outermost first; None where no DTensor has this layout."""
    if isinstance(layout, Stripes):
        return None
    found: dict[str, Placement] = {axis: Partial() for axis in layout.partial}
    for dim, (size, axes) in enumerate(zip(shape, layout.dims, strict=True)):
        slicing = tuple(axis for axis in axes if mesh.sizes[axis] > 1)
        uneven = size % mesh.product(slicing) != 0
        if slicing != mesh.sorted(slicing) or (uneven and len(slicing) > 1):
            return None
        found |= {axis: Shard(dim) for axis in slicing}
    return tuple(found.get(axis, Replicate()) for axis in mesh.names)


def as_dtensor(
    local: Tensor, placed: Sequence[Placement], layout: Layout, shape: Sequence[int], mesh: Mesh, on: DeviceMesh
) -> DTensor:
    """This rank's slice as a DTensor on the same memory.

    Args:
        local: with padding.
        placed: the `placements` of `layout`.
        layout: that of the tensor.
        shape: the global shape.
        mesh: the plan's.
        on: the same grid of ranks; its current rank is that of `local`.
    """
    block = layout.block(shape, mesh, on.mesh.flatten().tolist().index(torch.distributed.get_rank()))
    strides = torch.empty(tuple(shape), device="meta").stride()
    own = local[indices(block, block)]
    return DTensor.from_local(own, on, placed, run_check=False, shape=torch.Size(shape), stride=strides)


def global_tensor(value: Tensor) -> Tensor:
    """All of a tensor; collective for a DTensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value
