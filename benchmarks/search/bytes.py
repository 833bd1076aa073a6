"""Bytes sent by searched plans against hand-written plans within the same memory, executed on real ranks."""

from __future__ import annotations

from benchmarks.hand_plans import HANDS, run, table
from benchmarks.search import charts
from benchmarks.search.outcome import Claim, Outcome, Setting
from runner import launch

TITLE = "Bytes sent, against plans by hand"


def measure(setting: Setting) -> Outcome:
    """All hand plans; one of them in a quick run."""
    launch.warm()
    results = run([one for one in HANDS if one.name == "sliced vocabulary"] if setting.quick else HANDS)
    (setting.folder / "hand_plans.md").write_text(table(results), encoding="utf-8")
    rows = [(one.hand.name, float(one.sent[0]), float(one.sent[1])) for one in results]
    charts.pairs(setting.pictures / "bytes.svg", rows, ("by hand", "found"), "bytes sent per step by the busiest rank")
    worst = max(one.sent[1] / one.sent[0] for one in results)
    larger = [one.hand.name for one in results if one.peaks[1] > one.peaks[0]]
    claims = (
        Claim(
            "at most the bytes of ten hand plans at equal memory",
            f"{len(results)} plans, at most {worst:.2f} of the bytes; more memory in {len(larger)}",
            worst <= 1 and not larger and len(results) >= 10,
        ),
    )
    return Outcome(claims, pictures=("search/bytes.svg",), pages=("hand_plans.md",))
