"""The strategies that a user configured by path: which operator each one means, and the slices of its factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strategies.core.addressing import addresses, meant
from strategies.core.errors import StrategyError, closest
from strategies.core.graph import Operator, OperatorGraph
from strategies.core.request import NamedDims, Operand, OperatorStrategy
from strategies.rules.sharding import Sharding

Slicing = int | tuple[str, tuple[str, ...]]
"""The setting of one factor: the number of slices, or (layout name, its axes)."""


@dataclass(frozen=True)
class Configured:
    """A user's strategy on one operator. `factors` in the order in which the operands name them."""

    path: str
    wanted: OperatorStrategy
    factors: Mapping[str, Slicing]


def configured(
    graph: OperatorGraph, shardings: Mapping[str, Sharding], strategies: Mapping[str, OperatorStrategy]
) -> dict[str, Configured]:
    """The configured operators by id. A path with `@k` counts before one without, both before a glob, a later glob
    before an earlier one. Raises StrategyError for a path that means nothing, for two equal ones that disagree, and for
    a strategy that does not fit.
    """
    matched: dict[str, tuple[int, str, str]] = {}
    for path in strategies:
        rank = 0 if any(mark in path for mark in "*?[") else 2 if "@" in path else 1
        hits = meant(path, graph.operators)
        if not hits:
            names = [operator.name for operator in graph.operators]
            names += [address for operator in graph.operators for address in addresses(operator)]
            raise StrategyError(
                "MW211", f"parallel.strategies.{path} matches no operator of the model.{closest(path, names)}"
            )
        for operator, address in hits:
            before = matched.get(operator.id, (0, "", ""))
            if rank and rank == before[0] and (strategies[path], address) != (strategies[before[1]], before[2]):
                raise StrategyError(
                    "MW406",
                    f"parallel.strategies.{before[1]} and parallel.strategies.{path} both configure {operator.where}; "
                    "keep one of them.",
                )
            if rank >= before[0]:
                matched[operator.id] = (rank, path, address)
    return {
        operator.id: _read(graph, operator, shardings[operator.id], path, address, strategies[path])
        for operator in graph.operators
        if operator.id in matched
        for _, path, address in (matched[operator.id],)
    }


def _read(
    graph: OperatorGraph, operator: Operator, sharding: Sharding, path: str, address: str, wanted: OperatorStrategy
) -> Configured:
    """Slices per factor. Every operand's dims are compared with the shape and with what other operands say of the
    same factor."""
    where = f"parallel.strategies.{path}: {wanted} on {operator.where}"
    if wanted.inputs is None:
        return Configured(path, wanted, {})
    if not sharding.known and any(_sliced(operand) for operand in wanted.inputs):
        why = "no sharding rule"
        if operator.lines:
            why = f"no rule that fits this call (declared: {'; '.join(operator.lines)})"
        raise StrategyError(
            "MW405",
            f"{where}: operator {operator.op} has {why}, so it runs replicated; drop the strategy, or give it "
            "a rule (`@sharding_rule`).",
        )
    product_order = operator.op == "linear" and address == f"{operator.module}.matmul"
    factors: dict[str, Slicing] = {}
    named: dict[str, str] = {}
    shapes = [spec.shape for spec in graph.operand_specs(operator)]
    if len(wanted.inputs) > len(shapes):
        raise StrategyError(
            "MW401",
            f"{where}: it gives {len(wanted.inputs)} operands, but the operator has {len(shapes)} (shapes "
            f"{_shapes(shapes)}).",
        )
    for position, operand in enumerate(wanted.inputs):
        dims, shape = sharding.operands[position], shapes[position]
        if product_order and position == 1:
            dims, shape = dims[::-1], shape[::-1]
        entries: Sequence[int | tuple[str, ...]] = operand.dims if isinstance(operand, NamedDims) else operand
        if len(entries) != len(shape):
            raise StrategyError(
                "MW401",
                f"{where}: operand {position} has {len(shape)} dims (shape {tuple(shape)}), the strategy gives "
                f"{len(entries)}.",
            )
        for dim, (factor, entry) in enumerate(zip(dims, entries, strict=True)):
            slicing: Slicing = entry if isinstance(entry, int) else (operand.layout, entry)  # type: ignore[union-attr]
            place = f"dim {dim} of operand {position} (shape {tuple(shape)})"
            if isinstance(slicing, int) and slicing < 1:
                raise StrategyError("MW402", f"{where}: {place} is given {slicing} slices; a count is at least 1.")
            if factor is None:
                if _many(slicing):
                    raise StrategyError(
                        "MW404", f"{where}: {place} must be replicated for {operator.op}; write 1 (or null) there."
                    )
                continue
            if isinstance(slicing, int) and not sharding.fits(factor, slicing):
                fit = [n for n in range(1, max(sharding.lengths_of(factor)) + 1) if sharding.fits(factor, n)]
                shown = ", ".join(map(str, fit[:12])) + (", ..." if len(fit) > 12 else "")
                sizes = sharding.size_of(factor)
                of_sizes = "" if sizes == str(shape[dim]) else f" (operands and results have the sizes {sizes} there)"
                raise StrategyError(
                    "MW402",
                    f"{where}: {place} cannot be cut into {slicing} equal slices{of_sizes}; counts that fit: {shown}.",
                )
            if factor in sharding.gathered and position and not _many(slicing):
                continue
            if factor in factors and factors[factor] != slicing and (_many(slicing) or _many(factors[factor])):
                raise StrategyError(
                    "MW404", f"{where}: {place} is the same loop as {named[factor]}, so both need the same slices."
                )
            factors.setdefault(factor, slicing)
            named.setdefault(factor, place)
    missing = [
        position
        for position in range(len(wanted.inputs), len(shapes))
        if len(shapes[position]) >= len(shapes[0])  # not a bias or a scale, whose slices follow from the others
        or any(factor is not None and factor not in factors for factor in sharding.operands[position])
    ]
    if missing:
        raise StrategyError(
            "MW401",
            f"{where}: operand {missing[0]} (shape {tuple(shapes[missing[0]])}) has no entry; give one per operand.",
        )
    return Configured(path, wanted, factors)


def _many(slicing: Slicing) -> bool:
    return slicing > 1 if isinstance(slicing, int) else bool(slicing[1])


def _sliced(operand: Operand) -> bool:
    entries = operand.dims if isinstance(operand, NamedDims) else operand
    return any(entry if isinstance(operand, NamedDims) else entry != 1 for entry in entries)


def _shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(map(str, shapes))
