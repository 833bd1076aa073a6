"""`checkpoint`: when a run is saved, and how much of it is kept."""

from __future__ import annotations

from pydantic import StrictBool

from runner.sections.section import Count, Section


class Checkpoint(Section):
    every: Count | None
    at_end: StrictBool
    keep: Count | None
