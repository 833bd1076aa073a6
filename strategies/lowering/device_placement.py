"""Operators on the host: which instructions run there, and the copies between.

Invariant: sources, redistributions, outputs and written buffers are on the device; every operand is on the side on
which it is used, by a copy that is an instruction of the program and is made once per value and side.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from strategies.core.addressing import in_module
from strategies.core.errors import StrategyError, closest
from strategies.core.graph import Operator, OperatorGraph, Ref, fresh, with_leaves
from strategies.core.program import KEY, Compute, Copy, Fused, Instruction, Program, Start, Wait


def on_host(graph: OperatorGraph, globs: Collection[str], *, strict: bool = True) -> frozenset[str]:
    """Plan names of the operators that `globs` (of operators and of modules around them) mean. If `strict`, raises
    StrategyError for a glob without any."""
    found: set[str] = set()
    for glob in globs:
        names = {operator.name for operator in graph.operators if in_module(glob, _in_model(operator))}
        if not names and strict:
            known = [operator.module for operator in graph.operators if operator.module]
            raise StrategyError(
                "MW211",
                f"parallel.place: {glob!r} matches no module and no operator of the model.{closest(glob, known)}",
            )
        found |= names
    return frozenset(found)


def _in_model(operator: Operator) -> Operator:
    return operator if operator.batch_slice is None else replace(operator, name=operator.batch_slice.name)


def place_on_host(program: Program, hosted: Collection[str]) -> Program:
    """`program` with the operators of these plan names on the host."""
    return _Placing(program, hosted).program if hosted else program


class _Placing:
    def __init__(self, program: Program, hosted: Collection[str]) -> None:
        self.host: dict[str, bool] = {source.id: False for source in program.sources}
        self.copies: dict[tuple[Ref, bool], Ref] = {}
        self.names = {*self.host, *(instruction.id for instruction in program.instructions)}
        self.instructions: list[Instruction] = []
        for instruction in program.instructions:
            host = isinstance(instruction, Compute) and instruction.operator in hosted
            self.host[instruction.id] = host
            self.instructions.append(self._beside(instruction, host))
        outputs = tuple(self._on_device(ref) for ref in program.outputs)
        updates = tuple((buffer, self._on_device(ref)) for buffer, ref in program.updates)
        self.program = replace(program, instructions=tuple(self.instructions), outputs=outputs, updates=updates)

    def _beside(self, instruction: Instruction, host: bool) -> Instruction:
        """The instruction on its side, with its operands there."""

        def local(leaf: Any) -> Any:
            return self._copied(leaf, host, instruction.operator, instruction.path) if isinstance(leaf, Ref) else leaf

        if isinstance(instruction, Compute):
            return with_leaves(instruction, local, host=host)
        assert not isinstance(instruction, Fused | Start | Wait), "operators are placed before anything is rearranged"
        return replace(instruction, value=local(instruction.value))

    def _on_device(self, ref: Ref) -> Ref:
        return self._copied(ref, False, "", ())

    def _copied(self, ref: Ref, host: bool, operator: str, path: tuple[str, ...]) -> Ref:
        if ref == KEY or self.host[ref.id] == host:
            return ref
        if (ref, host) not in self.copies:
            name = f"{ref.id}_{ref.index}" if ref.index else ref.id
            fresh_id = fresh(f"{name}_on_{'host' if host else 'device'}", self.names)
            self.names.add(fresh_id)
            self.host[fresh_id] = host
            self.instructions.append(Copy(fresh_id, ref, host, operator, path))
            self.copies[ref, host] = Ref(fresh_id)
        return self.copies[ref, host]
