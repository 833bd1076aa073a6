"""How the ranks of a plan hold the tensors of a checkpoint: who stores which block.

Invariant: the blocks of all ranks together are every element once; ranks that hold the same block take turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.checkpoint import HEADER
from runner.checkpoint.content import name_of
from runner.checkpoint.index import Entry
from runner.checkpoint.manifest import read_header
from runner.errors import ConfigError
from runner.run_folder.plan_file import read_content
from strategies.core.layout import Block, Layout
from strategies.core.plan import Plan

MOST_RANKS = 2**20


@dataclass(frozen=True)
class Cut:
    """`plan` on each of `groups` groups of ranks, `group` being where a tensor of a pipeline lies (0 if not said)."""

    plan: Plan
    groups: int
    group: Mapping[str, int]

    @property
    def ranks(self) -> int:
        return self.plan.mesh.size * self.groups

    def held(self, rank: int, tensors: Mapping[str, Entry]) -> Iterator[tuple[str, Block]]:
        """What `rank` stores: the block of each tensor, by key."""
        mesh = self.plan.mesh
        group, local = divmod(rank, mesh.size)
        for number, (key, entry) in enumerate(tensors.items()):
            name = name_of(key)
            if self.group.get(name, 0) % self.groups != group or 0 in entry.shape:
                continue
            layout = self.plan.tensors.get(name)
            if layout is None or len(layout.dims) != len(entry.shape):  # a state that has not its parameter's shape
                layout = Layout.replicated(len(entry.shape))
            replicas = layout.replica_axes(mesh)
            block = layout.block(entry.shape, mesh, local)
            turn = mesh.index(local, replicas) == number % mesh.product(replicas)
            if turn and all(start < stop for start, stop in block):
                yield key, block


def cut_of(path: Path, tensors: Mapping[str, Entry]) -> Cut:
    """How the plan in `path` (a plan.json, a run folder or a checkpoint) cuts `tensors`.

    Raises ConfigError for what holds no plan, and for the plan of another model.
    """
    content: Any = read_header(path).plan if (path / HEADER).is_file() else read_content(path)
    where = f"plan={path}"
    try:
        plan = Plan.from_json(content)
        parameters: Mapping[str, Any] = content.get("parameters", {})
        groups = int(content["pipeline"]["stages"]) if content.get("pipeline") else 1
        group = {name: int(entry["stages"][0]) for name, entry in parameters.items() if "stages" in entry}
        shapes = {name: tuple(entry["shape"]) for name, entry in parameters.items()}
        axes = {axis for layout in plan.tensors.values() for dim in layout.dims for axis in dim}
        if groups < 1 or plan.mesh.size * groups > MOST_RANKS or not axes <= set(plan.mesh.names):
            raise ValueError(f"{groups} stages on the mesh {dict(plan.mesh.axes)}")
    except (LookupError, ArithmeticError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ConfigError("MW420", f"{where} is not a plan.json ({type(error).__name__}: {error}).") from None
    for key, entry in tensors.items():
        name = name_of(key)
        if name not in plan.tensors:
            raise ConfigError("MW612", f"{where} says nothing of {name}, so it belongs to another model; plan anew.")
        if key == f"model/{name}" and shapes.get(name, entry.shape) != entry.shape:
            raise ConfigError(
                "MW612",
                f"{where} has {name} with shape {list(shapes[name])}, but it is stored with {list(entry.shape)}; plan "
                "anew for this model.",
            )
    return Cut(plan, groups, group)
