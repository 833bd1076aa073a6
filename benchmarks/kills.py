"""Kills at every moment of real runs, and what becomes of them.

    python -m benchmarks.kills [--kills 300] [--seed 0] [--minutes 60] [--plans PLAN ...] [--out FILE]

Small models are trained by the command itself, each plan first undisturbed. Then signals reach its processes (SIGKILL,
SIGSTOP, SIGTERM; the command, the fork server, the preparation, the search for a checkpoint, ranks) in a phase that is
drawn at random, one by one or in storms; a command that has ended is given again with train.resume=auto. Asked of every
run: are the last weights and the metrics those of the undisturbed run, bit for bit; is a process left, a file in
/dev/shm, a folder of multiprocessing, or a partial file. With --out, results are added to those of earlier calls.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.recovery import NET, PLANS
from runner import checkpoints
from strategies.engine.whereabouts import BEGUN, EVALUATION, PHASE, SAVING, STEP, read_cells

STEPS, EVERY = 96, 6
WORDS = (
    *(word for word in NET if not word.startswith(("train.steps", "checkpoint.every", "launch.max_restarts"))),
    f"train.steps={STEPS}",
    f"checkpoint.every={EVERY}",
    "launch.max_restarts=50",
    "train.resume=auto",
    "evaluate.every=8",
    "train.log_every=1",
    "report.progress=false",
)
ALL = PLANS | {"ZeRO 2, 2 ranks": ("world_size=2", "parallel=data_parallel", "parallel.zero.stage=2")}
PHASES = (
    "import",
    "preparation",
    "start",
    "first step",
    "training",
    "saving",
    "evaluation",
    "end",
    "between attempts",
)
AT_ONCE = "at once"
"""The phase of a signal that follows the one before without a pause, to another process."""
MARK = "MESHWRIGHT_KILLS"
ATTEMPTS = 12
LEFT = 20.0
"""Seconds after which nothing of a command may be alive; a server that still imports ends when it has done so."""


@dataclass(frozen=True)
class Kill:
    """One signal: when, to whom, which."""

    phase: str
    victim: str
    number: signal.Signals


def drawn(draw: random.Random) -> list[Kill]:
    """The signals of one run, in order of the phases."""
    kind = draw.choice(("ranks", "ranks", "ranks", "storm", "storm", "storm", "command", "stopped", "server"))
    kill, stop, end = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM
    if kind == "storm":
        phases, victims = (*PHASES[1:], "between attempts"), ("fork", "fork", "fork", "server")
        count = draw.randint(16, 24)
        return [Kill(draw.choice((AT_ONCE, draw.choice(phases))), draw.choice(victims), kill) for _ in range(count)]
    victim = {"ranks": "fork", "stopped": "fork"}.get(kind, kind)
    most = {"ranks": 14, "command": 4, "server": 6, "stopped": 3}[kind]
    number = {"stopped": [stop], "command": [kill, kill, end]}.get(kind, [kill])
    return [Kill(draw.choice(PHASES), victim, draw.choice(number)) for _ in range(draw.randint(most // 2, most))]


def command(folder: Path, words: Sequence[str], mark: str) -> subprocess.Popen[bytes]:
    with (folder.parent / f"{folder.name}.console").open("ab") as console:
        return subprocess.Popen(
            [sys.executable, "-m", "runner", *WORDS, *words, f"hydra.run.dir={folder}"],
            stdout=console,
            stderr=console,
            stdin=subprocess.DEVNULL,
            env=os.environ | {MARK: mark, "TMPDIR": str(scratch(folder))},
        )


def scratch(folder: Path) -> Path:
    """Where the run in `folder` has its temporary files."""
    made = folder.with_name(f"{folder.name}.tmp")
    made.mkdir(exist_ok=True)
    return made


def marked(mark: str) -> list[int]:
    """The processes of one run that are alive, whoever their parents are."""
    found, wanted = [], f"{MARK}={mark}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (
                wanted in (process / "environ").read_bytes()
                and (process / "stat").read_text().split(") ")[-1][0] != "Z"
            ):
                found.append(int(process.name))
    return found


def children(pid: int) -> list[int]:
    with suppress(OSError):
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    return []


def phase_of(folder: Path, forks: Sequence[int]) -> str:
    """What the run does now, as its ranks and files show it."""
    cells = [found for file in folder.glob("ranks/*.where") if (found := read_cells(file))]
    if not forks:
        return "between attempts" if (folder / "plan.json").exists() else "import"
    if not (folder / "plan.json").exists():
        return "preparation"
    if not cells or all(one[BEGUN] == 0 for one in cells):
        return "start"
    if any(one[PHASE] == SAVING for one in cells) or any(folder.glob("checkpoints/.step-*.partial")):
        return "end" if max(one[STEP] for one in cells) == STEPS else "saving"
    if max(one[STEP] for one in cells) == STEPS:
        return "end"
    if any(one[PHASE] == EVALUATION for one in cells):
        return "evaluation"
    return "first step" if max(one[BEGUN] for one in cells) == 1 else "training"


def shared() -> set[str]:
    """The names in shared memory; those of other programs come and go."""
    place = Path("/dev/shm")
    return {path.name for path in place.iterdir()} if place.is_dir() else set()


def strike(process: subprocess.Popen[bytes], folder: Path, kills: list[Kill], draw: random.Random) -> Iterator[str]:
    """Send what is due while `process` runs; the phase of each signal that was sent."""
    began, wait, hit, first = time.monotonic(), draw.random() * 0.3, set[int](), kills[0] if kills else None
    since = {process.pid: began}
    while process.poll() is None:
        time.sleep(0.002)
        if not kills:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
            continue
        if time.monotonic() - began > 300:
            raise RuntimeError(f"{folder} hangs, with {kills[0]} still to come")
        server = next(iter(children(process.pid)), None)
        forks = [] if server is None else children(server)
        phase = phase_of(folder, forks)
        late = time.monotonic() - since[process.pid] > (8.0 if phase in PHASES[:2] else 0.8)  # the phase has passed
        due = phase == kills[0].phase or late
        if kills[0].phase != AT_ONCE and (not due or time.monotonic() - since[process.pid] < wait):
            continue
        one = kills[0]
        others = [fork for fork in forks if fork not in hit]
        fork = draw.choice(others) if others else None
        target = {"command": process.pid, "server": server, "fork": fork}[one.victim]
        if target is None and one.phase == AT_ONCE and one is not first:
            kills.pop(0)  # all that was there has been hit
        if target is not None and target not in hit:
            hit.add(target)
            kills.pop(0)
            with suppress(ProcessLookupError):
                os.kill(target, one.number)
                yield f"{one.number.name} to the {one.victim}, {phase}"
        since[process.pid], wait = time.monotonic(), draw.random() * 0.5


def ended(folder: Path) -> tuple[dict[str, str], list[tuple[int, float]]]:
    """Checksums of the last weights and states, and the losses."""
    path = checkpoints.newest(folder / "checkpoints")
    assert path is not None
    header = json.loads((path / "checkpoint.json").read_text())
    sums = {name: stamp["sha256"] for name, stamp in header["files"].items() if name.endswith(".safetensors")}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return sums, [(line["step"], line["loss"]) for line in lines if "loss" in line]


def survive(folder: Path, words: Sequence[str], kills: list[Kill], draw: random.Random) -> tuple[list[str], list[str]]:
    """Run to the end, through `kills`: the signals that were sent, and what is wrong."""
    sent: list[str] = []
    wrong: list[str] = []
    before = shared()
    for _ in range(ATTEMPTS):
        mark = uuid.uuid4().hex
        process = command(folder, words, mark)
        try:
            sent += strike(process, folder, kills, draw)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        until = time.monotonic() + LEFT
        while (alive := marked(mark)) and time.monotonic() < until:
            time.sleep(0.05)
        if alive:
            wrong.append(f"{len(alive)} processes left")
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if process.returncode == 0:
            break
        if process.returncode not in (-9, -15, 143):
            wrong.append(f"exit code {process.returncode}")
            break
    else:
        wrong.append("no end")
    until = time.monotonic() + LEFT
    while (new := shared() - before) and time.monotonic() < until:
        time.sleep(0.1)
    new |= {path.name for path in scratch(folder).iterdir() if not path.name.startswith("torchinductor")}  # a cache
    if new:
        wrong.append(f"left: {sorted(new)}")
    if partial := [path.name for path in folder.rglob("*") if path.name.startswith(".") and path.name != ".lock"]:
        wrong.append(f"partial files: {partial}")
    return sent, wrong


def drill(kills: int, seed: int, minutes: float, names: Sequence[str] = tuple(ALL)) -> dict[str, object]:
    """Run until so many signals were sent, or the time is over."""
    draw, sent, wrong, runs = random.Random(seed), Counter[str](), list[str](), 0
    undisturbed: dict[str, object] = {}
    until = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as place:
        while sent.total() < kills and time.monotonic() < until:
            name = names[runs % len(names)]
            runs += 1
            if name not in undisturbed:
                folder = Path(place) / f"undisturbed-{len(undisturbed)}"
                _, faults = survive(folder, ALL[name], [], draw)
                assert not faults, faults
                undisturbed[name] = ended(folder)
            folder, planned = Path(place) / str(runs), drawn(draw)
            told = [f"{one.number.name} to {one.victim} in {one.phase}" for one in planned]
            done, faults = survive(folder, ALL[name], planned, draw)
            if not faults and ended(folder) != undisturbed[name]:
                faults.append("other weights or losses")
            sent.update(done)
            wrong += [f"run {runs} ({name}): {fault}; wanted {told}, sent {done}" for fault in faults]
            print(f"run {runs}, {name}: {len(done)} sent ({sent.total()}): {faults or 'bit for bit'}", flush=True)
            if faults:
                console = (Path(place) / f"{runs}.console").read_text(errors="replace")
                print("\n".join(console.splitlines()[-25:]), flush=True)
    return {"seed": seed, "kills": sent.total(), "runs": runs, "plans": len(undisturbed), "sent": sent, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--plans", nargs="*", default=[*ALL], choices=[*ALL], metavar="PLAN")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    result = drill(asked.kills, asked.seed, asked.minutes, asked.plans)
    print(json.dumps(result, indent=1))
    if asked.out is not None:
        before = json.loads(asked.out.read_text()) if asked.out.exists() else []
        asked.out.write_text(json.dumps([*before, result], indent=1) + "\n")


if __name__ == "__main__":
    main()
