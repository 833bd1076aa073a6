"""Layouts as placements of torch's DTensor.

DTensor slices a tensor once per mesh axis, from the first axis to the last, and keeps no padding. A layout whose dims
are sliced by axes in another order, or a dim that several axes slice into unequal parts, is no DTensor. Stripes of
sections of one size over one axis are `_StridedShard`, which torch.distributed.checkpoint (torch 2.13) takes for one
block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from strategies.core.layout import Layout, Stripes, indices
from strategies.core.mesh import Mesh

GATHERED: dict[str, tuple[int | str, ...]] = {
    "scaled_dot_product_attention": (-2,),
    "cross_entropy_loss": (1,),
    "conv1d": (-1,),
    "conv2d": (-2, -1),
    "conv3d": (-3, -2, -1),
    **dict.fromkeys(("chunk", "glu", "narrow", "slice", "split", "split_with_sizes"), ("part",)),
}
"""Dims that the plan may slice and DTensor replicates, by operator; see `unsliced_dims`."""


def placements(
    layout: Layout, shape: Sequence[int], mesh: Mesh, *, stripes: bool = False
) -> tuple[Placement, ...] | None:
    """The placement on every axis of the mesh, outermost first; None where no DTensor has this layout.

    Args:
        layout: of a tensor.
        shape: the global one.
        mesh: the plan's.
        stripes: whether `_StridedShard` may say slices of every section.
    """
    if isinstance(layout, Stripes) and not (stripes and len({*layout.packed.sizes}) == 1):
        return None
    found: dict[str, Placement] = {axis: Partial() for axis in layout.partial}
    for dim, (size, axes) in enumerate(zip(shape, layout.dims, strict=True)):
        slicing = tuple(axis for axis in axes if mesh.sizes[axis] > 1)
        uneven = size % mesh.product(slicing) != 0
        sections = len(layout.packed.sizes) if isinstance(layout, Stripes) and dim == layout.packed.dim else 0
        if slicing != mesh.sorted(slicing) or ((uneven or sections) and len(slicing) > 1):
            return None
        found |= dict.fromkeys(slicing, _StridedShard(dim, split_factor=sections) if sections else Shard(dim))
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
