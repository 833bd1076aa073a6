"""Simulated hosts, and the command started on the first of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for `launched` and `namespaces`

from launched import RECIPE, ROOT, STEPS, losses  # noqa: E402
from namespaces import Hosts  # noqa: E402


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two hosts with two ranks each; the program `ssh` connects them."""
    made = Hosts(2, tmp_path_factory.mktemp("hosts"))
    yield made
    made.close()


@pytest.fixture
def on_first(hosts: Hosts, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`on_first("train", "launch=mpirun", ...)` starts the command on the first host, in `tmp_path`."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, on: int = 0, **environment: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                hosts.inside(hosts.names[on], [sys.executable, "-m", "runner", *words]),
                cwd=tmp_path,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "OMP_NUM_THREADS": "1",
                    **hosts.environment(),
                    **environment,
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
    for name in hosts.names:
        hosts.bring_back(name)
    assert hosts.empty(15), "processes are left on the hosts"


@pytest.fixture(scope="module")
def local_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of every step of a run with `launch=local`."""
    folder = tmp_path_factory.mktemp("local")
    subprocess.run(
        [sys.executable, "-m", "runner", "train", *RECIPE, f"train.steps={STEPS}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    return losses(folder / "run")
