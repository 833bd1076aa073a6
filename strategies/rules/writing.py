"""Writes by index into a copy (scatter): the factors are the dims that are not indexed and the indexed dim itself; with
accumulation the indexed entries may be sliced too, which leaves a partial sum.

A slice of the indexed dim has one extra entry while it is written, which takes the writes to other slices and is then
dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.arguments import named
from strategies.rules.indexing import own_index, places
from strategies.rules.notation import broadcast_dims, first_slice_only
from strategies.rules.registry import local_function, resolve, rule
from strategies.rules.sharding import Dims, Local, Sharding, sharding


@local_function
def write_slice(target: str, arguments: Mapping[str, Any], dim: int, start: int, total: int) -> Tensor:
    """`target` with `arguments` by name, whose global `index` (or only one of `indices`) along `dim` is written into
    the slice of self that begins at `start` and is cut from `total` entries."""
    x: Tensor = arguments["self"]
    wide = torch.cat((x, x.narrow(dim, 0, 1)), dim)

    def own(index: Tensor | None) -> Tensor | None:
        if index is None:
            return None
        place, inside = own_index(index, start, x.shape[dim], total)
        return place.where(inside, x.shape[dim])

    changed = dict(arguments) | {"self": wide}
    if "indices" in arguments:
        changed["indices"] = [own(index) for index in arguments["indices"]]
    else:
        changed["index"] = own(arguments["index"])
    written: Tensor = resolve(target)(**changed)
    return written.narrow(dim, 0, x.shape[dim])


def _write(added: Sequence[str], written: str, dim: int) -> Any:
    """The operator, with self from the first slice of the factors `added` alone, and `written` the factor of `dim`."""

    def program(operator: Operator, local: Local) -> Ref:
        x, *rest = local.args
        if local.slices(*added) > 1:
            x = local.call(f"local.{first_slice_only.__name__}", x, local.position(tuple(added)))
        if local.slices(written) == 1:
            return local.call(operator.target, x, *rest, **local.kwargs)
        arguments = named(operator.target, (x, *rest), local.kwargs)
        start = local.position(written, local.operand_shape(0)[dim])
        return local.call("local.write_slice", operator.target, arguments, dim, start, local.size(written))

    return program


@rule("index_put")
def index_put(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x with values at x[indices], written or (accumulate) added; values broadcast to the shape of x[indices]."""
    options = named(operator.target, operator.args, operator.keywords)
    x, *indices, values = specs
    found = places(options["indices"], (x, *indices))
    if found is None:
        return None
    adds = options["accumulate"] and x.dtype != "bool"
    alone = len(found.dims) == 1  # places along several dims are not those of one slice
    index = tuple(tuple(dim if adds else None for dim in part) for part in found.indices)
    own: Dims = tuple(dim if alone or dim not in found.read else None for dim in found.x)
    sizes: dict[str | None, int] = {}
    for dims, spec in zip((found.x, *found.indices), specs, strict=False):
        sizes |= {dim: size for dim, size in zip(dims, spec.shape, strict=True) if size > 1}
    (aligned,) = broadcast_dims((values,), [sizes.get(dim, 1) for dim in found.result])
    given = [None if dim is None else found.result[int(dim[1:])] for dim in aligned]
    summed = sorted({dim for part in index for dim in part if dim is not None})
    return sharding(
        [own, *index, tuple(dim if adds or dim in found.counted else None for dim in given)],
        [own],
        specs,
        operator.results,
        sums=summed,
        local=_write(summed, found.read[0], found.dims[0]),
        padded=(*found.counted, *found.read),
    )


@rule("index_add", "index_copy", "index_fill")
def along_dim(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x [..., v, ...], index [k], source [..., k, ...] (or one value to fill in) -> like x."""
    rank = len(specs[0].shape)
    if rank == 0 or len(specs[1].shape) != 1:
        return None
    dim = int(named(operator.target, operator.args, operator.keywords)["dim"]) % rank
    added = "k" if operator.op == "index_add" and specs[0].dtype != "bool" else None
    x = tuple("v" if i == dim else f"d{i}" for i in range(rank))
    source: list[Dims] = [tuple(added if i == dim else name for i, name in enumerate(x))]
    if operator.op == "index_fill":
        source = [()] * (len(specs) - 2)
    summed = [added] if added else []
    local = _write(summed, "v", dim)
    return sharding([x, (added,), *source], [x], specs, operator.results, sums=summed, local=local, padded=x)


@rule("scatter", "scatter_add", "scatter_reduce")
def scatter(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x [..., v, ...], index [..., k, ...], source like the index or larger (or one value) -> like x. Dims other than
    `dim` pass where all sizes agree."""
    rank = len(specs[0].shape)
    if rank == 0 or any(len(spec.shape) != rank for spec in specs):
        return None
    dim = int(named(operator.target, operator.args, operator.keywords)["dim"]) % rank
    equal = [len({spec.shape[i] for spec in specs}) == 1 for i in range(rank)]
    names = [f"d{i}" if same and i != dim else None for i, same in enumerate(equal)]
    taken = len({spec.shape[dim] for spec in specs[1:]}) == 1
    x, index = list(names), list(names)
    x[dim] = None if operator.op == "scatter_reduce" else "v"
    index[dim] = "k" if operator.op == "scatter_add" and taken and specs[0].dtype != "bool" else None
    summed = ["k"] if index[dim] else []
    rest = [tuple(index)] * (len(specs) - 1)
    local = _write(summed, "v", dim)
    return sharding([tuple(x), *rest], [tuple(x)], specs, operator.results, sums=summed, local=local, padded=("v",))


@rule("select_scatter", "slice_scatter")
def part_scatter(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x with one position, or a range, of a dim replaced: that dim stays replicated, unless all of it is replaced."""
    x, source = specs
    rank = len(x.shape)
    dim = int(named(operator.target, operator.args, operator.keywords)["dim"]) % rank
    everything = x.shape == source.shape
    dims: Dims = tuple(None if i == dim and not everything else f"d{i}" for i in range(rank))
    given = dims if operator.op == "slice_scatter" else (*dims[:dim], *dims[dim + 1 :])
    local = _replaced if everything else None
    padded = tuple(name for name in dims if name)
    return sharding([dims, given], [dims], specs, operator.results, local=local, padded=padded)


def _replaced(operator: Operator, local: Local) -> Ref:
    return local.call("aten.alias.default", named(operator.target, local.args, local.kwargs)["src"])


@rule("diagonal_scatter")
def diagonal_scatter(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x with a diagonal of two dims replaced: those two stay replicated."""
    rank = len(specs[0].shape)
    options = named(operator.target, operator.args, operator.keywords)
    pair = {options["dim1"] % rank, options["dim2"] % rank}
    dims: Dims = tuple(None if i in pair else f"d{i}" for i in range(rank))
    passing = tuple(name for name in dims if name)
    return sharding([dims, (*passing, None)], [dims], specs, operator.results, padded=passing)
