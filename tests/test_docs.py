"""README and the pages of docs/: every command is valid and runs, every link leads somewhere, and the site builds."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import hydra
import pytest

from runner import refusals
from runner.cli import arguments, recipes
from runner.cli.verbs import VERBS, page
from runner.config import load
from runner.config.origins import Origins

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in PAGES}
BY_PAGE = {
    name: [line for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.splitlines() if line]
    for name, text in TEXTS.items()
}
COMMANDS = list(dict.fromkeys(command for commands in BY_PAGE.values() for command in commands))
WRITTEN = re.compile(r"runs/|plans/|sweeps/|machine\.yaml|hydra/|offload_disk|hf_|mine|resnet|launch=|=tokenizer")
"""Commands that need files that another writes, or more than a few seconds."""
SHORT = ["train.steps=2", "evaluate.metric=null", "evaluate.metrics=[]", "evaluate.every=null", "evaluate.args={}"]
"""Added to commands that would train for a minute."""


def _environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONSAFEPATH": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HOME": str(folder),  # where completion is installed
    }


def _run(command: str, folder: Path) -> None:
    words = shlex.split(command)[1:]
    trains = words[0].startswith("+recipe") and "train.steps" not in command and "quickstart" not in command
    done = subprocess.run(
        [sys.executable, "-m", "runner", *words, *(SHORT if trains else [])],
        cwd=folder,
        env=_environment(folder),
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def _own_recipe(folder: Path, name: str) -> None:
    """Write the recipe that a page shows, as +recipe=mine, where its commands use it, and its modules."""
    for file, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", TEXTS[name], re.S):
        (folder / file).write_text(code, encoding="utf-8")
    blocks = [block for block in re.findall(r"```yaml\n(.*?)```", TEXTS[name], re.S) if "@package" in block]
    for block in blocks:
        (folder / "recipes").mkdir(exist_ok=True)
        (folder / "recipes" / "mine.yaml").write_text(block, encoding="utf-8")


def _first_value(word: str) -> str:
    """An override of a sweep with the first of its values."""
    key, equals, values = word.partition("=")
    return f"{key}{equals}{values.removeprefix('interval(').split(',')[0]}"


def test_every_block_holds_commands_of_run() -> None:
    assert len(COMMANDS) > 80
    assert [command for command in COMMANDS if not command.startswith("run ")] == []


@pytest.mark.few(5)
@pytest.mark.parametrize("name", [name for name, commands in BY_PAGE.items() if commands])
def test_commands_are_valid(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command composes to a valid config; nothing is captured or started."""
    monkeypatch.chdir(tmp_path)
    _own_recipe(tmp_path, name)
    recipes.search(None)
    recipes.register()
    for command in BY_PAGE[name]:
        verb, words = arguments.split_verb(shlex.split(command)[1:])
        if verb is not None and not VERBS[verb].composed:
            continue
        if refusals.CODE.fullmatch(command[-5:]):
            continue
        # what a launcher or sweeper chooses, and files that an earlier command has written
        swept, left_out = "-m" in words, ("hydra/", "hydra.", "cluster.file=", "-")
        words = [_first_value(word) if swept else word for word in words if not word.startswith(left_out)]
        given = arguments.for_hydra(verb, words)
        with hydra.initialize_config_module("conf", version_base="1.3"):
            load.load(hydra.compose("config", given), Origins(given))


def test_the_recipe_of_the_readme_is_the_one_of_its_commands() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXTS["README.md"], re.S)
    assert len(block.splitlines()) <= 25
    assert sum("+recipe=mine" in command for command in BY_PAGE["README.md"]) >= 2


def test_the_readme_is_short() -> None:
    assert len(TEXTS["README.md"].splitlines()) <= 130


@pytest.mark.slow
def test_a_sampled_command_runs(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    candidates = [command for command in COMMANDS if not WRITTEN.search(command)]
    _run(random.Random(request.config.getoption("seed")).choice(candidates), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, commands in BY_PAGE.items() if commands])
def test_all_commands_run(name: str, tmp_path: Path) -> None:
    """In order, because some need the output of earlier ones."""
    _own_recipe(tmp_path, name)
    for command in BY_PAGE[name]:
        _run(command, tmp_path)


def _anchors(text: str) -> set[str]:
    """The anchors of the headings of a page, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    words = (re.sub(r"[^\w\- ]", "", heading.replace("`", "")).strip().lower() for heading in headings)
    return {re.sub(r"[ ]+", "-", word) for word in words}


def test_links_lead_somewhere() -> None:
    broken = []
    for name, text in TEXTS.items():
        bare = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", bare):
            if re.match(r"https?://|mailto:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (ROOT / name).parent / path if path else ROOT / name
            if not file.exists():
                broken.append((name, target))
            elif anchor and file.suffix == ".md" and anchor not in _anchors(file.read_text(encoding="utf-8")):
                broken.append((name, target))
            if name.startswith("docs/") and path and not file.resolve().is_relative_to(ROOT / "docs"):
                broken.append((name, target))  # the site has no such page
    assert broken == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    for name in TEXTS:
        if name.startswith("docs/"):
            assert re.search(rf"[ :]{re.escape(name.removeprefix('docs/'))}$", navigation, re.M), name


def test_the_page_of_the_command_line_is_generated() -> None:
    text = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    assert text == page(), "python -m runner.cli.verbs > docs/reference/cli.md"


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    assert importlib.util.find_spec("mkdocs") is not None, 'pip install -c constraints.txt -e ".[docs]"'
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/api/index.html").read_text(encoding="utf-8").count("make_plan") > 1
