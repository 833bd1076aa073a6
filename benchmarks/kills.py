"""Kill real runs at random moments and check that they recover.

    python -m benchmarks.kills [--kills 300] [--seed 0] [--minutes 60] [--plans PLAN ...] [--out FILE]

Small models are trained by the command itself, each plan first undisturbed. Then signals (SIGKILL, SIGSTOP, SIGTERM)
reach its processes: the command, the fork server, and its forks (the preparation, the search for a checkpoint, ranks).
A run gets several; each waits for its phase, and phases that were hit least come first. A command that has ended is
repeated with train.resume=auto. Checked for every run: the last weights and the metrics equal those of the undisturbed
run bitwise; no process, file in /dev/shm, multiprocessing folder or partial file is left. With --out, results are added
to those of earlier calls.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.recovery import NET, PLANS
from runner import checkpoint as checkpoints
from strategies.runtime.flight_recorder import EVALUATION, PHASE, SAVES, SAVING, STARTED, STEP, read_cells

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
ALL = PLANS | {
    "ZeRO 2, 2 ranks": ("world_size=2", "parallel=data_parallel", "parallel.zero.stage=2"),
    "saved in the background, 2 ranks": ("world_size=2", "parallel=data_parallel", "checkpoint.background=true"),
    "one rank": ("world_size=1", "parallel=data_parallel"),
}
BESIDE, BETWEEN = "saving beside training", "between attempts"
PHASES = {
    "import": 1.5,
    "preparation": 0.6,
    "start": 0.5,
    "first step": 0.02,
    "training": 0.2,
    BETWEEN: 0.5,
    "evaluation": 0.004,
    "saving": 0.004,
    BESIDE: 0.004,
    "end": 0.004,
}
"""In the order in which one run is hit in them: at most how many seconds after a phase has started."""
ONCE = ("import", "preparation", "start", "first step", BETWEEN)
"""Phases that come once for each start of the command or of the ranks."""
KINDS = {
    "fork": 8,
    "storm": 5,
    "server": 2,
    "command": 2,
    "command and server": 1,
    "terminated command": 1,
    "stopped fork": 2,
    "stopped server": 1,
}
"""Who is hit, and how often among all; a storm is all forks and at times the server, shortly after each other."""
MARK = "MESHWRIGHT_KILLS"
MOST = 14
"""Blows that one run gets."""
ATTEMPTS = 12
LEFT = 6.0
"""Seconds after which nothing of a command may be alive."""
CLEARED = 10.0
"""Seconds after which a process that was stopped is killed, or goes on because something has woken it."""
LONGEST = 240.0
"""Seconds after which a command hangs."""


@dataclass(frozen=True)
class Blow:
    """One or several signals: when, and to which processes."""

    phase: str
    kind: str


def random_blows(draw: random.Random, hit: Mapping[str, int], phases: Sequence[str], most: int) -> list[Blow]:
    """The signals for one run, `most` blows in order; `hit` counts the signals in each phase so far."""
    counts = Counter({phase: hit.get(phase, 0) for phase in phases})
    found = []
    for _ in range(most):
        phase = min(phases, key=lambda phase: (counts[phase], draw.random()))
        counts[phase] += 1
        kinds = [kind for kind in KINDS if phase != "import" or "server" in kind or "command" in kind]
        found.append(Blow(phase, draw.choices(kinds, [KINDS[kind] for kind in kinds])[0]))
    found.sort(key=lambda blow: [*PHASES].index(blow.phase))
    return found


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
                and (process / "stat").read_text(encoding="utf-8").split(") ")[-1][0] != "Z"
            ):
                found.append(int(process.name))
    return found


def children(pid: int) -> list[int]:
    with suppress(OSError):
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text(encoding="utf-8").split()
        ]
    return []


def flight_record(fork: int) -> Path | None:
    """The flight record of a rank, once it exists."""
    with suppress(OSError):
        for descriptor in Path(f"/proc/{fork}/fd").iterdir():
            if (name := os.readlink(descriptor)).endswith(".where"):
                return Path(name)
    return None


def phase_of(cells: Sequence[Sequence[int]], forks: int, prepared: bool, ranks: int) -> str:
    """The current phase of the run: `cells` are the flight records of the forks that have one, `prepared` is whether
    the plan is written."""
    if not prepared:
        return "preparation" if forks else "import"
    started = max((one[STARTED] for one in cells), default=0)
    if not started:
        return BETWEEN if forks < min(ranks, 2) else "start"
    if max(one[STEP] for one in cells) == STEPS:
        return "end"
    if any(one[PHASE] == SAVING for one in cells):
        return "saving"
    if any(one[SAVES] % 2 for one in cells):
        return BESIDE
    if any(one[PHASE] == EVALUATION for one in cells):
        return "evaluation"
    return "first step" if started == 1 else "training"


def shared() -> set[str]:
    """The names in shared memory; those of other programs come and go."""
    place = Path("/dev/shm")
    return {path.name for path in place.iterdir()} if place.is_dir() else set()


def strike(
    process: subprocess.Popen[bytes], folder: Path, ranks: int, blows: list[Blow], draw: random.Random
) -> Iterator[tuple[str, str]]:
    """Give the `blows`, and remove each from the list, while `process` runs; the phase and kind of each signal sent."""
    began, plan = time.time(), folder / "plan.json"
    shown: dict[int, Path] = {}
    hit, last, prepared = set[int](), 0.0, False
    since: float | None = None
    wait, narrower, order = draw.random(), 1.0, {phase: place for place, phase in enumerate(PHASES)}
    while process.poll() is None:
        if time.time() - began > LONGEST:
            raise RuntimeError(f"{folder} hangs, with {blows} still to come")
        if not blows:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
            continue
        time.sleep(0.001 if prepared else 0.02)
        server = next(iter(children(process.pid)), None)
        forks = [] if server is None else children(server)
        if hit & {*forks, server, process.pid} and time.monotonic() < last + CLEARED:
            continue  # the killed process is not reaped yet
        with suppress(FileNotFoundError):
            prepared = prepared or plan.stat().st_mtime > began
        for fork in forks:
            if fork not in shown and (file := flight_record(fork)):
                shown[fork] = file
        cells = [found for fork in forks if fork in shown and (found := read_cells(shown[fork]))]
        blow, phase = blows[0], phase_of(cells, len(forks), prepared, ranks)
        if phase != blow.phase:
            if since is not None:
                since, wait, narrower = None, draw.random(), narrower / 2  # the phase ended too soon
            if blow.phase in ONCE and phase != BETWEEN and order[phase] > order[blow.phase]:
                blows.pop(0)  # the phase does not recur
            continue
        since = since or time.monotonic()
        if time.monotonic() - since < wait * narrower * PHASES[phase]:
            continue
        victims = {
            "fork": draw.sample(forks, min(1, len(forks))),
            "storm": [*draw.sample(forks, len(forks)), *draw.sample([server], draw.randrange(2))],
            "server": [server],
            "command": [process.pid],
        }
        struck = [one for name in blow.kind.split(" and ") for one in victims[name.split()[-1]] if one is not None]
        if not struck:
            continue
        number = {"stopped": signal.SIGSTOP, "terminated": signal.SIGTERM}.get(blow.kind.split()[0], signal.SIGKILL)
        blows.pop(0)
        hit |= {*struck}
        for place, victim in enumerate(struck):
            if place and blow.kind == "storm":
                time.sleep(draw.random() ** 3 * 0.3)
            with suppress(ProcessLookupError):  # the previous signal has ended it
                os.kill(victim, number)
                yield phase, blow.kind
        last, since, wait, narrower = time.monotonic(), None, draw.random(), 1.0


def ended(folder: Path) -> tuple[dict[str, str], list[tuple[int, float]]]:
    """Checksums of the last weights and states, and the losses."""
    path = checkpoints.newest(folder / "checkpoints")
    assert path is not None
    header = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))
    sums = {name: stamp["sha256"] for name, stamp in header["files"].items() if name.endswith(".safetensors")}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return sums, [(line["step"], line["loss"]) for line in lines if "loss" in line]


def survive(
    folder: Path, words: Sequence[str], blows: list[Blow], draw: random.Random
) -> tuple[list[tuple[str, str]], list[str]]:
    """Run to the end, through `blows`. Returns phase and kind of the signals sent, and the violations."""
    sent: list[tuple[str, str]] = []
    wrong: list[str] = []
    before = shared()
    for _ in range(ATTEMPTS):
        mark = uuid.uuid4().hex
        process = command(folder, words, mark)
        try:
            sent += strike(process, folder, int(words[0].removeprefix("world_size=")), blows, draw)
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


def drill(
    kills: int, seed: int, minutes: float, names: Sequence[str] = tuple(ALL), phases: Sequence[str] = tuple(PHASES)
) -> dict[str, object]:
    """Run until the wanted number of signals was sent, all in `phases`, or time is up."""
    draw, sent, wrong, runs = random.Random(seed), Counter[tuple[str, str]](), list[str](), 0
    hit = Counter[str]()
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
            folder, began = Path(place) / str(runs), time.monotonic()
            beside = "checkpoint.background=true" in ALL[name]
            blows = random_blows(draw, hit, [phase for phase in phases if beside or phase != BESIDE], min(MOST, kills))
            planned = [*blows]
            done, faults = survive(folder, ALL[name], blows, draw)
            if not faults and ended(folder) != undisturbed[name]:
                faults.append("other weights or losses")
            sent.update(done)
            hit.update(phase for phase, _ in done)
            wrong += [f"run {runs} ({name}): {fault}; planned {planned}, sent {done}" for fault in faults]
            print(
                f"run {runs}, {name}: {len(done)} sent ({sent.total()}) in {time.monotonic() - began:.0f} s, "
                f"missed {sorted({one.phase for one in planned} - {phase for phase, _ in done})}: "
                f"{faults or 'bit for bit'}",
                flush=True,
            )
            if faults:
                console = (Path(place) / f"{runs}.console").read_text(errors="replace", encoding="utf-8")
                print("\n".join(console.splitlines()[-25:]), flush=True)
    by_kind = {f"{phase}: {kind}": count for (phase, kind), count in sorted(sent.items())}
    return {
        "seed": seed,
        "kills": sent.total(),
        "runs": runs,
        "plans": [*undisturbed],
        "sent": by_kind,
        "wrong": wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--plans", nargs="*", default=[*ALL], choices=[*ALL], metavar="PLAN")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = drill(options.kills, options.seed, options.minutes, options.plans)
    print(json.dumps(result, indent=1))
    if options.out is not None:
        before = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else []
        options.out.write_text(json.dumps([*before, result], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
