"""Packed tensors: operators whose operands or results hold several sections along one dim, as a fused qkv does.

A factor of such dims is cut into stripes of every section, so that what takes the sections apart takes its own stripe
of each, without a collective. Most operators compute the same whatever the order along a dim is; those that take
sections apart do it at the places of the slice's sections. Slices that do not divide every section are blocks of the
tensor, as without sections. Where some dim of a factor is packed and another is not, it stays replicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import gcd

from strategies.core.graph import FusedSections, Operator, Ref, TensorSpec
from strategies.rules.data_movement import matched, reshape, reshaped
from strategies.rules.registry import RULES, arguments
from strategies.rules.sharding import Dims, Local, LocalProgram, Sharding, numbered, sharding

SPLITS = frozenset(
    "chunk split split_with_sizes tensor_split unsafe_chunk unsafe_split unsafe_split_with_sizes".split()
)
RESHAPES = frozenset(name for name, rule in RULES.items() if rule is reshape)
ORDERLESS = RESHAPES | frozenset(
    """
    _grouped_mm addbmm addmm addmv baddbmm bilinear broadcast_to expand expand_as index index_select linear
    transformers::grouped_mm_fallback
    """.split()
)
"""Operators with a local program that does not ask where along a dim that passes, or is summed over, a slice begins."""


def in_sections(operator: Operator, specs: Sequence[TensorSpec], found: Sharding) -> Sharding:
    """The sharding of an operator of which some operand or result is packed; `found` is that of the same tensors, were
    they not packed."""
    if specs and specs[0].packed is not None:
        apart = taken_apart(operator, specs, specs[0].packed)
        if apart is not None:
            return apart
    sections: dict[str, set[FusedSections | None]] = {}
    for dims, spec in zip((*found.operands, *found.results), (*specs, *operator.results), strict=True):
        for dim, factor in enumerate(dims):
            if factor is not None:
                own = spec.packed if spec.packed is not None and spec.packed.dim == dim else None
                sections.setdefault(factor, set()).add(own and replace(own, dim=0))
    fixed = {
        factor
        for factor, kinds in sections.items()
        if kinds != {None}
        and (
            len(kinds) > 1
            or not orderless(operator, found)
            or {sum(one.sizes) for one in kinds if one} != {found.sizes[factor]}
        )
    }
    if not fixed:
        return found

    def left(dims: Dims) -> Dims:
        return tuple(None if factor in fixed else factor for factor in dims)

    return replace(
        found,
        operands=tuple(map(left, found.operands)),
        results=tuple(map(left, found.results)),
        sizes={factor: size for factor, size in found.sizes.items() if factor not in fixed},
        sums=found.sums - fixed,
        padded=found.padded - fixed,
        gathered=found.gathered - fixed,
        lengths={factor: sizes for factor, sizes in found.lengths.items() if factor not in fixed},
    )


def orderless(operator: Operator, found: Sharding) -> bool:
    """Whether the order of the elements along a factor does not matter to a slice."""
    return (found.local is None and found.known) or operator.op in ORDERLESS


def sections_taken(operator: Operator, spec: TensorSpec) -> tuple[int, Sequence[tuple[int, int]]] | None:
    """What an operator takes of its first operand: the dim, and (start, stop) of each part; None if it is no parts of a
    dim."""
    shape, options = spec.shape, {}
    if operator.op in SPLITS | {"glu", "slice", "narrow"} and shape:
        options = arguments(operator)
    dim = options.get("dim")
    if not isinstance(dim, int):
        return None
    dim %= len(shape)
    if operator.op == "glu":
        return dim, [(0, shape[dim] // 2), (shape[dim] // 2, shape[dim])]
    if operator.op in SPLITS:
        ends = list(accumulate(one.shape[dim] for one in operator.results))
        return dim, list(zip([0, *ends], ends, strict=False))
    start, step = options.get("start"), options.get("step", 1)
    if not isinstance(start, int | None) or step != 1:
        return None
    first = min(max((start or 0) + (shape[dim] if (start or 0) < 0 else 0), 0), shape[dim])
    return dim, [(first, first + operator.results[0].shape[dim])]


def taken_apart(operator: Operator, specs: Sequence[TensorSpec], packed: FusedSections) -> Sharding | None:
    """The sharding of an operator whose results are sections of its first operand; None if they are none."""
    if any(one.packed is not None for one in (*specs[1:], *operator.results)):
        return None
    if operator.op in RESHAPES:
        return _reshaped(operator, specs, packed)
    taken, ends = sections_taken(operator, specs[0]), list(accumulate(packed.sizes, initial=0))
    if taken is None or taken[0] != packed.dim:
        return None
    sections = list(pairwise(ends))
    if any(part not in sections for part in taken[1]) or (len(taken[1]) > 1 and taken[1] != sections):
        return None
    local: LocalProgram | None = None if operator.op == "glu" else _parts(packed, sections.index(taken[1][0]))
    dims = numbered(len(specs[0].shape))
    sizes = {f"d{packed.dim}": gcd(*packed.sizes)}
    padded = {factor for factor in dims if factor not in sizes}
    results = [dims] * len(operator.results)
    return sharding(operator, specs, [dims], results, sizes=sizes, local=local, padded=padded)


def unsliced_dims(
    operator: Operator, specs: Sequence[TensorSpec], position: int, wanted: Sequence[int | str]
) -> tuple[int, ...]:
    """The dims of an operand that are not to be sliced.

    Args:
        operator: the call.
        specs: shapes of its tensor operands.
        position: of the operand.
        wanted: dims of operands with more than one; `part` stands for the dim of which the operator takes parts, other
            ones than sections of one size; `rows` for dim 0 of the first operand; `all` for all dims.
    """
    rank = len(specs[position].shape)
    if "all" in wanted:
        return tuple(range(rank))
    found = [dim % rank for dim in wanted if isinstance(dim, int) and rank > 1]
    if "rows" in wanted and position == 0:
        found.append(0)
    if "part" in wanted and position == 0:
        packed = specs[0].packed
        if packed is not None and taken_apart(operator, specs, packed) is not None:
            found += [packed.dim] if len({*packed.sizes}) > 1 else []
        elif (taken := arguments(operator).get("dim")) is not None and specs[0].shape != operator.results[0].shape:
            found.append(taken % rank)
    return tuple(found)


def _parts(packed: FusedSections, first: int) -> LocalProgram:
    """All sections of a slice, or the one of number `first`."""

    def program(operator: Operator, local: Local) -> Ref:
        slices = local.slices(f"d{packed.dim}")
        sizes = [size // slices for size in packed.sizes]
        if operator.op in SPLITS:
            return local.several("aten.split_with_sizes.default", local.args[0], sizes, packed.dim)
        x, start = local.arguments["self"], sum(sizes[:first])
        return local.call("aten.slice.Tensor", x, packed.dim, start, start + sizes[first])

    return program


def _reshaped(operator: Operator, specs: Sequence[TensorSpec], packed: FusedSections) -> Sharding | None:
    """A reshape that gives the sections, all of one size, a dim of their own."""
    before, after, dim = specs[0].shape, operator.results[0].shape, packed.dim
    if len(set(packed.sizes)) > 1 or 0 in before:
        return None
    apart = (*before[:dim], len(packed.sizes), packed.sizes[0], *before[dim + 1 :])
    left, right, sizes, alone = matched(apart, after)
    sections, section = left[dim], left[dim + 1]
    if sections is None or sizes[sections] != len(packed.sizes) or sections not in alone or section is None:
        return None
    operand = (*left[:dim], section, *left[dim + 2 :])
    result = tuple(None if factor == sections else factor for factor in right)
    operands = [operand, *[result] * (len(specs) - 1)]
    known = {factor: size for factor, size in sizes.items() if factor != sections}
    padded = alone - {sections, section}
    return sharding(operator, specs, operands, [result], local=reshaped, sizes=known, padded=padded)
