"""docs/search.md: every claim with its goal first, then a section per part with its pictures and its table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import strategies.search
from benchmarks.search.outcome import Record

HEAD = (
    "# What the searches promise, and what was measured",
    "",
    "Written by `python -m benchmarks.search`; one part anew: `--only PART`. Seconds of searches are CPU seconds of",
    "one core, capture excluded unless said.",
    "",
    "`cost` here is the sum of seconds that a search minimises, and `lower_bound` the least such sum. `run plan`",
    "evaluates what the searches find once more, as a step runs: its `cost` is `cost.total`, and its `lower_bound` is",
    "below the step of every plan, whatever overlap hides and joined calls save. That bound leaves out all that",
    "these may save, so its gap is larger. Both bounds are of all plans on at most three mesh axes: an open mesh is",
    "searched over every factorisation of the ranks into at most three axes that respects the levels of the cluster,",
    "and the best plan gives way to one on all prime axes where that costs less: to itself with single axes decided",
    "again and, where that gains more than 0.1 %, to that of recursive programming on up to six axes. A named mesh",
    "of more axes is searched by recursive programming, without a bound.",
    "",
    "```",
    *str(strategies.search.__doc__).split("\n\nOne cost graph")[0].splitlines(),
    "```",
    "",
)


BESIDE = (
    "",
    "## Beside the table",
    "",
    "* On three named axes the search ends at a gap of 1 %. GPT-2 on 8 x 4 x 2 and 64 x 4 x 2 devices costs 5.964",
    "  and 6.075 ms, 0.22 % more than the plans of commit 8464346.",
    "* A Qwen3-Next of 3,208 operators on an open mesh of 4 ranks takes 2.1 CPU-s (28 before), and its plan is",
    "  proven to be the cheapest.",
    "* Single prime axes of the best plan are decided again for 0.1 to 0.4 CPU-s: the 8B on 64, 128, 256 and 512",
    "  devices costs 0.06, 0.28, 0.69 and 0.35 % less by that, the 70B on 512 0.52 %.",
    "* The joint decision of the 7B llama within 20 GiB took 35.0 CPU-s before our own stage 3 was traced in one",
    "  pass and for all numbers of complete parameters at once. Two fifths of the rest are memory traces,",
    "  about as much lowers and estimates plans, the rest searches.",
    "* Open meshes take less since the table was measured, with plans that cost the same. CPU-s before and after,",
    "  one after the other on a busy machine: factorisations that divide the innermost units come first (load 10:",
    "  the mixture of experts on 64 devices 5.3 and 4.5, on 512 10.1 and 8.0; the 8B on 512 3.9 and 3.2; the 70B",
    "  4.3 and 3.6); those that follow another one of a wide graph begin with exact seconds (load 15: the mixture",
    "  of experts on 64 to 512 devices 4.6, 5.7, 6.5 and 8.2, then 3.9, 4.3, 4.7 and 6.1).",
)


def page(records: Sequence[Record]) -> str:
    """The page, in markdown."""
    claims = [claim for record in records for claim in record.outcome.claims]
    lines = [*HEAD, f"{sum(claim.met for claim in claims)} of {len(claims)} goals are met.", ""]
    lines += _table(
        ("part", "goal", "measured", "met"),
        [
            (f"[{record.name}](#{record.name})", claim.goal, claim.measured, "yes" if claim.met else "**no**")
            for record in records
            for claim in record.outcome.claims
        ],
    )
    for record in records:
        lines += ["", *_section(record)]
    return "\n".join([*lines, *BESIDE]) + "\n"


def _section(record: Record) -> Iterator[str]:
    found = record.outcome
    yield f"## {record.name}"
    yield ""
    yield f"{record.title}. {record.date}, {record.seconds:.0f} s: `{record.command}`"
    for name in found.pages:
        yield ""
        yield f"All rows: [{name}]({name})."
    for name in found.pictures:
        yield ""
        yield f"![{record.title}]({name})"
    if found.rows:
        yield ""
        yield from _table(found.head, found.rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
