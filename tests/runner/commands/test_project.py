"""What a newcomer meets first: a project, recipes to change, the schema for editors, a block for reports; and all of it
from the wheel."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from composing import compose_config

from runner.cli import recipes

ROOT = Path(__file__).parents[3]


def test_a_project_is_complete_and_never_written_over_files(command, left, tmp_path):
    assert command("init", "mine").code == 0
    files = "data.py Makefile README.md .gitignore model.py recipes recipes/mine.yaml test_model.py".split()
    assert set(left()) == {Path("mine"), *(Path("mine", file) for file in files)}
    assert not any("PROJECT" in file.read_text(encoding="utf-8") for file in tmp_path.glob("mine/**/*.*"))
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    for words, code in ((["mine"], "MW860"), ([], "MW112"), (["a", "b"], "MW112"), (["mine/1"], "MW112")):
        refused = command("init", *words)
        assert refused.code == 2 and refused.err.rstrip().endswith(f"[{code}]"), refused
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before


def test_a_project_cannot_be_made_below_a_file(command, tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    refused = command("init", "file/mine")
    assert refused.code == 2 and "[MW603]" in refused.err


def test_a_copied_recipe_is_the_same_run(command, tmp_path):
    shipped = compose_config("+recipe=gpt_long")
    assert command("recipes", "gpt_long", "--copy").code == 0
    recipes.search(None)
    copied = compose_config("+recipe=gpt_long")
    assert copied.model.target == f"meshwright.{shipped.model.target}"
    again = copied.model_dump_json().replace('"meshwright.models.', '"models.')
    assert again == shipped.model_dump_json()
    for words, code in ((["gpt_long", "--copy"], "MW860"), (["--copy"], "MW112"), (["nothing", "--copy"], "MW110")):
        refused = command("recipes", *words)
        assert refused.code == 2 and f"[{code}]" in refused.err, refused


def test_every_copy_means_the_models_that_ship(command, tmp_path):
    """Also those that a metric or an object in an object names."""
    names = list(recipes.catalogue())
    assert command("recipes", *names, "--copy").code == 0
    for name in names:
        lines = (tmp_path / "recipes" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        values = "\n".join(line for line in lines if not line.startswith("#"))
        assert re.search(r"(?<!meshwright\.)\bmodels\.\w+\.[A-Za-z]", values) is None, name


def test_the_schema_is_what_an_editor_reads_from_the_second_line(command, tmp_path):
    printed = command("schema")
    schema = json.loads(printed.out)
    assert set(schema["properties"]) > {"model", "train", "parallel"}
    written = command("schema", "keys.json")
    assert json.loads((tmp_path / "keys.json").read_text(encoding="utf-8")) == schema
    header = written.out.splitlines()[-2:]
    assert header[1] == f"# yaml-language-server: $schema=file://{tmp_path}/keys.json"
    text = (recipes.shipped() / "quickstart.yaml").read_text(encoding="utf-8").splitlines()
    own = tmp_path / "recipes" / "mine.yaml"
    own.parent.mkdir()
    own.write_text("\n".join([*header, *text[1:]]), encoding="utf-8")
    recipes.search(None)
    assert compose_config("+recipe=mine") == compose_config("+recipe=quickstart")
    assert recipes.description(own) == recipes.description(recipes.shipped() / "quickstart.yaml")
    assert command("schema", "a", "b").code == command("schema", "no/where.json").code == 2


def test_the_block_for_reports_holds_settings_and_no_secrets(command):
    block = command("env", NCCL_DEBUG="INFO", HF_TOKEN="hf_secret", WANDB_API_KEY="key_secret")
    lines = dict(line.split(None, 1) for line in block.out.splitlines()[1:-1])
    assert lines["NCCL_DEBUG"] == "INFO" and "secret" not in block.out
    assert lines["torch"][0].isdigit() and lines["built"] and lines["GPUs"] and block.out.startswith("```text\n")
    assert command("env", "x").code == 2


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> dict[str, str]:
    """The environment of a user with nothing but the wheel of this project and the packages that it needs."""
    place = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", place, ROOT], check=True)
    (wheel,) = place.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", place / "site", wheel], check=True)
    keep = ("HOME", "LANG", "OMP_NUM_THREADS")
    return {
        **{name: os.environ[name] for name in keep if name in os.environ},
        "PATH": f"{place / 'site' / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": str(place / "site"),
        "XDG_CACHE_HOME": str(place / "cache"),
    }


@pytest.mark.slow
def test_the_first_ten_minutes_work_from_the_wheel(installed, tmp_path):
    def shell(line: str) -> str:
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=installed, capture_output=True, encoding="utf-8", timeout=280
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    assert shell("meshwright --version") == shell("run --version")
    assert "site/runner" in shell("python -c 'import runner; print(runner.__file__)'")
    shell("meshwright init mine")
    trained = shell("cd mine && make train PYTHON=python")
    assert float(trained.rpartition("test accuracy ")[2].partition(";")[0]) > 0.95, trained
    shell("cd mine && make plan PYTHON=python")
    assert "verify passed" in shell("cd mine && make test PYTHON=python")
