"""Reading by index: factors are the dims that are not indexed, the dims of the index, and the indexed dims themselves.

A slice of an indexed dim reads the entries that it has and zeros in place of the others, so the results of the slices
are summands. Index operands carry no padding, because padding is no valid index; dims that are not indexed may have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.arguments import named
from strategies.rules.index_checks import check_inside
from strategies.rules.notation import broadcast_dims
from strategies.rules.registry import local_function, rule
from strategies.rules.sharding import Dims, Local, Sharding, sharding


def own_index(index: Tensor, start: int, size: int, total: int) -> tuple[Tensor, Tensor]:
    """The local position of a global index in the slice [start, start + size) of a dim of `total` entries, and whether
    it is inside the slice (if not, the position is 0). Raises IndexError on the CPU for an index outside the dim, as
    the unsharded operator would (a GPU would have to synchronize for it)."""
    check_inside(index, -total, total, f"An index lies outside a dim of size {total}")
    own = torch.where(index < 0, index + total, index) - start
    inside = (own >= 0) & (own < size)
    return own.where(inside, 0), inside


@dataclass(frozen=True)
class Places:
    """The layout of x[indices]: dims of x, of each index and of the result."""

    x: Dims
    indices: tuple[Dims, ...]
    result: Dims
    dims: tuple[int, ...]
    """The dims of x that are indexed, factors v0, v1, ..."""

    @property
    def read(self) -> tuple[str, ...]:
        return tuple(f"v{dim}" for dim in self.dims)

    @property
    def counted(self) -> tuple[str, ...]:
        return tuple(dim for dim in self.result if dim is not None and dim.startswith("d"))


def places(indices: Sequence[object], specs: Sequence[TensorSpec]) -> Places | None:
    """The factors of x[indices]; specs are those of x and of the indices that are tensors.

    The dims of the broadcast index stand where the indexed dims of x stood, or in front if those are not neighbours.
    None for masks in place of indices, and for a call without any index.
    """
    x, *tensors = specs
    dims = tuple(i for i, index in enumerate(indices) if index is not None)
    if not tensors or any(spec.dtype in ("bool", "uint8") for spec in tensors):
        return None
    shape = tuple(torch.broadcast_shapes(*(spec.shape for spec in tensors)))  # type: ignore[no-untyped-call]
    aligned = broadcast_dims(tensors, shape)
    names = [tuple(None if dim is None else f"i{dim[1:]}" for dim in part) for part in aligned]
    front = [f"d{i}" for i in range(dims[0])]
    back = [f"d{i}" for i in range(dims[0], len(x.shape)) if i not in dims]
    index = [f"i{i}" for i in range(len(shape))]
    neighbours = dims == tuple(range(dims[0], dims[0] + len(dims)))
    result = [*front, *index, *back] if neighbours else [*index, *front, *back]
    own = tuple(f"v{i}" if i in dims else f"d{i}" for i in range(len(x.shape)))
    return Places(own, tuple(names), tuple(result), dims)


@local_function
def index_slice(x: Tensor, indices: Sequence[Tensor | None], starts: Sequence[int], totals: Sequence[int]) -> Tensor:
    """x[indices] with global indices into the slices of the indexed dims that begin at `starts` and are cut from dims
    of `totals`; zeros for entries of other slices."""
    own: list[Tensor | None] = list(indices)
    inside: Tensor | None = None
    dims = [i for i, index in enumerate(indices) if index is not None]
    for dim, start, total in zip(dims, starts, totals, strict=True):
        index = indices[dim]
        assert index is not None
        own[dim], here = own_index(index, start, x.shape[dim], total)
        inside = here if inside is None else inside & here
    assert inside is not None
    found: Tensor = torch.ops.aten.index.Tensor(x, own)
    before = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    shown = inside.reshape((*inside.shape, *(1,) * (found.dim() - before - inside.dim())))
    return found.where(shown, found.new_zeros(()))


def _index(operator: Operator, local: Local) -> Ref:
    x, indices = local.args
    found = [i for i, index in enumerate(indices) if index is not None]
    if local.slices(*(f"v{dim}" for dim in found)) == 1:
        return local.call(operator.target, x, indices)
    shape = local.operand_shape(0)
    starts = tuple(local.position(f"v{dim}", shape[dim]) for dim in found)
    return local.call("local.index_slice", x, indices, starts, tuple(local.size(f"v{dim}") for dim in found))


@rule("index")
def index(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x[indices] with index tensors of integers."""
    found = places(operator.args[1], specs)
    if found is None:
        return None
    x = found.x
    if specs[0].dtype == "bool":  # truth values do not add
        x = tuple(None if dim in found.read else dim for dim in x)
    return sharding(
        [x, *found.indices],
        [found.result],
        specs,
        operator.results,
        sums=found.read,
        local=_index,
        padded=(*found.counted, *found.read),
    )


@local_function
def pick_slice(target: str, x: Tensor, dim: int, index: Tensor, start: int, total: int) -> Tensor:
    """`aten.gather` or `aten.index_select` with a global index into the slice of `dim` that begins at `start`."""
    own, inside = own_index(index, start, x.shape[dim], total)
    if target == "index_select":
        found = x.index_select(dim, own)
        return found.where(inside.reshape(-1, *(1,) * (x.dim() - 1 - dim)), found.new_zeros(()))
    return x.gather(dim, own).where(inside, x.new_zeros(()))


def _pick(operator: Operator, local: Local) -> Ref:
    if local.slices("v") == 1:
        return local.call(operator.target, *local.args, **local.kwargs)
    options = named(operator.target, local.args, local.kwargs)
    shape = local.operand_shape(0)
    dim = options["dim"] % len(shape)
    start = local.position("v", shape[dim])
    return local.call("local.pick_slice", operator.op, options["self"], dim, options["index"], start, local.size("v"))


def _named_dim(operator: Operator, rank: int) -> int:
    return int(named(operator.target, operator.args, operator.keywords)["dim"]) % rank


@rule("index_select")
def index_select(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x [..., v, ...], index [k] -> [..., k, ...]."""
    rank = len(specs[0].shape)
    if rank == 0 or len(specs[1].shape) != 1:
        return None
    dim = _named_dim(operator, rank)
    read = None if specs[0].dtype == "bool" else "v"
    x: Dims = tuple(read if i == dim else f"d{i}" for i in range(rank))
    result = tuple("k" if i == dim else f"d{i}" for i in range(rank))
    padded = ("v", *(name for name in result if name != "k"))
    return sharding([x, ("k",)], [result], specs, operator.results, sums=["v"], local=_pick, padded=padded)


@rule("gather")
def gather(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x [..., v, ...], index [..., k, ...] -> [..., k, ...]; other dims pass where index and x have the same size."""
    x, index = (spec.shape for spec in specs)
    if not x or len(x) != len(index):
        return None
    dim = _named_dim(operator, len(x))
    names = [f"d{i}" if a == b else None for i, (a, b) in enumerate(zip(x, index, strict=True))]
    read, picked = list(names), list(names)
    read[dim], picked[dim] = None if specs[0].dtype == "bool" else "v", "k"
    return sharding(
        [tuple(read), tuple(picked)], [tuple(picked)], specs, operator.results, sums=["v"], local=_pick, padded=("v",)
    )


@rule("take_along_dim")
def take_along_dim(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Like gather, with broadcast dims; `dim` of x stays replicated. Without dim it runs over the flattened tensor."""
    x, index = specs
    dim = named(operator.target, operator.args, operator.keywords)["dim"]
    rank = len(x.shape)
    if dim is None or not rank or rank != len(index.shape):
        return None
    dim %= rank
    result = tuple("k" if i == dim else f"d{i}" for i in range(rank))
    shape = operator.results[0].shape
    own: list[Dims] = [
        tuple(name if size == whole else None for name, size, whole in zip(result, spec.shape, shape, strict=True))
        for spec in specs
    ]
    own[0] = tuple(None if i == dim else name for i, name in enumerate(own[0]))
    return sharding(own, [result], specs, operator.results)
