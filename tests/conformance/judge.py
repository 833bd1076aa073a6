"""Compares the planner's and the engine's results for one recorded case with the record.

A case passes if the strategies chosen, the slices of parameters and the communication between operators are the
recorded ones, if the strategy is refused for the recorded reason, or if the network is planned and lowered; and, where
it is small enough to be run on simulated ranks, if its loss and gradients are those of the network itself. A plan that
differs from the recorded one passes if our own cost model estimates no higher cost; both costs are reported. A
strategy that is refused there and right here differs by design, once a run has proved it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from strategies.core.errors import StrategyError
from tests.conformance.bench import Bench, Differs
from tests.conformance.compare import compare
from tests.conformance.forms import NotMapped
from tests.conformance.network import Case

Kind = Literal["passed", "differs", "not mapped", "failed"]

MESSAGES: Mapping[str, str] = {
    "strategy_count": r"gives \d+ operands|has no entry",
    "strategy_rank": r"has \d+ dims",
    "layout_rank": r"has \d+ dims",
    "strategy_value": r"a count is at least 1",
    "axis_split_forbidden": r"must be replicated",
    "norm_axis_split_forbidden": r"must be replicated",
    "sliced_dim_split_rule": r"must be replicated|cannot be cut",
    "pool_spatial_split_rule": r"must be replicated|cannot be cut",
    "shape_not_divisible": r"cannot be cut|must be replicated",
    "elementwise_layout_mismatch": r"same loop",
    "elementwise_mismatch": r"same loop",
    "contraction_mismatch": r"same loop",
    "too_many_devices": r"do not divide the \d+ devices|no unused axes",
    "gather_param_and_index_split_rule": r"do not divide the \d+ devices|must be replicated",
    "out_layout_rule": r"gives \d+ results|has no unused axes|cannot be cut|no output strategy to choose",
    "shared_parameter_layout_conflict": r"used by two operators",
    "dataset_strategy": r"dataset_strategy",
}
"""The required content of our error message, by recorded rule."""

BY_DESIGN: Mapping[str, str] = {
    "out_layout_rule": "a result that leaves a choice may be handed on in any layout",
    "gather_param_and_index_split_rule": "rows and indices are two loops of a lookup; both may be sliced",
    "sliced_dim_split_rule": "dims that are taken entirely may be sliced, however the range is written",
    "axis_split_forbidden": "the rule computes this operator over slices of the dim",
    "norm_axis_split_forbidden": "the rule adds the statistics over the slices",
    "pool_spatial_split_rule": "the rule computes windows over the ends of slices",
    "shape_not_divisible": "slices need not be equal here; the last one is padded",
    "not_power_of_two": "any number of slices that fits is legal",
}


@dataclass(frozen=True)
class Verdict:
    """`ran`: on simulated ranks, equal to the network itself."""

    kind: Kind
    reason: str = ""
    ran: bool = False


def judge(case: Case, most: int) -> Verdict:
    """The verdict on one case. Networks whose tensors all have at most `most` elements are run."""
    try:
        bench = Bench(case, most)
        expected = case["expected"]
        if "error" in expected:
            return refusal(bench, expected["error"])
        plan, program = bench.lowered(bench.request)
        notes = compare(bench, plan, program)
        if case["mode"] == "auto" and bench.request.mode != "auto":
            notes.append(f"planned by defaults: {case['search_mode']} {bench.no_search}")
        return Verdict("passed", "; ".join(notes), bench.run(plan))
    except NotMapped as missing:
        return Verdict("not mapped", str(missing))
    except StrategyError as error:
        return Verdict("failed", f"refused: {error}")
    except Differs as difference:
        return Verdict("failed", str(difference))


def named_in(error: Mapping[str, Any]) -> str:
    """For a rule that is not known here: our message must at least speak of the operator, `add` of `Add(add)`."""
    names = [re.sub(r".*\((.*)\)", r"\1", trigger["op"]) for trigger in error.get("trigger") or []]
    return "|".join(re.escape(name) for name in names if name)


def refusal(bench: Bench, error: Mapping[str, Any]) -> Verdict:
    rules = list(dict.fromkeys(trigger["rule"] for trigger in error.get("trigger") or []))
    try:
        plan, _ = bench.lowered(bench.request)
    except StrategyError as refused:
        about = "|".join(MESSAGES[rule] for rule in rules if rule in MESSAGES) or named_in(error)
        if re.search(about, str(refused)):
            return Verdict("passed")
        return Verdict("failed", f"refused for another reason than {', '.join(rules)}: {refused}")
    text = next((BY_DESIGN[rule] for rule in rules if rule in BY_DESIGN), None)
    if text is None or not bench.run(plan):
        return Verdict("failed", f"accepted, although {', '.join(rules)} should refuse it")
    return Verdict("differs", f"{text} (run on simulated ranks: right)", True)
