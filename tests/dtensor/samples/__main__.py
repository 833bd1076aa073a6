"""`python -m tests.dtensor.samples [--only GLOB ...] [--mesh 2|2x2]`: functions of torch beside one device in fp64.

The calls are the samples of torch's own tests.

Each function runs on gloo ranks as a program of `plan.export("torch")` runs it, with operands of random placements, out
of place, as a method and in place; and under random plans of ours on simulated ranks. Exit code 1 if anything differs.
Needs the package expecttest.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from strategies.capture import Objective, capture
from strategies.core.errors import CodedError
from strategies.core.graph import OperatorGraph
from strategies.core.mesh import Mesh
from strategies.runtime.dtensors import unknown
from tests.dtensor.samples.calls import functions, placements, samples_of
from tests.dtensor.samples.on_ranks import Job, outcomes
from tests.fuzz.cases import Case, Refused, failure, sensitive
from tests.fuzz.plans import random_plan


@dataclass
class Row:
    """What became of a function.

    Attributes:
        name: with its variant.
        calls: on ranks.
        plans: of ours.
        wrong: calls that differ from one device.
        errors: calls that end in an error.
        ours: plans that differ, or end in an error.
        refused: samples that cannot be captured, so that there is no program of them.
        seconds: on the clock.
    """

    name: str
    calls: int = 0
    plans: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    ours: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        lists = {"wrong": self.wrong, "errors": self.errors, "ours": self.ours, "refused": self.refused}
        some = "; ".join(f"{len(those)} {title}" for title, those in lists.items() if those)
        head = f"{self.name:<40} {self.calls:4} calls, {self.plans:3} plans, {self.seconds:5.1f} s  {some}"
        return "\n".join([head, *(f"    {those[0]}" for those in lists.values() if those)])


@dataclass(frozen=True)
class Settings:
    """How much of a function is tried: samples of each form, placements and plans of each sample."""

    mesh: tuple[int, ...]
    dtype: torch.dtype
    samples: int
    placements: int
    plans: int


def tried(name: str, settings: Settings) -> Row:
    """A function in this process, which forks ranks."""
    started, row, jobs = time.monotonic(), Row(name), list[Job]()
    for sample in samples_of(name, settings.samples, dtype=settings.dtype):
        try:
            captured = capture(Objective(sample.call, None, ("0",), ()), [torch.ones(4)], training=True)
        except CodedError as error:
            row.refused.append(f"{sample.name}: {error.code}")
            continue
        graph, values = captured.graph, {**captured.tensors, "0": torch.ones(4)}
        found = dict.fromkeys(one for names in unknown(graph, "cpu").values() for one in sorted(names))
        axes, seed = len(settings.mesh), f"{name} {sample.name}"
        jobs += [(sample, tuple(found), one) for one in placements(sample, axes, settings.placements, seed)]
        row.plans += settings.plans
        row.ours += [f"{sample.name}: {one}" for one in _planned(graph, values, settings, seed)]
    row.calls = len(jobs)
    for (sample, _, placed), found in zip(jobs, outcomes(jobs, settings.mesh), strict=True):
        if found:
            at = ", ".join("/".join(words) for words in placed.values())
            (row.errors if found.startswith("!") else row.wrong).append(f"{sample.name} at {at}: {found}")
    row.seconds = round(time.monotonic() - started, 1)
    return row


def _planned(graph: OperatorGraph, values: dict[str, torch.Tensor], settings: Settings, seed: str) -> Iterator[str]:
    """Failures of random plans of ours."""
    for number in range(settings.plans):
        rng = random.Random(f"{seed} {number}")
        mesh = Mesh(tuple(zip("ab", rng.choice([(2,), settings.mesh, (3,)]), strict=False)))
        case = Case(graph, values, random_plan(rng, graph, mesh), False, number)
        try:
            found = failure(case)
            if found is not None and not ("differs" in found and sensitive(case)):
                yield f"plan {number} on {dict(mesh.axes)}: {found}"
        except Refused as error:
            yield f"plan {number}: one device: {error}"


def every(names: Sequence[str], settings: Settings, limit: float, jobs: int) -> Iterator[Row]:
    """The rows of functions as they end, `jobs` at a time, each in a process that is ended after `limit` seconds."""
    functions()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tried("exp", settings)  # imports what forks would import each by itself
    context, waiting = multiprocessing.get_context("fork"), list(reversed(names))
    running: dict[Connection, tuple[str, float, BaseProcess]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name, (ours, theirs) = waiting.pop(), context.Pipe(duplex=False)
            process = context.Process(target=_report, args=(theirs, name, settings))
            process.start()
            theirs.close()
            running[ours] = name, time.monotonic() + limit, process
        soonest = min(deadline for _, deadline, _ in running.values())
        ready = wait(list(running), timeout=max(0.0, soonest - time.monotonic()))
        for pipe, (name, deadline, process) in list(running.items()):
            if pipe not in ready and time.monotonic() < deadline:
                continue
            row = Row(name, errors=[f"! not done within {limit:g} s"], seconds=limit)
            if pipe in ready:
                try:
                    row = pipe.recv()
                except EOFError:
                    process.join()
                    row = Row(name, errors=[f"! its process ended with {process.exitcode}"])
            process.terminate()
            process.join()
            pipe.close()
            del running[pipe]
            yield row


def _report(pipe: Connection, name: str, settings: Settings) -> None:
    """In a separate process, for its dtype and threads."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    pipe.send(tried(name, settings))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.dtensor.samples", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="GLOB", default=["*"], help="names of functions")
    parser.add_argument("--mesh", default="2", help="sizes of the axes (default 2)")
    parser.add_argument("--dtype", default="float64", help="of the samples (default float64)")
    parser.add_argument("--samples", type=int, default=2, help="of each form of a function (default 2)")
    parser.add_argument("--placements", type=int, default=5, help="of each sample (default 5)")
    parser.add_argument("--plans", type=int, default=3, help="of ours, of each sample (default 3)")
    parser.add_argument("--limit", type=float, default=240.0, metavar="SECONDS", help="for each function (default 240)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="functions at a time (default 1)")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="results: known ones are kept, new ones appended")
    options = parser.parse_args(arguments)
    known = options.resume is not None and options.resume.exists()
    lines = options.resume.read_text(encoding="utf-8").splitlines() if known else []
    rows = {row["name"]: Row(**row) for row in map(json.loads, lines)}
    names = [name for name in functions() if any(fnmatchcase(name, glob) for glob in options.only)]
    sizes = tuple(map(int, options.mesh.split("x")))
    settings = Settings(sizes, getattr(torch, options.dtype), options.samples, options.placements, options.plans)
    missing = [name for name in names if name not in rows]
    for row in every(missing, settings, options.limit, options.jobs) if missing else ():
        rows[row.name] = row
        print(row, flush=True)
        if options.resume:
            with options.resume.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    chosen = [rows[name] for name in names if name in rows]
    lists = "wrong", "errors", "ours", "refused"
    total = Counter({title: sum(len(getattr(row, title)) for row in chosen) for title in lists})
    calls, plans = sum(row.calls for row in chosen), sum(row.plans for row in chosen)
    print(f"{len(chosen)} functions, {calls} calls, {plans} plans: {dict(total)}")
    return 1 if total["wrong"] or total["ours"] else 0


if __name__ == "__main__":
    sys.exit(main())
