"""The command, called in this process as the console script would be called in an empty folder."""

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from runner.cli import main
from runner.verbs import VERBS, Verb

LAUNCHER_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


@dataclass(frozen=True)
class Done:
    """How a command ended."""

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

    def call(*words: str, **environment: str) -> Done:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["run", *words])
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
    """What a command left behind in its folder."""
    return lambda: sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
