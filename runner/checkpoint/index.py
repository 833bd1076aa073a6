"""Where every tensor of a checkpoint is stored: its parts by file, byte and block. Plain data, JSON in and out.

Invariant: the parts of a tensor in `Index` are disjoint, also where a checkpoint stores some of them several times: one
of them is chosen from the existing files.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from strategies.core.bounded_files import is_count
from strategies.core.layout import Block
from strategies.runtime.tensor_files import SIZES


@dataclass(frozen=True)
class Part:
    """The part `block` of a tensor: contiguous, row by row, from byte `offset` of `file`."""

    file: str
    offset: int
    block: Block

    @property
    def elements(self) -> int:
        return volume(self.block)


@dataclass(frozen=True)
class Entry:
    """A tensor: its global shape, torch's name of its dtype, and its parts."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


Index = Mapping[str, Entry]
"""Tensors by key."""

MOST_CUT = 10
"""Dims along which a tensor may be cut."""


def volume(block: Block) -> int:
    """How many elements a block has."""
    return math.prod(stop - start for start, stop in block)


def place(key: str, block: Block) -> str:
    """The name of a part: `model/dense1.weight[0:256,0:784]`."""
    return f"{key}[{','.join(f'{start}:{stop}' for start, stop in block)}]"


def joined(indices: Iterable[Index]) -> dict[str, Entry]:
    """The parts that several ranks stored. Raises ValueError where they disagree about a tensor."""
    found: dict[str, Entry] = {}
    for index in indices:
        for key, entry in index.items():
            before = found.get(key)
            if before is not None and (before.shape, before.dtype) != (entry.shape, entry.dtype):
                raise ValueError(f"{key} is stored as {before.dtype}{before.shape} and as {entry.dtype}{entry.shape}")
            found[key] = Entry(entry.shape, entry.dtype, (*(before.parts if before else ()), *entry.parts))
    return found


def chosen(index: Index, lost: Collection[str] = ()) -> dict[str, Entry]:
    """`index` without parts in the files `lost` and with every element once.

    Raises ValueError, naming a tensor, where an element is in no other file, or where blocks overlap.
    """
    found = {}
    for key, entry in index.items():
        kept: dict[Block, Part] = {}
        for part in entry.parts:
            if part.file not in lost:
                kept.setdefault(part.block, part)
        if not partitions(kept, entry.shape):
            if sum(map(volume, kept)) >= entry.elements:
                raise ValueError(f"the blocks of {key} overlap")
            gone = sorted({part.file for part in entry.parts if part.file in lost})
            where = f"was in {', '.join(gone)}, which is lost or damaged" if gone else "was never stored"
            raise ValueError(f"a part of {key} {where}, and is in no other file")
        found[key] = Entry(entry.shape, entry.dtype, tuple(kept.values()))
    return found


def partitions(blocks: Collection[Block], shape: tuple[int, ...]) -> bool:
    """Whether `blocks` within a tensor of `shape` hold every element exactly once.

    A sum of indicator functions of boxes follows from its jumps at their corners, so it is that of the tensor exactly
    where the jumps are. Dims that no block cuts are left out.
    """
    if 0 in shape:
        return True
    cut = [dim for dim, size in enumerate(shape) if any(block[dim] != (0, size) for block in blocks)]
    if not cut:
        return len(blocks) == 1
    if len(cut) > MOST_CUT:
        raise ValueError(f"a tensor is cut along {len(cut)} dims; at most {MOST_CUT} are read")
    jumps: Counter[tuple[int, ...]] = Counter()
    whole = tuple((0, size) for size in shape)
    for sign, block in ((-1, whole), *((1, block) for block in blocks)):
        for corner in product(*(((block[dim][0], 1), (block[dim][1], -1)) for dim in cut)):
            jumps[tuple(at for at, _ in corner)] += sign * math.prod(jump for _, jump in corner)
    return not any(jumps.values())


def with_copies(index: Index, copies: Mapping[str, str]) -> dict[str, Entry]:
    """`index` with the parts in copies of files too: `copies` gives the file of which each is a copy."""
    of: dict[str, list[str]] = {}
    for copy, file in copies.items():
        of.setdefault(file, []).append(copy)
    found = {}
    for key, entry in index.items():
        more = tuple(replace(part, file=copy) for part in entry.parts for copy in of.get(part.file, ()))
        found[key] = replace(entry, parts=(*entry.parts, *more))
    return found


def to_json(index: Index) -> dict[str, Any]:
    """{"files": [...], "tensors": {key: [shape, dtype, [[number of the file, byte, starts, stops], ...]]}}."""
    files = list(dict.fromkeys(part.file for entry in index.values() for part in entry.parts))
    number = {file: position for position, file in enumerate(files)}
    return {
        "files": files,
        "tensors": {
            key: [
                entry.shape,
                entry.dtype,
                [
                    [
                        number[part.file],
                        part.offset,
                        [start for start, _ in part.block],
                        [stop for _, stop in part.block],
                    ]
                    for part in entry.parts
                ],
            ]
            for key, entry in index.items()
        },
    }


def from_json(content: Mapping[str, Any]) -> dict[str, Entry]:
    """The inverse of `to_json`. Raises IndexError, KeyError, TypeError and ValueError for anything else."""
    files = content["files"]
    found = {}
    for key, (shape, dtype, parts) in content["tensors"].items():
        if not all(map(is_count, shape)) or math.prod(max(size, 1) for size in shape) >= 2**63:
            raise ValueError(f"{key} cannot have the shape {shape}")
        if dtype not in SIZES:
            raise ValueError(f"{key} has the unknown dtype {dtype!r}")
        read = []
        for number, offset, starts, stops in parts:
            block = tuple(zip(starts, stops, strict=True))
            if not is_count(number) or not is_count(offset):
                raise ValueError(f"a part of {key} has no file or no offset")
            if not all(
                is_count(start) and is_count(stop) and start <= stop <= size
                for (start, stop), size in zip(block, shape, strict=True)
            ):
                raise ValueError(f"a part of {key} is outside of its shape {shape}")
            read.append(Part(files[number], offset, block))
        found[key] = Entry(tuple(shape), dtype, tuple(read))
    return found


def check_files(index: Index, sizes: Mapping[str, int]) -> None:
    """Raise ValueError unless the parts of `index` are disjoint byte ranges in files of these `sizes` (by name)."""
    ranges: dict[str, list[tuple[int, int, str]]] = {}
    for key, entry in index.items():
        for part in entry.parts:
            if part.file not in sizes:
                raise ValueError(f"a part of {key} is in {part.file!r}, which is not a file of the checkpoint")
            end = part.offset + part.elements * SIZES[entry.dtype]
            ranges.setdefault(part.file, []).append((part.offset, end, key))
    for file, spans in ranges.items():
        last = 0
        for start, end, key in sorted(spans):
            if start < last or end > sizes[file]:
                raise ValueError(f"a part of {key} overlaps another one in {file}, or ends behind it")
            last = max(end, last)
