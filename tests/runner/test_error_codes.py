"""Every error that ends a command has a code, and every code of the catalogue is used, printed and explained."""

from __future__ import annotations

import ast
import pickle
import re
import shlex
from pathlib import Path

import pytest
from composing import compose_config

from runner import refusals
from runner.cli.arguments import VERBS
from runner.config.schema import Config
from runner.config.section import Section
from runner.errors import ConfigError, RunFailed
from strategies.core.errors import StrategyError

ROOT = Path(__file__).parents[2]
ERRORS = ("CodedError", "ConfigError", "StrategyError", "TooLarge", "RunFailed")
FORWARDED = ("code", "RAISED_CODE")
"""Names of first arguments that hold the code of another error."""
SOURCES = [
    file for folder in ("runner", "strategies", "models", "meshwright") for file in (ROOT / folder).rglob("*.py")
]


def test_every_error_has_a_code_and_every_code_is_used() -> None:
    used: set[str] = set()
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and refusals.CODE.fullmatch(node.value):
                used.add(node.value)
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ERRORS:
                first = node.args[0]
                name = getattr(first, "attr", getattr(first, "id", None))
                constant = isinstance(first, ast.Constant) and refusals.CODE.fullmatch(str(first.value))
                assert constant or name in FORWARDED, f"{file}:{node.lineno}"
    assert used == refusals.catalogue().keys()


def test_the_catalogue_is_complete_and_in_order() -> None:
    catalogue = refusals.catalogue()
    assert list(catalogue) == sorted(catalogue)
    for code, refusal in catalogue.items():
        assert code[2] in refusals.AREAS and len(refusal.title) < 70
        assert refusal.cause.endswith((".", ".`")) and refusal.remedy.endswith("."), code


def test_the_catalogue_names_keys_that_exist() -> None:
    types = {name: info.annotation for name, info in Config.model_fields.items()}
    sections = {n: set(t.model_fields) for n, t in types.items() if isinstance(t, type) and issubclass(t, Section)}
    for code, refusal in refusals.catalogue().items():
        text = f"{refusal.cause} {refusal.remedy} {refusal.example}"
        for section, key in re.findall(rf"(?<![\w./])({'|'.join(sections)})\.(\w+)(?!\.\w*Net)", text):
            assert key in sections[section] or (section == "model" and key == "state_dict"), (code, section, key)


def test_examples_are_commands() -> None:
    lines = [line for one in refusals.catalogue().values() for line in (one.example or "").splitlines()]
    tried = 0
    for line in lines:
        command, *words = shlex.split(line)
        verb = words.pop(0) if command == "run" and words[0] in VERBS else "train"
        assert command != "run" or verb != "train" or any(word.startswith("+recipe=") for word in words), line
        if any(word.startswith("+recipe=") for word in words) and not {"-m", "cluster.file=machine.yaml"} & {*words}:
            keys = [word for word in words if "=" in word and not word.startswith("--")]
            assert compose_config(*keys, f"job={verb}")
            tried += 1
    assert tried > 20


def test_the_page_is_the_catalogue() -> None:
    assert (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8") == refusals.page(), (
        "python -m runner.refusals > docs/troubleshooting.md"
    )


def test_an_error_keeps_its_code_on_its_way() -> None:
    failed = pickle.loads(pickle.dumps(RunFailed("MW711", "rank 1 was killed.\nits last line", rank=1)))
    assert (failed.code, str(failed), failed.rank) == ("MW711", "rank 1 was killed.\nits last line", 1)
    assert failed.marked == ("rank 1 was killed. [MW711]\nits last line",)
    several = pickle.loads(pickle.dumps(ConfigError.of([("MW201", "no key a."), ("MW204", "b is no number.")])))
    assert several.marked == ("no key a. [MW201]", "b is no number. [MW204]")
    assert str(StrategyError("MW402", "one", "two")) == "one\ntwo"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["nothing"], "MW101"),
        (["+recipe=nothing"], "MW106"),
        (["+recipe=quickstart", "train.stepz=1"], "MW201"),
        (["+recipe=quickstart", "train.steps=many"], "MW204"),
        (["+recipe=quickstart", "parallel.strategies={matmul: 3}"], "MW400"),
        (["plan", "+recipe=quickstart", "parallel.strategies={matmull: [[1, 1], [1, 4]]}"], "MW211"),
        (["plan", "+recipe=quickstart", "model.target=nowhere.Net"], "MW301"),
        (["explain", "MW999"], "MW112"),
    ],
)
def test_a_command_shows_the_code(command, words: list[str], code: str) -> None:
    done = command(*words)
    assert done.code == 2 and done.err.rstrip().endswith(f"[{code}]")


@pytest.mark.parametrize("typed", ["mw204", "204", "[MW204]"])
def test_a_code_is_explained(command, typed: str) -> None:
    done = command("explain", typed)
    assert done.code == 0 and refusals.catalogue()["MW204"].remedy in done.out
