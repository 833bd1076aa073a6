"""Which operators are recomputed in backward (activation checkpointing): from what a user asks to paths of modules and
names of operators, and from these to the instructions of a program.

A repeated layer is a module whose path ends in a number and that holds several operators. Modules inside a recomputed
module are recomputed with it. An operator is cheap if it does no more than a few floating-point operations per element
that it reads or writes: products, convolutions and attention are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from strategies.core.addressing import segments_match
from strategies.core.errors import StrategyError, closest
from strategies.core.graph import Operator, OperatorGraph, Ref, modules_around
from strategies.core.plan import Recompute
from strategies.core.program import KEY, Compute, Cooperate, Copy, Instruction, Program, Redistribute, Start, Wait
from strategies.core.request import RecomputeRequest
from strategies.core.steps import LOCAL
from strategies.rules.sharding import Sharding


def recomputed(graph: OperatorGraph, shardings: Mapping[str, Sharding], wanted: RecomputeRequest) -> Recompute:
    """What `wanted` means for this model. Raises StrategyError for globs and kinds that match nothing, and where no
    module may be recomputed."""
    found = layers(graph, wanted.modules)
    modules = {*found} - _with_changing_buffers(graph)
    if not modules:
        raise StrategyError(
            "MW441",
            f"parallel.recompute: {', '.join(found[:3])}{', ...' if len(found) > 3 else ''} cannot be recomputed, as "
            "forward computes with a buffer there that it writes (a spectral norm, an own running mean), which has "
            "changed in backward. Name other modules in parallel.recompute.modules, or choose parallel.recompute=none.",
        )
    inside = [operator for operator in graph.operators if not modules.isdisjoint(modules_around(operator.path))]
    if wanted.operators == "full":
        kept: tuple[str, ...] = ()
    elif wanted.operators == "selective":
        kept = tuple(operator.name for operator in inside if not _cheap(graph, operator, shardings[operator.id]))
    else:
        kinds = {operator.op for operator in inside}
        for kind in wanted.operators:
            if kind not in kinds:
                raise StrategyError(
                    "MW211",
                    f"parallel.recompute.operators: no operator of kind {kind!r} is in the recomputed modules "
                    f"(parallel.recompute.modules).{closest(kind, sorted(kinds))}",
                )
        kept = tuple(operator.name for operator in inside if operator.op not in wanted.operators)
    keeps = wanted.communication == "keep" or (wanted.communication is None and wanted.operators != "full")
    paths = dict.fromkeys(path for operator in inside for path in modules_around(operator.path) if path in modules)
    return Recompute(tuple(paths), kept, keeps, wanted.slice_inputs)


def _with_changing_buffers(graph: OperatorGraph) -> frozenset[str]:
    """The modules that compute with a buffer that the step writes, as the power iteration of a spectral norm does: in
    backward they would read its new values. Norms in training compute with the statistics of the batch alone."""
    written, behind, found = {Ref(id) for id, _ in graph.updates}, {ref.id for ref in graph.outputs}, set[str]()
    for operator in reversed(graph.operators):
        if operator.id in behind:
            behind.update(ref.id for ref in operator.operands)
            if not written.isdisjoint(operator.operands) and not operator.op.endswith("_training"):
                found.update(modules_around(operator.path))
    return frozenset(found)


def layers(graph: OperatorGraph, patterns: tuple[str, ...] | None) -> tuple[str, ...]:
    """The outermost modules that are meant, by path, in the order in which they run. Raises StrategyError for globs
    that match nothing, and where none are given, for a model without repeated layers."""
    found = repeated_layers(graph, patterns)
    if not found:
        raise StrategyError(
            "MW441",
            "parallel.recompute: the model has no repeated layers (modules of several operators whose path ends in "
            f"a number), so parallel.recompute.modules must name what to "
            f"recompute.{closest('', sorted(_operators_by_module(graph)))}",
        )
    return found


def repeated_layers(graph: OperatorGraph, patterns: tuple[str, ...] | None) -> tuple[str, ...]:
    """`layers`; of a model that has no repeated ones, none."""
    counts = _operators_by_module(graph)
    if patterns is None:
        found = {path for path, count in counts.items() if count > 1 and path.rpartition(".")[2].isdigit()}
    else:
        found = set()
        for pattern in patterns:
            matched = {path for path in counts if segments_match(pattern, path)}
            if not matched:
                raise StrategyError(
                    "MW211",
                    f"parallel.recompute.modules: {pattern!r} matches no module of the "
                    f"model.{closest(pattern, sorted(counts))}",
                )
            found |= matched
    return tuple(dict.fromkeys(path for operator in graph.operators for path in _outermost(operator, found)))


def _operators_by_module(graph: OperatorGraph) -> Counter[str]:
    return Counter(path for operator in graph.operators for path in modules_around(operator.path))


def _outermost(operator: Operator, found: set[str]) -> list[str]:
    return [path for path in modules_around(operator.path) if path in found][:1]


def _cheap(graph: OperatorGraph, operator: Operator, sharding: Sharding) -> bool:
    elements = max((spec.elements for spec in (*graph.operand_specs(operator), *operator.results)), default=0)
    return sharding.known and sharding.flops <= elements


def region_of(instruction: Instruction, program: Program) -> str | None:
    """The module path of the recomputed module in which an instruction stands."""
    return None if program.recompute is None else program.recompute.region(instruction.path)


@dataclass(frozen=True)
class RegionPart:
    """An instruction of a region, the values that it takes in the order of its arguments, whether it is carried out
    once only, and whether it carries a value elsewhere."""

    id: str
    takes: tuple[str, ...]
    kept: bool
    carries: bool


def parts_of(program: Program) -> dict[str, RegionPart]:
    """The instructions of all regions by id, if any of them is carried out once only."""
    chosen = program.recompute
    return {} if chosen is None else program.once("region parts", lambda: _parts_of(program, chosen))


def _parts_of(program: Program, chosen: Recompute) -> dict[str, RegionPart]:
    operators = frozenset(chosen.kept)

    def keeps(instruction: Instruction) -> bool:
        if isinstance(instruction, Compute):
            return instruction.operator in operators
        if isinstance(instruction, Copy | Start | Wait):
            return False
        assert isinstance(instruction, Redistribute), "programs that recompute have nothing joined"
        sent = any(step.kind not in LOCAL for step in instruction.forward)
        return sent and (chosen.keeps_communication or (instruction.operand < 0 and instruction.operator in operators))

    found = {
        instruction.id: RegionPart(
            instruction.id,
            tuple(ref.id for ref in instruction.operands if ref != KEY),
            keeps(instruction),
            isinstance(instruction, Redistribute | Copy | Cooperate),
        )
        for instruction in program.instructions
        if region_of(instruction, program) is not None
    }
    return found if any(part.kept for part in found.values()) else {}
