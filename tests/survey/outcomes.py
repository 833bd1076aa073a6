"""One architecture of the survey: built, trained eagerly, captured, planned in every mode, run on simulated ranks and
as generated modules in threads, and compared; what became of it is one line of JSON."""

from __future__ import annotations

import math
import multiprocessing
import re
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from typing import Literal

import torch
from torch import nn

from strategies.core.errors import CodedError
from tests.matrix.plans import MODES
from tests.matrix.runs import Precision, matrix_run, own_rounding, subject
from tests.matrix.zoo.architecture import Architecture, Example
from tests.survey.registries import Squares

Status = Literal["exact", "differs", "refused", "crash", "late", "unbuilt"]
"""Equal to one device in every mode; not; refused with a code; an error without one; over the time limit; not built, or
eager torch itself does not train it."""


@dataclass(frozen=True)
class Outcome:
    """`cause` is one line; `worst` the largest relative difference; `seconds` of wall time."""

    registry: str
    name: str
    status: Status
    cause: str = ""
    operators: int = 0
    worst: float = 0.0
    precision: str = ""
    seconds: float = 0.0


def outcome(architecture: Architecture, world: int) -> Outcome:
    """What becomes of one architecture, in this process."""
    started, registry, name = time.monotonic(), architecture.family, architecture.name

    def ended(status: Status, cause: str = "", operators: int = 0, worst: float = 0.0, precision: str = "") -> Outcome:
        seconds = round(time.monotonic() - started, 1)
        return Outcome(registry, name, status, cause, operators, worst, precision, seconds)

    try:
        _train(architecture)
    except Exception as error:  # counted apart: the package or the survey's batch
        return ended("unbuilt", _cause(error))
    for precision in ("fp64", "fp32"):
        kind: Precision = precision  # type: ignore[assignment]
        try:
            one = subject(architecture, 0.0, kind)
        except CodedError as error:
            return ended("refused", _cause(error))
        except Exception as error:  # a defect, unless the model cannot compute in double precision
            if precision == "fp64":
                continue
            return ended("crash", _cause(error))
        break
    worst, size = 0.0, len(one.graph.operators)
    for mode in MODES:
        done = matrix_run(one, mode, 0.0, world)
        if done.differences is None:
            return ended("crash", f"{mode}: {done.error}", size, worst, kind)
        if kind == "fp32" and not done.passed:
            done = done.widened(own_rounding(architecture, 0.0))
        worst = max(worst, done.differences.worst)
        if not done.passed:
            found = done.differences
            which = max((found.loss, "loss"), found.gradient, found.buffer)
            return ended("differs", f"{mode}: {which[1]} by {which[0]:.0e}", size, worst, kind)
    return ended("exact", "", size, worst, kind)


def _train(architecture: Architecture) -> None:
    """One step of eager torch. Raises whatever the model raises, and ValueError for a loss without gradients."""
    torch.manual_seed(0)
    model, batch = architecture.build(0.0)
    loss = model.train()(**batch)
    loss.backward()
    if not math.isfinite(loss.item()) or all(one.grad is None for one in model.parameters()):
        raise ValueError(f"the loss is {loss.item()}, or no parameter has a gradient")


def _cause(error: BaseException) -> str:
    """An error in one line, with the place in the library or the project that raised it."""
    text = re.sub(r"\s+", " ", str(error)).strip()[:200]
    if isinstance(error, CodedError):
        return f"[{error.code}] {text}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({'/'.join(frame.filename.split('/')[-2:])}:{frame.lineno})"


def survey(architectures: Sequence[Architecture], world: int, limit: float, jobs: int) -> Iterator[Outcome]:
    """The outcomes of all, each in a process of its own that is ended after `limit` seconds; `jobs` at a time. They
    come as they end."""
    outcome(Architecture("warm", "", _smallest), 2)  # imports what the forks would import each by itself
    context, waiting = multiprocessing.get_context("fork"), list(reversed(architectures))
    running: dict[Connection, tuple[Architecture, float, multiprocessing.process.BaseProcess]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            one, (ours, theirs) = waiting.pop(), context.Pipe(duplex=False)
            process = context.Process(target=_report, args=(one, world, theirs), daemon=True)
            process.start()
            theirs.close()
            running[ours] = one, time.monotonic() + limit, process
        soonest = min(deadline for _, deadline, _ in running.values())
        ready = wait(list(running), timeout=max(0.0, soonest - time.monotonic()))
        for pipe, (one, deadline, process) in list(running.items()):
            late = time.monotonic() > deadline
            if pipe not in ready and not late:
                continue
            try:
                found = pipe.recv() if pipe in ready else Outcome(one.family, one.name, "late", f"over {limit:g} s")
            except EOFError:
                process.join()
                found = Outcome(one.family, one.name, "crash", f"the process ended with {process.exitcode}")
            process.kill()
            process.join()
            pipe.close()
            del running[pipe]
            yield found


def _smallest(_: float) -> Example:
    return Squares(nn.Linear(4, 4)), {"x": torch.randn(4, 4)}


def _report(architecture: Architecture, world: int, pipe: Connection) -> None:
    pipe.send(outcome(architecture, world))


def as_json(one: Outcome) -> dict[str, object]:
    return asdict(one)
