"""`train` and `evaluate`: the length, determinism and precision of training, and evaluation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, StrictBool

from runner.config.arguments import Arguments
from runner.config.section import Count, Positive, Section, dotted, setting
from runner.errors import allowed


def _metric(name: str) -> str:
    if name != "accuracy" and "." not in name:
        raise ValueError(f"is neither accuracy nor a dotted name.{allowed(name, ['accuracy', 'package.module.Name'])}")
    return name if name == "accuracy" else dotted(name)


Metric = Annotated[str, AfterValidator(_metric)]


class Train(Section):
    steps: Count | None = setting(None, "Optimizer steps to train; give steps or epochs", unit="steps")
    epochs: Count | None = setting(None, "Passes over the dataset; give steps or epochs", unit="epochs")
    seed: int = setting(0, "Seed of initial weights, data order and random operators", strict=True, ge=0, lt=2**63)
    precision: Literal["fp32", "fp64", "bf16", "fp16", "bf16_autocast"] = setting(
        "fp32", "Precision of training; bf16_autocast: fp32 parameters, torch.autocast in bf16"
    )
    loss_scale: Positive | None = setting(None, "Loss scale of fp16; null: dynamic")
    accumulate: Count = setting(1, "Micro-batches of one optimizer step (gradient accumulation)")
    clip: Positive | None = setting(None, "Maximum norm of the gradient; null: no clipping")
    random: Literal["fast", "exact"] = setting("fast", "exact: random operators draw the numbers of a single process")
    compile: StrictBool = setting(False, "Pass each rank's program through torch.compile")
    measure_memory: StrictBool = setting(False, "Count each rank's tensors while it trains, into memory.json")
    resume: str | None = setting(None, "auto (the newest checkpoint of the run) or the path of a checkpoint")
    log_every: Count = setting(10, "Interval of lines in the log", unit="steps")


class Evaluate(Section):
    metric: Metric | None = setting(None, "accuracy, or the dotted name of a function")
    every: Count | None = setting(None, "Interval of evaluations; null: after every epoch, or the run", unit="steps")
    args: Arguments = setting({}, "Arguments of the dataset that differ from data.args")
    batch_size: Count | None = setting(None, "Samples of one batch over all ranks; null: as in training")

    @property
    def wanted(self) -> bool:
        """Whether evaluation is configured."""
        return bool(self.metric is not None or self.every is not None or self.batch_size is not None or self.args)
