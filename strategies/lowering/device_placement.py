"""Operators on the host: which instructions run there, and the copies between.

Invariant: sources, redistributions, outputs and written buffers are on the device; every operand is on the side on
which it is used, by a copy that is an instruction of the program and is made once per value and side.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from strategies.core.addressing import in_module
from strategies.core.errors import StrategyError, closest
from strategies.core.graph import Operator, OperatorGraph, Ref, fresh
from strategies.core.program import KEY, Compute, Cooperate, Copy, Instruction, Program, Redistribute, rewired


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
    if not hosted:
        return program
    on_host = {source.id: False for source in program.sources}
    copies: dict[tuple[Ref, bool], Ref] = {}
    names = {*on_host, *(instruction.id for instruction in program.instructions)}
    instructions: list[Instruction] = []

    def copied(ref: Ref, host: bool = False, operator: str = "", path: tuple[str, ...] = ()) -> Ref:
        if ref == KEY or on_host[ref.id] == host:
            return ref
        if (ref, host) not in copies:
            name = f"{ref.id}_{ref.index}" if ref.index else ref.id
            copies[ref, host] = Ref(fresh(f"{name}_on_{'host' if host else 'device'}", names))
            on_host[copies[ref, host].id] = host
            instructions.append(Copy(copies[ref, host].id, ref, host, operator, path))
        return copies[ref, host]

    for instruction in program.instructions:
        assert isinstance(instruction, Compute | Redistribute | Copy), (
            "operators are placed before anything is rearranged"
        )
        host = isinstance(instruction, Compute) and instruction.operator in hosted
        if host and isinstance(instruction, Cooperate):
            raise StrategyError(
                "MW205",
                f"parallel.place puts {instruction.operator} on the host, but with parallel.context_parallel=ring its "
                "blocks travel between devices; leave it on the device, or choose parallel.context_parallel=gather.",
            )
        on_host[instruction.id] = host
        there = partial(copied, host=host, operator=instruction.operator, path=instruction.path)
        moved = rewired(instruction, there)
        instructions.append(replace(moved, host=True) if host and isinstance(moved, Compute) else moved)
    return program.with_instructions(instructions, copied)
