"""Random corruptions of checkpoints, plan cache entries and run folders, and the outcome of each.

    python tests/runner/checkpoint/corruptions.py [--first 0] [--count 1500]

Corruption N depends on N alone. For each, the reader must end within seconds, either with the data that was written
(in this checkpoint or an older intact one) or with one paragraph; never with other values or another exception.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[3])]

import torch  # noqa: E402
from six_ranks import equal, expected, save, weights  # noqa: E402

from runner import checkpoint as checkpoints  # noqa: E402
from runner.checkpoint import manifest as header  # noqa: E402
from runner.checkpoint.folder import HEADER, INDEX  # noqa: E402
from runner.commands import doctor_checkpoint as examination  # noqa: E402
from runner.config import load as config  # noqa: E402
from runner.errors import ConfigError  # noqa: E402
from runner.run_folder import lineage  # noqa: E402
from runner.run_folder import metrics as metrics_file  # noqa: E402
from runner.run_folder.lineage import Lineage  # noqa: E402
from runner.run_folder.lock import Occupant  # noqa: E402
from runner.run_folder.plan_file import read_content  # noqa: E402
from runner.sweep import job as jobs  # noqa: E402
from runner.training.metrics import Metrics  # noqa: E402
from strategies.core.bounded_files import read_json  # noqa: E402
from strategies.core.errors import StrategyError  # noqa: E402
from strategies.core.layout import Layout  # noqa: E402
from strategies.core.mesh import Mesh  # noqa: E402
from strategies.core.plan import OperatorPlan, Plan  # noqa: E402
from strategies.planner import plan_cache  # noqa: E402

SECONDS = 20
"""A reader that takes longer hangs."""
DEEP = "[" * 10_000 + "]" * 10_000
ODD: tuple[Any, ...] = (None, -1, 0, 2**70, 1.5, "", "../x", "/etc/hostname", [], {}, True, "nan", [[[]]])
STEPS = (1, 2, 3)


class Wrong(Exception):
    """A corruption had a forbidden outcome."""


def flip(file: Path, draw: random.Random) -> None:
    content = bytearray(file.read_bytes() or b"\0")
    for _ in range(draw.choice((1, 1, 1, 8, 200))):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(bytes(content))


def cut(file: Path, draw: random.Random) -> None:
    os.truncate(file, draw.randrange(max(file.stat().st_size, 1)))


def zero(file: Path, draw: random.Random) -> None:
    size = file.stat().st_size
    start = draw.randrange(max(size, 1))
    with file.open("r+b") as opened:
        opened.seek(start)
        opened.write(b"\0" * min(512, size - start))


def extend(file: Path, draw: random.Random) -> None:
    with file.open("ab") as opened:
        opened.write(draw.randbytes(draw.choice((1, 16, 4096))))


def noise(file: Path, draw: random.Random) -> None:
    file.write_bytes(draw.randbytes(draw.choice((0, 1, 64, 4096))))


def lose(file: Path, draw: random.Random) -> None:
    file.unlink()


def fifo(file: Path, draw: random.Random) -> None:
    file.unlink()
    os.mkfifo(file)


def device(file: Path, draw: random.Random) -> None:
    file.unlink()
    file.symlink_to(draw.choice(("/dev/zero", "/dev/full", "/etc/hostname", "nowhere", file.name)))


def folder(file: Path, draw: random.Random) -> None:
    file.unlink()
    (file / "inside").mkdir(parents=True)


def huge(file: Path, draw: random.Random) -> None:
    os.truncate(file, 2**40)


def deep(file: Path, draw: random.Random) -> None:
    file.write_text(draw.choice((DEEP, '{"plan": ' + DEEP + ', "sha256": ""}')), encoding="utf-8")


def swap(file: Path, draw: random.Random) -> None:
    other = draw.choice(sorted(one for one in file.parent.iterdir() if one.is_file() and not one.is_symlink()))
    one, another = file.read_bytes(), other.read_bytes()
    file.write_bytes(another)
    other.write_bytes(one)


def odd(file: Path, draw: random.Random) -> None:
    """Replace one value in a JSON file; overwrite any other file with noise."""
    try:
        value = read_json(file)  # an earlier corruption may have made it huge
    except ValueError:
        return noise(file, draw)
    places = list(_places(value))
    if places:
        holder, key = draw.choice(places)
        if draw.random() < 0.2:
            del holder[key]
        else:
            holder[key] = draw.choice(ODD)
    file.write_text(json.dumps(value), encoding="utf-8")


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from _places(inner)


PLAIN: tuple[Callable[[Path, random.Random], None], ...] = (
    *(flip, flip, cut, zero, extend, noise, lose, fifo, device, folder, huge, deep, swap, odd),
)


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise Wrong(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Corruptions:
    """The files to corrupt, written once into the folder `origin`; every corruption works on a copy."""

    origin: Path

    def __post_init__(self) -> None:
        for form, copies in (("sharded", 1), ("sharded", 2), ("merged", 1), ("both", 1)):
            run = self.origin / f"{form}-{copies}"
            place = run / "checkpoints"
            for step in STEPS:
                save(place, step, seed=step, lineage=Lineage("a"), form=form, copies=copies)
            self._of_a_run(run)
        plan_cache.store(self.origin / "cache", "key", self.plan.to_json(), print)

    @cached_property
    def plan(self) -> Plan:
        layout = Layout((("dp",), ()))
        operators = {f"op{number}": OperatorPlan({"m": ("dp",)}, "search", (layout,)) for number in range(8)}
        return Plan(Mesh((("dp", 4),)), operators, {"x": layout}, {"w": layout}, {"cost": 1.0}, None)

    @staticmethod
    def _of_a_run(run: Path) -> None:
        (run / lineage.FILE).write_text(
            json.dumps(vars(Occupant.now("train", "mine", "a")) | {"history": [], "resumed": None}), encoding="utf-8"
        )
        lines = [json.dumps({"step": step, "loss": 1 / step}) for step in range(1, 9)]
        (run / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (run / "plan.json").write_text(
            json.dumps({"mesh": {"dp": 6}, "parameters": {}, "tensors": {}}), encoding="utf-8"
        )
        (run / "config.json").write_text(json.dumps({"parallel": {"zero": {"stage": 0}}}), encoding="utf-8")
        jobs.SweepJob(0, ("a=1",), "train", "s", "done", 0.5).write(run)

    def one(self, number: int) -> str:
        """Do corruption `number`. Returns its kind and outcome. Raises Wrong."""
        draw = random.Random(number)
        kind = draw.choice(("checkpoint", "checkpoint", "checkpoint", "forged", "cache", "run folder"))
        with tempfile.TemporaryDirectory() as place, within(SECONDS):
            try:
                return f"{kind}: {getattr(self, kind.replace(' ', '_'))(Path(place) / 'run', draw)}"
            except Wrong:
                raise
            except Exception as error:
                raise Wrong(f"corruption {number}, {kind}: {type(error).__name__}: {error}") from error

    def _copy(self, to: Path, draw: random.Random) -> None:
        names = sorted(path.name for path in self.origin.iterdir() if path.name != "cache")
        shutil.copytree(self.origin / draw.choice(names), to)

    def checkpoint(self, run: Path, draw: random.Random) -> str:
        self._copy(run, draw)
        place = run / "checkpoints"
        for _ in range(draw.choice((1, 1, 2, 5))):
            path = draw.choice(sorted(one for one in place.iterdir() if one.is_dir()))
            files = sorted(file for file in path.iterdir() if file.is_file() and not file.is_symlink())
            way = draw.randrange(20)
            if way == 0:
                path.rename(place / f"step-{draw.randrange(9):08d}x")
            elif way == 1 and not (place / "step-00000007").exists():
                path.rename(place / "step-00000007")
            elif way == 2 and not os.path.lexists(path / "damaged.json"):
                draw.choice((fifo, folder, noise))(_made(path / "damaged.json"), draw)
            elif way == 3:
                _made(place / ".step-00000009.partial")
            elif files:
                draw.choice(PLAIN)(draw.choice(files), draw)
        return self._resumed(run)

    def _resumed(self, run: Path) -> str:
        """Which checkpoint a resume loads, and which weights every other reader loads."""
        outcomes = [_taken(lambda: checkpoints.to_continue("auto", run / "checkpoints", lineage.read(run)))]
        outcomes += [_taken(lambda: checkpoints.locate(run))] if outcomes[0] is not None else []
        for found in (one for one in outcomes if one is not None):
            try:
                checkpoints.weights(found)
                step = header.read_header(found).step
                if not equal(weights(found), expected(step)):
                    raise Wrong(f"other weights than those of step {step}")
            except ConfigError as error:
                _one_paragraph(error)
                if found is outcomes[0]:
                    raise Wrong(f"a resume takes what cannot be loaded: {error}") from error
        if outcomes[0] is None:
            return "refused"
        return "taken" if header.read_header(outcomes[0]).step == STEPS[-1] else "an older one taken"

    def forged(self, run: Path, draw: random.Random) -> str:
        """JSON with odd values and valid checksums: refused, or read literally."""
        self._copy(run, draw)
        path = run / "checkpoints" / "step-00000003"
        if draw.random() < 0.5:
            odd(path / INDEX, draw)
            found = header.read_header(path)
            text = header.to_text(replace(found, files={**found.files, INDEX: header.stamp(path / INDEX)}))
        else:
            odd(path / HEADER, draw)
            value = json.loads((path / HEADER).read_bytes())
            value.pop("checksum", None)
            text = json.dumps(value | {"checksum": header._sum_of(value)})
        (path / HEADER).write_text(text, encoding="utf-8")
        for use in (checkpoints.verify, checkpoints.weights, weights):
            with suppress(StrategyError):
                try:
                    use(path)
                except ConfigError as error:
                    _one_paragraph(error)
                    return "refused"
        return "read"

    def cache(self, run: Path, draw: random.Random) -> str:
        shutil.copytree(self.origin / "cache", run)
        draw.choice(PLAIN)(run / "key.json", draw)
        said: list[str] = []
        found = plan_cache.load(run, "key", said.append, Plan.from_json)
        if found is None:
            if not said and (run / "key.json").exists():
                raise Wrong("an entry is ignored without a line")
            plan_cache.store(run, "key", self.plan.to_json(), said.append)
            return "ignored"
        if found != self.plan:
            raise Wrong("another plan")
        return "read"

    def run_folder(self, run: Path, draw: random.Random) -> str:
        self._copy(run, draw)
        names = ("run.json", "metrics.jsonl", "plan.json", "config.json", "job.json")
        name = draw.choice(names)
        draw.choice(PLAIN)(run / name, draw)
        said = []
        for use in (
            lambda: lineage.read(run),
            lambda: read_content(run),
            lambda: config.read(run / "config.json"),
            lambda: examination.run(run / "plan.json"),
            lambda: jobs.jobs(run),
            lambda: list(metrics_file.records(run)),
            lambda: (run / "metrics.jsonl").is_file() and _measured(run),
        ):
            try:
                use()
            except ConfigError as error:
                said.append(_one_paragraph(error))
        before = self._resumed(run)
        if before == "refused":
            raise Wrong(f"{name} keeps a run from going on")
        return "refused by a reader of the file" if len(said) > 1 else "read or ignored"


def _measured(run: Path) -> None:
    with Metrics(run, log_every=100, first_step=5, progress=False) as metrics:
        metrics.step(5, loss=0.5, lr=0.1, seconds=1.0, samples=1)
    steps = [record["step"] for record in metrics_file.records(run)]
    if steps[-1] != 5 or len(set(steps)) != len(steps):
        raise Wrong(f"metrics of steps {steps}")


def _made(file: Path) -> Path:
    if not file.exists():
        file.write_text("{}", encoding="utf-8")
    return file


def _taken(use: Callable[[], Path | None]) -> Path | None:
    try:
        return use()
    except ConfigError as error:
        _one_paragraph(error)
        return None


def _one_paragraph(error: ConfigError) -> str:
    text = str(error)
    if "\n\n" in text or "Traceback" in text or not text:
        raise Wrong(f"not one paragraph: {text}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1500)
    given = parser.parse_args()
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:
        made = Corruptions(Path(place))
        for number in range(given.first, given.first + given.count):
            with redirect_stdout(StringIO()):
                try:
                    outcome = made.one(number)
                except Wrong as error:
                    outcome = "WRONG"
                    print(number, error, file=sys.stderr)
            outcomes[outcome] += 1
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:5}  {outcome}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
