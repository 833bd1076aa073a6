"""What was decided of what `auto` leaves open, as a config that holds it; as a saved plan tells it, and as a choice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from runner.config.schema import Config
from runner.errors import ConfigError
from runner.planning.stored import read_content
from strategies.planner.plan_file import check_form
from strategies.search.joint import Choice


def of_file(name: str) -> dict[str, Any]:
    """What was decided when a saved plan was made. Raises ConfigError and StrategyError."""
    content = read_content(Path(name))
    check_form(content, f"parallel.plan = {name!r}")
    told: dict[str, Any] | None = content["search"].get("decided")
    if told is None:
        raise ConfigError(
            "MW422",
            f"parallel.plan = {name!r} was made with parallel.zero.stage and parallel.pipeline given, so they cannot "
            "be auto here, nor parallel.recompute of a pipeline; give all as in the run that made it.",
        )
    return told


def decided(config: Config, told: dict[str, Any]) -> Config:
    """The config with what plan.json's `search` tells as `decided`. Raises ConfigError as `with_choice` does."""
    return with_choice(config, choice_of(told), told.get("modules"))


def choice_of(told: dict[str, Any]) -> Choice:
    return Choice(told["stages"], told["zero"], told["micro_batches"], told["recompute"])


def with_choice(config: Config, choice: Choice, modules: Sequence[str] | None = None) -> Config:
    """The config with what `choice` says of the keys that are open, computing again in these `modules` alone if not in
    all that may be. Raises ConfigError where its sections do not go together."""
    content = config.model_dump()
    parallel, staged = content["parallel"], choice.stages > 1
    if config.parallel.zero.stage == "auto":
        parallel["zero"] |= {"stage": choice.zero}
    if config.parallel.pipeline.open:
        parts = choice.micro_batches if staged else None
        parallel["pipeline"] |= {"stages": choice.stages if staged else None, "micro_batches": parts}
    if config.parallel.recompute.operators == "auto":
        none = choice.recompute == "none"
        again = {"operators": choice.recompute} | ({} if modules is None else {"modules": list(modules)})
        parallel["recompute"] = "none" if none else parallel["recompute"] | again
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        raise ConfigError("MW205", *(one["msg"] for one in error.errors())) from None
