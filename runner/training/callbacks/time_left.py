"""How long a run will still take, from the steps so far."""

from __future__ import annotations

import time

from runner.training.hooks import Callback, TrainingState

FIRST = 2
"""Steps that are not measured: they start compilers and allocate buffers."""


class TimeLeft(Callback):
    """Logs `seconds_left` at every step and prints it every `every` steps.

    The mean time of all steps of this run but the first two, with evaluations and checkpoints between them.

    Args:
        every: steps between two lines; None: train.log_every.
    """

    ranks = "first"

    def __init__(self, every: int | None = None) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every = {every} must be at least 1")
        self.every, self._began = every, 0.0

    def after_step(self, state: TrainingState) -> None:
        done = state.step - state.first + 1 - FIRST
        if done <= 0:
            self._began = time.perf_counter()
            return
        left = (time.perf_counter() - self._began) / done * (state.last - state.step)
        state.log(seconds_left=left)
        if state.step % (self.every or state.config.train.log_every) == 0:
            state.say(f"step {state.step}  {_clock(left)} left")


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
