"""What is asked of the verbs that describe: `calibrate` and `explain`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from runner.sections.section import Glob, Positive, Section


class Calibrate(Section):
    file: Annotated[str, Field(min_length=1, description="Where the description of this machine is written.")]
    seconds: Annotated[Positive, Field(description="How long to measure.")]


class Explain(Section):
    operator: Annotated[Glob | None, Field(description="The operators to explain, as in parallel.strategies.")]
    slices: Annotated[
        Glob | None, Field(description="The tensors of which to show every rank's slice, also as --slices NAME.")
    ]
