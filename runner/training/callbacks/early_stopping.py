"""Early stopping: training ends when a result of the evaluations no longer improves."""

from __future__ import annotations

import math
from typing import Any

from runner.errors import allowed
from runner.training.hooks import Callback, TrainingState


class EarlyStopping(Callback):
    """Ends training after `patience` evaluations without improvement.

    Args:
        metric: a result of the evaluations by name.
        mode: "min" or "max", which value is better; None: min of a loss, else max.
        patience: evaluations to wait for a better value, at least 1.
        min_delta: how much better a value must be, at least 0.

    Raises:
        ValueError: an argument out of its range.
    """

    def __init__(
        self, metric: str = "loss", mode: str | None = None, patience: int = 3, min_delta: float = 0.0
    ) -> None:
        if mode not in (None, "min", "max"):
            raise ValueError(f"mode = {mode!r}.{allowed(str(mode), ('min', 'max'))}")
        if patience < 1 or min_delta < 0:
            raise ValueError(f"patience = {patience} must be at least 1, and min_delta = {min_delta} at least 0")
        self.metric = self.follows = metric
        self.patience, self.min_delta = patience, min_delta
        self._sign = 1 if (mode or ("min" if "loss" in metric else "max")) == "max" else -1
        self.best, self.waited = -math.inf, 0

    def start(self, state: TrainingState) -> None:
        if self.waited >= self.patience:
            state.stop(self._reason())

    def evaluation(self, state: TrainingState) -> None:
        if not state.regular:
            return
        value = self._sign * state.evaluation[self.metric]
        better = value > self.best + self.min_delta if math.isfinite(self.best) else value > self.best
        self.best, self.waited = (value, 0) if better else (self.best, self.waited + 1)
        if self.waited >= self.patience:
            state.stop(self._reason())

    def _reason(self) -> str:
        return f"{self.metric} has not improved on {self._sign * self.best:.6g} in {self.waited} evaluations"

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]
