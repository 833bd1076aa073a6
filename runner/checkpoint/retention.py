"""The checkpoints of one training run: from which step and which row it goes on, and what is saved after which step.

Invariant: the rows of a step follow from its number and from `ahead`, by how many steps the data is ahead of the
optimizer; that is 0 unless a checkpoint was continued with another batch size or dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from runner.checkpoint import loading
from runner.checkpoint import triggers as when
from runner.checkpoint.content import Content
from runner.checkpoint.rescue import Intact
from runner.checkpoint.saving import Saver, save
from runner.config.schema import Config
from runner.data.order import Order
from runner.launch.worker import RankContext


class Keeper:
    """Every rank has one, and all call it together. `begin` is called before anything is saved."""

    def __init__(self, config: Config, rank: RankContext, order: Order, begin: Callable[[], None]) -> None:
        self._config, self._order, self._rank, self._begin = config, order, rank.rank, begin
        self._place = rank.run_dir / "checkpoints"
        self._calendar = when.Calendar(config.checkpoint, self._place, rank.rank, rank.world_size, rank.device)
        self._saver = Saver() if config.checkpoint.background else None
        self.ahead = 0
        self._saved = 0
        self._intact = Intact() if config.launch.rescue and config.job.name == "train" else None

    def restore(self, path: Path, content: Content) -> int:
        """Load the checkpoint `path`; the optimizer step after which it was saved. Rank 0 prints what is other than it
        was. Collective; raises as `loading.load`."""
        restored = loading.load(path, content)
        epoch, row = restored.position
        self.ahead = epoch * self._order.steps_per_epoch + row // self._order.batch_size - restored.step
        if self._rank == 0:
            for line in restored.told(content.config):
                print(f"resume: {line}", flush=True)
        self._saved = restored.step
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
            self._save(step, metric, content)

    def stop(self, step: int, content: Callable[[], Content]) -> None:
        """Save after `step`, the last one because the run was asked to stop, if that has not been done. Collective."""
        if step > self._saved:
            self._save(step, None, content)

    def whole(self, step: int) -> None:
        """The state is that after `step`, until `changing`."""
        if self._intact is not None:
            self._intact.after(step)

    def changing(self) -> None:
        """Something of the state is about to be changed."""
        if self._intact is not None:
            self._intact.changes()

    @contextmanager
    def rescuing(self, content: Callable[[], Content]) -> Iterator[None]:
        """Before an error leaves the block, leave what is in memory to the next start (`launch.rescue`)."""
        try:
            yield
        except Exception:
            if self._intact is not None and self._intact.step is not None:
                self._intact.leave(self._place, content, self._position(self._intact.step))
            raise

    def _position(self, step: int) -> tuple[int, int]:
        """The epoch, and the row within it, at which the data goes on after `step`."""
        done = step + self.ahead
        return self._order.epoch(done), done % self._order.steps_per_epoch * self._order.batch_size

    def _save(self, step: int, metric: float | None, content: Callable[[], Content]) -> None:
        self._begin()
        wanted, position = when.wanted(self._config.checkpoint), self._position(step)
        store = save if self._saver is None else self._saver.save
        store(self._place, step, content(), wanted, position=position, metric=metric)
        self._saved = step

    def before_update(self) -> None:
        """Before weights and states change."""
        self.changing()
        if self._saver is not None:
            self._saver.settle()

    def finish(self) -> None:
        """Return when everything is on the disk."""
        if self._saver is not None:
            self._saver.wait()
