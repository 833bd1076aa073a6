"""What a run can restore from a checkpoint, and what changes as a result.

Weights, states and scheduler fit any plan: strategies, mode, mesh, number of ranks, ZeRO stage, pipeline and precision
may be others. Invariant: a change that would alter the meaning of the stored states, or that they would silently
override, is rejected with both values; state that cannot be carried over is reported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strategies.core.errors import StrategyError

ENDLESS = 2**62
"""The rows of training data that begins again after its last sample, for as many steps as training takes."""

SAME = ("optimizer",)
"""Config keys that must be as they were: the states are those of this optimizer."""

PROGRAM = ("world_size", "parallel.mode", "parallel.zero.stage", "train.precision")
"""Config keys that, beside the plan, determine what the ranks run."""

DECIDES = ("mesh", "inputs", "tensors", "assignments")
"""Entries of a plan that determine the program; who chose them and how does not matter."""

SOURCE = ("data.target", "data.args", "data.path")
"""Config keys from which the rows of the data follow."""

DATA = ("data.batch_size", "data.shuffle", "data.drop_last", "data.unbatched", "train.seed", *SOURCE)
"""Config keys from which the rows of a step follow."""

LATER = {"data.shuffle": True, "data.drop_last": True, "data.unbatched": []}
"""What keys stand for that the checkpoints of earlier versions do not have."""

MODEL = ("model", "loss", "data", "train.accumulate", "train.random", "parallel")
"""Config keys that may change what the captured model computes, or how."""

Difference = tuple[str, Any, Any]
"""(dotted key, before, after)."""


@dataclass(frozen=True)
class Continuation:
    """`moved` are the differences between the programs, none if the run continues bitwise identically; `data` those
    between the rows that steps read; `micro_batches` of a step, before and now."""

    moved: tuple[Difference, ...]
    data: tuple[Difference, ...]
    micro_batches: tuple[int, int]

    def lines(self, config: Mapping[str, Any], draws: bool) -> Iterator[str]:
        """Lines for the user: the differences and their consequences. `draws`: the model draws random numbers."""
        if self.moved:
            yield f"moved to another plan: {'; '.join(_change(one) for one in self.moved[:3])}"
            if draws and _at(config, "train.random") == "fast":
                yield "random numbers (dropout) will be others than without the move; train.random=exact keeps them"
        before, now = self.micro_batches
        if before != now:
            yield (
                f"a step had {before} micro-batches and now has {now} (train.accumulate, parallel.pipeline): the mean "
                "of their losses is another one where the loss is no mean over rows, or the model normalizes over rows"
            )
        if self.data:
            yield (
                f"the data changes: {'; '.join(_change(one) for one in self.data)}. It goes on at the same place of "
                "the epoch, to complete batches, in the order that follows from the new values"
            )


def compare(
    path: Path,
    saved: Mapping[str, Any],
    *,
    plan: Mapping[str, Any],
    config: Mapping[str, Any],
    fingerprint: str,
    samples: int | None = None,
) -> Continuation:
    """`saved` has "plan", "config", "fingerprint" and "samples" (rows of the training data) of the checkpoint `path`;
    the others are those of this run.

    Raises StrategyError, naming the first difference that cannot be carried over.
    """
    before, after, now = saved["config"], _as_json(config), _as_json(plan)

    def changed(keys: Iterable[str]) -> list[Difference]:
        return [one for key in keys for one in differences(_at(before, key), _at(after, key), key)]

    refused, data = changed(SAME), changed(DATA)
    programs = [*changed(PROGRAM), *differences(_deciding(saved["plan"]), _deciding(now), "plan")]
    if not refused and not programs and not changed(MODEL) and saved["fingerprint"] != fingerprint:
        refused = [("the captured model (hash of graph and plan)", saved["fingerprint"], fingerprint)]
    if refused:
        key, was, is_now = refused[0]
        raise StrategyError(
            "MW607",
            f"The checkpoint {path} cannot be continued by this run: {key} was {_shown(was)} and is now "
            f"{_shown(is_now)}. Plan, mode, number of ranks, ZeRO stage and precision may be others; the model's "
            "parameters and the optimizer must be those of the checkpoint. Of its weights alone a run begins with "
            f"model.weights={path}.",
        )
    had = saved.get("samples")
    if None not in (had, samples) and had != samples:
        if ENDLESS in (had, samples):
            counted = ("train.steps", "train.epochs") if had == ENDLESS else ("train.epochs", "train.steps")
            raise StrategyError(
                "MW607",
                f"The checkpoint {path} cannot be continued by this run: its stream was counted by {counted[0]}, and "
                f"by {counted[1]} now, which ends other batches where a pass ends. Go on with {counted[0]}.",
            )
        if not any(key.startswith(SOURCE) for key, _, _ in data):
            raise StrategyError(
                "MW607",
                f"The checkpoint {path} cannot be continued by this run: the training data had {had} rows and has "
                f"{samples} now, although the config names the same data. Give the data of that run; for other data "
                "change data.target, data.args or data.path, or start anew from its weights with model.weights.",
            )
        data.append(("the number of training rows", had, samples))
    return Continuation(tuple(programs), tuple(data), (_micro_batches(before), _micro_batches(after)))


def differences(before: Any, after: Any, where: str) -> Iterator[Difference]:
    """Every entry of two JSON values that differs, in order."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            yield from differences(before.get(key), after.get(key), f"{where}.{key}")
    elif before != after:
        yield where, before, after


def _deciding(plan: Mapping[str, Any]) -> dict[str, Any]:
    mesh = [list(item) for item in plan.get("mesh", {}).items()]  # the order of the axes matters
    assignments = {
        name: {key: value for key, value in entry.items() if key != "origin"}
        for name, entry in plan.get("assignments", {}).items()
    }
    return {key: plan.get(key) for key in DECIDES} | {"mesh": mesh, "assignments": assignments}


def _at(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for word in key.split("."):
        value = value.get(word) if isinstance(value, Mapping) else None
    return LATER.get(key) if value is None else value


def _micro_batches(config: Mapping[str, Any]) -> int:
    """The number in a step, of accumulation and of the pipeline."""
    stages = _at(config, "parallel.pipeline.stages")
    parts: int = (_at(config, "parallel.pipeline.micro_batches") or 2 * stages) if stages else 1
    return parts * (_at(config, "train.accumulate") or 1)


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _change(difference: Difference) -> str:
    key, was, is_now = difference
    return f"{key} was {_shown(was)} and is now {_shown(is_now)}"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."
