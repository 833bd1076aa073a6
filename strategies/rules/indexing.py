"""Reading and writing by index. Factors are the dims that are not indexed, the dims of the index, and the indexed dims
themselves.

Reading (index, gather, table lookup): a slice of an indexed dim reads the entries that it has and zeros in place of the
others, so the results of the slices are summands. Index operands carry no padding, because padding is no valid index;
dims that are not indexed may have it.

Writing into a copy (scatter): a slice of the indexed dim has one extra entry while it is written, which takes the
writes to other slices and is then dropped. With accumulation the indexed entries may be sliced too, which leaves a
partial sum.

Local functions that would mask invalid indices check them. Invariant: no check synchronizes a device. A GPU is not
checked at all, as in torch's own operators; on the CPU an invalid index raises IndexError, and in a compiled program,
which cannot branch on values, an assertion fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.registry import arguments, dim_of, local_function, named, resolve, rule
from strategies.rules.sharding import (
    Dims,
    Local,
    LocalProgram,
    Sharding,
    broadcast_dims,
    numbered,
    sharding,
    unsliced,
)


def check_inside(indices: Tensor, lowest: int, end: int, what: str, counted: Tensor | None = None) -> None:
    """Raises IndexError on the CPU unless lowest <= indices < end (where `counted`, of the same shape, is true)."""
    if indices.device.type != "cpu":
        return
    outside = (indices < lowest) | (indices >= end)
    if counted is not None:
        outside = outside & counted
    wrong = outside.any()
    if torch.compiler.is_compiling():
        torch._assert_async(~wrong, what)
    elif not hasattr(wrong, "fake_mode") and bool(wrong):  # a fake tensor has no values to check
        raise IndexError(f"{what} (smallest {indices.min()}, largest {indices.max()}).")


def own_index(index: Tensor, start: int, size: int, total: int) -> tuple[Tensor, Tensor]:
    """The local position of a global index in the slice [start, start + size) of a dim of `total` entries, and whether
    it is inside the slice (if not, the position is 0). Raises IndexError on the CPU for an index outside the dim, as
    the unsharded operator would."""
    check_inside(index, -total, total, f"An index is outside a dim of size {total}")
    own = torch.where(index < 0, index + total, index) - start
    inside = (own >= 0) & (own < size)
    return own.where(inside, 0), inside


@dataclass(frozen=True)
class IndexedDims:
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


def indexed_dims(indices: Sequence[object], specs: Sequence[TensorSpec]) -> IndexedDims | None:
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
    return IndexedDims(own, tuple(names), tuple(result), dims)


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
    dims = [i for i, index in enumerate(indices) if index is not None]
    if local.slices(*(f"v{dim}" for dim in dims)) == 1:
        return local.call(operator.target, x, indices)
    shape = local.operand_shape(0)
    starts = tuple(local.position(f"v{dim}", shape[dim]) for dim in dims)
    return local.call("local.index_slice", x, indices, starts, tuple(local.size(f"v{dim}") for dim in dims))


@rule("index")
def index(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x[indices] with index tensors of integers."""
    dims = indexed_dims(operator.args[1], specs)
    if dims is None:
        return None
    x = dims.x
    if specs[0].dtype == "bool":  # truth values do not add
        x = tuple(None if dim in dims.read else dim for dim in x)
    padded = (*dims.counted, *dims.read)
    operands = [x, *dims.indices]
    return sharding(operator, specs, operands, [dims.result], sums=dims.read, local=_index, padded=padded)


@local_function
def read_slice(target: str, x: Tensor, dim: int, index: Tensor, start: int, total: int) -> Tensor:
    """`aten.gather` or `aten.index_select` with a global index into the slice of `dim` that begins at `start`."""
    own, inside = own_index(index, start, x.shape[dim], total)
    if target == "index_select":
        found = x.index_select(dim, own)
        return found.where(inside.reshape(-1, *(1,) * (x.dim() - 1 - dim)), found.new_zeros(()))
    return x.gather(dim, own).where(inside, x.new_zeros(()))


def _read(operator: Operator, local: Local) -> Ref:
    if local.slices("v") == 1:
        return local.itself()
    options, shape = local.arguments, local.operand_shape(0)
    dim = options["dim"] % len(shape)
    start = local.position("v", shape[dim])
    return local.call("local.read_slice", operator.op, options["self"], dim, options["index"], start, local.size("v"))


@rule("index_select")
def index_select(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x [..., v, ...], index [k] -> [..., k, ...]."""
    rank = len(specs[0].shape)
    if rank == 0 or len(specs[1].shape) != 1:
        return None
    passing = numbered(rank)
    x, result = _with(passing, dim_of(operator, rank), _summable(specs, "v"), "k")
    padded = {"v", *result} - {"k"}
    return sharding(operator, specs, [x, ("k",)], [result], sums=["v"], local=_read, padded=padded)


def _with(dims: Dims, at: int, *names: str | None) -> list[Dims]:
    """`dims` with each of `names` in the place `at`."""
    return [(*dims[:at], name, *dims[at + 1 :]) for name in names]


def _summable(specs: Sequence[TensorSpec], factor: str) -> str | None:
    """`factor`, unless the first tensor holds truth values, which do not add."""
    return None if specs[0].dtype == "bool" else factor


@rule("gather")
def gather(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x [..., v, ...], index [..., k, ...] -> [..., k, ...]; other dims pass where index and x have the same size."""
    x, index = (spec.shape for spec in specs)
    if not x or len(x) != len(index):
        return None
    equal: Dims = tuple(f"d{i}" if a == b else None for i, (a, b) in enumerate(zip(x, index, strict=True)))
    read, result = _with(equal, dim_of(operator, len(x)), _summable(specs, "v"), "k")
    return sharding(operator, specs, [read, result], [result], sums=["v"], local=_read, padded=("v",))


@local_function
def take_along_all(x: Tensor, index: Tensor) -> Tensor:
    """`aten.take_along_dim` without a dim, which takes no tensors that are not contiguous."""
    return x.reshape(-1).gather(0, index.reshape(-1))


def _take_along_all(_: Operator, local: Local) -> Ref:
    return local.call("local.take_along_all", local.arguments["self"], local.arguments["indices"])


@rule("take_along_dim")
def take_along_dim(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Gather with broadcast dims; `dim` of x stays replicated. Without dim it runs over the flattened tensor,
    replicated."""
    rank, dim = len(specs[0].shape), arguments(operator)["dim"]
    if dim is None:
        dims: list[Dims] = [(None,) * len(spec.shape) for spec in specs]
        return sharding(operator, specs, dims, [(None,)], local=_take_along_all)
    if not rank or rank != len(specs[1].shape):
        return None
    x, index = broadcast_dims(specs, operator.results[0].shape)
    result, dim = numbered(rank), dim % rank
    dims = [_with(own, dim, name)[0] for own, name in ((x, None), (index, index[dim] and "k"), (result, "k"))]
    return sharding(operator, specs, dims[:2], dims[2:])


@local_function
def masked_scatter_slice(x: Tensor, mask: Tensor, source: Tensor, start: int) -> Tensor:
    """Rows of `aten.masked_scatter` from `start` on: x [n/s, ...], the mask of all rows, all of the source. Rows behind
    the last one take nothing. A mask that is one for all of a last dim, as of the tokens that stand for an image, is
    counted without it.

    Raises IndexError on the CPU where the mask has more places than the source has elements.
    """
    width = x.shape[-1] if mask.stride(-1) == 0 and mask.dim() > 1 else 1
    mask = mask[..., :1] if width > 1 else mask
    own = mask[start : start + len(x)]
    own = torch.cat([own, own.new_zeros(len(x) - len(own), *own.shape[1:])]) if len(own) < len(x) else own
    places = mask[:start].sum() + own.reshape(-1).cumsum(0) - 1
    units = source.reshape(-1)[: source.numel() // width * width].reshape(-1, width)
    what = f"masked_scatter: the mask has more places than the source has elements ({source.numel()})"
    check_inside(places, 0, len(units), what, own.reshape(-1))
    values = units[places.clamp(0, max(len(units) - 1, 0))] if len(units) else units.new_zeros(len(places), width)
    return values.reshape(x.shape).where(own, x)


def _masked_scatter(operator: Operator, local: Local) -> Ref:
    if local.slices("d0") == 1:
        return local.itself()
    options = local.arguments
    start = local.position("d0", local.operand_shape(0)[0])
    return local.call("local.masked_scatter_slice", options["self"], options["mask"], options["source"], start)


@rule("masked_scatter")
def masked_scatter(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x [d0, ...], mask [...], source [...] -> [d0, ...]: a slice counts the places that the mask has before it."""
    x, mask, source = (spec.shape for spec in specs)
    if not x or mask != x or operator.results[0].shape != x:
        return None
    rows: Dims = ("d0", *(None,) * (len(x) - 1))
    operands: list[Dims] = [rows, (None,) * len(mask), (None,) * len(source)]
    return sharding(operator, specs, operands, [rows], local=_masked_scatter, padded=("d0",))


@local_function
def lookup_slice(table: Tensor, indices: Tensor, start: int, padding: int, total: int) -> Tensor:
    """Rows of a vocabulary slice: table [v/n, e], global indices [...] -> [..., e], zeros for rows of other slices.

    Raises IndexError on the CPU for an index outside the `total` rows, as the unsliced table would.
    """
    check_inside(indices, 0, total, f"embedding: an index is outside the table of {total} rows")
    own = indices - start
    inside = (own >= 0) & (own < table.shape[0])
    # the row padding_idx gets no gradient; if another slice has it, no row of this one is exempt
    padding = padding - start if start <= padding < start + table.shape[0] else -1
    rows = torch.ops.aten.embedding.default(table, own.clamp(0, table.shape[0] - 1), padding)
    return torch.where(inside.unsqueeze(-1), rows, rows.new_zeros(()))


def _embedding(operator: Operator, local: Local) -> Ref:
    if local.slices("v") == 1:
        return local.itself()
    options = local.arguments
    start = local.position("v", local.operand_shape(0)[0])
    return local.call(
        "local.lookup_slice", options["weight"], options["indices"], start, options["padding_idx"], local.size("v")
    )


@rule("embedding")
def embedding(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """embedding(table [v, e], indices [...]) -> [..., e], v and e padded. Where the gradient depends on counts over all
    indices, only e is a factor. None for a sparse gradient."""
    options = arguments(operator)
    if options["sparse"]:
        return None
    counts = options["scale_grad_by_freq"]
    indices: Dims = tuple(None if counts else f"i{i}" for i in range(len(specs[1].shape)))
    table, sums = ((None, "e"), ()) if counts else (("v", "e"), ("v",))
    operands: list[Dims] = [table, indices]
    return sharding(operator, specs, operands, [(*indices, "e")], sums=sums, local=_embedding, padded=("v", "e"))


@rule("embedding_bag")
def embedding_bag(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Sums, means or maxima of bags of rows: table [v, e], indices, offsets, weights of the samples -> [bags, e]. The
    bags are counted through all indices, so only e is a factor. None for a sparse gradient."""
    if arguments(operator)["sparse"]:
        return None
    results: list[Dims] = [(None, "e") if len(spec.shape) == 2 else (None,) for spec in operator.results]
    return sharding(operator, specs, [(None, "e"), *unsliced(specs[1:])], results, padded=("e",))


@local_function
def one_hot_slice(indices: Tensor, start: int, classes: int) -> Tensor:
    """Classes start, start + 1, ... of a one-hot code: indices [...] -> [..., classes]."""
    own = torch.arange(start, start + classes, device=indices.device)
    return (indices.unsqueeze(-1) == own).to(torch.int64)


def _one_hot(operator: Operator, local: Local) -> Ref:
    if local.slices("c") == 1:
        return local.itself()
    classes = local.result_shape()[-1]
    return local.call("local.one_hot_slice", local.args[0], local.position("c", classes), classes)


@rule("one_hot")
def one_hot(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """indices [...] -> [..., c]."""
    dims = tuple(f"i{i}" for i in range(len(specs[0].shape)))
    return sharding(operator, specs, [dims], [(*dims, "c")], local=_one_hot, padded=("c",))


@local_function
def write_slice(target: str, given: Mapping[str, Any], dim: int, start: int, total: int) -> Tensor:
    """`target` with arguments `given` by name, whose global `index` (or only one of `indices`) along `dim` is written
    into the slice of self that begins at `start` and is cut from `total` entries."""
    x: Tensor = given["self"]
    wide = torch.cat((x, x.narrow(dim, 0, 1)), dim)

    def own(index: Tensor | None) -> Tensor | None:
        if index is None:
            return None
        place, inside = own_index(index, start, x.shape[dim], total)
        return place.where(inside, x.shape[dim])

    changed = dict(given) | {"self": wide}
    if "indices" in given:
        changed["indices"] = [own(index) for index in given["indices"]]
    else:
        changed["index"] = own(given["index"])
    written: Tensor = resolve(target)(**changed)
    return written.narrow(dim, 0, x.shape[dim])


def _write(added: Sequence[str], written: str, dim: int) -> LocalProgram:
    """The operator, with self from the first slice of the factors `added` alone, and `written` the factor of `dim`."""

    def program(operator: Operator, local: Local) -> Ref:
        x, *rest = local.args
        if local.slices(*added) > 1:
            x = local.call("local.first_slice_only", x, local.position(tuple(added)))
        if local.slices(written) == 1:
            return local.call(operator.target, x, *rest, **local.kwargs)
        given = named(operator.target, (x, *rest), local.kwargs)
        start = local.position(written, local.operand_shape(0)[dim])
        return local.call("local.write_slice", operator.target, given, dim, start, local.size(written))

    return program


@rule("index_put")
def index_put(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x with values at x[indices], written or (accumulate) added; values broadcast to the shape of x[indices]."""
    options = arguments(operator)
    x, *indices, values = specs
    dims = indexed_dims(options["indices"], (x, *indices))
    if dims is None:
        return None
    adds = options["accumulate"] and x.dtype != "bool"
    alone = len(dims.dims) == 1  # places along several dims are not those of one slice
    index = [own if adds else (None,) * len(own) for own in dims.indices]
    own: Dims = tuple(dim if alone or dim not in dims.read else None for dim in dims.x)
    sizes: dict[str | None, int] = {}
    for named_dims, spec in zip((dims.x, *dims.indices), specs, strict=False):
        sizes |= {dim: size for dim, size in zip(named_dims, spec.shape, strict=True) if size > 1}
    (aligned,) = broadcast_dims((values,), [sizes.get(dim, 1) for dim in dims.result])
    given = [None if dim is None else dims.result[int(dim[1:])] for dim in aligned]
    summed = sorted({dim for part in index for dim in part if dim is not None})
    return sharding(
        operator,
        specs,
        [own, *index, tuple(dim if adds or dim in dims.counted else None for dim in given)],
        [own],
        sums=summed,
        local=_write(summed, dims.read[0], dims.dims[0]),
        padded=(*dims.counted, *dims.read),
    )


@rule("index_add", "index_copy", "index_fill")
def along_dim(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x [..., v, ...], index [k], source [..., k, ...] (or one value to fill in) -> like x."""
    rank = len(specs[0].shape)
    if rank == 0 or len(specs[1].shape) != 1:
        return None
    dim = dim_of(operator, rank)
    added = _summable(specs, "k") if operator.op == "index_add" else None
    x, source = _with(numbered(rank), dim, "v", added)
    sources = [()] * (len(specs) - 2) if operator.op == "index_fill" else [source]
    summed = [added] if added else []
    local = _write(summed, "v", dim)
    return sharding(operator, specs, [x, (added,), *sources], [x], sums=summed, local=local, padded=x)


@rule("scatter", "scatter_add", "scatter_reduce")
def scatter(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x [..., v, ...], index [..., k, ...], source like the index or larger (or one value) -> like x. Dims other than
    `dim` pass where all sizes agree."""
    rank = len(specs[0].shape)
    if rank == 0 or any(len(spec.shape) != rank for spec in specs):
        return None
    dim = dim_of(operator, rank)
    equal = numbered(rank, [i for i in range(rank) if len({spec.shape[i] for spec in specs}) > 1])
    taken = operator.op == "scatter_add" and len({spec.shape[dim] for spec in specs[1:]}) == 1
    added = _summable(specs, "k") if taken else None
    x, index = _with(equal, dim, None if operator.op == "scatter_reduce" else "v", added)
    summed = [added] if added else []
    operands, local = [x, *[index] * (len(specs) - 1)], _write(summed, "v", dim)
    return sharding(operator, specs, operands, [x], sums=summed, local=local, padded=("v",))


def _replaced(operator: Operator, local: Local) -> Ref:
    return local.call("aten.alias.default", local.arguments["src"])


@rule("select_scatter", "slice_scatter")
def part_scatter(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x with one position, or a range, of a dim replaced: that dim stays replicated, unless all of it is replaced."""
    rank, everything = len(specs[0].shape), specs[0].shape == specs[1].shape
    dim = dim_of(operator, rank)
    dims = numbered(rank, () if everything else [dim])
    given = dims if operator.op == "slice_scatter" else (*dims[:dim], *dims[dim + 1 :])
    return sharding(operator, specs, [dims, given], [dims], local=_replaced if everything else None, padded=dims)


@rule("diagonal_scatter")
def diagonal_scatter(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x with a diagonal of two dims replaced: those two stay replicated."""
    rank, options = len(specs[0].shape), arguments(operator)
    dims = numbered(rank, [options["dim1"] % rank, options["dim2"] % rank])
    return sharding(operator, specs, [dims, (*filter(None, dims), None)], [dims], padded=dims)
