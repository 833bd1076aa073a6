"""The exact search against every assignment of small graphs, and against an integer program on the same costs."""

from __future__ import annotations

from benchmarks.search.outcome import Claim, Outcome, Setting
from benchmarks.search_milp import CASES, compare, table
from tests.strategies.search.test_dynamic_programming import compare as enumerated

TITLE = "The exact search against enumeration and an integer program"
SEEDS = range(1000, 1450)
"""Of the random graphs; those with too many assignments to enumerate are left out."""
ROUNDING = 1e-9


def measure(setting: Setting) -> Outcome:
    """Raises AssertionError where an assignment of a random graph is cheaper."""
    count = enumerated(SEEDS[:40] if setting.quick else SEEDS)
    print(f"{count} random graphs enumerated", flush=True)
    results = []
    for name, make, layers, mesh in CASES[:2] if setting.quick else CASES:
        results.append(compare(name, make, layers, mesh))
        print(table(results[-1:]).splitlines()[-1], flush=True)
    (setting.folder / "search_milp.md").write_text(table(results), encoding="utf-8")
    worst = max(abs(one.difference) for one in results)
    claims = (
        Claim("equal to enumeration on at least 200 random graphs", f"equal on {count}", count >= 200),
        Claim(
            "equal to scipy.optimize.milp, gpt2 of 12 and llamas of 2 to 8 layers, 1-D and 2-D",
            f"{len(results)} problems, difference at most {worst:.1e}",
            worst <= ROUNDING,
        ),
    )
    return Outcome(claims, pages=("search_milp.md",))
