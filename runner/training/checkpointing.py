"""The checkpoints of one training run: the step and row at which it continues, and when it saves: every N steps, every
N minutes, at the best value of a metric, at the end.

Clock and metric are rank 0's; where they decide, it broadcasts the decision. Invariants: all ranks save after the same
steps; the rows of a step follow from its number and from `ahead`, by how many steps the data is ahead of the
optimizer; that is 0 unless a checkpoint was continued with another batch size or dataset.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from runner.checkpoint import branch, loading
from runner.checkpoint.content import Content
from runner.checkpoint.rescue import UPDATE, Intact
from runner.checkpoint.saving import SaveOptions, Saver, better_of
from runner.config.schema import CheckpointForm, Config
from runner.data.order import Order
from runner.errors import ConfigError, allowed
from runner.launch import leaving
from runner.launch.orders import RankContext


def wanted(section: CheckpointForm) -> SaveOptions:
    """How to save, from the config."""
    best = None if section.best is None else section.best_mode or ("min" if "loss" in section.best else "max")
    return SaveOptions(section.form, section.copies, section.keep, best)


@dataclass
class Calendar:
    """Decides for one rank of a run whose checkpoints are in `place`; `world` ranks ask together after every step."""

    section: CheckpointForm
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
        """Whether to save after `step`, and the metric of this step; `evaluation` holds its evaluation results, if any.
        Collective. Raises ConfigError for a metric that is not in the evaluation results."""
        section, metric, improves = self.section, None, False
        evaluated = self._better is not None and evaluation is not None
        if self._better is not None and section.best is not None and evaluation is not None and self.rank == 0:
            if section.best not in evaluation:
                raise ConfigError(
                    "MW614",
                    f"checkpoint.best = {section.best!r} is not what an evaluation of this run finds."
                    + allowed(section.best, evaluation),
                )
            metric = evaluation[section.best]
            improves = self._better(metric, self._best)
            self._best = metric if improves else self._best
        due = (section.every is not None and step % section.every == 0) or (section.at_end and step == last)
        if section.minutes is not None or evaluated:
            due |= improves
            due |= section.minutes is not None and time.monotonic() - self._saved >= 60 * section.minutes
            if self.world > 1:
                flag = torch.tensor([int(due)], device=self.device)
                dist.broadcast(flag, 0)
                due = bool(flag.item())
        if due:
            self._saved = time.monotonic()
        return due, metric


class Keeper:
    """Restores and saves checkpoints. Every rank has one, and all call it together.

    Args:
        content: what a checkpoint holds now.
        begin: called before anything is saved.
    """

    def __init__(
        self,
        config: Config,
        rank: RankContext,
        order: Order,
        content: Callable[[], Content],
        begin: Callable[[], None],
    ) -> None:
        self._config, self._order, self._rank, self._content, self._begin = config, order, rank.rank, content, begin
        self._place = rank.run_dir / "checkpoints"
        self._calendar = Calendar(config.checkpoint, self._place, rank.rank, rank.world_size, rank.device)
        self._saver = Saver(config.checkpoint.background)
        self.ahead = 0
        self._saved = 0
        self.pending = False
        """Whether the evaluation after the last step is still to be made."""
        self.intact = Intact(config.launch.rescue and config.job.name == "train")

    def restore(self, path: Path) -> int:
        """Load the checkpoint `path` (collective). Rank 0 prints the differences.

        Returns:
            The optimizer step after which it was saved.

        Raises:
            ConfigError, StrategyError: as `loading.load`.
        """
        content = self._content()
        restored = loading.load(path, content)
        epoch, row = restored.position
        self.ahead = epoch * self._order.steps_per_epoch + row // self._order.batch_size - restored.step
        if self._rank == 0:
            for line in restored.lines(content.config):
                print(f"resume: {line}", flush=True)
        self._saved, self.pending = restored.step, restored.pending
        return restored.step

    def after(self, step: int, last: int, evaluation: Mapping[str, float] | None) -> None:
        """Save after `step` if it is due; `evaluation` holds its evaluation results. Collective. Raises the error of a
        background save, if any."""
        due, metric = self._calendar.due(step, last, evaluation)
        self._saver.check()
        if due:
            self._save(step, metric)

    def stop(self, step: int) -> None:
        """Save after `step`, the last one because a stop was requested, if that has not been done. Collective."""
        if step > self._saved:
            self._save(step, None)

    @contextmanager
    def rescuing(self) -> Iterator[None]:
        """Write a rescue checkpoint before an error leaves the block, or when the command asks for it
        (`launch.rescue`; always after the last step, where only the evaluation is missing)."""
        leave = partial(self.intact.leave, self._place, self._content, self._position)
        with leaving.saving(partial(leave, UPDATE)):
            try:
                yield
            except Exception:
                leave()
                raise

    def _position(self, step: int) -> tuple[int, int]:
        """The epoch, and the row within it, at which the data continues after `step`."""
        done = step + self.ahead
        return self._order.epoch(done), done % self._order.steps_per_epoch * self._order.batch_size

    def _save(self, step: int, metric: float | None) -> None:
        self._begin()
        section, position = wanted(self._config.checkpoint), self._position(step)
        self._saver.save(self._place, step, self._content(), section, position=position, metric=metric)
        self._saved = step

    def before_update(self) -> None:
        """Called before every update: wait for pending copies."""
        self.intact.changes()
        self._saver.wait_for_copies()

    def finish(self) -> None:
        """Return when everything is on the disk."""
        self._saver.close()
