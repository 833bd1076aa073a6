"""A data-parallel program whose slices any process can compute alone, at any time.

Ranks of such a program communicate facts about the batch while they compute: how many targets count in a mean.
A worker computes those for the entire batch, and they enter its slice as further inputs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from runner.config.schema import Config
from runner.errors import ConfigError
from runner.planning import lowering
from strategies.core.errors import StrategyError, closest
from strategies.core.graph import OperatorGraph, Ref, Source, TensorSpec, rewrite
from strategies.core.layout import Layout
from strategies.core.plan import Plan
from strategies.core.program import Compute, Instruction, Program, Redistribute
from strategies.core.steps import ALL_REDUCE, LOCAL
from strategies.lowering.lowering import lower
from strategies.runtime.simulate import Simulation

POSITIONS = "positions_of_"
"""Begins the ids of inputs that are positions of rows."""
WEIGHT = "local.target_weight"
"""Takes its first operand for the dtype alone."""


EMBEDDING = "aten.embedding.default"
SUMS = frozenset(
    f"aten.{name}"
    for name in """
    _to_copy.default add.Tensor clone.default mean.default neg.default reshape.default squeeze.default stack.default
    sub.Tensor sum.default to.dtype view.default
    """.split()
)
"""Calls that are linear in all of their tensors together."""
MULTIPLES = frozenset({"aten.mul.Tensor", "aten.div.Tensor", "aten.masked_fill.Scalar"})
"""Calls that are linear in their first tensor, the last one with zeros."""


@dataclass(frozen=True)
class Table:
    """A parameter of which a slice uses only the rows that entries of the batch name.

    Attributes:
        name: of the parameter.
        entries: the positions of these entries in the batch.
        rows, width: its shape.
        padding: the row that is not trained, if there is one.
    """

    name: str
    entries: tuple[int, ...]
    rows: int
    width: int
    padding: int | None


@dataclass(frozen=True)
class SlicedProgram:
    """A program in which no rank communicates, with the facts of a batch as its last inputs, before them the positions
    of the rows of tables: one input per entry of a table.

    Attributes:
        program: of a slice.
        facts: computes the facts from the batch; None where there are none.
        tables: the parameters of which only rows are needed.
        served: the names of the trained parameters that servers hold; workers keep the others.
    """

    program: Program
    facts: Program | None
    tables: tuple[Table, ...]
    served: frozenset[str]

    @cached_property
    def _trained(self) -> dict[str, int]:
        sizes = {one.name: math.prod(one.spec.shape) for one in self.program.parameters}
        return {name: sizes[name] for name in self.program.trainable_names}

    @cached_property
    def elements(self) -> dict[str, int]:
        """The number of elements of every trained parameter that servers hold, by name."""
        return {name: size for name, size in self._trained.items() if name in self.served}

    @cached_property
    def kept(self) -> dict[str, int]:
        """The number of elements of every trained parameter that workers keep, by name."""
        return {name: size for name, size in self._trained.items() if name not in self.served}

    @property
    def constants(self) -> list[str]:
        """The tensors of the model that nobody changes, by name."""
        sources = (one for one in self.program.sources if one.kind in ("parameter", "buffer"))
        return [one.name for one in sources if one.name not in self._trained]

    @property
    def widths(self) -> dict[str, int]:
        """The width of every table, by name."""
        return {table.name: table.width for table in self.tables}

    @property
    def slices(self) -> int:
        return self.program.mesh.size

    @cached_property
    def stored(self) -> Program:
        """The program with the tensors of the model and the entries of a batch as its only sources."""
        tensors = self.program.tensors.values()
        return replace(self.program, sources=(*tensors, *self.entries))

    @cached_property
    def entries(self) -> list[Source]:
        """The entries of a batch."""
        added = set() if self.facts is None else {ref.id for ref in self.facts.outputs}
        return [
            one
            for one in self.program.sources
            if one.kind == "input" and one.id not in added and not one.id.startswith(POSITIONS)
        ]

    @cached_property
    def counted(self) -> list[int]:
        """The positions of the entries on which facts depend."""
        used = set() if self.facts is None else {one.id for one in self.facts.sources}
        return [position for position, one in enumerate(self.entries) if one.id in used]

    def facts_of(self, batch: Sequence[Tensor], tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The facts of a global micro-batch.

        Args:
            batch: its entries at the positions `counted`.
            tensors: of the model, by name.
        """
        if self.facts is None:
            return []
        values = {self.entries[position].name: tensor for position, tensor in zip(self.counted, batch, strict=True)}
        constants = {one.name: torch.empty(0, dtype=getattr(torch, one.spec.dtype)) for one in self.facts.sources}
        known = {one.name: tensors[one.name] for one in self.facts.sources if one.name in tensors}
        return [results[0] for results in Simulation(self.facts, constants | known | values).run()]


def sliced(config: Config, graph: OperatorGraph, plan: Plan) -> SlicedProgram:
    """The program of a slice of a training step.

    Raises:
        ConfigError: a glob of parallel.server.parameters matches nothing.
        StrategyError: slices would need one another's values, a buffer is written, or parameters have several dtypes.
    """
    complete = lower(graph, plan, lowering.training_options(config))
    served = _served(config, complete)
    program, tables = _with_tables(complete, served)
    trained = {one.spec.dtype: one.name for one in program.parameters if one.name in program.trainable_names}
    if len(trained) > 1 or any(dtype.startswith("complex") for dtype in trained):
        shown = " and ".join(f"{name} is {dtype}" for dtype, name in sorted(trained.items()))
        raise StrategyError(
            "MW454",
            f"parallel.mode = parameter_server: servers hold trained parameters of one dtype, real numbers, but {shown}"
            ". Use parallel=data_parallel.",
        )
    if program.updates:
        name = next(source.name for source in program.sources if source.id == program.updates[0][0])
        raise StrategyError(
            "MW413",
            f"parallel.mode = parameter_server: the model writes its {name} in every step, which workers would "
            "have to agree on. Use norms without running statistics, such as LayerNorm or GroupNorm, or "
            "parallel=data_parallel.",
        )
    if program.mesh.size > 1 and set(program.loss_axes) != set(program.mesh.names):
        program = _PartialLoss(program).result()
        if not program.loss_axes:
            raise _dependent("the loss")
    made = {one.id: one for one in program.instructions}
    program = replace(program, instructions=tuple(_alone(one, made) for one in program.instructions))
    made = {one.id: one for one in program.instructions}
    carrying = [one for one in program.instructions if isinstance(one, Redistribute) and one.collectives]
    behind: dict[str, Instruction] = {}
    sources = {source.id: source for source in program.sources}
    stubs: dict[str, Source] = {}
    for one in carrying:
        for name in _behind(one.value, made):
            if name in behind:
                continue
            step = made.get(name)
            if step is None and (sources[name].kind != "parameter" or not sources[name].trainable):
                stubs[name] = sources[name]
            elif isinstance(step, Compute) and step.target == WEIGHT:
                stub = f"dtype_{name}"
                stubs[stub] = Source(stub, "buffer", stub, TensorSpec((0,), one.spec.dtype))
                behind[name] = replace(step, args=(Ref(stub), *step.args[1:]))
            elif isinstance(step, Compute | Redistribute):
                behind[name] = step
            else:
                raise _dependent(one.operator)
    if not carrying:
        return SlicedProgram(program, None, tables, served)
    scalar = Layout(())
    outputs = tuple(Ref(one.id) for one in carrying)
    facts = replace(
        program,
        sources=tuple(stubs.values()),
        layouts={name: program.layouts.get(name, Layout.replicated(1)) for name in stubs},
        instructions=tuple(one if one.id not in behind else behind[one.id] for one in program.instructions
                           if one.id in behind or one in carrying),
        outputs=outputs, reductions={}, parameter_order=(), random=False, loss_axes=(),
    )  # fmt: skip
    inputs = tuple(Source(one.id, "input", one.id, one.spec) for one in carrying)
    of_slice = replace(
        program,
        sources=(*program.sources, *inputs),
        layouts=program.layouts | {one.id: scalar for one in carrying},
        instructions=tuple(one for one in program.instructions if one not in carrying),
    )
    return SlicedProgram(of_slice, facts, tables, served)


class _PartialLoss:
    """The loss of a program as the sum of those of the slices, where it is linear in what slices add up: a weighted sum
    of means over the batch, and of terms of the parameters alone, of which every slice takes its part."""

    def __init__(self, program: Program) -> None:
        self.program, self.made = program, {one.id: one for one in program.instructions}
        self.uses = Counter(ref.id for one in program.instructions for ref in one.operands)
        self.changed: dict[str, list[Instruction]] = {}

    def result(self) -> Program:
        """The program; as it was where its loss is another function of the slices' values."""
        (loss,) = self.program.outputs
        partial = self._partial(loss)
        if partial is None:
            return self.program
        instructions = [new for one in self.program.instructions for new in self.changed.get(one.id, [one])]
        needed = {partial.id}
        for one in reversed(instructions):
            if one.id in needed:
                needed.update(ref.id for ref in one.operands)
        return replace(
            self.program,
            instructions=tuple(one for one in instructions if one.id in needed),
            outputs=(partial,),
            loss_axes=self.program.mesh.names,
        )

    def _partial(self, value: Ref) -> Ref | None:
        """What the slices add up to a scalar or a stack of scalars; None if they do not."""
        step = self.made.get(value.id)
        if isinstance(step, Redistribute):
            return step.value if [one.kind for one in step.forward] == [ALL_REDUCE] and not step.spec.shape else None
        if not isinstance(step, Compute) or self.uses[step.id] > 1:
            return None
        if step.target in SUMS:
            return self._of_all(step)
        if step.target in MULTIPLES and isinstance(step.args[0], Ref) and not (len(step.args) == 3 and step.args[2]):
            first, *others = step.args
            if (part := self._partial(first)) is None and step.target == "aten.mul.Tensor":
                first, others = others[0], [first]
                part = self._partial(first) if isinstance(first, Ref) else None
            return None if part is None else self._in_place(step, [part, *others])
        return None

    def _of_all(self, step: Compute) -> Ref | None:
        parts = {ref: self._partial(ref) for ref in step.operands}
        if all(part is None for part in parts.values()):
            return None
        count = self.program.mesh.size
        own: list[Instruction] = []

        def of_slice(leaf: Any) -> Any:
            if isinstance(leaf, Ref) and (part := parts[leaf]) is not None:
                return part
            if not isinstance(leaf, Ref):
                return leaf
            own.append(
                replace(step, id=f"{step.id}_{leaf.id}", target="aten.div.Tensor", args=(leaf, count), kwargs=())
            )
            return Ref(own[-1].id)

        args = rewrite(step.args, of_slice)
        if step.target in ("aten.add.Tensor", "aten.sub.Tensor") and not isinstance(args[1], Ref):
            args = (args[0], args[1] / count)
        return self._in_place(step, args, own)

    def _in_place(self, step: Compute, args: Sequence[Any], before: Sequence[Instruction] = ()) -> Ref:
        self.changed[step.id] = [*before, replace(step, args=tuple(args))]
        return Ref(step.id)


def _served(config: Config, program: Program) -> frozenset[str]:
    """The names of the trained parameters that servers hold."""
    names, globs = list(program.trainable_names), config.parallel.server.parameters
    if globs is None:
        return frozenset(names)
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            raise ConfigError(
                "MW211",
                f"parallel.server.parameters: {glob!r} matches no parameter that is trained.{closest(glob, names)}",
            )
    return frozenset(name for name in names if any(fnmatchcase(name, glob) for glob in globs))


def _with_tables(program: Program, served: Collection[str]) -> tuple[Program, tuple[Table, ...]]:
    """`program` with positions as further inputs in place of the ids of rows; and the tables.

    A parameter on servers is a table where all its uses are embeddings by entries of the batch. What is done to the row
    of the padding is left to who adds up gradients.
    """
    inputs = program.inputs
    position = {source.id: number for number, source in enumerate(inputs)}
    changed: dict[str, Instruction] = {}
    added: list[Source] = []
    layouts: dict[str, Layout] = {}
    tables = []
    for source in program.sources:
        if source.kind != "parameter" or source.name not in served:
            continue
        uses = [one for one in program.instructions if any(ref.id == source.id for ref in one.operands)]
        lookups = [one for one in uses if isinstance(one, Compute) and _looks_up(one, source.id, position)]
        paddings = {one.args[2] if len(one.args) > 2 else -1 for one in lookups}
        if len(lookups) < len(uses) or len(paddings) != 1:
            continue
        entries = []
        for one in lookups:
            entry = one.args[1].id
            name = f"{POSITIONS}{one.id}"
            spec = next(own.spec for own in inputs if own.id == entry)
            added.append(Source(name, "input", name, spec))
            layouts[name] = program.layouts[entry]
            changed[one.id] = replace(one, args=(one.args[0], Ref(name)))
            entries.append(position[entry])
        rows, width = source.spec.shape
        padding = next(iter(paddings))
        tables.append(Table(source.name, tuple(entries), rows, width, None if padding < 0 else padding))
    rewired = replace(
        program,
        sources=(*program.sources, *added),
        layouts=program.layouts | layouts,
        instructions=tuple(changed.get(one.id, one) for one in program.instructions),
    )
    return rewired, tuple(tables)


def _looks_up(step: Compute, table: str, entries: Mapping[str, int]) -> bool:
    """Whether `step` is a plain embedding of `table` by an entry of the batch."""
    return (
        step.target == EMBEDDING
        and step.args[0] == Ref(table)
        and isinstance(step.args[1], Ref)
        and step.args[1].id in entries
        and not any(step.args[3:])
        and not step.kwargs
    )


def _alone(step: Instruction, made: Mapping[str, Instruction]) -> Instruction:
    """`step` without the sum of gradients over slices. The loss is the sum of those of the slices, and so is every
    gradient, wherever on its way back it is added up: here where it has arrived at the parameters."""
    if not isinstance(step, Redistribute) or not step.differentiable:
        return step
    if step.forward:
        complete = made.get(step.value.id) if all(one.kind in LOCAL for one in step.forward) else None
        raise _dependent((complete if isinstance(complete, Compute) else step).operator)
    return replace(step, backward=(), scale=1.0)


def _dependent(what: str) -> StrategyError:
    return StrategyError(
        "MW413",
        f"parallel.mode = parameter_server: {what} needs values of all slices of the batch at once, so no worker can "
        "compute a slice alone. Use a model whose rows do not depend on one another, or parallel=data_parallel; give "
        "a function or operator of yours that works row by row a rule (`@sharding_rule`), without which it takes all.",
    )


def _behind(value: Ref, made: dict[str, Instruction]) -> list[str]:
    """The ids of everything on which a value depends, except for values taken for their dtype alone."""
    found: list[str] = []
    waiting = [value.id]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.append(name)
        step = made.get(name)
        if step is not None:
            skip = isinstance(step, Compute) and step.target == WEIGHT
            waiting += [ref.id for ref in step.operands[skip:]]
    return found
