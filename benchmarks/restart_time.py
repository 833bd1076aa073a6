"""Recovery time: what a killed rank costs a run on local ranks, and the effective training time ratio (ETTR).

    python -m benchmarks.restart_time [--failures 30] [--ranks 4] [--seed 0] [--write docs/recovery.md]

A GPT trains data parallel, saves in the background, and has its surviving ranks save their memory (`launch.rescue`).
Again and again a random rank is killed (SIGKILL) at a random moment. Per failure: the seconds until the next step that
is new has ended, and what of them is lost, that is without the time of one step. ETTR is the useful share of wall time
with a failure every 60 s: 1 - lost / 60. The steps between give the time of a step, and by how much a step beside a
save is longer. On a machine that others use too, lost steps can be compared, and seconds cannot. Goals: ETTR
at least 0.97, a step beside a save at most 1 % longer.

With `--smaller` a rank is killed again as soon as it is back, so it is lost for good (`launch.min_ranks`): the seconds
from that until the next step of the others, which have the state in memory, under a plan searched anew.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from benchmarks.kills import children, flight_record
from runner.recovery.restarting import RESTARTS

WORDS = (
    "+recipe=gpt",
    "parallel=data_parallel",
    "parallel.strategies=null",
    "parallel.mesh=null",
    "model.args.width=256",
    "model.args.layers=6",
    "evaluate.metric=null",
    "evaluate.args={}",
    "train.log_every=100000",
    "train.steps=100000",
    "checkpoint.background=true",
    "checkpoint.keep=2",
    "launch.rescue=true",
)
CALM, FIRST = 8, 60
"""Steps between a recovery and the next failure, and before the first one."""
EVERY = 10
"""Steps between two saves."""
PERIOD = 60.0
"""Seconds between two failures for which ETTR is given."""
LOOK = 0.002
"""Seconds between two looks at metrics.jsonl."""
LONGEST = 120.0
"""Seconds without a new step after which the run is given up."""
BEGIN, END = "<!-- restart_time -->", "<!-- end of restart_time -->"


@dataclass(frozen=True)
class Recovery:
    """Attributes:
    rank: the one that was killed.
    seconds: from the kill to the end of the next step that is new.
    repeated: steps that were trained again.
    """

    rank: int
    seconds: float
    repeated: int


class Steps:
    """The lines that a run appends to metrics.jsonl, as they come; a restart may cut some off."""

    def __init__(self, file: Path) -> None:
        self._file, self._place = file, 0

    def come(self) -> Iterator[dict[str, float]]:
        size = self._file.stat().st_size if self._file.exists() else 0
        self._place = min(self._place, size)
        if size > self._place:
            with self._file.open("rb") as file:
                file.seek(self._place)
                content = file.read()
            complete = content.rfind(b"\n") + 1
            self._place += complete
            for line in content[:complete].splitlines():
                if line.strip():
                    yield json.loads(line)


def ranks_of(command: int) -> dict[int, int]:
    """Process ids of the ranks that run, by rank."""
    forks = [fork for server in children(command) for fork in children(server)]
    records = {fork: flight_record(fork) for fork in forks}
    return {int(record.stem): fork for fork, record in records.items() if record is not None}


def restarts(run: Path) -> int:
    """How often the run has been started again."""
    file = run / RESTARTS
    return file.read_bytes().count(b"\n") if file.exists() else 0


def measure(folder: Path, ranks: int, failures: int, seed: int) -> tuple[list[Recovery], list[dict[str, float]]]:
    """Run, kill, and stop; the recoveries, and the steps between them."""
    draw = random.Random(seed)
    process = run(folder, f"world_size={ranks}", f"launch.max_restarts={failures + 1}")
    steps, recoveries, calm = Steps(folder / "run" / "metrics.jsonl"), list[Recovery](), list[dict[str, float]]()
    newest, at, target, killed, repeated = 0, time.monotonic(), FIRST, None, 0
    try:
        while len(recoveries) < failures:
            for line in steps.come():
                at = time.monotonic()
                again = killed is not None and restarts(folder / "run") > len(recoveries)  # else of before the kill
                if killed is not None and again and line["step"] > newest:
                    recoveries.append(Recovery(killed[0], at - killed[1], repeated))
                    print(f"failure {len(recoveries)} of {failures}: {recoveries[-1]}", flush=True)
                    killed, target = None, int(line["step"]) + CALM
                elif again:
                    repeated += 1
                elif killed is None:
                    calm.append(line)
                newest = max(newest, int(line["step"]))
            if process.poll() is not None or time.monotonic() > at + LONGEST:
                raise SystemExit(f"the run ended or stood still:\n{(folder / 'console').read_text(encoding='utf-8')}")
            if killed is None and newest >= target:
                time.sleep(draw.uniform(0.0, 1.0))  # any moment of a step
                running = ranks_of(process.pid)
                if len(running) == ranks:
                    newest = max([newest, *(int(line["step"]) for line in steps.come())])
                    rank, repeated = draw.randrange(ranks), 0
                    os.kill(running[rank], signal.SIGKILL)
                    killed = rank, time.monotonic()
            time.sleep(LOOK)
    finally:
        end(process)
    return recoveries, calm


def measure_smaller(folder: Path, ranks: int) -> str:
    """Run, kill a rank until it is lost for good, and stop."""
    words = (f"world_size={ranks}", f"data.batch_size={4 * ranks * (ranks - 1)}", "launch.max_restarts=2")
    process, began = run(folder, *words, f"launch.min_ranks={ranks - 1}"), time.monotonic()
    steps, record = Steps(folder / "run" / "metrics.jsonl"), folder / "run" / "restarts.jsonl"
    newest, killed = 0, list[float]()
    try:
        while True:
            for line in steps.come():
                if len(killed) == 2 and line["step"] > newest:
                    seconds, (_, last) = time.monotonic() - killed[1], record.read_text(encoding="utf-8").splitlines()
                    assert json.loads(last)["ranks"] == ranks - 1, last
                    return f"{seconds:.2f} s from a kill to the next step of {ranks - 1} of {ranks} ranks: {last}"
                newest = max(newest, int(line["step"]))
            again = killed and record.exists() and len(ranks_of(process.pid)) == ranks
            if (not killed and newest >= CALM) or (len(killed) == 1 and again):
                os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
                killed.append(time.monotonic())
            if process.poll() is not None or time.monotonic() > began + LONGEST:
                raise SystemExit(f"the run ended or stood still:\n{(folder / 'console').read_text(encoding='utf-8')}")
            time.sleep(LOOK)
    finally:
        end(process)


def run(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start a training in `folder`."""
    with (folder / "console").open("wb") as console:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "runner",
                *WORDS,
                f"checkpoint.every={EVERY}",
                *words,
                f"hydra.run.dir={folder / 'run'}",
            ],
            stdout=console,
            stderr=console,
            stdin=subprocess.DEVNULL,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """Stop a training."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def report(recoveries: list[Recovery], calm: list[dict[str, float]], ranks: int) -> str:
    """The section of the page."""
    plain = [line["seconds"] for line in calm[5:] if (line["step"] - 1) % EVERY]
    beside = [line["seconds"] for line in calm[5:] if (line["step"] - 1) % EVERY == 0]
    step = statistics.median(plain)
    lost = [recovery.seconds - step for recovery in recoveries]
    ettr = 1 - statistics.mean(lost) / PERIOD
    load = os.getloadavg()[0]
    rows = {
        "a step": f"{step * 1000:.0f} ms",
        "the step after a save began": f"{statistics.median(beside) * 1000:.0f} ms",
        "from a kill to the end of the next new step, mean": f"{statistics.mean(r.seconds for r in recoveries):.2f} s",
        "the same, longest": f"{max(r.seconds for r in recoveries):.2f} s",
        "lost, mean, in steps": f"{statistics.mean(lost) / step:.1f}",
        "steps trained again, mean": f"{statistics.mean(r.repeated for r in recoveries):.2f}",
        f"ETTR with a failure every {PERIOD:.0f} s": f"{ettr:.1%}",
    }
    lines = [
        f"{date.today()}, {os.cpu_count()} cores, load {load:.1f}: {len(recoveries)} kills of random ranks of {ranks}.",
        "",
    ]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--failures", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smaller", action="store_true")
    parser.add_argument("--write", type=Path, help="the page whose section is replaced")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        if options.smaller:
            print(measure_smaller(Path(folder), options.ranks))
            return
        text = report(*measure(Path(folder), options.ranks, options.failures, options.seed), options.ranks)
    print(text)
    if options.write is not None:
        before, _, rest = options.write.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        options.write.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
