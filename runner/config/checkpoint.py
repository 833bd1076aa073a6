"""`checkpoint`: when a run is saved, in which form, and how much of it is kept."""

from __future__ import annotations

from typing import Literal

from pydantic import StrictBool

from runner.config.section import Count, Positive, Section, setting


class Checkpoint(Section):
    every: Count | None = setting(None, "Save every N steps", unit="steps")
    minutes: Positive | None = setting(
        None, "Save when this much time has passed since the last checkpoint", unit="minutes"
    )
    best: str | None = setting(
        None, "Save at the best value so far of a metric of evaluate, such as loss", min_length=1
    )
    best_mode: Literal["min", "max"] | None = setting(
        None, "Which value of best is better; null: min of a loss, else max"
    )
    at_end: StrictBool = setting(True, "Save after the last step")
    keep: Count | None = setting(None, "Number of newest checkpoints to keep, and the best one; null: all")
    form: Literal["sharded", "merged", "both"] = setting(
        "sharded", "sharded: a file per rank; merged: one file of full weights for torch and transformers; both"
    )
    background: StrictBool = setting(False, "Train on while files are written")
    copies: Count = setting(1, "Ranks on which each replicated tensor is stored")
