"""What a user asks of the planner, as plain frozen data: mode, mesh, strategies by operator path, layouts, the
dataset's strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from strategies.core.errors import StrategyError, closest

SEARCHES = ("sharding_propagation", "dynamic_programming", "recursive_programming")
Unsliced = Mapping[str, tuple[int | str, ...]]
"""Dims of operands by label of an operator; `part`: the dim of which it takes parts."""
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
class OperatorStrategy:
    """The configured strategy of one operator.

    Attributes:
        inputs: slices of every operand, in the operator's order; None: open.
        outputs: slices of every result; None: open.
    """

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
class RecomputeRequest:
    """What backward recomputes (activation checkpointing).

    Attributes:
        operators: all (`full`), the cheap ones (`selective`), or some kinds.
        modules: globs of module paths; None: every repeated layer.
        communication: whether collectives are repeated or their results stored; None: repeated with `full` only.
        slice_inputs: ranks that have the same input of a module each store their part of it.
    """

    operators: Literal["full", "selective"] | tuple[str, ...]
    modules: tuple[str, ...] | None = None
    communication: Literal["recompute", "keep"] | None = None
    slice_inputs: bool = False


@dataclass(frozen=True)
class Request:
    """What a plan must satisfy, and the settings of a step on which its cost and memory depend.

    Attributes:
        strategies: by path (globs per segment), later entries before earlier ones, exact paths before globs.
        zero_stage: 0 to 3.
        zero_engine: of the stages from 1 on.
        optimizer_state_factor: optimizer states per parameter element.
        optimizer_bytes: bytes that the optimizer step reads and writes per parameter element.
        overlap_gradients: backward hides the gradient reduction as far as the machine can.
        micro_batches: of a step; those for which a pipeline fills up among them.
        memory_limit: bytes per rank.
        runner_up: an exact search of an open mesh also returns the second best plan.
        unsliced: dims of operands that no plan slices, by label of an operator.
        styles: names of the styles of modules that a plan is made of; None: any layouts.
        ring: keys and values that are sliced with the queries travel around a ring instead of being gathered.
        unbatched: batch entries whose dim 0 counts no samples.
        borders: values are laid out anew where modules receive and return them, and nowhere else.
    """

    mode: Mode
    world_size: int
    search: str = "sharding_propagation"
    mesh: tuple[tuple[str, int], ...] | None = None
    strategies: Mapping[str, OperatorStrategy] = field(default_factory=dict)
    layouts: Mapping[str, NamedMatrix] = field(default_factory=dict)
    set_data_parallel: tuple[str, ...] = ()
    dataset_strategy: Literal["data_parallel", "full_batch"] | tuple[Operand, ...] = "data_parallel"
    recompute: RecomputeRequest | None = None
    zero_stage: int = 0
    zero_engine: Literal["deepspeed", "native"] = "deepspeed"
    optimizer_state_factor: float = 2.0
    optimizer_bytes: float = 28.0
    overlap_gradients: bool = True
    micro_batches: int = 1
    memory_limit: int | None = None
    runner_up: bool = True
    unsliced: Unsliced = field(default_factory=dict)
    styles: tuple[str, ...] | None = None
    ring: bool = False
    borders: bool = False
    unbatched: tuple[str, ...] = ()

    @property
    def by_module(self) -> bool:
        """Whether the axis `tp` of a mesh slices modules, and all others the rows of the batch."""
        return self.styles is not None or self.borders


def check(request: Request) -> None:
    """Check what does not depend on the model.

    Raises:
        StrategyError: values that do not exist or exclude one another.
    """
    if request.world_size < 1:
        raise StrategyError("MW407", f"world_size = {request.world_size}; at least one device is needed.")
    if request.mode not in ("data_parallel", "semi_auto", "auto"):
        raise StrategyError(
            "MW410", f"parallel.mode = {request.mode} has no plan; data_parallel, semi_auto and auto have one."
        )
    if request.mode == "auto" and request.search not in SEARCHES:
        raise StrategyError(
            "MW410", f"parallel.search = {request.search!r} is not available.{closest(request.search, SEARCHES)}"
        )
    configured = request.strategies or request.set_data_parallel
    if request.mode == "auto" and request.search == "sharding_propagation" and not configured:
        raise StrategyError(
            "MW410",
            "parallel.search = sharding_propagation starts from configured operators, and none is configured: give at "
            "least one entry in parallel.strategies or parallel.set_data_parallel, search without them "
            "(parallel.search=recursive_programming), or use parallel.mode=semi_auto for defaults everywhere.",
        )
    if request.mode == "data_parallel":
        given = {
            "strategies": bool(request.strategies),
            "set_data_parallel": bool(request.set_data_parallel),
            "mesh": request.mesh is not None,
            "dataset_strategy": request.dataset_strategy != "data_parallel",
        }
        for name in (name for name, unused in given.items() if unused):
            raise StrategyError(
                "MW410",
                f"parallel.{name} is given, but parallel.mode = data_parallel would ignore it; use semi_auto or auto.",
            )
    if request.by_module and (request.mode, request.search) != ("auto", "dynamic_programming"):
        raise StrategyError(
            "MW410",
            f"parallel.mode = {request.mode} with parallel.search = {request.search} finds no plan by module, "
            "as this parallel.for_target needs; use mode=auto with search=dynamic_programming.",
        )
    if request.by_module and (configured or request.dataset_strategy != "data_parallel"):
        raise StrategyError(
            "MW410",
            "parallel.for_target decides by module how everything is sliced, and the batch by rows; leave out "
            "parallel.strategies, parallel.set_data_parallel and parallel.dataset_strategy.",
        )
    for where, operand in operands(request):
        if isinstance(operand, NamedDims):
            _check_names(where, operand, request)
        elif min(operand, default=1) < 1:
            raise StrategyError("MW402", f"{where}: {operand} has a count of {min(operand)}; a count is at least 1.")


def operands(request: Request) -> Iterator[tuple[str, Operand]]:
    """Every operand form with the place where it stands."""
    for path, wanted in request.strategies.items():
        for operand in (*(wanted.inputs or ()), *(wanted.outputs or ())):
            yield f"parallel.strategies.{path}", operand
    for operand in request.dataset_strategy if isinstance(request.dataset_strategy, tuple) else ():
        yield "parallel.dataset_strategy", operand


def without_idle_axes(request: Request) -> Request:
    """The same request without the named axes of one device: they slice nothing."""

    def operand(given: Operand) -> Operand:
        if not isinstance(given, NamedDims):
            return given
        matrix = request.layouts[given.layout]
        idle = {name for name, size in zip(matrix.axes, matrix.device_matrix, strict=False) if size == 1}
        return NamedDims(given.layout, tuple(tuple(name for name in dim if name not in idle) for dim in given.dims))

    def side(given: tuple[Operand, ...] | None) -> tuple[Operand, ...] | None:
        return None if given is None else tuple(map(operand, given))

    dataset = request.dataset_strategy
    return replace(
        request,
        strategies={path: OperatorStrategy(side(w.inputs), side(w.outputs)) for path, w in request.strategies.items()},
        dataset_strategy=tuple(map(operand, dataset)) if isinstance(dataset, tuple) else dataset,
    )


def _check_names(where: str, operand: NamedDims, request: Request) -> None:
    if operand.layout not in request.layouts:
        raise StrategyError(
            "MW408",
            f"{where}: layout {operand.layout!r} is not in parallel.layouts.{closest(operand.layout, request.layouts)}",
        )
    names, known = [name for dim in operand.dims for name in dim], request.layouts[operand.layout].axes
    for name in names:
        if name not in known:
            raise StrategyError(
                "MW408", f"{where}: {name!r} is not an axis of parallel.layouts.{operand.layout}.{closest(name, known)}"
            )
        if names.count(name) > 1:
            raise StrategyError(
                "MW408", f"{where}: {operand} uses axis {name!r} twice; an axis slices at most one dim of a tensor."
            )
