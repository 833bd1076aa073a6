"""The section `parallel.pipeline`: the number of stages, the cuts between them, and their schedule."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from runner.config.section import Count, Section, by_path, refusal, setting

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
DEALT = ("interleaved_1f1b", "zero_bubble")
"""The schedules in which a rank may have several stages."""


class Pipeline(Section):
    """`stages` of the model, one after the other, each on its own share of the ranks; with `virtual_stages`, so many
    times as many, dealt out round robin."""

    stages: Literal["auto"] | Annotated[int, Field(strict=True, ge=2)] | None = setting(
        None, "Stages, each on world_size / stages ranks, which parallel.mesh describes; auto; null: no pipeline"
    )
    virtual_stages: Count | None = setting(
        None, "Stages of each rank, assigned round robin; null: 2 with interleaved_1f1b, else 1"
    )
    micro_batches: Literal["auto"] | Count | None = setting(
        None, "Micro-batches in the pipeline at once; auto; null: twice the stages (auto with them)"
    )
    schedule: Schedule = setting(
        "1f1b", "Order of forward and backward passes; interleaved_1f1b and zero_bubble idle less"
    )
    cuts: Literal["auto"] | dict[str, Annotated[int, Field(strict=True, ge=0)]] = setting(
        "auto", "auto: balanced; or {module.path: stage, ...}"
    )

    @field_validator("cuts", mode="before")
    @classmethod
    def _cuts(cls, value: Any) -> Any:
        """Flatten the nested keys that a dotted key on the command line builds."""
        return by_path(value, "parallel.pipeline.cuts")

    @model_validator(mode="after")
    def _enough_to_do(self) -> Pipeline:
        if self.stages is None or self.stages == "auto":
            return self
        if self.micro_batches != "auto" and self.parts < self.stages:
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
            count = self.stages * self.virtual
            product = f"parallel.pipeline.stages = {self.stages}"
            if self.virtual > 1:
                product = f"parallel.pipeline.stages x virtual_stages = {self.stages} x {self.virtual} = {count}"
            for path, stage in self.cuts.items():
                if stage >= count:
                    raise refusal(
                        f"parallel.pipeline.cuts: {path} = {stage}, but {product} has the stages 0 to {count - 1}.",
                        "parallel.pipeline.cuts",
                        "parallel.pipeline.stages",
                    )
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> Pipeline:
        if self.stages is None or self.stages == "auto":
            return self
        schedule = f"parallel.pipeline.schedule = {self.schedule!r}"
        if self.schedule in DEALT and not self.open and self.parts % max(1, self.parts // self.stages):
            raise refusal(
                f"{schedule} sends parallel.pipeline.micro_batches = {self.parts} through the stages in "
                f"{self.parts // self.stages} groups of one size, into which they do not divide; take a multiple of "
                f"parallel.pipeline.stages = {self.stages}.",
                "parallel.pipeline.micro_batches",
                "parallel.pipeline.stages",
            )
        return self

    @property
    def open(self) -> bool:
        """Whether the number of stages or of micro-batches is still to be decided."""
        return "auto" in (self.stages, self.micro_batches)

    @property
    def known(self) -> int | None:
        """The number of stages; None without a pipeline, or if still undecided."""
        return None if self.stages == "auto" else self.stages

    @property
    def virtual(self) -> int:
        """The number of stages of each rank."""
        return self.virtual_stages or (2 if self.schedule == "interleaved_1f1b" else 1)

    @property
    def parts(self) -> int:
        """Micro-batches of one pipeline pass; 1 without a pipeline, or if still undecided."""
        if self.known is None or self.micro_batches == "auto":
            return 1
        return self.micro_batches or 2 * self.known
