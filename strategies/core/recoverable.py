"""Which ranks hold the same as one of them, and so could give it back what it lost: pure arithmetic on layouts.

Invariant: a rank can be restored from any rank that is in its replica group for every parameter; where the optimizer's
states are split over the replicas (ZeRO), no other rank holds the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from strategies.core.layout import Layout
from strategies.core.mesh import Mesh


def recoverable(
    parameters: Iterable[Layout], mesh: Mesh, rank: int, *, stage: int = 0, split: bool = False
) -> tuple[int, ...]:
    """The ranks, `rank` among them, that hold the same slices of all `parameters`, in order.

    `rank` counts over the whole run; in a pipeline `parameters` are those of its `stage`, whose ranks begin at
    `stage * mesh.size`. `split`: the optimizer's states are not the same on replicas.
    """
    first = stage * mesh.size
    if split:
        return (rank,)
    found = set(range(mesh.size))
    for layout in parameters:
        found &= set(layout.replica_group(mesh, rank - first))
    return tuple(first + one for one in sorted(found))
