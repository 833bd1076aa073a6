"""Random layouts and assignments that are legal, for tests that try many."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import settings

from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.rules.sharding import Sharding

# the same examples everywhere, no time limit on busy machines, no folder left behind
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")


Fits = Callable[[int], bool]
"""Whether a dim or a factor can be cut into so many slices."""


def _fits(size: int, uneven: bool, count: int) -> bool:
    return size % count == 0 or (uneven and -(-size // count) * (count - 1) < size)


class Draw:
    """A seeded source of layouts and assignments. The axes that slice one dim come in random order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def _spread(self, room: Sequence[Fits], mesh: Mesh) -> list[tuple[str, ...]]:
        """Per place the axes that slice it, as many slices as fit there."""
        places: list[tuple[str, ...]] = [() for _ in room]
        for axis, size in self.rng.sample(mesh.axes, len(mesh.axes)):
            fits = [i for i, fit in enumerate(room) if fit(size * mesh.product(places[i]))]
            place = self.rng.choice([*fits, None])
            if place is not None:
                places[place] = (*places[place], axis)
        return places

    def layout(self, shape: Sequence[int], mesh: Mesh, *, partial: bool = False, uneven: bool = False) -> Layout:
        """Some axes slice dims; with `partial`, some of the others are partial; with `uneven`, also into padded
        slices."""
        found = Layout(tuple(self._spread([functools.partial(_fits, size, uneven) for size in shape], mesh)))
        if not partial:
            return found
        return Layout(found.dims, frozenset(axis for axis in mesh.others(found.axes) if self.rng.random() < 0.4))

    def assignment(self, sharding: Sharding, mesh: Mesh) -> dict[str, tuple[str, ...]]:
        places = self._spread([functools.partial(sharding.fits, factor) for factor in sharding.factors], mesh)
        return {factor: axes for factor, axes in zip(sharding.factors, places, strict=True) if axes}


@pytest.fixture(scope="session")
def draw() -> type[Draw]:
    return Draw
