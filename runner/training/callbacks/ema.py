"""An exponential moving average of the weights, in slices, as the optimizer holds them.

Every rank averages what its optimizer updates: its slice under tensor parallel, its part of that under ZeRO, fp32
masters where the weights have fewer bits. So nothing is communicated, and all ranks have the average of one device.
Invariant: after an evaluation all weights have the bits that they had before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runner.training.hooks import Callback, TrainingState
from strategies.runtime.shards import Shard, Shards


class Ema(Callback):
    """Averages the weights after every step, uses the average in evaluations, and keeps it in checkpoints, as
    `ema/NAME`.

    average = decay * average + (1 - decay) * weights, from the weights at the start on. Buffers are not averaged.

    Args:
        decay: between 0 and 1.
        warmup: take less of the average at first: min(decay, (1 + n) / (10 + n)) after n steps, as TensorFlow does.
        evaluate: whether evaluations use the average.

    Raises:
        ValueError: decay out of its range.
    """

    copies = 1

    def __init__(self, decay: float = 0.999, warmup: bool = False, evaluate: bool = True) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"decay = {decay} must be between 0 and 1")
        self.decay, self.warmup, self.evaluate = decay, warmup, evaluate
        self._shards: dict[str, list[Shard]] = {}
        self._weights: list[Tensor] = []
        self._steps: int | None = None

    def tensors(self, state: TrainingState) -> Shards:
        """The average of this rank's part of every trained parameter, by name."""
        if not self._shards:
            for name, shards in state.parts():
                copies = [replace(one, view=one.view.clone(), lasting=True) for one in shards]
                self._shards.setdefault(name, []).extend(copies)
        return self._shards

    @torch.no_grad()
    def start(self, state: TrainingState) -> None:
        self.tensors(state)
        if self._steps is None:  # no checkpoint, or one without an average
            for average, weight in self._pairs(state):
                average.copy_(weight)
            self._steps = 0

    @torch.no_grad()
    def after_step(self, state: TrainingState) -> None:
        assert self._steps is not None
        decay = min(self.decay, (1 + self._steps) / (10 + self._steps)) if self.warmup else self.decay
        for average, weight in self._pairs(state):
            average.lerp_(weight, 1 - decay)
        self._steps += 1

    @torch.no_grad()
    def before_evaluation(self, state: TrainingState) -> None:
        if self.evaluate:
            self._weights = []
            for average, weight in self._pairs(state):
                self._weights.append(weight.clone())
                weight.copy_(average)
            state.updates.loaded()

    @torch.no_grad()
    def evaluation(self, state: TrainingState) -> None:
        if self.evaluate:
            for kept, (_, weight) in zip(self._weights, self._pairs(state), strict=True):
                weight.copy_(kept)
            self._weights = []
            state.updates.loaded()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]

    def _pairs(self, state: TrainingState) -> Iterator[tuple[Tensor, Tensor]]:
        """Average and weights of every part; the weights may be written."""
        position = dict.fromkeys(self._shards, 0)
        for name, shards in state.parts():
            for one in shards:
                yield self._shards[name][position[name]].view, one.view
                position[name] += 1
