"""Resharding on the links alone, by which sharding propagation compares slicings."""

from __future__ import annotations

from strategies.core.graph import TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.steps import LOCAL
from strategies.cost.cluster import Cluster
from strategies.cost.resharding_estimate import shares
from strategies.resharding.path import resharding_path

SEARCHED_AXES = 5
"""Axes up to which resharding paths are searched for: that takes 1 ms on few axes, and 50 on nine."""


class LinkSeconds:
    """Seconds on the links of a cluster: the bytes of a path's collectives over the slowest link that each crosses,
    without what every call costs: calls would decide between slicings that send the same, by how many ranks take part.
    On more than `SEARCHED_AXES` axes the paths are estimated in closed form."""

    def __init__(self, mesh: Mesh, cluster: Cluster) -> None:
        self.mesh, self.cluster = mesh, cluster
        self.searched = len(mesh.sorted(mesh.names)) <= SEARCHED_AXES
        self._known: dict[tuple[Layout, Layout, tuple[int, ...], int], float] = {}

    def seconds(self, before: Layout, after: Layout, spec: TensorSpec) -> float:
        """Seconds of resharding a value."""
        key = before, after, spec.shape, spec.item_bytes
        if key not in self._known:
            sent: list[tuple[str, tuple[str, ...], float]] = []
            if self.searched or after.partial:
                path = resharding_path(before, after, spec.shape, self.mesh)
                sent = [(step.kind, step.axes, step.busiest(self.mesh)) for step in path]
            elif before != after:
                sent = [(kind, axes, part * spec.elements) for kind, axes, part, _ in shares(before, after, self.mesh)]
            self._known[key] = sum(
                elements * spec.item_bytes / self.cluster.link(self.mesh, axes).bandwidth
                for kind, axes, elements in sent
                if kind not in LOCAL
            )
        return self._known[key]
