"""Collectives of one rank: process groups by mesh axes, and the steps of a redistribution carried out on a local
tensor.

A process group is created once per distinct set of ranks. Every byte sent is counted by collective, in the same way in
which plans predict it. One code path serves gloo and nccl.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.core.layout import Block
from strategies.core.mesh import Mesh
from strategies.core.steps import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    EXCHANGE,
    LOCAL,
    PAD,
    REDUCE_SCATTER,
    SLICE,
    ReshardingPath,
    Step,
    receives,
    sends,
    size_of,
)
from strategies.runtime import coalesced
from strategies.runtime.flight_recorder import EXCHANGE as EXCHANGING
from strategies.runtime.flight_recorder import GATHER, SCATTER, SUM, Awaited, recorder
from strategies.runtime.slices import padded, resized

# torch 2.13 renamed these two; the old names warn there
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Carrier = Callable[[Tensor], Tensor]
CarrierOfAll = Callable[[Sequence[Tensor]], list[Tensor]]
Landing = Callable[[], list[Tensor]]
"""Waits for the collectives in flight, once, and returns the results."""
Launcher = Callable[[Sequence[Tensor]], Landing]
_Begin = Callable[[Tensor], Callable[[], Tensor]]
_BeginAll = Callable[[Sequence[Tensor]], Landing]


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
                self._groups[ranks] = dist.new_group([first + r for r in ranks], use_local_synchronization=own)
            if self.rank in ranks:
                recorder.know(self._groups[ranks], [first + r for r in ranks], names)

    def group(self, axes: Iterable[str]) -> dist.ProcessGroup:
        """The process group of this rank along `axes` (more than one rank)."""
        return self._groups[tuple(sorted(self.mesh.group(self.rank, self.mesh.sorted(axes))))]

    def own_group(self, axes: Iterable[str]) -> dist.ProcessGroup:
        """A new process group of this rank along `axes` (more than one rank), for calls that may run beside all others
        (collective)."""
        mine: dist.ProcessGroup | None = None
        for ranks in self.mesh.groups(self.mesh.sorted(axes)):
            group = dist.new_group(sorted(ranks))
            if self.rank in ranks:
                mine = group
                recorder.know(group, ranks, ", ".join(self.mesh.sorted(axes)))
        assert mine is not None
        return mine

    def sum(self, tensor: Tensor, group: dist.ProcessGroup, later: bool = False) -> Awaited | None:
        """Add up `tensor` over `group`, in place; `later`: begin to, and return what to wait for."""
        number = recorder.enter(group, SUM)
        work = dist.all_reduce(tensor, group=group, async_op=later)
        recorder.leave()
        return Awaited(work, group, SUM, number) if later else None

    def gather(self, into: Tensor, tensor: Tensor, group: dist.ProcessGroup, later: bool = False) -> Awaited | None:
        """Fill `into` with the `tensor`s of the ranks of `group`."""
        number = recorder.enter(group, GATHER)
        work = all_gather(into, tensor, group=group, async_op=later)
        recorder.leave()
        return Awaited(work, group, GATHER, number) if later else None

    def scatter(self, into: Tensor, tensor: Tensor, group: dist.ProcessGroup, later: bool = False) -> Awaited | None:
        """Add up `tensor` over `group`, and leave this rank's part in `into`."""
        number = recorder.enter(group, SCATTER)
        work = reduce_scatter(into, tensor, group=group, async_op=later)
        recorder.leave()
        return Awaited(work, group, SCATTER, number) if later else None

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
        number = recorder.enter(group, EXCHANGING)
        work = dist.all_to_all_single(into, tensor, get, give, group=group, async_op=later)
        recorder.leave()
        return Awaited(work, group, EXCHANGING, number) if later else None

    def count(self, kind: str, elements: int, tensor: Tensor) -> None:
        self.sent[kind] += elements * tensor.element_size()
        self.calls[kind] += 1

    def carrier(self, steps: ReshardingPath) -> Carrier:
        """A function that carries a local tensor along `steps`."""
        parts = [self._step(step) for step in steps]
        if not parts:
            return lambda tensor: tensor
        if len(parts) == 1:
            return parts[0]

        def run(tensor: Tensor) -> Tensor:
            for part in parts:
                tensor = part(tensor)
            return tensor

        return run

    def carrier_of_all(self, chains: Sequence[ReshardingPath]) -> CarrierOfAll:
        """A function that carries one local tensor along each chain, with one call for all where they communicate. The
        chains have the same collectives over the same axes."""
        stages = [self._stage(steps) for steps in zip(*chains, strict=True)]

        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            now = list(tensors)
            for stage in stages:
                now = stage(now)
            return now

        return run

    def launcher(self, chains: Sequence[ReshardingPath]) -> Launcher:
        """What starts to carry one local tensor along each chain, and returns what waits for the results. The first
        collective runs meanwhile; what comes after it is done when the results are needed."""
        stages = list(zip(*chains, strict=True))
        sent = next((i for i, steps in enumerate(stages) if steps[0].kind not in LOCAL), len(stages))
        before, after = ([self._stage(steps) for steps in part] for part in (stages[:sent], stages[sent + 1 :]))
        begin = self._begin_all(stages[sent]) if sent < len(stages) else None

        def launch(tensors: Sequence[Tensor]) -> Landing:
            now = list(tensors)
            for stage in before:
                now = stage(now)
            if begin is None:
                return lambda: now
            finish = begin(now)

            def land() -> list[Tensor]:
                results = finish()
                for stage in after:
                    results = stage(results)
                return results

            return land

        return launch

    def _begin_all(self, steps: Sequence[Step]) -> _BeginAll:
        if len(steps) > 1:
            return self._begin_joined(steps, True)
        begin = self._begin(steps[0], True)

        def run(tensors: Sequence[Tensor]) -> Landing:
            finish = begin(tensors[0])
            return lambda: [finish()]

        return run

    def _stage(self, steps: Sequence[Step]) -> CarrierOfAll:
        if steps[0].kind in LOCAL or len(steps) == 1:
            alone = [self._step(step) for step in steps]
            return lambda tensors: [carry(tensor) for carry, tensor in zip(alone, tensors, strict=True)]
        begin = self._begin_joined(steps, False)
        return lambda tensors: begin(tensors)()

    def _begin_joined(self, steps: Sequence[Step], later: bool) -> _BeginAll:
        kind, mesh, rank = steps[0].kind, self.mesh, self.rank
        group, n = self.group(steps[0].axes), mesh.product(steps[0].axes)

        def run(tensors: Sequence[Tensor]) -> Landing:
            flat = coalesced.packed(steps, tensors, mesh, rank)
            if kind == ALL_REDUCE:
                result = flat
                work = self.sum(result, group, later)
            elif kind == ALL_GATHER:
                result = flat.new_empty(n * flat.numel())
                work = self.gather(result, flat, group, later)
            else:
                result = flat.new_empty(flat.numel() // n)
                work = self.scatter(result, flat, group, later)
            self.count(kind, coalesced.elements(steps, tensors, mesh), flat)
            shapes = [tensor.shape for tensor in tensors]

            def finish() -> list[Tensor]:
                _wait(work, flat)
                return coalesced.unpacked(steps, result, shapes, mesh, rank)

            return finish

        return run

    def _step(self, step: Step) -> Carrier:
        if step.kind in LOCAL:
            return self._local(step)
        begin = self._begin(step, False)
        return lambda tensor: begin(tensor)()

    def _local(self, step: Step) -> Carrier:
        mesh, rank = self.mesh, self.rank
        n, index = mesh.product(step.axes), mesh.index(rank, step.axes)
        length = step.cut_length(mesh)
        if step.kind == SLICE:

            def own(tensor: Tensor) -> Tensor:
                piece = resized(tensor, step.dim, length).chunk(n, step.dim)[index]
                # Not only contiguous(): where an operator returns its argument itself in the forward of an
                # autograd.Function, torch 2.11 compiles a backward whose gradient is zero.
                return piece if piece.is_contiguous() else piece.contiguous()

            return own
        assert step.kind == PAD
        end = step.joined_length(mesh, step.dim)
        return lambda tensor: resized(padded(tensor, step.dim, n, index), step.dim, end)

    def _begin(self, step: Step, later: bool) -> _Begin:
        """Makes the call of a step; what it returns waits for it, if it was made for `later`, and gives the result."""
        mesh, rank = self.mesh, self.rank
        n, length = mesh.product(step.axes), step.cut_length(mesh)
        end = step.joined_length(mesh, step.source if step.kind == ALL_TO_ALL else step.dim)
        group = self.group(step.axes)
        order = mesh.group(rank, step.axes)  # the ranks in the order of the slices; process groups are sorted
        places = [sorted(order).index(peer) for peer in order]
        if step.kind == EXCHANGE:
            return self._exchange(step, group, sorted(order), later)

        def all_reduce(tensor: Tensor) -> Callable[[], Tensor]:
            result = tensor.clone(memory_format=torch.contiguous_format)
            work = self.sum(result, group, later)
            self.count(ALL_REDUCE, -(-2 * (n - 1) * tensor.numel() // n), tensor)
            return lambda: _wait(work, result)

        def gather(tensor: Tensor) -> Callable[[], Tensor]:
            given = tensor.contiguous()
            gathered = tensor.new_empty((n * tensor.shape[0], *tensor.shape[1:]))
            work = self.gather(gathered, given, group, later)
            self.count(ALL_GATHER, tensor.numel() * (n - 1), tensor)

            def finish() -> Tensor:
                _wait(work, given)
                if step.dim == 0 and places == sorted(places):
                    return resized(gathered, step.dim, end)
                pieces = gathered.chunk(n)
                return resized(torch.cat([pieces[place] for place in places], step.dim), step.dim, end)

            return finish

        def scatter(tensor: Tensor) -> Callable[[], Tensor]:
            tensor = resized(tensor, step.dim, length)
            if step.dim == 0 and places == sorted(places):  # rows are in order
                packed = tensor.contiguous()
            else:
                packed = torch.cat(_by_place(tensor.chunk(n, step.dim), places))
            result = tensor.new_empty(packed.shape[0] // n, *packed.shape[1:])
            work = self.scatter(result, packed, group, later)
            self.count(REDUCE_SCATTER, tensor.numel() * (n - 1) // n, tensor)

            def finish() -> Tensor:
                _wait(work, packed)
                return result

            return finish

        def all_to_all(tensor: Tensor) -> Callable[[], Tensor]:
            tensor = resized(tensor, step.dim, length)
            packed = torch.stack(_by_place(tensor.chunk(n, step.dim), places))
            received = torch.empty_like(packed)
            work = self.exchange(received, packed, None, None, group, later)
            self.count(ALL_TO_ALL, tensor.numel() * (n - 1) // n, tensor)

            def finish() -> Tensor:
                _wait(work, packed)
                return resized(torch.cat([received[place] for place in places], step.source), step.source, end)

            return finish

        by_kind = {ALL_REDUCE: all_reduce, ALL_GATHER: gather, REDUCE_SCATTER: scatter, ALL_TO_ALL: all_to_all}
        return by_kind[step.kind]

    def _exchange(self, step: Step, group: dist.ProcessGroup, peers: list[int], later: bool) -> _Begin:
        mesh, rank = self.mesh, self.rank
        local_block = step.before.block(step.shape, mesh, rank)
        wanted = step.after.block(step.shape, mesh, rank)
        outgoing, incoming = dict(sends(step, mesh, rank)), dict(receives(step, mesh, rank))
        take = {peer: _within(block, local_block) for peer, block in outgoing.items()}
        put = {peer: _within(block, wanted) for peer, block in incoming.items()}
        give = [size_of(outgoing[peer]) if peer in outgoing and peer != rank else 0 for peer in peers]
        get = [size_of(incoming[peer]) if peer in incoming and peer != rank else 0 for peer in peers]
        shape = step.after.local_shape(step.shape, mesh)
        full = shape == tuple(stop - start for start, stop in wanted)

        def run(tensor: Tensor) -> Callable[[], Tensor]:
            parts = [tensor[take[peer]].reshape(-1) for peer, size in zip(peers, give, strict=True) if size]
            packed = torch.cat(parts) if parts else tensor.new_empty(0)
            received = tensor.new_empty(sum(get))
            work = self.exchange(received, packed, get, give, group, later)
            self.count(EXCHANGE, sum(give), tensor)

            def finish() -> Tensor:
                _wait(work, packed)
                result = tensor.new_empty(shape) if full else tensor.new_zeros(shape)
                if rank in put:
                    result[put[rank]] = tensor[take[rank]]
                for peer, piece in zip(peers, torch.split(received, get), strict=True):
                    if piece.numel():
                        result[put[peer]] = piece.view(result[put[peer]].shape)
                return result

            return finish

        return run


def _wait(work: Awaited | None, buffer: Tensor) -> Tensor:
    """Wait for a call that was made for later; until then `buffer`, on which it works, must live."""
    if work is not None:
        work.wait()
    return buffer


def _by_place(pieces: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    """Pieces in slice order -> pieces in the order of the process group's ranks."""
    ordered = list(pieces)
    for piece, place in zip(pieces, places, strict=True):
        ordered[place] = piece
    return ordered


def _within(block: Block, local_block: Block) -> tuple[slice, ...]:
    return tuple(slice(start - base, stop - base) for (start, stop), (base, _) in zip(block, local_block, strict=True))
