"""`checkpoint`: when a run is saved, in which form, and how much of it is kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool, model_validator

from runner.config.section import Count, Positive, Section, refusal


class Checkpoint(Section):
    every: Count | None
    minutes: Positive | None
    best: Annotated[str | None, Field(min_length=1)]
    best_mode: Literal["min", "max"] | None
    at_end: StrictBool
    keep: Count | None
    form: Literal["sharded", "merged", "both"]
    background: StrictBool
    copies: Count

    @model_validator(mode="after")
    def _better(self) -> Checkpoint:
        if self.best_mode is not None and self.best is None:
            raise refusal(
                f"checkpoint.best_mode = {self.best_mode!r} says which value of checkpoint.best is better, but that is "
                "null; name a metric of evaluate, such as checkpoint.best=loss.",
                "checkpoint.best_mode",
            )
        return self
