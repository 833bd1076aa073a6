"""Collectives of one rank: process groups by mesh axes, and the steps of a redistribution carried out on a local
tensor.

A process group is created once per distinct set of ranks. Every byte sent is counted by collective, in the same way in
which plans predict it. One code path serves gloo and nccl.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.core.mesh import Mesh
from strategies.core.steps import ALL_GATHER, ALL_REDUCE, LOCAL, REDUCE_SCATTER, ReshardingPath, Step
from strategies.runtime.flight_recorder import EXCHANGE as EXCHANGING
from strategies.runtime.flight_recorder import GATHER, NUMBER, SCATTER, SUM, Awaited, recorder
from strategies.runtime.transfer import Transfer, local

# torch 2.13 renamed these two; the old names warn there
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

BYTES_ALONE = frozenset((torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2))
"""Dtypes that gloo and nccl do not know (of float8, gloo): what only moves is sent as bytes."""

Carrier = Callable[[Sequence[Tensor]], list[Tensor]]
"""Carries one local tensor along each of several paths."""
Landing = Callable[[], list[Tensor]]
"""Waits for the collectives in flight, once, and returns the results."""
Launcher = Callable[[Sequence[Tensor]], Landing]


def new_group(ranks: Sequence[int], own: bool) -> dist.ProcessGroup:
    """A process group of `ranks`, made by these alone (`own`) or by all ranks of the default group, whose time limit it
    has: torch would give it one of its own, of 10 or 30 minutes."""
    world: Any = dist.group.WORLD
    options = getattr(world._get_backend(world._device_types[0]), "options", None)
    timeout = getattr(options, "_timeout", None)
    group: dist.ProcessGroup = dist.new_group(list(ranks), timeout, use_local_synchronization=own)
    return group


class Communicator:
    """The collectives of one rank on a mesh.

    Constructing it is collective: every rank names the same sets of axes, in the same order. The default process group
    must exist if the mesh has more than one rank.

    Args:
        mesh: in a pipeline, the mesh of one stage.
        rank: 0 <= rank < mesh.size.
        axes: the sets of axes over which the rank communicates.
        stage: of the pipeline that the rank runs; the ranks of stage 0 come first.
        stages: of the pipeline.

    Attributes:
        world_rank: this rank's number among those of all stages.
        sent: bytes sent, by collective.
        calls: number of calls, by collective.
    """

    def __init__(
        self, mesh: Mesh, rank: int, axes: Iterable[Sequence[str]] = (), *, stage: int = 0, stages: int = 1
    ) -> None:
        self.mesh, self.rank, self.stage, self.stages = mesh, rank, stage, stages
        self.world = mesh.size * stages
        self.world_rank = mesh.size * stage + rank
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self.prepare(axes)

    def prepare(self, axes: Iterable[Sequence[str]]) -> None:
        """Create the groups along every given set of axes (collective; groups that exist are kept)."""
        wanted = {
            tuple(sorted(group)): ", ".join(self.mesh.sorted(names))
            for names in axes
            if self.mesh.product(names) > 1
            for group in self.mesh.groups(self.mesh.sorted(names))
        }
        first = self.world_rank - self.rank
        for ranks, names in wanted.items():
            if ranks in self._groups or (self.stages > 1 and self.rank not in ranks):
                continue
            if len(ranks) == dist.get_world_size():
                self._groups[ranks] = dist.group.WORLD  # type: ignore[assignment]
            else:
                own = self.stages > 1  # other stages make other groups
                self._groups[ranks] = new_group([first + r for r in ranks], own)
            if self.rank in ranks:
                recorder.know(self._groups[ranks], [first + r for r in ranks], names)

    def sliced_as(self, mesh: Mesh) -> Communicator:
        """This communicator, with its groups and counts, for a program whose slices are those of `mesh`: equal ones
        where this rank's share of a training batch is another."""
        if mesh == self.mesh:
            return self
        other = copy.copy(self)
        other.mesh = mesh
        return other

    def group(self, axes: Iterable[str]) -> dist.ProcessGroup:
        """The process group of this rank along `axes` (more than one rank)."""
        return self._groups[tuple(sorted(self.mesh.group(self.rank, self.mesh.sorted(axes))))]

    def own_group(self, axes: Iterable[str]) -> dist.ProcessGroup:
        """A new process group of this rank along `axes` (more than one rank), for calls that may run beside all others
        (collective)."""
        mine: dist.ProcessGroup | None = None
        for ranks in self.mesh.groups(self.mesh.sorted(axes)):
            group = new_group(sorted(ranks), False)
            if self.rank in ranks:
                mine = group
                recorder.know(group, ranks, ", ".join(self.mesh.sorted(axes)))
        assert mine is not None
        return mine

    def sum(self, tensor: Tensor, group: dist.ProcessGroup, later: bool = False) -> Awaited | None:
        """Add up `tensor` over `group`, in place; `later`: begin to, and return what to wait for."""
        return self._call(SUM, group, later, dist.all_reduce, tensor)

    def gather(self, into: Tensor, tensor: Tensor, group: dist.ProcessGroup, later: bool = False) -> Awaited | None:
        """Fill `into` with the `tensor`s of the ranks of `group`."""
        return self._call(GATHER, group, later, all_gather, _sendable(into), _sendable(tensor))

    def gather_later(self, into: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> Awaited | None:
        """Begin to fill `into` with the flat `tensor`s of the ranks of `group`, which makes no other calls."""
        if tensor.device.type != "cpu":
            return self.gather(into, tensor, group, later=True)
        work = recorder.call(group, GATHER, _gather_from_each, into, tensor, group)
        return Awaited(work, group, GATHER, recorder.cells[NUMBER])

    def scatter(self, into: Tensor, tensor: Tensor, group: dist.ProcessGroup, later: bool = False) -> Awaited | None:
        """Add up `tensor` over `group`, and leave this rank's part in `into`."""
        return self._call(SCATTER, group, later, reduce_scatter, into, tensor)

    def exchange(
        self,
        into: Tensor,
        tensor: Tensor,
        get: list[int] | None,
        give: list[int] | None,
        group: dist.ProcessGroup,
        later: bool = False,
    ) -> Awaited | None:
        """Give every rank of `group` its part of `tensor`, and get their parts; equal parts without sizes."""
        if tensor.dtype in BYTES_ALONE and get is not None and give is not None:
            size = tensor.element_size()
            get, give = [size * one for one in get], [size * one for one in give]
        return self._call(
            EXCHANGING, group, later, dist.all_to_all_single, _sendable(into), _sendable(tensor), get, give
        )

    def _call(
        self, kind: int, group: dist.ProcessGroup, later: bool, call: Callable[..., Any], *args: Any
    ) -> Awaited | None:
        work = recorder.call(group, kind, call, *args, group=group, async_op=later)
        return Awaited(work, group, kind, recorder.cells[NUMBER]) if later else None

    def count(self, kind: str, elements: int, tensor: Tensor) -> None:
        """Count a call that sends `elements` like those of `tensor`."""
        self.sent[kind] += elements * tensor.element_size()
        self.calls[kind] += 1

    def carried(self, steps: ReshardingPath, tensor: Tensor) -> Tensor:
        """A local tensor at the end of a resharding path (collective)."""
        return self.carrier([steps])([tensor])[0]

    def carrier(self, paths: Sequence[ReshardingPath]) -> Carrier:
        """A function that carries one local tensor along each path, with one call for all where they communicate.

        Args:
            paths: with the same collectives over the same axes.
        """
        launch = self.launcher(paths, later=False)
        return lambda tensors: launch(tensors)()

    def launcher(self, paths: Sequence[ReshardingPath], *, later: bool = True) -> Launcher:
        """What starts a `carrier`, and returns what waits for the results. The first collective runs meanwhile; what
        comes after it is done when the results are needed."""
        stages = list(zip(*paths, strict=True))
        first = next((i for i, steps in enumerate(stages) if steps[0].kind not in LOCAL), len(stages))
        before, after = ([self._stage(steps) for steps in part] for part in (stages[:first], stages[first + 1 :]))
        begin = self._begin(stages[first], later) if first < len(stages) else None

        def launch(tensors: Sequence[Tensor]) -> Landing:
            now = list(tensors)
            for stage in before:
                now = stage(now)
            if begin is None:
                return lambda: now
            finish = begin(now)
            if not after:
                return finish

            def land() -> list[Tensor]:
                results = finish()
                for stage in after:
                    results = stage(results)
                return results

            return land

        return launch

    def _stage(self, steps: Sequence[Step]) -> Carrier:
        if steps[0].kind in LOCAL:
            alone = [local(step, self.mesh, self.rank) for step in steps]
            return lambda tensors: [carry(tensor) for carry, tensor in zip(alone, tensors, strict=True)]
        begin = self._begin(steps, False)
        return lambda tensors: begin(tensors)()

    def _begin(self, steps: Sequence[Step], later: bool) -> Launcher:
        """Makes the one call of `steps`; what it returns waits for it, if it was made for `later`."""
        transfer, group = Transfer(steps, self.mesh, self.rank), self.group(steps[0].axes)
        kind, n, give, get = transfer.kind, transfer.size, transfer.give, transfer.get

        def begin(tensors: Sequence[Tensor]) -> Landing:
            packed, unpack = transfer.pack(tensors)
            if kind == ALL_REDUCE:
                received = packed
                work = self.sum(received, group, later)
            elif kind == ALL_GATHER:
                received = packed.new_empty((n * packed.shape[0], *packed.shape[1:]))
                work = self.gather(received, packed, group, later)
            elif kind == REDUCE_SCATTER:
                received = packed.new_empty((packed.shape[0] // n, *packed.shape[1:]))
                work = self.scatter(received, packed, group, later)
            else:
                received = torch.empty_like(packed) if get is None else packed.new_empty(sum(get))
                work = self.exchange(received, packed, get, give, group, later)
            self.count(kind, transfer.sent(tensors, packed), packed)

            def land(_: Tensor = packed) -> list[Tensor]:  # it lives until the call, which works on it, is done
                if work is not None:
                    work.wait()
                return unpack(received)

            return land

        return begin


def _sendable(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in BYTES_ALONE else tensor


class _Several:
    """Works that are waited for together."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _gather_from_each(into: Tensor, tensor: Tensor, group: Any) -> _Several:
    """An all-gather in which every rank sends its part to each: on gloo half the processor time of its own, which sends
    parts round a ring in small pieces (4 ranks, 3 MB: 1.5 ms for 2.8)."""
    rank, parts = group.rank(), into.view(group.size(), -1)
    works = []
    for distance in range(1, len(parts)):
        works.append(group.send([tensor], (rank + distance) % len(parts), 0))
        works.append(group.recv([parts[rank - distance]], (rank - distance) % len(parts), 0))
    parts[rank].copy_(tensor)
    return _Several(works)
