"""When a run is saved: after so many steps, after so many minutes, at the best value of a metric, at the end.

Clock and metric are rank 0's; where they decide, it tells the others. Invariant: all ranks save after the same steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from runner.checkpoint import branch
from runner.checkpoint.committing import Wanted, better_of
from runner.config.checkpoint import Checkpoint
from runner.errors import ConfigError, allowed


def wanted(section: Checkpoint) -> Wanted:
    """How to save, from the config."""
    best = None if section.best is None else section.best_mode or ("min" if "loss" in section.best else "max")
    return Wanted(section.form, section.copies, section.keep, best)


@dataclass
class Calendar:
    """Decides for one rank of a run whose checkpoints are in `place`; `world` ranks ask together after every step."""

    section: Checkpoint
    place: Path
    rank: int
    world: int
    device: str = "cpu"

    def __post_init__(self) -> None:
        self._saved = time.monotonic()
        self._better = better_of(wanted(self.section).best)
        self._best: float | None = None
        if self._better is not None and self.rank == 0:
            self._best = branch.best_metric(self.place, self._better)

    def due(self, step: int, last: int, evaluation: Mapping[str, float] | None) -> tuple[bool, float | None]:
        """Whether to save after `step`, and the metric of this step; `evaluation` is what was found after it, if it was
        evaluated. Collective. Raises ConfigError for a metric that an evaluation does not find."""
        metric = self._metric(evaluation)
        found = self.section.every is not None and step % self.section.every == 0
        found = found or (self.section.at_end and step == last)
        if self.section.minutes is not None or (self._better is not None and evaluation is not None):
            late = self.section.minutes is not None and time.monotonic() - self._saved >= 60 * self.section.minutes
            improves = self._improves(metric)
            found = self._told(found or late or improves)
        if found:
            self._saved = time.monotonic()
        return found, metric

    def _metric(self, evaluation: Mapping[str, float] | None) -> float | None:
        if self.section.best is None or evaluation is None or self.rank:
            return None
        if self.section.best not in evaluation:
            raise ConfigError(
                f"checkpoint.best = {self.section.best!r} is not what an evaluation of this run finds."
                + allowed(self.section.best, evaluation)
            )
        return evaluation[self.section.best]

    def _improves(self, metric: float | None) -> bool:
        if metric is None or self._better is None or not (self._best is None or self._better(metric, self._best)):
            return False
        self._best = metric
        return True

    def _told(self, mine: bool) -> bool:
        """What rank 0 has decided."""
        if self.world == 1:
            return mine
        flag = torch.tensor([int(mine)], device=self.device)
        dist.broadcast(flag, 0)
        return bool(flag.item())
