"""torch.profiler during some steps: a Chrome trace per rank, with collectives named by what they are made for.

The flight recorder notes every collective before it is made, and for which operator, forward and backward. While a
trace is recorded, and only then, this callback stands in for two of its methods and opens a range of the profiler too.
Invariant: outside of the recorded steps nothing of this file is called by a collective.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function, schedule

from runner.training.hooks import Callback, TrainingState
from strategies.runtime.flight_recorder import KINDS, PLACE, recorder

FOLDER = "profile"


class Profiler(Callback):
    """Writes `profile/rank-RANK-step-STEP.json` (the last step of the trace) for chrome://tracing or ui.perfetto.dev.

    Args:
        wait: steps before the profiler starts, at least 0.
        warmup: steps that it runs without recording, at least 0.
        active: steps that it records, at least 1.
        repeat: how many times it does so, at least 1.
        shapes: record the shapes of operands.
        memory: record allocations.
        stacks: record Python's stack of every operator.

    Raises:
        ValueError: an argument out of its range.
    """

    def __init__(
        self,
        wait: int = 2,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        shapes: bool = False,
        memory: bool = False,
        stacks: bool = False,
    ) -> None:
        if min(wait, warmup) < 0 or min(active, repeat) < 1:
            raise ValueError(
                f"wait = {wait} and warmup = {warmup} must be at least 0, active = {active} and repeat = {repeat} at "
                "least 1"
            )
        self._before = wait + warmup
        self._steps = (wait + warmup + active) * repeat
        self._schedule = schedule(wait=wait, warmup=warmup, active=active, repeat=repeat)
        self._options: dict[str, Any] = {"record_shapes": shapes, "profile_memory": memory, "with_stack": stacks}
        self._profile: Any = None
        self._range: Any = None

    def start(self, state: TrainingState) -> None:
        if (steps := state.last - state.first + 1) <= self._before:
            state.say(f"profiler: records nothing, as it waits for {self._before} steps, and this run has {steps}")
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if state.device != "cpu" else [])]
        (state.run_dir / FOLDER).mkdir(exist_ok=True)

        def write(made: Any) -> None:
            made.export_chrome_trace(str(state.run_dir / FOLDER / f"rank-{state.rank}-step-{state.step}.json"))

        self._profile = profile(activities=kinds, schedule=self._schedule, on_trace_ready=write, **self._options)
        self._profile.start()

        def enter(group: Hashable, kind: int) -> int:
            text = recorder.text(recorder.cells[PLACE])
            text = state.operators.get(text, text)
            self._range = record_function(f"{KINDS[kind]} for {text}" if text else KINDS[kind])
            self._range.__enter__()
            return type(recorder).enter(recorder, group, kind)

        def leave() -> None:
            type(recorder).leave(recorder)
            if self._range is not None:
                self._range.__exit__(None, None, None)
                self._range = None

        vars(recorder).update(enter=enter, leave=leave)

    def after_step(self, state: TrainingState) -> None:
        if self._profile is not None:
            self._profile.step()
            if state.step - state.first + 1 >= self._steps:
                self._finish()

    def exception(self, state: TrainingState, error: Exception) -> None:
        self._finish()

    def end(self, state: TrainingState) -> None:
        self._finish()

    def _finish(self) -> None:
        if self._profile is not None:
            for name in ("enter", "leave"):
                vars(recorder).pop(name)
            self._profile.stop()
            self._profile = None
