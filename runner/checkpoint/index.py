"""The index of a checkpoint: the parts of every tensor by file, byte and block. Plain data, JSON in and out.

Invariant: the parts of a tensor in `Index` are disjoint, also where a checkpoint stores some of them several times: one
of them is chosen from the existing files.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import chain, product
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from strategies.core.layout import Block
from strategies.runtime.shards import full
from strategies.runtime.tensor_files import SIZES, Part, StoredTensor

Kind = TypeVar("Kind")
Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
"""A size or an offset of a tensor in a file."""
Counts = tuple[Count, ...]
Index = Mapping[str, StoredTensor]
"""Tensors by key."""


class _IndexForm(BaseModel):
    """The JSON of an index."""

    files: list[str]
    tensors: dict[str, tuple[Counts, str, list[tuple[Count, Count, Counts, Counts]]]]


MOST_CUT = 10
"""Dims along which a tensor may be cut."""


def validated(kind: TypeAdapter[Kind], content: Any) -> Kind:
    """`content` as `kind`. Raises ValueError with the first entry that is wrong."""
    try:
        return kind.validate_python(content)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None


def place(key: str, block: Block) -> str:
    """The name of a part: `model/dense1.weight[0:256,0:784]`."""
    return f"{key}[{','.join(f'{start}:{stop}' for start, stop in block)}]"


def joined(indices: Iterable[Index]) -> dict[str, StoredTensor]:
    """The parts that several ranks stored. Raises ValueError where they disagree about a tensor."""
    tensors: dict[str, StoredTensor] = {}
    for index in indices:
        for key, entry in index.items():
            before = tensors.setdefault(key, replace(entry, parts=()))
            if (before.shape, before.dtype) != (entry.shape, entry.dtype):
                raise ValueError(f"{key} is stored as {before.dtype}{before.shape} and as {entry.dtype}{entry.shape}")
            tensors[key] = replace(before, parts=before.parts + entry.parts)
    return tensors


def chosen(index: Index, lost: Collection[str] = ()) -> dict[str, StoredTensor]:
    """`index` without parts in the files `lost` and with every element once.

    Raises ValueError, naming a tensor, where an element is in no other file, or where blocks overlap.
    """
    tensors = {}
    for key, entry in index.items():
        kept: dict[Block, Part] = {}
        for part in entry.parts:
            if part.file not in lost:
                kept.setdefault(part.block, part)
        if not partitions(kept, entry.shape):
            if sum(part.elements for part in kept.values()) >= entry.elements:
                raise ValueError(f"the blocks of {key} overlap")
            gone = sorted({part.file for part in entry.parts if part.file in lost})
            where = f"was in {', '.join(gone)}, which is lost or damaged" if gone else "was never stored"
            raise ValueError(f"a part of {key} {where}, and is in no other file")
        tensors[key] = replace(entry, parts=tuple(kept.values()))
    return tensors


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
    for sign, block in ((-1, full(shape)), *((1, block) for block in blocks)):
        for corner in product(*(((block[dim][0], 1), (block[dim][1], -1)) for dim in cut)):
            jumps[tuple(at for at, _ in corner)] += sign * math.prod(jump for _, jump in corner)
    return not any(jumps.values())


def with_copies(index: Index, copies: Mapping[str, str]) -> dict[str, StoredTensor]:
    """`index` with the parts in copies of files too: `copies` gives the file of which each is a copy."""
    of: dict[str, list[str]] = {}
    for copy, file in copies.items():
        of.setdefault(file, []).append(copy)
    return {
        key: replace(
            entry,
            parts=entry.parts
            + tuple(replace(part, file=copy) for part in entry.parts for copy in of.get(part.file, ())),
        )
        for key, entry in index.items()
    }


def to_json(index: Index) -> dict[str, Any]:
    """{"files": [...], "tensors": {key: [shape, dtype, [[number of the file, byte, starts, stops], ...]]}}."""
    number: dict[str, int] = {}

    def part(one: Part) -> list[Any]:
        starts, stops = ([bounds[end] for bounds in one.block] for end in (0, 1))
        return [number.setdefault(one.file, len(number)), one.offset, starts, stops]

    tensors = {key: [entry.shape, entry.dtype, list(map(part, entry.parts))] for key, entry in index.items()}
    return {"files": list(number), "tensors": tensors}


def from_json(content: Any) -> dict[str, StoredTensor]:
    """The inverse of `to_json`. Raises IndexError and ValueError for anything else."""
    form, tensors = validated(TypeAdapter(_IndexForm), content), {}
    for key, (shape, dtype, stored) in form.tensors.items():
        if dtype not in SIZES or math.prod(max(size, 1) for size in shape) >= 2**63:
            raise ValueError(f"{key} cannot have the shape {shape} and the dtype {dtype!r}")
        parts = tuple(
            Part(form.files[number], offset, tuple(zip(starts, stops, strict=True)))
            for number, offset, starts, stops in stored
        )
        bounds = (zip(part.block, shape, strict=True) for part in parts)
        if not all(start <= stop <= size for (start, stop), size in chain.from_iterable(bounds)):
            raise ValueError(f"a part of {key} is outside of its shape {shape}")
        tensors[key] = StoredTensor(shape, dtype, parts)
    return tensors


def check_files(index: Index, sizes: Mapping[str, int]) -> None:
    """Raise ValueError unless the parts of `index` are disjoint byte ranges in files of these `sizes` (by name)."""
    ranges: dict[str, list[tuple[int, int, str]]] = {}
    for key, entry in index.items():
        for part in entry.parts:
            if part.file not in sizes:
                raise ValueError(f"a part of {key} is in {part.file!r}, which is not a file of the checkpoint")
            start = part.offset or 0
            ranges.setdefault(part.file, []).append((start, start + part.elements * SIZES[entry.dtype], key))
    for file, spans in ranges.items():
        last = 0
        for start, end, key in sorted(spans):
            if start < last or end > sizes[file]:
                raise ValueError(f"a part of {key} overlaps another one in {file}, or ends behind it")
            last = max(end, last)
