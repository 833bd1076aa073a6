"""The results of the survey as a page: numbers by registry, then every architecture that is not exact, by cause."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from tests.survey.outcomes import Outcome

HEAD = """# Survey

Written by `python -m tests.survey --write docs/survey.md`. Every model class that an installed package builds from a
shrunk default config is trained for one step eagerly and on 4 simulated ranks, and as generated modules in threads,
under three plans (data parallel, a search, a random one). `exact`: loss, every gradient and every buffer agree (1e-10
in double precision; classes that do not compute in it: 1e-5, or 3 times one device's own rounding). `refused`: one
paragraph says what to change. `unbuilt`: the survey's config or batch does not suit the class, or eager torch does not
train it; these are not counted.
"""
STATUSES = ("exact", "refused", "differs", "crash", "late", "unbuilt")


def markdown(results: Sequence[Outcome], wanted: int) -> str:
    """The page docs/survey.md; `wanted` is the number of classes that the registries have."""
    parts = [HEAD, "| package | classes | " + " | ".join(STATUSES) + " | exact of those that eager trains | minutes |"]
    parts.append("|---" * (len(STATUSES) + 4) + "|")
    for registry in sorted({one.registry for one in results}):
        own = [one for one in results if one.registry == registry]
        counts = Counter(one.status for one in own)
        trained = len(own) - counts["unbuilt"]
        cells = " | ".join(str(counts[status]) for status in STATUSES)
        minutes = sum(one.seconds for one in own) / 60
        parts.append(f"| {registry} | {len(own)} | {cells} | {counts['exact'] / max(trained, 1):.1%} | {minutes:.0f} |")
    parts.append(f"\n{len(results)} of {wanted} classes were tried.\n")
    for status in STATUSES[1:]:
        some = [one for one in results if one.status == status]
        if some:
            causes: defaultdict[str, list[str]] = defaultdict(list)
            for one in some:
                causes[one.cause].append(one.name)
            parts.append(f"## {status} ({len(some)})\n")
            for cause, names in sorted(causes.items(), key=lambda item: -len(item[1])):
                parts.append(f"* {', '.join(names)}: {cause.replace('|', '/').replace('<', '(').replace('>', ')')}")
            parts.append("")
    return "\n".join(parts).rstrip() + "\n"
