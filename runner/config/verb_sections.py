"""What is asked of the verbs that describe: `calibrate` and `explain`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictBool

from runner.config.section import Glob, Section


class Calibrate(Section):
    file: Annotated[str, Field(min_length=1, description="Where the description of this machine is written.")]
    seconds: Annotated[
        float, Field(ge=8, allow_inf_nan=False, description="Seconds that the command may take, with its start.")
    ]
    force: Annotated[StrictBool, Field(description="Whether a file of other origin is overwritten.")]


class Explain(Section):
    operator: Annotated[Glob | None, Field(description="The operators to explain, as in parallel.strategies.")]
    slices: Annotated[
        Glob | None, Field(description="The tensors of which to show every rank's slice, also as --slices NAME.")
    ]
