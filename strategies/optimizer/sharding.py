"""How ZeRO without DeepSpeed divides parameters: buckets of neighbours, each one flat tensor cut into equal parts.

A bucket holds parameters of one block of the model, as lists of modules number them (`layers.3`), or of a few small
ones, in the order in which forward first uses them: one all-gather makes all of them complete. Within a bucket they
are ordered by the optimizer's groups, so a rank's part of a group is one slice of memory. Parameters that a step may
leave without a gradient are updated by themselves. At stages 1 and 2, where parameters stay complete, frozen ones have
buckets of their own, which nothing gathers after an update; at stage 3 as many buckets stay complete as are wanted, the
small ones first. Invariant: every element of a rank's slices of parameters is in the part of exactly one of its
replicas, whatever the size of the buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from strategies.core.graph import ITEM_BYTES
from strategies.core.program import Program
from strategies.core.steps import ALL_GATHER, REDUCE_SCATTER
from strategies.optimizer.buckets import BUCKET_BYTES
from strategies.optimizer.updates import local_elements
from strategies.optimizer.zero.partition import Range
from strategies.optimizer.zero.traffic import Calls
from strategies.runtime.module_tree import units

SMALLEST, LARGEST = 2**20, 64 * 2**20
"""Bytes between which a bucket of stage 3 is chosen, unless one parameter is larger."""
PARTS = 4
"""How many buckets there are at least, if the smallest size allows."""
ALIGNED = 16
"""Elements at whose multiples a parameter begins: kernels read aligned memory faster."""
FROZEN = -1
"""The group of parameters that are not updated."""
Unit = tuple[int, str]
"""Parameters updated as one tensor of a bucket: all of a group but optional ones, or one of these, by its name."""


@dataclass(frozen=True)
class Member:
    """A parameter in a bucket: `elements` of a rank's slice from `first` on; `group` of the optimizer, or FROZEN;
    `optional`: a step may leave it without a gradient."""

    name: str
    elements: int
    first: int
    group: int
    optional: bool = False

    @property
    def unit(self) -> Unit:
        """The parameters updated together with it."""
        return self.group, self.name if self.optional else ""


@dataclass(frozen=True)
class ShardedBucket:
    """Parameters that the ranks along `axes` hold in equal parts; `part` is the number of elements of each. Those that
    `stay` are complete between their uses, and gathered after an update."""

    axes: tuple[str, ...]
    ranks: int
    dtype: str
    members: tuple[Member, ...]
    part: int
    stay: bool = False

    @property
    def elements(self) -> int:
        return self.ranks * self.part

    @property
    def trained(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.group != FROZEN)

    def ranges(self, index: int) -> Iterator[Range]:
        """The ranges of members in the part of the `index`-th replica; one replica has those of no elements."""
        start, stop = index * self.part, (index + 1) * self.part
        for number, member in enumerate(self.members):
            first, last = max(member.first, start), min(member.first + member.elements, stop)
            here = start <= member.first and (member.first < stop or index == self.ranks - 1)
            if first < last or (here and not member.elements):
                yield Range(number, first - member.first, first - start, last - first)

    def of_units(self, index: int) -> dict[Unit, list[Range]]:
        """The ranges of everything that is updated together; their positions follow each other. A rank counts the steps
        of what it has no part of, too: numbers that an optimizer keeps for a group follow from its options."""
        found = groupby(self.ranges(index), key=lambda one: self.members[one.member].unit)
        nothing: dict[Unit, list[Range]] = {member.unit: [] for member in self.trained}
        return nothing | {unit: list(ranges) for unit, ranges in found}


def sharded_buckets(
    program: Program, groups: Sequence[Sequence[str]], limit: int | None = None, stage: int = 3, complete: int = 0
) -> tuple[ShardedBucket, ...]:
    """The buckets of a program in the order in which forward first needs them.

    Args:
        program: lowered for a sharded optimizer.
        groups: the names in each of the optimizer's groups.
        limit: bytes of a bucket, at most, unless it is one parameter; None: see `usual_limit`.
        stage: of ZeRO, 1 to 3.
        complete: elements in the buckets that stay complete at stage 3, at most; see `staying`.
    """
    key = "buckets", tuple(map(tuple, groups)), limit, stage == 3
    found = program.once(key, lambda: _buckets(program, groups, limit, stage))
    if not complete or stage < 3:
        return found
    stay = {number for number, so_far in staying(found) if so_far <= complete}
    return tuple(replace(bucket, stay=number in stay) for number, bucket in enumerate(found))


def _buckets(
    program: Program, groups: Sequence[Sequence[str]], limit: int | None, stage: int
) -> tuple[ShardedBucket, ...]:
    """The buckets, none of which stays complete at stage 3."""
    sources = {source.name: source for source in program.parameters}
    elements = {name: local_elements(program, source) for name, source in sources.items()}
    size = {name: elements[name] * source.spec.item_bytes for name, source in sources.items()}
    limit = bucket_limit(program, stage) if limit is None else limit
    trainable = frozenset(program.trainable_names)
    group_of = {name: number for number, names in enumerate(groups) for name in names if name in trainable}
    found = []
    for names in _neighbours(program, list(sources), size, limit):
        by_axes: dict[tuple[tuple[str, ...], str, bool], list[str]] = {}
        for name in names:
            axes = program.layouts[sources[name].id].replica_axes(program.mesh)
            axes = axes if program.mesh.product(axes) > 1 else ()
            apart = stage < 3 and name not in group_of
            by_axes.setdefault((axes, sources[name].spec.dtype, apart), []).append(name)
        for (axes, dtype, _), same in by_axes.items():
            ranks, position, members = program.mesh.product(axes), 0, []
            for name in sorted(same, key=lambda one: (group_of.get(one, len(groups)), one in program.optional_names)):
                optional = name in program.optional_names
                members.append(Member(name, elements[name], position, group_of.get(name, FROZEN), optional))
                position += -(-elements[name] // ALIGNED) * ALIGNED
            part = -(-position // (ranks * ALIGNED)) * ALIGNED
            found.append(ShardedBucket(axes, ranks, dtype, tuple(members), part, stage < 3 and ranks > 1))
    return tuple(found)


def staying(buckets: Sequence[ShardedBucket]) -> Iterator[tuple[int, int]]:
    """The buckets that are gathered, in the order in which they may stay complete, with the elements of all up to each:
    small ones first, and at last the one with which backward begins, which is gathered but once for a micro-batch."""
    last, total = len(buckets) - 1, 0
    gathered = [number for number, bucket in enumerate(buckets) if bucket.ranks > 1]
    for number in sorted(gathered, key=lambda one: (one == last, buckets[one].elements)):
        total += buckets[number].elements
        yield number, total


def bucket_limit(program: Program, stage: int) -> int:
    """Bytes of a bucket of a program at most, where none are configured."""
    sources = program.parameters
    return usual_limit(sum(local_elements(program, source) * source.spec.item_bytes for source in sources), stage)


def usual_limit(size: int, stage: int) -> int:
    """Bytes of a bucket at most, of parameters of `size` bytes: a quarter of all at stage 3, which gathers one while
    another computes; those of stage 0 elsewhere."""
    return min(max(size // PARTS, SMALLEST), LARGEST) if stage == 3 else BUCKET_BYTES


def calls(
    program: Program,
    groups: Sequence[Sequence[str]],
    accumulate: int = 1,
    limit: int | None = None,
    stage: int = 3,
    complete: int = 0,
) -> tuple[Calls, ...]:
    """What one rank calls per optimizer step, at most; see `sharded_buckets`. Stage 3 gathers for every micro-batch,
    forward and backward, but for the last bucket, which stays for backward; what stays complete is gathered where it
    was updated."""
    found, buckets = [], sharded_buckets(program, groups, limit, stage, complete)
    for number, bucket in enumerate(buckets):
        if bucket.ranks == 1:
            continue
        sent = (bucket.ranks - 1) * bucket.part
        if not bucket.stay:
            gathers = accumulate * (1 if number == len(buckets) - 1 else 2)
            found.append(Calls(ALL_GATHER, bucket.axes, gathers * sent * ITEM_BYTES[bucket.dtype], gathers))
        if bucket.trained:
            times = accumulate if stage > 1 else 1
            size = times * sent * ITEM_BYTES[gradient_dtype(bucket)]
            found.append(Calls(REDUCE_SCATTER, bucket.axes, size, times))
    return (*found, *after_update(buckets))


def after_update(buckets: Sequence[ShardedBucket]) -> Iterator[Calls]:
    """What one rank calls per optimizer step to complete what stays complete."""
    for bucket in buckets:
        if bucket.stay and bucket.trained:
            sent = (bucket.ranks - 1) * bucket.part
            yield Calls(ALL_GATHER, bucket.axes, sent * ITEM_BYTES[bucket.dtype], 1)


def gradient_dtype(bucket: ShardedBucket) -> str:
    """The dtype in which gradients are added, and in which the optimizer works."""
    return bucket.dtype if ITEM_BYTES[bucket.dtype] >= ITEM_BYTES["float32"] else "float32"


def _neighbours(program: Program, names: Sequence[str], size: dict[str, int], limit: int) -> Iterator[list[str]]:
    """The parameters in the order of their first use, cut between blocks where that keeps `limit`."""
    used = dict.fromkeys(name for unit in units(program) for name in unit.parameters if name in size)
    ordered = list(used | dict.fromkeys(names))
    bucket: list[str] = []
    for _, block in groupby(ordered, key=_block):
        block_names = list(block)
        if bucket and sum(size[name] for name in bucket + block_names) > limit:
            yield bucket
            bucket = []
        for name in block_names:
            if bucket and sum(map(size.__getitem__, bucket)) + size[name] > limit:
                yield bucket
                bucket = []
            bucket.append(name)
    if bucket:
        yield bucket


def _block(name: str) -> str:
    """The numbered module around a parameter, or else the module that owns it."""
    words = name.split(".")[:-1]
    numbered = next((place for place, word in enumerate(words) if word.isdigit()), len(words))
    return ".".join(words[: numbered + 1])
