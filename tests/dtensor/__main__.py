"""`python -m tests.dtensor [--write docs/dtensor.md]`: our sharding rules beside DTensor's, one row per operator.

Every call whose answers differ is judged by one device: what only our rule takes is run on simulated ranks, what only
DTensor takes is its own result on simulated ranks. Exit code 1 if a rule of ours is wrong.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from strategies.core.mesh import Mesh
from strategies.rules import RULES
from tests.dtensor.compare import (
    Answer,
    Call,
    Taken,
    ours,
    paired,
    placements_of,
    proved,
    random_calls,
    simulate_ranks,
    theirs,
)
from tests.fuzz.generators import GENERATORS

MARK = "<!-- measured -->"
SHOWN = ("ours is wrong", "DTensor is wrong, ours exact", "DTensor is wrong", "other results", "DTensor only")
LISTED = (
    "ours only",
    "DTensor has no backward",
    "DTensor does not know it",
    "DTensor raises",
    "partial sums, DTensor only",
)
MESHES = (Mesh((("a", 2),)), Mesh((("a", 2), ("b", 2))))


@dataclass
class Row:
    """The comparison of one operator. `counts`: placements of operands by outcome; `examples`: one for each outcome
    other than agreement."""

    op: str
    calls: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def note(self, outcome: str, call: Call, taken: Taken, more: str) -> None:
        self.counts[outcome] += 1
        shapes = ", ".join("x".join(map(str, value.shape)) or "scalar" for value in call.operands)
        rest = [str(arg) for arg in call.operator.args if isinstance(arg, (int, float, bool, str))]
        text = f"{shapes}{'; ' if rest else ''}{', '.join(rest)} at {_say(taken)}: {more}"
        self.examples.setdefault(outcome, text)


def _say(taken: Taken) -> str:
    return " ".join("/".join(placed) for placed in taken)


def outcome(answer: Answer, mine: Taken | None, taken: Taken) -> str:
    """What the two answers to one placement make together."""
    partial = any("P" in placed for placed in taken)
    if answer.verdict == "wrong":
        return "DTensor is wrong" + (", ours exact" if mine else "")
    if answer.verdict == "exact":
        if mine is None:
            return "partial sums, DTensor only" if partial else "DTensor only"
        return "same" if mine == answer.results else "other results"
    if mine is None:
        return "neither"
    return {
        "unknown": "DTensor does not know it",
        "refused": "DTensor raises",
        "redistributed": "ours only",
        "no backward": "DTensor has no backward",
    }[answer.verdict]


def compare(op: str, count: int, seed: int) -> Row:
    """One operator, on every mesh."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # DTensor warns of slow redistributions
    simulate_ranks(max(mesh.size for mesh in MESHES))
    row = Row(op)
    for call in random_calls(op, count, seed):
        row.calls += 1
        along_one: list[Taken] = []
        for mesh in MESHES:
            mine = ours(call, mesh)
            tried = paired(call, mesh, along_one) if len(mesh.axes) == 2 else placements_of(call, mesh)
            for taken in dict.fromkeys([*mine, *tried]):
                answer = theirs(call, mesh, taken)
                if len(mesh.axes) == 1 and (taken in mine or answer.verdict in ("exact", "wrong")):
                    along_one.append(taken)
                results, assignment = mine.get(taken, (None, {}))
                found = outcome(answer, results, taken)
                if results is not None and found != "same" and not proved(call, mesh, assignment):
                    row.note("ours is wrong", call, taken, f"{results}")
                more = ", ".join(
                    filter(None, (_say(answer.results), answer.problem, results and f"ours {_say(results)}"))
                )
                row.note(found, call, taken, more)
    return row


def tables(rows: Sequence[Row]) -> str:
    """What the page shows: placements by outcome, then the operators of every outcome with an example."""
    lines = ["", "", "| outcome | placements | operators |", "|---|---|---|"]
    total: Counter[str] = sum((row.counts for row in rows), Counter())
    lines += [f"| {found} | {n:,} | {sum(found in row.counts for row in rows)} |" for found, n in total.most_common()]
    for found in SHOWN:
        those = [row for row in rows if found in row.counts]
        if those:
            lines += [
                "",
                f"## {found[0].upper()}{found[1:]}",
                "",
                "| operator | placements | an example |",
                "|---|---|---|",
            ]
            lines += [
                f"| `{row.op}` | {row.counts[found]} | {row.examples[found].replace('|', '/')} |" for row in those
            ]
    for found in LISTED:
        those = [f"`{row.op}`" for row in rows if found in row.counts]
        if those:
            lines += ["", f"## {found[0].upper()}{found[1:]}", "", ", ".join(those) + "."]
    return "\n".join(lines) + "\n"


def _rows(file: Path) -> list[Row]:
    found = json.loads(file.read_text(encoding="utf-8"))
    return [Row(row["op"], row["calls"], Counter(row["counts"]), row["examples"]) for row in found]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.dtensor", description=__doc__)
    parser.add_argument(
        "--operators", nargs="*", help="names of operators (default: all that have a rule and a generator)"
    )
    parser.add_argument("--calls", type=int, default=4, help="calls of each operator (default 4)")
    parser.add_argument("--seed", type=int, default=0, help="draws other calls (default 0)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--json", type=Path, help="write all rows into this file")
    parser.add_argument("--read", type=Path, nargs="*", help="take the rows of these files instead of comparing")
    parser.add_argument("--write", type=Path, help="write the tables into this page, behind its line MARK")
    options = parser.parse_args(arguments)
    names = options.operators or sorted(GENERATORS.keys() & RULES.keys())
    started, rows = time.monotonic(), [row for file in options.read or () for row in _rows(file)]
    with ProcessPoolExecutor(options.workers) as workers:
        waiting = {} if options.read else {op: workers.submit(compare, op, options.calls, options.seed) for op in names}
        for at, (name, future) in enumerate(waiting.items()):
            row = future.result()
            rows.append(row)
            print(f"{at + 1}/{len(names)} {name}: {dict(row.counts)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps([vars(row) for row in rows], indent=1), encoding="utf-8")
    total: Counter[str] = sum((row.counts for row in rows), Counter())
    for found, number in total.most_common():
        print(f"{found}: {number} placements of {sum(found in row.counts for row in rows)} operators")
    if options.write:
        head, mark, _ = options.write.read_text(encoding="utf-8").partition(MARK)
        options.write.write_text(head + mark + tables(rows), encoding="utf-8")
    print(f"{time.monotonic() - started:.0f} s")
    return 1 if total["ours is wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
