"""A few steps of a run, which `verify` compares and `tune` measures: nothing is evaluated, saved or resumed."""

from __future__ import annotations

from typing import Any

from runner.config.schema import Config


def few_steps(config: Config, steps: int, log_every: int) -> dict[str, Any]:
    """The content of the config of the first `steps`. What follows evaluations (early stopping, ReduceLROnPlateau) is
    left out, as it would not act before the first one. Raises ConfigError for callbacks that cannot be made."""
    content = config.model_dump()
    content["train"] |= {"steps": steps, "epochs": None, "resume": None, "log_every": log_every}
    content |= {"evaluate": {}, "checkpoint": {"at_end": False}, "report": {"progress": False}}
    if config.train.callbacks:
        from runner.build.callbacks import callbacks

        made = zip(content["train"]["callbacks"], callbacks(config).values(), strict=True)
        content["train"]["callbacks"] = [form for form, one in made if getattr(one, "follows", None) is None]
    if (config.optimizer.scheduler.target or "").endswith(".ReduceLROnPlateau"):
        content["optimizer"]["scheduler"] = {}
    return content
