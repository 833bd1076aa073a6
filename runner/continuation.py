"""Whether a run may continue a checkpoint: plan, model and optimizer must be those of the run that was saved. How long
it trains, what it reports, its data, seed and clipping may be others from here on.

Invariant: a difference that would change what the saved states mean, or that they would silently win over, is refused
and named with both values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from strategies.errors import StrategyError

SAME = ("world_size", "parallel.mode", "parallel.zero.stage", "train.precision", "optimizer")
"""Config keys that must be as they were."""

DECIDES = ("mesh", "inputs", "tensors", "operators")
"""Entries of a plan that determine the program; who chose them and how does not matter."""

Difference = tuple[str, Any, Any]
"""(dotted key, before, after)."""


def check_same(
    path: Path, saved: Mapping[str, Any], *, plan: Mapping[str, Any], config: Mapping[str, Any], fingerprint: str
) -> None:
    """`saved` has "plan", "config" and "fingerprint" of the checkpoint `path`; the others are those of this run.

    Raises StrategyError, naming the first difference.
    """
    before, after = saved["config"], _as_json(config)
    found = [one for key in SAME for one in differences(_at(before, key), _at(after, key), key)]
    found += differences(_deciding(saved["plan"]), _deciding(_as_json(plan)), "plan")
    if not found and saved["fingerprint"] != fingerprint:
        found = [("the captured model (hash of graph and plan)", saved["fingerprint"], fingerprint)]
    if found:
        key, was, now = found[0]
        raise StrategyError(
            f"The checkpoint {path} cannot be continued by this run: {key} was {_shown(was)} and is now {_shown(now)}. "
            "A run is resumed with the plan, mode, world size, ZeRO stage, precision and optimizer of its checkpoint."
        )


def differences(before: Any, after: Any, where: str) -> Iterator[Difference]:
    """Every entry of two JSON values that differs, in order."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            yield from differences(before.get(key), after.get(key), f"{where}.{key}")
    elif before != after:
        yield where, before, after


def _deciding(plan: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: plan.get(key) for key in DECIDES}
    found["mesh"] = [list(item) for item in plan.get("mesh", {}).items()]  # the order of the axes matters
    found["operators"] = {
        name: {key: value for key, value in entry.items() if key != "origin"}
        for name, entry in plan.get("operators", {}).items()
    }
    return found


def _at(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for word in key.split("."):
        value = value.get(word) if isinstance(value, Mapping) else None
    return value


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."
