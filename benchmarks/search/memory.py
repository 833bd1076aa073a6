"""Predicted peak memory against measured peaks in training on real ranks."""

from __future__ import annotations

from benchmarks.memory import run
from benchmarks.search import charts
from benchmarks.search.outcome import Claim, Outcome, Setting

TITLE = "Memory of a rank, predicted and measured"


def measure(setting: Setting) -> Outcome:
    """All pairs of a model and a plan; a quick run takes those of vit."""
    results = run(setting.folder / "memory.md", "vit" if setting.quick else "")
    groups: dict[str, list[tuple[float, float]]] = {}
    for one in results:
        groups.setdefault(one.model, []).append((one.measured["peak"], one.predicted["peak"]))
    charts.against(setting.pictures / "memory.svg", groups, "bytes")
    mean = sum(abs(one.difference) for one in results) / len(results)
    under = min(0.0, *(one.difference for one in results))
    claims = (
        Claim(
            "at least 40 pairs, mean error at most 5 %",
            f"{len(results)} pairs, {mean:.2%}",
            mean <= 0.05 and len(results) >= 40,
        ),
        Claim("never more than 3 % under", f"at most {-under:.2%} under", under >= -0.03),
    )
    return Outcome(claims, pictures=("search/memory.svg",), pages=("memory.md",))
