"""What shells offer while a command is typed, and how that is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.cli.completion import SCRIPTS, offers


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("run pl", ["plan"]),
        ("run +rec", ["+recipe="]),
        ("run +recipe=quick", ["+recipe=quickstart"]),
        ("run plan pl", []),
        ("run plan +recipe=gpt +rec", []),
        ("run plan par", ["parallel=", "parallel."]),
        ("run parallel.se", ["parallel.search=", "parallel.set_data_parallel=", "parallel.server."]),
        ("run ~parallel.str", ["~parallel.strategies."]),
        ("run ~train.st", ["~train.steps"]),
        ("run launch=r", ["launch=rank_table"]),
        ("run parallel.zero.stage=", [f"parallel.zero.stage={stage}" for stage in ("auto", "0", "1", "2", "3")]),
        ("run recipes vi", ["vit", "vit_images"]),
        ("run doctor runs/", []),
        ("run recipes vit --c", ["--cfg", "--copy"]),
        ("run +recipe=gpt model.args.w", None),
    ],
)
def test_what_may_follow(line, expected):
    assert offers(line) == expected


def test_recipes_of_the_user_are_offered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "quicker.yaml").touch()
    assert offers("run +recipe=quick") == ["+recipe=quicker", "+recipe=quickstart"]


def test_a_tab_imports_neither_hydra_nor_the_schema():
    """A TAB must not be felt."""
    check = (
        "import atexit, sys; sys.argv[1:] = ['--complete']; from runner.__main__ import main; "
        "atexit.register(lambda: print({'hydra', 'pydantic', 'torch'} & set(sys.modules))); main()"
    )
    environment = {**os.environ, "COMP_LINE": "run plan train.st", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stdout) == (0, "train.steps=\nset()\n"), done.stderr


def test_below_a_recipes_own_keys_hydra_answers():
    words = [sys.executable, "-m", "runner", "--complete"]
    environment = {**os.environ, "COMP_LINE": "run plan +recipe=gpt model.args.wi"}
    done = subprocess.run(words, env=environment, capture_output=True, encoding="utf-8")
    assert done.stdout.split() == ["model.args.width="], done.stderr


@pytest.mark.parametrize("shell", SCRIPTS)
def test_it_is_installed_once(command, tmp_path, monkeypatch, shell):
    start = tmp_path / f".{shell}rc"
    start.write_text("alias a=b", encoding="utf-8")
    for name in ("XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):
        assert command("completion", "--install", SHELL=f"/bin/{shell}", HOME=str(tmp_path)).code == 0
    assert command("completion", shell).out == SCRIPTS[shell]
    written = [file for file in tmp_path.rglob("*") if file.is_file() and file != start]
    assert {file.read_text(encoding="utf-8") for file in written} == {SCRIPTS[shell]}
    names = {str(file.relative_to(tmp_path / ".config")) for file in written}
    if shell == "fish":
        assert names == {"fish/completions/run.fish", "fish/completions/meshwright.fish"}
    else:
        first, source = start.read_text(encoding="utf-8").splitlines()
        assert (first, names) == ("alias a=b", {f"meshwright/completion.{shell}"})
        assert source.startswith(f"source '{tmp_path}/.config/meshwright/completion.{shell}'")


def test_a_shell_that_is_not_known_is_refused(command):
    for words in (["tcsh"], ["bash", "zsh"], []):
        refused = command("completion", *words, SHELL="/bin/tcsh")
        assert refused.code == 2 and "[MW112]" in refused.err


BASH = """
source ./script
answer() {
    COMP_LINE="$1"; COMP_POINT=${#1}
    COMP_WORDS=(${1//=/ = }); [[ $1 == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
    _meshwright
    printf '%s|' "${COMPREPLY[@]}"; echo
}
run() { "$PYTHON" -m runner "$@"; }
answer "run pla"
answer "run plan +recipe=quick"
answer "run plan parallel.se"
answer "run plan device="
"""


def test_bash_inserts_what_is_missing(tmp_path: Path):
    """Bash takes `=` for the end of a word, so what stands before it must not be inserted again."""
    (tmp_path / "script").write_text(SCRIPTS["bash"], encoding="utf-8")
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", "-c", BASH], cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", check=True
    )
    assert done.stdout.splitlines() == [
        "plan |",
        "quickstart |",
        "parallel.search=|parallel.set_data_parallel=|parallel.server.|",
        "auto |cpu |cuda |",
    ], done.stderr
