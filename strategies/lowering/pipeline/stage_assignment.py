"""Which stage every operator belongs to: as cuts by module path say, or balanced.

Invariant: no operator stands in an earlier stage than one whose result it uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from typing import Literal

from strategies.core.errors import StrategyError, closest
from strategies.core.graph import Operator, OperatorGraph, Source
from strategies.lowering.pipeline.cutting import Stage
from strategies.rules import rule_of

Cuts = Literal["auto"] | Mapping[str, int]
EVEN = 1.25
"""A heaviest stage of at most this many times the mean is balanced enough to leave modules uncut."""


def in_stages(graph: OperatorGraph, stages: int, cuts: Cuts, virtual: int = 1) -> dict[str, int]:
    """The stage of every operator by id; there are `stages` times `virtual` of them. With `cuts` (module path ->
    stage), the longest path that leads to an operator counts; operators that no path names go with what they use.
    Raises StrategyError for cuts that cannot be."""
    if virtual > 1:
        count = f"parallel.pipeline.stages x virtual_stages = {stages} x {virtual} = {stages * virtual}"
    else:
        count = f"parallel.pipeline.stages = {stages}"
    return (
        _balanced(graph, stages * virtual, count)
        if cuts == "auto"
        else _as_configured(graph, stages * virtual, cuts, count)
    )


def as_trained(graph: OperatorGraph, stages: Sequence[Stage]) -> dict[str, int]:
    """The stage of every operator of an evaluation graph by id: that of its namesake in training or else, like all that
    stands behind it, the first one that has what it uses. Raises StrategyError for a parameter or buffer that is only
    elsewhere."""
    named = {operator.name: stage.number for stage in stages for operator in stage.graph.operators}
    stages_by_parameter: dict[str, set[int]] = {}
    for stage in stages:
        for source in stage.graph.of_kind("parameter", "buffer"):
            stages_by_parameter.setdefault(source.name, set()).add(stage.number)
    found: dict[str, int] = {}
    for operator in graph.operators:
        nodes = [graph.by_id[ref.id] for ref in operator.operands]
        least = max((found[node.id] for node in nodes if isinstance(node, Operator)), default=0)
        owned = [source for source in nodes if isinstance(source, Source) and source.name in stages_by_parameter]
        allowed = set(range(len(stages))).intersection(*(stages_by_parameter[source.name] for source in owned))
        wanted = named.get(operator.name, named.get(f"{operator.module}.{operator.op}", least))
        later = sorted(number for number in allowed if number >= least)
        if not later:
            raise StrategyError(
                "MW430",
                f"parallel.pipeline.cuts: in evaluation {operator.where} uses {', '.join(s.name for s in owned)} "
                f"behind a result of stage {least}, but in training no such stage holds it; cut the model elsewhere, "
                "or leave evaluation out (evaluate.metric=null and every=null).",
            )
        found[operator.id] = wanted if wanted in later else later[0]
    return found


def _as_configured(graph: OperatorGraph, stages: int, cuts: Mapping[str, int], count: str) -> dict[str, int]:
    modules = {
        ".".join(words[: i + 1]) for o in graph.operators for words in [o.module.split(".")] for i in range(len(words))
    }
    for path, stage in cuts.items():
        if path not in modules:
            raise StrategyError(
                "MW211",
                f"parallel.pipeline.cuts: {path!r} is no module of the model.{closest(path, sorted(modules - {''}))}",
            )
        if not 0 <= stage < stages:
            raise StrategyError(
                "MW430", f"parallel.pipeline.cuts: {path} = {stage}, but {count} has the stages 0 to {stages - 1}."
            )
    found: dict[str, int] = {}
    for operator in graph.operators:
        producers = [graph.by_id[ref.id] for ref in operator.operands]
        latest = max((one for one in producers if isinstance(one, Operator)), key=lambda o: found[o.id], default=None)
        least = 0 if latest is None else found[latest.id]
        paths = [path for path in cuts if f"{operator.module}.".startswith(f"{path}.")]
        wanted = cuts[max(paths, key=len)] if paths else least
        if wanted < least:
            assert latest is not None
            raise StrategyError(
                "MW430",
                f"parallel.pipeline.cuts: {max(paths, key=len)} = {wanted} comes before what it uses: {operator.where} "
                f"needs the result of {latest.where}, which is in stage {least}. A stage can only use earlier ones; "
                f"give it stage {least} or later.",
            )
        found[operator.id] = wanted
    for stage in sorted(set(range(stages)) - set(found.values())):
        raise StrategyError(
            "MW430",
            f"parallel.pipeline.cuts leave stage {stage} of {count} without an operator; give it a module, or take "
            "fewer stages.",
        )
    return found


def _balanced(graph: OperatorGraph, stages: int, count: str) -> dict[str, int]:
    """Consecutive stages whose heaviest is as light as possible, cut between modules as far up the tree as is even."""
    work = [float(rule_of(operator, graph).flops) + 1.0 for operator in graph.operators]
    mean, found = sum(work) / stages, None
    deepest = max(len(operator.path) for operator in graph.operators)
    for depth in range(1, deepest + 2):
        units = _units(graph, depth)
        if len(units) < stages:
            continue
        sums = [sum(work[i] for i in unit) for unit in units]
        ends = _lightest(sums, stages)
        heaviest = max(sum(sums[a:b]) for a, b in zip((0, *ends), ends, strict=False))
        if found is None or heaviest < found[0] / EVEN:
            found = heaviest, units, ends
        if found[0] <= EVEN * mean:
            break
    if found is None:
        raise StrategyError("MW431", f"{count}, but the model has only {len(work)} operators; take fewer stages.")
    _, units, ends = found
    return {
        graph.operators[i].id: sum(number >= end for end in ends) for number, unit in enumerate(units) for i in unit
    }


def _units(graph: OperatorGraph, depth: int) -> list[list[int]]:
    """The numbers of consecutive operators of one module, `depth` calls down; below that, of single operators."""
    paths = [(*operator.path, operator.id)[:depth] for operator in graph.operators]
    return [list(run) for _, run in groupby(range(len(paths)), lambda i: paths[i])]


def _lightest(work: Sequence[float], parts: int) -> tuple[int, ...]:
    """The ends of `parts` consecutive parts, none empty, whose heaviest is as light as possible."""
    sums = (0.0, *accumulate(work))
    best: list[tuple[float, tuple[int, ...]]] = [(sums[end], (end,)) for end in range(len(sums))]
    for part in range(2, parts + 1):
        best = [
            min(
                ((max(best[cut][0], sums[end] - sums[cut]), (*best[cut][1], end)) for cut in range(part - 1, end)),
                default=(float("inf"), ()),
            )
            for end in range(len(sums))
        ]
    return best[-1][1]
