"""Recursive programming and sharding propagation against the exact search; its own gap on three axes."""

from __future__ import annotations

from benchmarks.search.outcome import Claim, Outcome, Setting
from benchmarks.search_quality import Result, results, table

TITLE = "The other searches against the exact one"
ROUNDING = 1e-9


def measure(setting: Setting) -> Outcome:
    """Every model on 4 and 8 devices."""
    found: list[Result] = []
    for one in results("gpt" if setting.quick else ""):
        found.append(one)
        print(f"{one.case.name} on {one.ranks}: {one.spent:.1f} s", flush=True)
    (setting.folder / "search_quality.md").write_text(table(found), encoding="utf-8")

    def worst(values: dict[str, float], goal: float, claim: str, form: str) -> Claim:
        name = max(values, key=lambda key: values[key])
        return Claim(claim, f"{values[name]:{form}} ({name})", values[name] <= goal)

    def named(one: Result) -> str:
        return f"{one.case.name} on {one.ranks} of {one.case.machine}"

    claims = (
        worst({named(one): one.gap for one in found if one.ranks == 4}, ROUNDING, "exact on 2-D: gap 0", ".2%"),
        worst({named(one): one.gap for one in found if one.ranks == 8}, 0.01, "exact on 3-D: gap at most 1 %", ".2%"),
        worst({named(one): one.recursive for one in found}, 1.05, "recursive: at most 1.05 of exact", ".3f"),
        worst(
            {f"{named(one)}, {way}": ratio for one in found for way, ratio in one.propagation.items()},
            1.03,
            "propagation, two operators per layer configured: at most 1.03 of exact",
            ".3f",
        ),
    )
    return Outcome(claims, pages=("search_quality.md",))
