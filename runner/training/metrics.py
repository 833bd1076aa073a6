"""The metrics of a run, step by step: `metrics.jsonl`, the console, and the loggers that are configured.

Rank 0 owns one `Metrics`. Invariant: `metrics.jsonl` only grows during a run, each line is complete JSON and on disk
when the call returns, and steps never repeat: a resumed run first drops the lines that it is about to write again.
Numbers that JSON cannot express (nan, infinity) are written as null.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from runner.config.schema import Config
from runner.launch.logs import console
from runner.report.units import shown_bytes, shown_rate, shown_share, shown_time
from runner.run_folder.atomic import replace_lines
from runner.run_folder.metrics import FILE, record_of
from runner.training.loggers import Logger, close, log, loggers_of
from strategies.core import bounded_files as bounded
from strategies.optimizer.loss_scale import LossScale

LATE = 0.1
"""Share of the time that a step waits for data from which on the console says so."""


@dataclass(frozen=True)
class Expected:
    """What the plan of a run predicts, for the console.

    Attributes:
        memory: peak bytes of a rank.
        tokens: of a sample; 0 for data without tokens.
        at_peak: seconds in which all devices at their peak would do the matrix products of a step; 0 where the cluster
            is not known.
    """

    memory: int = 0
    tokens: float = 0.0
    at_peak: float = 0.0

    @classmethod
    def of(cls, config: Config, run_dir: Path) -> Expected:
        """The predictions of the plan in a run folder; nothing is expected where there is none."""
        file = run_dir / "plan.json"
        if config.parallel.mode in ("stand_alone", "hybrid") or not file.is_file():
            return cls()
        found = json.loads(file.read_text(encoding="utf-8"))["prediction"]
        known = config.cluster.machine is not None and found["mfu"] is not None
        tokens = (found["tokens_per_second"] or 0) / (found["samples_per_second"] or 1)
        return cls(found["memory"], tokens, found["mfu"] * found["seconds"] if known else 0.0)


class Metrics(ExitStack):
    """The record of one run, used as a context manager by rank 0.

    Args:
        run_dir: the folder of the run, which exists.
        log_every: steps between two lines on the console, at least 1.
        total_steps: the number of the last step, None if it is unknown.
        first_step: the first step that this run will write; lines of it and of later steps are dropped.
        progress: "auto" shows a progress bar instead of lines when stdout is a terminal; True always, False never.
        loggers: what else receives the numbers, by name; they are closed with the record.
        expected: what the plan predicts, which the lines compare.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        log_every: int,
        total_steps: int | None = None,
        first_step: int = 0,
        progress: Literal["auto"] | bool = "auto",
        loggers: Mapping[str, Logger] | None = None,
        expected: Expected | None = None,
    ) -> None:
        super().__init__()
        path = self._path = run_dir / FILE
        _drop_from(path, first_step)
        self._log_every, self._total = log_every, total_steps
        self._bar: Any = None
        self._loggers = loggers or {}
        self._expected = expected or Expected()
        self._seconds, self._waited, self._samples, self._steps = 0.0, 0.0, 0, 0  # since the last line
        self.push(lambda kind, *_: close(self._loggers, kind is not None))
        screen = console()
        if progress is True or (progress == "auto" and screen.isatty()):
            from tqdm import tqdm

            done = max(0, first_step - 1)
            bar = tqdm(total=total_steps, initial=done, file=screen, unit="step", dynamic_ncols=True)
            self._bar = self.enter_context(bar)
        self._file = self.enter_context(path.open("a", encoding="utf-8"))

    def step(
        self,
        step: int,
        *,
        loss: float,
        lr: float | None,
        seconds: float,
        samples: int,
        waited: float = 0.0,
        grad_norm: float | None = None,
        offload: Mapping[str, int] | None = None,
        loss_scale: LossScale | None = None,
        server: Mapping[str, float] | None = None,
        callbacks: Mapping[str, float] | None = None,
        memory: int | None = None,
    ) -> None:
        """Record one optimizer step.

        Args:
            step: its number; larger than every number before.
            loss: mean loss of the step's global batch.
            lr: learning rate of the first parameter group during the step; None for an optimizer without one.
            seconds: wall time of the step.
            samples: rows of the global batch, over all ranks and micro-batches.
            waited: the part of `seconds` in which rank 0 waited for its rows.
            grad_norm: norm of all gradients before clipping, where it is known.
            loss_scale: in fp16, what the next step's loss is multiplied by, and how many steps were skipped so far.
            server: what servers and workers of mode parameter_server have done in this step.
            callbacks: what callbacks have logged in this step.
            memory: the most bytes that rank 0 has had on its device, where they are counted; only on the console.
            offload: bytes that were moved away from the device and back in this step, by kind.
        """
        rate = samples / seconds if seconds > 0 else 0.0
        rates = {} if lr is None else {"lr": lr}
        values = {"loss": loss, **rates, "seconds": seconds, "data_seconds": waited, "samples_per_second": rate}
        if grad_norm is not None:
            values["grad_norm"] = grad_norm
        if loss_scale is not None:
            values |= {"loss_scale": loss_scale.value, "skipped_steps": loss_scale.skipped}
        more = {"offload": offload, "server": server, "callbacks": callbacks}
        self._write(step, values | {name: dict(one) for name, one in more.items() if one})
        log(self._loggers, step, "train", {**(callbacks or {}), **values, **(offload or {}), **(server or {})})
        self._steps += 1
        self._seconds += seconds
        self._waited += waited
        self._samples += samples
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{loss:.4g}", refresh=False)
            self._bar.update(1)
        elif step % self._log_every == 0 or step == self._total:
            self._print_line(step, loss, lr, grad_norm, memory)

    def evaluation(self, step: int, results: Mapping[str, float]) -> None:
        """Record and print the results of an evaluation after `step`."""
        self._write(step, {"evaluation": dict(results)})
        log(self._loggers, step, "evaluation", results)
        scores = "  ".join(f"{key} {value:.6g}" for key, value in results.items())
        self.say(f"{self._label(step)}  evaluation  {scores}")

    def say(self, text: str) -> None:
        """Print a line without tearing the progress bar."""
        if self._bar is not None:
            self._bar.clear()
        print(text, flush=True)
        if self._bar is not None:
            self._bar.refresh()

    def _write(self, step: int, values: Mapping[str, Any]) -> None:
        if not os.fstat(self._file.fileno()).st_nlink:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.enter_context(self._path.open("a", encoding="utf-8"))
            self.say(f"warning: {self._path.name} was removed from the run folder; it begins anew with step {step}")
        self._file.write(json.dumps({"step": step, **_finite(values)}, allow_nan=False) + "\n")
        self._file.flush()

    def _print_line(
        self, step: int, loss: float, lr: float | None, grad_norm: float | None, memory: int | None
    ) -> None:
        seconds, expected = self._seconds / self._steps, self._expected
        rate = self._samples / self._seconds if self._seconds > 0 else 0.0
        parts = [self._label(step), f"loss {loss:.6g}", *([] if lr is None else [f"lr {lr:.4g}"])]
        parts += [] if grad_norm is None else [f"grad_norm {grad_norm:.4g}"]
        late = f" ({self._waited / self._seconds:.0%} waiting for data)" if self._waited > LATE * self._seconds else ""
        parts.append(f"{1000 * seconds:.4g} ms/step{late}")
        if expected.tokens:
            parts.append(f"{shown_rate(rate * expected.tokens)} tokens/s")
        else:
            parts.append(f"{shown_rate(rate)} samples/s")
        if expected.at_peak and seconds:
            parts.append(f"MFU {shown_share(expected.at_peak / seconds)}")
        if memory is not None:
            predicted = f" / {shown_bytes(expected.memory)}" if expected.memory else ""
            parts.append(f"memory {shown_bytes(memory)}{predicted}")
        if self._total is not None and step < self._total:
            parts.append(f"{shown_time((self._total - step) * seconds)} left")
        print("  ".join(parts), flush=True)
        self._seconds, self._waited, self._samples, self._steps = 0.0, 0.0, 0, 0

    def _label(self, step: int) -> str:
        if self._total is None:
            return f"step {step}"
        return f"step {step:>{len(str(self._total))}}/{self._total}"


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _finite(value) if isinstance(value, Mapping) else value if math.isfinite(value) else None
        for key, value in values.items()
    }


def metrics_of(
    config: Config, rank: int, run_dir: Path, first: int, last: int
) -> AbstractContextManager[Metrics | None]:
    """The record that `rank` keeps of the steps from `first` to `last`: rank 0 keeps one, others none."""
    if rank > 0:
        return nullcontext()
    report = config.report
    return Metrics(
        run_dir,
        log_every=config.train.log_every,
        total_steps=last,
        first_step=first,
        progress=report.progress,
        loggers=loggers_of(config, run_dir, first),
        expected=Expected.of(config, run_dir),
    )


def _drop_from(path: Path, step: int) -> None:
    """Cut the file before its first record of `step` or later. Lines before that which are no records, such as one that
    a kill has cut off, are left out; the file ends at a line longer than any record can be."""
    if not path.is_file():
        return
    end = position = 0
    damaged = False
    for line in bounded.lines(path):
        position += len(line)
        if (record := record_of(line)) is None:
            continue
        if record["step"] >= step:
            break
        damaged = damaged or end != position - len(line)
        end = position
    os.truncate(path, end)
    if damaged:
        replace_lines(path, (line for line in bounded.lines(path) if record_of(line) is not None))
