"""Layouts as placements: which layouts a DTensor has, compared with what torch itself would hold on every rank."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.runtime.dtensors import placements

MESH = Mesh((("a", 2), ("b", 3), ("c", 1)))


@pytest.mark.parametrize(
    ("dims", "shape", "expected"),
    [
        (((), ()), (6, 6), (Replicate(), Replicate(), Replicate())),
        ((("a",), ("b",)), (6, 6), (Shard(0), Shard(1), Replicate())),
        ((("a", "b"), ()), (6, 6), (Shard(0), Shard(0), Replicate())),
        ((("b",), ()), (7, 6), (Replicate(), Shard(0), Replicate())),  # slices of 3, 3 and 1 rows
        ((("a", "b"), ()), (7, 6), None),  # DTensor has 4 and 3 rows first
        ((("b", "a"), ()), (6, 6), (_StridedShard(0, split_factor=3), Shard(0), Replicate())),
        ((("c", "a"), ()), (6, 6), (Shard(0), Replicate(), Replicate())),
    ],
)
def test_a_dtensor_holds_the_same_blocks(
    dims: tuple[tuple[str, ...], ...], shape: tuple[int, ...], expected: tuple[Placement, ...] | None
) -> None:
    layout = Layout(dims)
    assert placements(layout, shape, MESH, any_order=True) == expected
    in_order = all(axes == MESH.sorted(axes) for axes in dims) or expected[1] == Replicate()
    assert placements(layout, shape, MESH) == (expected if in_order else None)
    for rank in range(MESH.size) if expected is not None else ():
        grid = torch.arange(MESH.size).view(2, 3, 1)
        on = DeviceMesh("cpu", grid, _init_backend=False, _rank=rank)
        local, offset = compute_local_shape_and_global_offset(shape, on, expected)
        block = layout.block(shape, MESH, rank)
        assert local == tuple(stop - start for start, stop in block)
        assert offset == tuple(start for start, _ in block)


def test_partial_sums_are_partial() -> None:
    layout = Layout(((), ("a",)), frozenset({"b"}))
    assert placements(layout, (6, 6), MESH) == (Shard(1), Partial(), Replicate())
