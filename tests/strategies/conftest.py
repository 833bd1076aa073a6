"""Random layouts and assignments that are legal, for tests that try many."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import settings

from strategies.layout import Layout
from strategies.mesh import Mesh
from strategies.rules.sharding import Sharding

# the same examples everywhere, no time limit on busy machines, no folder left behind
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")


class Draw:
    """A seeded source of layouts and assignments. The axes that slice one dim come in random order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def _spread(self, room: Sequence[int], mesh: Mesh) -> list[tuple[str, ...]]:
        """Per place the axes that slice it, so that their product divides what the place has room for."""
        places: list[tuple[str, ...]] = [() for _ in room]
        for axis, size in self.rng.sample(mesh.axes, len(mesh.axes)):
            fits = [i for i, n in enumerate(room) if n % (size * mesh.product(places[i])) == 0]
            place = self.rng.choice([*fits, None])
            if place is not None:
                places[place] = (*places[place], axis)
        return places

    def layout(self, shape: Sequence[int], mesh: Mesh, *, partial: bool = False) -> Layout:
        """Some axes slice dims; with `partial`, some of the others are partial."""
        found = Layout(tuple(self._spread(shape, mesh)))
        if not partial:
            return found
        return Layout(found.dims, frozenset(axis for axis in mesh.others(found.axes) if self.rng.random() < 0.4))

    def assignment(self, sharding: Sharding, mesh: Mesh) -> dict[str, tuple[str, ...]]:
        places = self._spread([sharding.sizes[factor] for factor in sharding.factors], mesh)
        return {factor: axes for factor, axes in zip(sharding.factors, places, strict=True) if axes}


@pytest.fixture(scope="session")
def draw() -> type[Draw]:
    return Draw
