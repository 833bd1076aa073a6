"""Recovery benchmark: inject failures of every kind in every phase on random ranks, and check the runs.

    python -m benchmarks.recovery [--failures 100] [--seed 0] [--minutes 60] [--out docs/recovery.md]

Small models train on 2 and 4 real ranks under several plans, each first undisturbed, then with two or three faults
chosen at random. For every disturbed run: does it finish with bitwise equal weights and optimizer states and the same
lines of metrics; how many steps did each failure cost; is a process left. Goals: all, at most one save interval (two
where the newest checkpoint is damaged by the benchmark, or its background save is still in progress), none.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from multiprocessing import forkserver
from pathlib import Path

from runner import launch
from runner.cli.jobs import composed
from runner.commands import train
from runner.recovery.restarting import RESTARTS

EVERY, STEPS = 4, 14
BACKGROUND = "saved in the background, 4 ranks"
NET = (
    "+recipe=quickstart parallel.strategies=null optimizer.args.momentum=0.9 optimizer.args.lr=0.02 "
    f"train.steps={STEPS} checkpoint.every={EVERY} checkpoint.keep=3 launch.timeout=5 launch.max_restarts=9 "
    "parallel.plan_cache=null"
).split()
PLANS: dict[str, tuple[str, ...]] = {
    "data parallel, 4 ranks": ("world_size=4", "parallel=data_parallel"),
    "sliced 2 x 2, 4 ranks": ("world_size=4", "parallel.strategies.matmul=[[2,2],[2,1]]"),
    "ZeRO 1, 2 ranks": ("world_size=2", "parallel=data_parallel", "parallel.zero.stage=1"),
    "ZeRO 3, 2 ranks": ("world_size=2", "parallel=data_parallel", "parallel.zero.stage=3"),
    "pipeline of 2 stages, 2 ranks": (
        "world_size=2",
        "parallel=data_parallel",
        "parallel.pipeline={stages: 2, micro_batches: 2}",
    ),
    BACKGROUND: ("world_size=4", "parallel=data_parallel", "checkpoint.background=true"),
}
PHASES = ("data", "forward", "backward", "collective", "optimizer", "save")
DAMAGES = ("corrupt", "truncate")
SAVES = tuple(range(EVERY, STEPS, EVERY))


@dataclass(frozen=True)
class RandomFailure:
    """One failure: the fault that causes it, and the damage that is done before it, if any."""

    kind: str
    rank: int
    step: int
    phase: str
    damage: str | None = None

    @property
    def row(self) -> str:
        return f"{self.damage} a file, then {self.kind}" if self.damage else self.phase

    def faults(self) -> list[str]:
        own = f"{{kind: {self.kind}, rank: {self.rank}, step: {self.step}, phase: {self.phase}}}"
        if self.damage is None:
            return [own]
        saved = max(step for step in SAVES if step < self.step)
        return [f"{{kind: {self.damage}, rank: 0, step: {saved}}}", own]

    @property
    def done(self) -> int:
        """The completed steps at the time of the failure."""
        return self.step if self.phase == "save" else self.step - 1

    def bound(self, plan: str) -> int:
        """The maximum number of steps that may be lost."""
        return 2 * EVERY if self.damage or plan == BACKGROUND else EVERY


@dataclass
class Row:
    """The outcome of the failures of one kind."""

    kinds: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    equal: int = 0
    lost: list[int] = field(default_factory=list)
    over: int = 0


def random_failures(draw: random.Random, ranks: int, count: int) -> list[RandomFailure]:
    """`count` failures at different steps, in their order."""
    found = []
    for step in sorted(draw.sample(range(2, STEPS), count)):
        kind, rank = draw.choice(("kill", "kill", "raise", "hang")), draw.randrange(ranks)
        phase = draw.choice(PHASES)
        if phase == "save":
            step = draw.choice(SAVES)
            kind = draw.choice((kind, "disk_full"))
        damaged = step - 1 in SAVES and phase != "save"
        found.append(RandomFailure(kind, rank, step, phase, draw.choice((*DAMAGES, None)) if damaged else None))
    return sorted({one.step: one for one in found}.values(), key=lambda one: one.step)


def run(folder: Path, given: Sequence[str]) -> None:
    made = composed(given)
    folder.mkdir()
    with redirect_stdout(StringIO()), (folder / "console").open("w", encoding="utf-8") as said:
        kept = os.dup(1)
        os.dup2(said.fileno(), 1)
        try:
            train.run(made, folder)
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def ending(folder: Path) -> dict[str, str]:
    """The checksums of the tensors in the last checkpoint: weights, buffers, optimizer states."""
    header = json.loads((folder / "checkpoints" / f"step-{STEPS:08d}" / "checkpoint.json").read_text(encoding="utf-8"))
    return {name: stamp["sha256"] for name, stamp in header["files"].items() if name.endswith(".safetensors")}


def losses(folder: Path) -> list[tuple[int, float]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(record["step"], record["loss"]) for record in records if "loss" in record]


def resumed_after(folder: Path) -> list[int]:
    file = folder / RESTARTS
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    return [0 if one["resume"] is None else int(one["resume"][-8:]) for one in found]


def left() -> int:
    """Processes of the fork server that are alive, without itself."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    name = Path(f"/proc/{server}/cmdline").read_bytes()
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            same = (process / "cmdline").read_bytes() == name and int(process.name) != server
            ours = os.getsid(int(process.name)) == os.getsid(0)
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += same and ours
    return found


def table(rows: dict[str, Row], summary: Sequence[str]) -> str:
    lines = [
        "# Recovery: what becomes of injected failures",
        "",
        "`python -m benchmarks.recovery` trains small models on 2 and 4 real ranks, lets random ones fail in every",
        f"phase, and compares with undisturbed runs. Checkpoints every {EVERY} steps.",
        "",
        *summary,
        "",
        "| phase | failures | kinds | resumed | ended bit for bit | most steps lost | over the bound |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in sorted(rows.items()):
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(row.kinds.items()))
        most = max(row.lost, default=0)
        count = row.kinds.total()
        lines.append(f"| {name} | {count} | {kinds} | {row.resumed} | {row.equal} | {most} | {row.over} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--failures", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    launch.warm()
    draw, rows, runs, extra, alive = random.Random(options.seed), defaultdict[str, Row](Row), 0, 0, 0
    undisturbed: dict[str, tuple[dict[str, str], list[tuple[int, float]]]] = {}
    until, plans = time.monotonic() + 60 * options.minutes, [*PLANS]
    with tempfile.TemporaryDirectory() as place:
        while sum(row.kinds.total() for row in rows.values()) < options.failures and time.monotonic() < until:
            name = plans[runs % len(plans)]
            runs += 1
            if name not in undisturbed:
                folder = Path(place) / f"undisturbed-{len(undisturbed)}"
                run(folder, (*NET, *PLANS[name]))
                undisturbed[name] = ending(folder), losses(folder)
            tensors, lines = undisturbed[name]
            failures = random_failures(draw, int(PLANS[name][0][-1]), draw.choice((2, 3)))
            faults = ", ".join(fault for one in failures for fault in one.faults())
            folder = Path(place) / str(runs)
            try:
                run(folder, (*NET, *PLANS[name], f"launch.faults=[{faults}]"))
                ended, equal = True, ending(folder) == tensors and losses(folder) == lines
            except Exception as error:
                ended, equal = False, False
                print(f"run {runs} ({name}; {faults}) did not end well: {error}", flush=True)
            resumed = resumed_after(folder)
            extra += len(resumed) - len(failures)
            alive += left()
            pairs = zip(failures, resumed, strict=True) if len(failures) == len(resumed) else ()  # two may be one
            for one, step in pairs:
                lost = one.done - step
                row = rows[one.row]
                row.lost.append(lost)
                row.over += lost > one.bound(name)
            for one in failures:
                row = rows[one.row]
                row.kinds[one.kind] += 1
                row.resumed += ended
                row.equal += equal
            total = sum(row.kinds.total() for row in rows.values())
            print(f"run {runs}, {name}: {faults}: resumed after {resumed}, equal {equal}; {total} failures", flush=True)
            summary = [
                f"Seed {options.seed}: {total} failures in {runs} runs under {len(undisturbed)} plans "
                f"({'; '.join(undisturbed)}).",
                f"Restarts beyond the failures: {extra}. Processes left after a run: {alive}.",
            ]
            if options.out is not None:
                options.out.write_text(table(rows, summary), encoding="utf-8")
    print(table(rows, summary))


if __name__ == "__main__":
    main()
