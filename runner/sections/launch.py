"""`launch`: how ranks are started, and how long they wait for one another."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from runner.sections.faults import Fault
from runner.sections.section import Count, Positive, Section


class Launch(Section):
    timeout: Annotated[Positive, Field(description="Seconds that a collective may take before its rank is given up.")]
    threads: Annotated[Count, Field(description="Threads of torch in each rank.")]
    max_restarts: Annotated[int, Field(strict=True, ge=0, description="How often a run that fails is started again.")]
    faults: Annotated[tuple[Fault, ...], Field(description="What is to go wrong on purpose, once per run folder.")]
