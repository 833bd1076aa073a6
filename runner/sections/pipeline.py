"""The section `parallel.pipeline`: into how many stages a model is cut, where, and in which order they work."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from runner.sections.section import Count, Section, by_path, refusal

Schedule = Literal["gpipe", "1f1b"]
LATER_SCHEDULES = ("interleaved_1f1b", "zero_bubble")


class Pipeline(Section):
    """`stages` of the model, one after the other, each on its own share of the ranks."""

    stages: Annotated[int, Field(strict=True, ge=2)] | None
    micro_batches: Count | None
    schedule: Schedule
    cuts: Literal["auto"] | dict[str, Annotated[int, Field(strict=True, ge=0)]]

    @field_validator("schedule", mode="before")
    @classmethod
    def _schedule_available(cls, schedule: Any) -> Any:
        if schedule in LATER_SCHEDULES:
            raise refusal(
                f"parallel.pipeline.schedule = {schedule!r} comes later; for now choose 1f1b or gpipe.",
                "parallel.pipeline.schedule",
            )
        return schedule

    @field_validator("cuts", mode="before")
    @classmethod
    def _cuts(cls, value: Any) -> Any:
        """A dotted key on the command line builds nested keys: they are made one path again."""
        return by_path(value)

    @model_validator(mode="after")
    def _enough_to_do(self) -> Pipeline:
        if self.stages is None:
            for name, given in (("micro_batches", self.micro_batches is not None), ("cuts", self.cuts != "auto")):
                if given:
                    raise refusal(
                        f"parallel.pipeline.{name} is given but parallel.pipeline.stages = null would ignore it; say "
                        "how many stages with parallel.pipeline.stages=N.",
                        f"parallel.pipeline.{name}",
                        "parallel.pipeline.stages",
                    )
            return self
        if self.parts < self.stages:
            raise refusal(
                f"parallel.pipeline.micro_batches = {self.micro_batches} is less than parallel.pipeline.stages = "
                f"{self.stages}: some stages would never work at the same time; take {self.stages} or more (twice as "
                "many is a good start).",
                "parallel.pipeline.micro_batches",
                "parallel.pipeline.stages",
            )
        if isinstance(self.cuts, dict):
            if not self.cuts:
                raise refusal(
                    "parallel.pipeline.cuts names no module; write auto, or {module.path: stage, ...}.",
                    "parallel.pipeline.cuts",
                )
            for path, stage in self.cuts.items():
                if stage >= self.stages:
                    raise refusal(
                        f"parallel.pipeline.cuts: {path} = {stage}, but parallel.pipeline.stages = {self.stages} has "
                        f"the stages 0 to {self.stages - 1}.",
                        "parallel.pipeline.cuts",
                        "parallel.pipeline.stages",
                    )
        return self

    @property
    def parts(self) -> int:
        """Micro-batches that are in the pipeline in one go; 1 without one."""
        return 1 if self.stages is None else self.micro_batches or 2 * self.stages
