"""Fixtures that call the command in this process, as the console script in an empty folder, and its jobs alone.

Jobs in this process share the fork server, and so its import of torch.
"""

import atexit
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from runner import launch
from runner.cli.main import main
from runner.cli.verbs import VERBS, Verb

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for `networks` and `small`, which stand for files in a user's folder

from composing import compose_config  # noqa: E402

# The fork server imports the project for all ranks at once; before python 3.12 it does not get this process's path.
ROOT = str(HERE.parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])

# Commands under test do not write to the user's plan cache.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="meshwright-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

LAUNCHER_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


@dataclass(frozen=True)
class Done:
    """The result of a command."""

    code: int
    out: str
    err: str

    @property
    def paragraphs(self) -> list[str]:
        return [line for line in self.err.splitlines() if line]


@pytest.fixture
def command(tmp_path, monkeypatch, capsys) -> Iterator[Callable[..., Done]]:
    """`command("plan", "+recipe=x")` is `run plan +recipe=x` in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    for name in ("MESHWRIGHT_TRACEBACK", "HYDRA_FULL_ERROR"):
        monkeypatch.setenv(name, "0")
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    root, handlers, level = logging.getLogger(), logging.getLogger().handlers[:], logging.getLogger().level

    def call(*typed: str, **environment: str) -> Done:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["run", *typed])
            for name, value in (("HYDRA_FULL_ERROR", "0"), *environment.items()):
                patch.setenv(name, value)
            try:
                main()
                code = 0
            except SystemExit as exit_:
                code = exit_.code or 0
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    yield call
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def job(monkeypatch) -> Callable[[Callable[..., float | None]], None]:
    """`job(function)` makes `function(config, run_dir)` the job of the verb train."""

    def put(function: Callable[..., float | None]) -> None:
        module = ModuleType("job_of_a_test")
        module.run = function
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(VERBS, "train", Verb("", "", f"{module.__name__}:run"))

    return put


@pytest.fixture
def left(tmp_path) -> Callable[[], list[Path]]:
    """The files that a command left in its folder."""
    return lambda: sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))


@dataclass(frozen=True)
class Ended:
    """The result of a job: its folder, its value, and the return value of rank 0 at every start of ranks."""

    folder: Path
    value: float | None
    results: list[Any] = field(default_factory=list)

    @property
    def plan(self) -> dict[str, Any]:
        return json.loads((self.folder / "plan.json").read_text(encoding="utf-8"))

    @property
    def verdict(self) -> dict[str, Any]:
        return json.loads((self.folder / "verify.json").read_text(encoding="utf-8"))

    @property
    def records(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records if "loss" in record]

    @property
    def evaluations(self) -> dict[int, dict[str, float]]:
        return {record["step"]: record["evaluation"] for record in self.records if "evaluation" in record}


@pytest.fixture
def start(tmp_path, monkeypatch) -> Callable[..., Ended]:
    """`start("+recipe=x", "train.steps=2", verb="verify", folder="a")` does that job in `tmp_path/a`."""
    run_ranks = launch.run_ranks

    def call(*overrides: str, verb: str = "train", folder: str = "run") -> Ended:
        ended: list[Any] = []

        def remembered(*args: Any, **kwargs: Any) -> Any:
            ended.append(run_ranks(*args, **kwargs))
            return ended[-1]

        place = tmp_path / folder
        place.mkdir(parents=True, exist_ok=True)
        with monkeypatch.context() as patch:
            patch.setattr(launch, "run_ranks", remembered)
            # every test plans anew: some use broken rules
            given = ("parallel.plan_cache=null", *overrides, f"job={verb}")
            value = VERBS[verb].function()(compose_config(*given), place)
        return Ended(place, value, ended)

    return call
