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

from strategies.engine import coalesced
from strategies.engine.slices import padded, resized
from strategies.layout import Block
from strategies.mesh import Mesh
from strategies.redistribution import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    EXCHANGE,
    LOCAL,
    PAD,
    REDUCE_SCATTER,
    SLICE,
    Chain,
    Step,
    receives,
    sends,
    size_of,
)

# torch 2.13 renamed these two; the old names warn there
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Carrier = Callable[[Tensor], Tensor]
CarrierOfAll = Callable[[Sequence[Tensor]], list[Tensor]]


class Communicator:
    """The collectives of `rank` on `mesh`. `sent` counts bytes and `calls` counts calls, by collective.

    Constructing it is collective: every rank names the same sets of axes, in the same order. The default process group
    must exist if the mesh has more than one rank. In a pipeline the mesh is that of one of `stages`; the ranks of stage
    0 come first, and `world_rank` is this rank's number among all.
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
        wanted = dict.fromkeys(
            tuple(sorted(group))
            for names in axes
            if self.mesh.product(names) > 1
            for group in self.mesh.groups(self.mesh.sorted(names))
        )
        first = self.world_rank - self.rank
        for ranks in wanted:
            if ranks in self._groups or (self.stages > 1 and self.rank not in ranks):
                continue
            if len(ranks) == dist.get_world_size():
                self._groups[ranks] = dist.group.WORLD  # type: ignore[assignment]
            else:
                own = self.stages > 1  # other stages make other groups
                self._groups[ranks] = dist.new_group([first + r for r in ranks], use_local_synchronization=own)

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
        assert mine is not None
        return mine

    def begin_sum(self, tensor: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
        """Begin to add up `tensor` over `group`, in place."""
        return dist.all_reduce(tensor, group=group, async_op=True)

    def sum(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Add up `tensor` over `group`, in place."""
        dist.all_reduce(tensor, group=group)

    def gather(self, into: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Fill `into` with the `tensor`s of the ranks of `group`."""
        all_gather(into, tensor, group=group)

    def scatter(self, into: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Add up `tensor` over `group`, and leave this rank's part in `into`."""
        reduce_scatter(into, tensor, group=group)

    def exchange(
        self, into: Tensor, tensor: Tensor, get: list[int] | None, give: list[int] | None, group: dist.ProcessGroup
    ) -> None:
        """Give every rank of `group` its part of `tensor`, and get their parts; equal parts without sizes."""
        dist.all_to_all_single(into, tensor, get, give, group=group)

    def count(self, kind: str, elements: int, tensor: Tensor) -> None:
        self.sent[kind] += elements * tensor.element_size()
        self.calls[kind] += 1

    def carrier(self, steps: Chain) -> Carrier:
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

    def carrier_of_all(self, chains: Sequence[Chain]) -> CarrierOfAll:
        """A function that carries one local tensor along each chain, with one call for all where they communicate. The
        chains have the same collectives over the same axes."""
        stages = [self._stage(steps) for steps in zip(*chains, strict=True)]

        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            now = list(tensors)
            for stage in stages:
                now = stage(now)
            return now

        return run

    def _stage(self, steps: Sequence[Step]) -> CarrierOfAll:
        kind, mesh, rank = steps[0].kind, self.mesh, self.rank
        if kind in LOCAL:
            alone = [self._step(step) for step in steps]
            return lambda tensors: [carry(tensor) for carry, tensor in zip(alone, tensors, strict=True)]
        group, n = self.group(steps[0].axes), mesh.product(steps[0].axes)

        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            flat = coalesced.packed(steps, tensors, mesh, rank)
            if kind == ALL_REDUCE:
                result = flat
                self.sum(result, group)
            elif kind == ALL_GATHER:
                result = flat.new_empty(n * flat.numel())
                self.gather(result, flat, group)
            else:
                result = flat.new_empty(flat.numel() // n)
                self.scatter(result, flat, group)
            self.count(kind, coalesced.elements(steps, tensors, mesh), flat)
            return coalesced.unpacked(steps, result, [tensor.shape for tensor in tensors], mesh, rank)

        return run

    def _step(self, step: Step) -> Carrier:
        mesh, rank = self.mesh, self.rank
        n, index = mesh.product(step.axes), mesh.index(rank, step.axes)
        length = step.cut_length(mesh)
        if step.kind == SLICE:
            return lambda tensor: resized(tensor, step.dim, length).chunk(n, step.dim)[index].contiguous()
        end = step.joined_length(mesh, step.source if step.kind == ALL_TO_ALL else step.dim)
        if step.kind == PAD:
            return lambda tensor: resized(padded(tensor, step.dim, n, index), step.dim, end)
        assert step.kind not in LOCAL
        group = self.group(step.axes)
        order = mesh.group(rank, step.axes)  # the ranks in the order of the slices; process groups are sorted
        places = [sorted(order).index(peer) for peer in order]
        if step.kind == ALL_REDUCE:
            return lambda tensor: self._all_reduce(tensor, n, group)
        if step.kind == ALL_GATHER:
            return lambda tensor: resized(self._all_gather(tensor, step.dim, n, places, group), step.dim, end)
        if step.kind == REDUCE_SCATTER:
            return lambda tensor: self._reduce_scatter(resized(tensor, step.dim, length), step.dim, n, places, group)
        if step.kind == ALL_TO_ALL:
            return lambda tensor: resized(
                self._all_to_all(resized(tensor, step.dim, length), step.source, step.dim, n, places, group),
                step.source,
                end,
            )
        assert step.kind == EXCHANGE
        return self._exchange(step, group, sorted(order))

    def _all_reduce(self, tensor: Tensor, n: int, group: dist.ProcessGroup) -> Tensor:
        result = tensor.clone(memory_format=torch.contiguous_format)
        self.sum(result, group)
        self.count(ALL_REDUCE, -(-2 * (n - 1) * tensor.numel() // n), tensor)
        return result

    def _all_gather(self, tensor: Tensor, dim: int, n: int, places: list[int], group: dist.ProcessGroup) -> Tensor:
        gathered = tensor.new_empty((n * tensor.shape[0], *tensor.shape[1:]))
        self.gather(gathered, tensor.contiguous(), group)
        self.count(ALL_GATHER, tensor.numel() * (n - 1), tensor)
        if dim == 0 and places == sorted(places):
            return gathered
        pieces = gathered.chunk(n)
        return torch.cat([pieces[place] for place in places], dim)

    def _reduce_scatter(self, tensor: Tensor, dim: int, n: int, places: list[int], group: dist.ProcessGroup) -> Tensor:
        if dim == 0 and places == sorted(places):  # rows are in order as they lie
            packed = tensor.contiguous()
        else:
            packed = torch.cat(_by_place(tensor.chunk(n, dim), places))
        result = tensor.new_empty(packed.shape[0] // n, *packed.shape[1:])
        self.scatter(result, packed, group)
        self.count(REDUCE_SCATTER, tensor.numel() * (n - 1) // n, tensor)
        return result

    def _all_to_all(
        self, tensor: Tensor, source: int, dim: int, n: int, places: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        packed = torch.stack(_by_place(tensor.chunk(n, dim), places))
        received = torch.empty_like(packed)
        self.exchange(received, packed, None, None, group)
        self.count(ALL_TO_ALL, tensor.numel() * (n - 1) // n, tensor)
        return torch.cat([received[place] for place in places], source)

    def _exchange(self, step: Step, group: dist.ProcessGroup, peers: list[int]) -> Carrier:
        mesh, rank = self.mesh, self.rank
        held = step.before.block(step.shape, mesh, rank)
        wanted = step.after.block(step.shape, mesh, rank)
        outgoing, incoming = dict(sends(step, mesh, rank)), dict(receives(step, mesh, rank))
        take = {peer: _within(block, held) for peer, block in outgoing.items()}
        put = {peer: _within(block, wanted) for peer, block in incoming.items()}
        give = [size_of(outgoing[peer]) if peer in outgoing and peer != rank else 0 for peer in peers]
        get = [size_of(incoming[peer]) if peer in incoming and peer != rank else 0 for peer in peers]
        shape = step.after.local_shape(step.shape, mesh)
        full = shape == tuple(stop - start for start, stop in wanted)

        def run(tensor: Tensor) -> Tensor:
            parts = [tensor[take[peer]].reshape(-1) for peer, size in zip(peers, give, strict=True) if size]
            packed = torch.cat(parts) if parts else tensor.new_empty(0)
            received = tensor.new_empty(sum(get))
            self.exchange(received, packed, get, give, group)
            self.count(EXCHANGE, sum(give), tensor)
            result = tensor.new_empty(shape) if full else tensor.new_zeros(shape)
            if rank in put:
                result[put[rank]] = tensor[take[rank]]
            for peer, piece in zip(peers, torch.split(received, get), strict=True):
                if piece.numel():
                    result[put[peer]] = piece.view(result[put[peer]].shape)
            return result

        return run


def _by_place(pieces: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    """Pieces in slice order -> pieces in the order of the process group's ranks."""
    ordered = list(pieces)
    for piece, place in zip(pieces, places, strict=True):
        ordered[place] = piece
    return ordered


def _within(block: Block, held: Block) -> tuple[slice, ...]:
    return tuple(slice(start - base, stop - base) for (start, stop), (base, _) in zip(block, held, strict=True))
