"""What a user asks of the planner, as plain frozen data: mode, mesh, strategies by operator path, layouts, the dataset's strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["stand_alone", "data_parallel", "semi_auto", "auto", "hybrid"]


@dataclass(frozen=True)
class NamedDims:
    """An operand sliced by the axes of a named layout: per tensor dim the axis names, major to minor."""

    layout: str
    dims: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        dims = ", ".join("None" if not dim else dim[0] if len(dim) == 1 else f"({', '.join(dim)})" for dim in self.dims)
        return f"{self.layout}({dims})"


Operand = tuple[int, ...] | NamedDims
"""Slices per dim, or named axes per dim."""


@dataclass(frozen=True)
class Wanted:
    """A configured strategy: operands in the order of the operator, results; None where it is left open."""

    inputs: tuple[Operand, ...] | None
    outputs: tuple[Operand, ...] | None

    def __str__(self) -> str:
        sides = [", ".join(map(_text, side)) for side in (self.inputs, self.outputs) if side is not None]
        if self.inputs is None:
            return f"out ({sides[0]})"
        return f"({sides[0]})" + (f" out ({sides[1]})" if len(sides) > 1 else "")


def _text(operand: Operand) -> str:
    return str(operand) if isinstance(operand, NamedDims) else f"({', '.join(map(str, operand))})"


@dataclass(frozen=True)
class NamedMatrix:
    """A device matrix with a name per axis; rank = row-major coordinate."""

    device_matrix: tuple[int, ...]
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Request:
    """`strategies` by path (globs per segment), later entries before earlier ones, exact paths before globs."""

    mode: Mode
    world_size: int
    search: str = "sharding_propagation"
    mesh: tuple[tuple[str, int], ...] | None = None
    strategies: Mapping[str, Wanted] = field(default_factory=dict)
    layouts: Mapping[str, NamedMatrix] = field(default_factory=dict)
    set_data_parallel: tuple[str, ...] = ()
    dataset_strategy: Literal["data_parallel", "full_batch"] | tuple[Operand, ...] = "data_parallel"
