"""Random layouts and assignments that are legal, for tests that try many; and `ranks`, which runs an entry of
`sharded_training` (or another module here) on real processes.
"""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.rules.sharding import Sharding
from tests.ranks import start_ranks

# reproducible examples, no time limit on busy machines, no folder left behind
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")


Fits = Callable[[int], bool]
"""Whether a dim or a factor can be divided into this number of slices."""


def _fits(size: int, padded: bool, count: int) -> bool:
    return size % count == 0 or (padded and -(-size // count) * (count - 1) < size)


class Draw:
    """A seeded source of layouts and assignments. The axes that slice one dim come in random order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def _spread(self, room: Sequence[Fits], mesh: Mesh) -> list[tuple[str, ...]]:
        """The axes that slice each dim or factor, as many slices as fit there."""
        places: list[tuple[str, ...]] = [() for _ in room]
        for axis, size in self.rng.sample(mesh.axes, len(mesh.axes)):
            fits = [i for i, fit in enumerate(room) if fit(size * mesh.product(places[i]))]
            place = self.rng.choice([*fits, None])
            if place is not None:
                places[place] = (*places[place], axis)
        return places

    def layout(self, shape: Sequence[int], mesh: Mesh, *, partial: bool = False, padded: bool = False) -> Layout:
        """Some axes slice dims; with `partial`, some of the others are partial; with `padded`, also into padded
        slices."""
        found = Layout(tuple(self._spread([functools.partial(_fits, size, padded) for size in shape], mesh)))
        if not partial:
            return found
        return Layout(found.dims, frozenset(axis for axis in mesh.others(found.axes) if self.rng.random() < 0.4))

    def assignment(self, sharding: Sharding, mesh: Mesh) -> dict[str, tuple[str, ...]]:
        places = self._spread([functools.partial(sharding.fits, factor) for factor in sharding.factors], mesh)
        return {factor: axes for factor, axes in zip(sharding.factors, places, strict=True) if axes}


@pytest.fixture(scope="session")
def draw() -> type[Draw]:
    return Draw


HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def training() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        yield importlib.import_module("sharded_training")


@pytest.fixture(scope="session")
def ranks(training: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    def call(entry: str, payload: Any, world_size: int = 4, module: str = "sharded_training") -> Any:
        folder = tmp_path_factory.mktemp("run")
        return start_ranks(f"{module}:{entry}", payload, world_size, folder, timeout=60.0)

    return call
