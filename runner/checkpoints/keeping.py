"""The checkpoints of one training run: from which step and which row it goes on, and what is saved after which step.

Invariant: the rows of a step follow from its number and from `ahead`, by how many steps the data is ahead of the
optimizer; that is 0 unless a checkpoint was continued with another batch size or dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from runner.checkpoints import loading, when
from runner.checkpoints.content import Content
from runner.checkpoints.saving import Saver, save
from runner.data.order import Order
from runner.schema import Config
from runner.worker import RankContext


class Keeper:
    """Every rank has one, and all call it together."""

    def __init__(self, config: Config, rank: RankContext, order: Order) -> None:
        self._config, self._order, self._rank = config, order, rank.rank
        self._place = rank.run_dir / "checkpoints"
        self._calendar = when.Calendar(config.checkpoint, self._place, rank.rank, rank.world_size, rank.device)
        self._saver = Saver() if config.checkpoint.background else None
        self.ahead = 0
        self._saved: int | None = None

    def restore(self, path: Path, content: Content) -> int:
        """Load the checkpoint `path`; the optimizer step after which it was saved. Rank 0 prints what is other than it
        was. Collective; raises as `loading.load`."""
        restored = loading.load(path, content)
        epoch, row = restored.position
        self.ahead = epoch * self._order.steps_per_epoch + row // self._order.batch_size - restored.step
        if self._rank == 0:
            for line in restored.told(content.config):
                print(f"resume: {line}", flush=True)
        return restored.step

    def after(
        self, step: int, last: int, evaluation: Mapping[str, float] | None, content: Callable[[], Content]
    ) -> None:
        """Save after `step` if it is due; `evaluation` is what was found after it. Collective. Raises what a save
        beside training raised meanwhile."""
        due, metric = self._calendar.due(step, last, evaluation)
        if self._saver is not None:
            self._saver.check()
        if due:
            self._save(step, content, metric)

    def now(self, step: int, content: Callable[[], Content]) -> None:
        """Save after `step` unless that was done. Collective."""
        if self._saved != step:
            self._save(step, content, None)

    def _save(self, step: int, content: Callable[[], Content], metric: float | None) -> None:
        done, self._saved = step + self.ahead, step
        position = (self._order.epoch(done), done % self._order.steps_per_epoch * self._order.batch_size)
        store = save if self._saver is None else self._saver.save
        store(self._place, step, content(), when.wanted(self._config.checkpoint), position=position, metric=metric)

    def finish(self) -> None:
        """Return when everything is on the disk."""
        if self._saver is not None:
            self._saver.wait()
