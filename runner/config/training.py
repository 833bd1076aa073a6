"""`train` and `evaluate`: how long, how exactly and in which numbers a model is trained, and what is measured."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StrictBool, model_validator

from runner.config.arguments import Arguments
from runner.config.section import Count, Positive, Section, dotted, refusal
from runner.errors import allowed


def _metric(name: str) -> str:
    if name != "accuracy" and "." not in name:
        raise ValueError(f"is neither accuracy nor a dotted name.{allowed(name, ['accuracy', 'package.module.Name'])}")
    return name if name == "accuracy" else dotted(name)


Metric = Annotated[str, AfterValidator(_metric)]


class Train(Section):
    steps: Count | None
    epochs: Count | None
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)]
    precision: Literal["fp32", "fp64", "bf16", "fp16", "bf16_autocast"]
    loss_scale: Annotated[Positive | None, Field(description="For fp16; null: one that adapts.")]
    accumulate: Count
    clip: Positive | None
    random: Literal["fast", "exact"]
    compile: StrictBool
    measure_memory: StrictBool
    resume: Annotated[str | None, Field(description="null, auto (the newest checkpoint of the run) or a path.")]
    log_every: Count

    @model_validator(mode="after")
    def _one_length(self) -> Train:
        if self.steps is not None and self.epochs is not None:
            raise refusal(
                f"train.steps = {self.steps} and train.epochs = {self.epochs} cannot both be given; "
                "drop one with train.steps=null or train.epochs=null.",
                "train.steps",
                "train.epochs",
            )
        return self

    @model_validator(mode="after")
    def _something_to_scale(self) -> Train:
        if self.loss_scale is not None and self.precision != "fp16":
            raise refusal(
                f"train.loss_scale = {self.loss_scale:g} is for fp16, but train.precision = {self.precision!r} needs "
                "no scale; choose train.precision=fp16 or train.loss_scale=null.",
                "train.loss_scale",
                "train.precision",
            )
        return self


class Evaluate(Section):
    metric: Annotated[Metric | None, Field(description="null, accuracy, or a dotted name.")]
    every: Count | None
    args: Arguments
    batch_size: Count | None

    @property
    def wanted(self) -> bool:
        """Whether anything asks for evaluations."""
        return bool(self.metric is not None or self.every is not None or self.batch_size is not None or self.args)
