"""Every command of the README runs, from a folder of its own, as the installed command would."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line.startswith("run ")]
SHORT = ["train.steps=2", "evaluate.metric=null", "evaluate.args={}"]
"""Added to commands that would train for a minute."""


def shortened(command: str) -> list[str]:
    words = shlex.split(command)[1:]
    trains = words[0].startswith("+recipe") and "train.steps" not in command and "quickstart" not in command
    return words + (SHORT if trains else [])


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "readme"  # one for all: a resumed run needs the folder of the run before
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "runner", *shortened(command)],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONSAFEPATH": "1",
            "XDG_CACHE_HOME": str(folder / "cache"),
        },
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 15


def test_the_recipe_of_the_readme_is_valid(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (recipe,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    (tmp_path / "recipes" / "mine.yaml").write_text(recipe, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "runner", "+recipe=mine", "--cfg", "job"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0 and "my_models.Net" in done.stdout, done.stdout + done.stderr
