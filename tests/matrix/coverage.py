"""The results of the matrix as a table: per architecture the sharded share, replicated operators, numerical error."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strategies.core.graph import OperatorGraph
from strategies.core.plan import Plan
from strategies.rules import rule_of
from tests.matrix.plans import MODES, Mode, flops
from tests.matrix.runs import DROPOUT, ROUNDINGS, Precision, Run, matrix_run, own_rounding, subject
from tests.matrix.zoo.architecture import Architecture

LISTED = 0.03
"""Operators without a rule, which run replicated, are listed above this share of the flops."""
CELLS: tuple[tuple[Mode, float], ...] = tuple((mode, dropout) for mode in MODES for dropout in (0.0, DROPOUT))


@dataclass(frozen=True)
class Share:
    """Of a plan's operators: the number, and the share of all flops, between 0 and 1."""

    count: int
    flops: float


@dataclass(frozen=True)
class Row:
    """One architecture. `sliced` by mode; `replicated` are the operators without a rule, by operator name."""

    architecture: Architecture
    operators: int
    sliced: dict[Mode, Share]
    fallback: Share
    replicated: dict[str, Share]
    runs: tuple[Run, ...]
    error: str
    rounding: float
    seconds: float

    @property
    def passed(self) -> bool:
        return not self.error and all(run.passed for run in self.runs)

    @property
    def listed(self) -> dict[str, Share]:
        return {op: share for op, share in self.replicated.items() if share.flops > LISTED}


def row(architecture: Architecture, world: int, say: Callable[[str], None]) -> Row:
    """All runs of one architecture: three plans, with and without dropout, in both precisions."""
    started, runs, rounding = time.process_time(), [], 0.0
    graph, plans = None, {}
    precisions: tuple[Precision, ...] = ("fp64", "fp32")
    for dropout in (0.0, DROPOUT):
        for precision in precisions:
            try:
                one = subject(architecture, dropout, precision)
            except Exception as problem:  # a rejected model is a row of the table
                error = f"{type(problem).__name__}: {str(problem).splitlines()[0]}"
                return Row(architecture, 0, {}, Share(0, 0.0), {}, tuple(runs), error, rounding, _since(started))
            for mode in MODES:
                done = matrix_run(one, mode, dropout, world)
                if precision == "fp32" and done.differences is not None and not done.passed:
                    rounding = max(rounding, own_rounding(architecture, dropout))
                    done = done.widened(rounding)
                if not done.passed:
                    say(
                        f"{architecture.name}: {mode}, dropout {dropout}, {precision}: {done.error or done.differences}"
                    )
                if dropout == 0 and precision == "fp32" and done.plan is not None:
                    graph, plans[mode] = one.graph, done.plan
                runs.append(done)
    if graph is None:
        return Row(architecture, 0, {}, Share(0, 0.0), {}, tuple(runs), runs[0].error, rounding, _since(started))
    sliced = {mode: _sliced(graph, plan) for mode, plan in plans.items()}
    replicated = _replicated(graph)
    fallback = Share(sum(s.count for s in replicated.values()), sum(s.flops for s in replicated.values()))
    count = len(graph.operators)
    return Row(architecture, count, sliced, fallback, replicated, tuple(runs), "", rounding, _since(started))


def _since(started: float) -> float:
    return time.process_time() - started


def _sliced(graph: OperatorGraph, plan: Plan) -> Share:
    total = sum(flops(graph, operator) for operator in graph.operators)
    cut = [operator for operator in graph.operators if plan.operators[operator.name].assignment]
    return Share(len(cut), sum(flops(graph, operator) for operator in cut) / total)


def _replicated(graph: OperatorGraph) -> dict[str, Share]:
    """The operators without a rule, with their shares of the flops, the greatest first."""
    total = sum(flops(graph, operator) for operator in graph.operators)
    counts: Counter[str] = Counter()
    work: Counter[str] = Counter()
    for operator in graph.operators:
        if not rule_of(operator, graph).known:
            counts[operator.op] += 1
            work[operator.op] += flops(graph, operator) / total  # type: ignore[assignment]
    return {op: Share(counts[op], share) for op, share in work.most_common()}


def markdown(rows: Sequence[Row], further: Sequence[Row], world: int) -> str:
    """The page docs/coverage.md."""
    parts = [HEAD.format(world=world), _table(rows), _notes(rows)]
    if further:
        parts += ["## Also tried\n\nArchitectures that are not among the 32.\n", _table(further), _notes(further)]
    return "\n".join(part for part in parts if part)


HEAD = """# Coverage

Written by `make coverage`. Every architecture is a small random model, trained for one step on {world} ranks, which are
simulated and then run as generated modules in threads, and eagerly on one device, from the same weights, batch and
random numbers.

* **sliced**: operators that the plan cuts, and their share of the flops; with `parallel.mode=data_parallel`, and with
  sharding propagation from strategies on the products with the most flops (columns and rows of the weights in turn).
* **no rule**: operators that run on replicated tensors because no rule covers them, and their share of the flops.
* **the others** are the worst differences in double / single precision: of the loss on any rank, any gradient and any
  buffer, relative to its largest element. `random` is a random legal strategy on every operator and a random layout of
  every source. Tolerances: 1e-10 and 1e-5.
"""
TITLES = (
    "architecture",
    "operators",
    "sliced, data parallel",
    "sliced, auto",
    "no rule",
    "data parallel",
    "dropout 0.1",
    "auto",
    "dropout 0.1",
    "random",
    "dropout 0.1",
    "CPU s",
)


def _table(rows: Sequence[Row]) -> str:
    lines = [_line(TITLES), _line(["---"] * len(TITLES))]
    for one in rows:
        if one.error:
            lines.append(_line([one.architecture.name, "refused", *[""] * (len(TITLES) - 3), f"{one.seconds:.0f}"]))
            continue
        shares = [_share(one.sliced[mode], one.operators) if mode in one.sliced else "" for mode in MODES[:2]]
        fallback = f"{one.fallback.count} ({one.fallback.flops:.1%})" if one.fallback.count else "0"
        cells = [_cell(one, mode, dropout) for mode, dropout in CELLS]
        lines.append(
            _line([one.architecture.name, str(one.operators), *shares, fallback, *cells, f"{one.seconds:.0f}"])
        )
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _share(share: Share, total: int) -> str:
    return f"{share.count / total:.0%} ({share.flops:.1%})"


def _cell(one: Row, mode: Mode, dropout: float) -> str:
    """Both precisions of one run; what failed is bold."""
    found = []
    for run in one.runs:
        if (run.mode, run.dropout) == (mode, dropout):
            text = f"{run.differences.worst:.0e}" if run.differences else "error"
            found.append(text if run.passed else f"**{text}**")
    return " / ".join(found)


def _notes(rows: Sequence[Row]) -> str:
    notes = []
    for one in rows:
        name = one.architecture.name
        if one.error:
            notes.append(f"* {name}: {one.error}")
        notes += [
            f"* {name}: {op} ({share.count} of {one.operators} operators, {share.flops:.1%} of the flops), replicated: "
            f"{REASONS.get(op, 'no rule covers it')}."
            for op, share in one.listed.items()
        ]
        if one.rounding:
            notes.append(
                f"* {name}: in single precision one device itself is {one.rounding:.0e} away from double precision; "
                f"runs may differ by {ROUNDINGS:g} times that."
            )
        notes += [
            f"* {name}, {run.mode}, dropout {run.dropout}, {run.precision}: {run.error or run.differences}"
            for run in one.runs
            if not run.passed
        ]
    return "\n".join([*notes, ""]) if notes else ""


REASONS: dict[str, str] = {}
"""Why a listed operator has no rule."""
