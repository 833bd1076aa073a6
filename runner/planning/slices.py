"""A data-parallel program whose slices any process can compute alone, at any time.

Ranks of such a program communicate facts about the batch while they compute: how many targets count in a mean.
A worker computes those for the entire batch, and they enter its slice as further inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from runner.config.schema import Config
from runner.planning import lowering
from strategies.core.errors import StrategyError
from strategies.core.graph import OperatorGraph, Ref, Source, TensorSpec
from strategies.core.layout import Layout
from strategies.core.plan import Plan
from strategies.core.program import Compute, Instruction, Program, Redistribute
from strategies.lowering.lowering import lower
from strategies.runtime.simulate import Simulation

WEIGHT = "local.target_weight"
"""Takes its first operand for the dtype alone."""


@dataclass(frozen=True)
class SlicedProgram:
    """A program in which no rank communicates, with the facts of a batch as its last inputs.

    Attributes:
        program: of a slice.
        facts: computes the facts from the batch; None where there are none.
    """

    program: Program
    facts: Program | None

    @property
    def slices(self) -> int:
        return self.program.mesh.size

    @cached_property
    def stored(self) -> Program:
        """The program with the tensors of the model and the entries of a batch as its only sources."""
        tensors = (one for one in self.program.sources if one.kind != "input")
        return replace(self.program, sources=(*tensors, *self.entries))

    @cached_property
    def entries(self) -> list[Source]:
        """The entries of a batch."""
        facts = set() if self.facts is None else {ref.id for ref in self.facts.outputs}
        return [one for one in self.program.sources if one.kind == "input" and one.id not in facts]

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
        StrategyError: slices would need one another's values, or a buffer is written.
    """
    program = lower(graph, plan, lowering.training_options(config))
    if program.updates:
        name = next(source.name for source in program.sources if source.id == program.updates[0][0])
        raise StrategyError(
            "MW413",
            f"parallel.mode = parameter_server: the model writes its buffer {name} in every step, which workers would "
            "have to agree on. Use norms without running statistics, such as LayerNorm or GroupNorm, or "
            "parallel=data_parallel.",
        )
    made = {one.id: one for one in program.instructions}
    carrying = [one for one in program.instructions if _communicates(one)]
    behind: dict[str, Instruction] = {}
    sources = {source.id: source for source in program.sources}
    stubs: dict[str, Source] = {}
    for one in carrying:
        assert isinstance(one, Redistribute)
        for name in _behind(one.value, made):
            if name in behind:
                continue
            step = made.get(name)
            if step is None and sources[name].kind in ("input", "buffer"):
                stubs[name] = sources[name]
            elif isinstance(step, Compute) and step.target == WEIGHT:
                stub = f"dtype_{name}"
                stubs[stub] = Source(stub, "buffer", stub, TensorSpec((0,), one.spec.dtype))
                behind[name] = replace(step, args=(Ref(stub), *step.args[1:]))
            elif isinstance(step, Compute | Redistribute):
                behind[name] = step
            else:
                raise _dependent(one.operator)
    axes = set(program.mesh.names)
    for what, added in (("the loss", program.loss_axes), *program.reductions.items()):
        if program.mesh.size > 1 and set(added) != axes:
            raise _dependent(what)
    if not carrying:
        return SlicedProgram(program, None)
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
    return SlicedProgram(of_slice, facts)


def _dependent(what: str) -> StrategyError:
    return StrategyError(
        "MW413",
        f"parallel.mode = parameter_server: {what} needs values of all slices of the batch at once, so no worker can "
        "compute a slice alone. Use a model whose rows do not depend on one another, or parallel=data_parallel.",
    )


def _communicates(instruction: Instruction) -> bool:
    return isinstance(instruction, Redistribute) and bool(instruction.collectives)


def _behind(value: Ref, made: dict[str, Instruction]) -> list[str]:
    """The ids of everything on which a value depends, except for what is taken for its dtype alone."""
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
