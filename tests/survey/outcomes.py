"""One architecture of the survey: built, trained eagerly, captured, planned in every mode, run on simulated ranks (the
random plan as generated modules in threads, too) and compared; what became of it is one line of JSON."""

from __future__ import annotations

import gc
import importlib
import math
import multiprocessing
import re
import resource
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Literal

import torch
from torch import nn

from strategies.core.errors import CodedError
from strategies.runtime.simulate import Simulation
from tests.matrix.plans import MODES
from tests.matrix.runs import BOTH, Precision, Subject, cancelling, last_bits, matrix_run, own_rounding, subject
from tests.matrix.zoo.architecture import Architecture, Example
from tests.survey.huggingface import train
from tests.survey.registries import Squares

Status = Literal["exact", "differs", "refused", "crash", "late", "unbuilt"]
"""Equal to one device in every mode; not; refused with a code; an error without one; over the time limit; not built, or
eager torch itself does not train it."""
NEARLY = 1e-6
"""Below this a difference in double precision may be rounding."""
ORDERS = 3.0
"""Sums in another order err in more than the last bit: the gradients of DenseNet-121 change 5 times as much where the
rows of its batch are reversed on one device."""
PATIENCE = 5
MEMORY = 16 * 2**30
"""Bytes of address space of the process of one architecture."""
WARM = {"transformers": ("transformers.models.llama.modeling_llama", "transformers.models.vit.modeling_vit")}
"""Modules of a package that most of its models import."""


@dataclass(frozen=True)
class Outcome:
    """`cause` is one line; `worst` the largest relative difference; `seconds` on a processor."""

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
    started, registry, name = time.process_time(), architecture.family, architecture.name

    def ended(status: Status, cause: str = "", operators: int = 0, worst: float = 0.0, precision: str = "") -> Outcome:
        seconds = round(time.process_time() - started, 1)
        return Outcome(registry, name, status, cause, operators, worst, precision, seconds)

    try:
        torch.manual_seed(0)
        train(*architecture.build(0.0))
    except Exception as error:  # counted apart: the package or the survey's batch
        return ended("unbuilt", _cause(error))
    for precision in ("fp64", "fp32"):
        kind: Precision = precision  # type: ignore[assignment]
        try:
            one = subject(architecture, 0.0, kind)
        except CodedError as error:
            if precision == "fp64":  # requests for another precision may be what is refused
                continue
            return ended("refused", _cause(error))
        except Exception as error:  # a defect, unless the model cannot compute in double precision
            if precision == "fp64":
                continue
            return ended("crash", _cause(error))
        status, cause, worst = _compared(one, kind, architecture, world)
        casts = any(operator.op == "called_module" for operator in one.graph.operators)  # as their authors wrote
        if status not in ("differs", "crash") or kind == "fp32" or not casts:
            break
    return ended(status, cause, len(one.graph.operators), worst, kind)


def _compared(one: Subject, kind: Precision, architecture: Architecture, world: int) -> tuple[Status, str, float]:
    """How a captured architecture compares with eager torch in every mode: what it is, the cause, and the largest
    difference."""
    worst = 0.0
    for mode in MODES:
        kinds = BOTH if mode == "random" else (Simulation,)
        done = matrix_run(one, mode, 0.0, world, kinds=kinds)
        if done.differences is None:
            return "crash", f"{mode}: {done.error}", worst
        if not done.passed and kind == "fp64" and not one.rounding and (noise := cancelling(architecture)):
            one = replace(one, rounding={name: ORDERS * size for name, size in noise.items()})
            done = matrix_run(one, mode, 0.0, world, kinds=kinds)
            assert done.differences is not None
        if not done.passed and (kind == "fp32" or done.differences.worst < NEARLY):
            single = kind == "fp32"
            done = done.widened(own_rounding(architecture, 0.0) if single else ORDERS * last_bits(architecture))
        worst = max(worst, done.differences.worst)
        if not done.passed:
            found = done.differences
            which = max((found.loss, "loss"), found.gradient, found.buffer)
            return "differs", f"{mode}: {which[1]} by {which[0]:.0e}", worst
    return "exact", "", worst


def _cause(error: BaseException) -> str:
    """An error in one line, with the place in the library or the project that raised it."""
    text = re.sub(r"\s+", " ", str(error)).strip()[:200]
    if isinstance(error, CodedError):
        return f"[{error.code}] {text}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({'/'.join(frame.filename.split('/')[-2:])}:{frame.lineno})"


def survey(architectures: Sequence[Architecture], world: int, limit: float, jobs: int) -> Iterator[Outcome]:
    """The outcomes of all, each in a process of its own that is ended after `limit` seconds on a processor (`PATIENCE`
    times as many on the clock: other work may be on the machine); `jobs` at a time. They come as they end."""
    for module in {module for one in architectures for module in WARM.get(one.family, ())}:
        importlib.import_module(module)
    outcome(Architecture("warm", "", _smallest), 2)  # imports what the forks would import each by itself
    gc.collect()
    gc.freeze()  # no collection of theirs goes through imported modules
    context, waiting = multiprocessing.get_context("fork"), list(reversed(architectures))
    running: dict[Connection, tuple[Architecture, float, multiprocessing.process.BaseProcess]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            one, (ours, theirs) = waiting.pop(), context.Pipe(duplex=False)
            process = context.Process(target=_report, args=(one, world, limit, theirs), daemon=True)
            process.start()
            theirs.close()
            running[ours] = one, time.monotonic() + PATIENCE * limit, process
        soonest = min(deadline for _, deadline, _ in running.values())
        ready = wait(list(running), timeout=max(0.0, soonest - time.monotonic()))
        for pipe, (one, deadline, process) in list(running.items()):
            if pipe not in ready and time.monotonic() < deadline:
                continue
            late = Outcome(one.family, one.name, "late", f"over {limit:g} s", seconds=limit)
            try:
                found = pipe.recv() if pipe in ready else late
            except EOFError:
                process.join()
                ended = Outcome(one.family, one.name, "crash", f"the process ended with {process.exitcode}")
                found = late if process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL) else ended
            process.kill()
            process.join()
            pipe.close()
            del running[pipe]
            yield found


def _smallest(_: float) -> Example:
    return Squares(nn.Linear(4, 4)), {"x": torch.randn(4, 4)}


def _report(architecture: Architecture, world: int, limit: float, pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit), math.ceil(limit)))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    pipe.send(outcome(architecture, world))


def as_json(one: Outcome) -> dict[str, object]:
    return asdict(one)
