"""A limit to the memory of a rank: whether a plan keeps it, and what to change if it does not."""

from __future__ import annotations

from strategies.core.errors import StrategyError
from strategies.core.plan import Plan
from strategies.memory.parts import Memory
from strategies.optimizer.settings import OptimizerSettings


def check_limit(needed: Memory, limit: int, plan: Plan, settings: OptimizerSettings) -> None:
    """Raises StrategyError for a plan that needs more than `limit` bytes."""
    if needed.peak > limit:
        raise StrategyError("MW501", over(needed, limit, settings, recomputes=plan.recompute is not None))


def over(needed: Memory, limit: int, settings: OptimizerSettings, *, recomputes: bool, all_of_it: bool = False) -> str:
    """Why a plan does not fit, and what would help first.

    Args:
        needed: What it needs.
        limit: Bytes of a rank.
        settings: Of the optimizer step.
        recomputes: Whether some layers are recomputed already.
        all_of_it: Whether all layers are that may be.
    """
    parts = needed.by_part
    largest = max(PARTS, key=lambda name: parts[name])
    shown = ", ".join(f"{name} {in_words(parts[name])}" for name in PARTS if parts[name])
    what = "even with all repeated layers recomputed the plan" if all_of_it else "the plan"
    return (
        f"parallel.memory_limit = {in_words(limit)} per rank, but {what} needs {in_words(needed.peak)} at once, in "
        f"{needed.peak_in} ({shown}). The largest part is {largest}: "
        f"{_advice(largest, settings, recomputes or all_of_it)}, more ranks, or a higher limit."
    )


PARTS = ("activations", "optimizer", "parameters", "gradients", "buffers")
"""Listed in display order."""


def _advice(part: str, settings: OptimizerSettings, recomputes: bool) -> str:
    stage, offload, advice = settings.stage, settings.offload, []
    if part == "activations":
        advice += [] if recomputes else ["parallel.recompute=auto"]
        advice += ["more train.accumulate"]
        advice += ["parallel.offload.activations.to=host"] if offload.activations == "none" else []
    elif part == "buffers":
        advice += ["a smaller parallel.zero.options.reduce_bucket_size"]
    else:
        least = {"optimizer": 1, "gradients": 2, "parameters": 3}[part]
        advice += [f"parallel.zero.stage={least}"] if stage < least else []
        name = "parameters" if part == "parameters" else "optimizer"
        advice += [f"parallel.offload.{name}=host"] if getattr(offload, name) == "none" and stage >= least else []
        advice += ["sliced weights (parallel.strategies)"]
    return "choose " + ", ".join(advice)


def in_words(count: int) -> str:
    """Bytes as people write them."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.4g} {units[0]}"
