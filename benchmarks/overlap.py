"""The gain of overlapping, as ratios of one run: batch splits over a slow link, gradient reduction during backward over
a slow link, and activations stored by pipeline schedules.

    python benchmarks/overlap.py [--parts copies reduction schedules] [--repetitions 15] [--clock wall|cpu]

A link adds latency and bandwidth delays to a collective; waiting uses no CPU time, so computation can overlap it. The
variants of a part alternate in the same processes and each is judged by its median step, so that other load on the
machine affects all of them; on a busy machine `--clock cpu` counts only computation and waiting for the link. Goals: a
step that communicates as long as it computes is 1.2 times faster with batch splits; 70 % of the gradient reduction
overlaps with backward, in at least 10 times fewer calls than there are gradients; with at least twice as many
micro-batches as stages, 1f1b holds less than gpipe.
"""

from __future__ import annotations

from typing import Any

from benchmarks import overlap_copies, overlap_reduction, overlap_schedules
from benchmarks.ranks import command_line, on_ranks

PARTS = {"copies": overlap_copies, "reduction": overlap_reduction, "schedules": overlap_schedules}


def main() -> None:
    parser = command_line(__doc__, repetitions=15)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    options = parser.parse_args()
    for name in options.parts:
        part: Any = PARTS[name]
        payload = {"repetitions": options.repetitions, "clock": options.clock}
        found = on_ranks(f"{part.__name__}:measure", payload, part.RANKS)
        print(f"{name}\n{part.table(found)}", flush=True)


if __name__ == "__main__":
    main()
