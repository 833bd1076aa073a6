"""User folders with the names of the project's packages: every process imports the right one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner import packages

NET = """
from torch import nn
from {sibling} import WIDTH

class {name}(nn.Module):
    def __init__(self, width=4, **rest):
        super().__init__()
        self.mine = nn.Linear(8, WIDTH * width, bias=False)

    def forward(self, x):
        return self.mine(x)
"""
DATA = """
import torch

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, row):
        return torch.full((8,), float(row)), row % 4
"""
RECIPE = """# @package _global_
# Mine
defaults: [{{override /parallel: data_parallel}}, _self_]
world_size: 2
model: {{target: {model}}}
loss: {{target: torch.nn.CrossEntropyLoss}}
data: {{target: {data}, batch_size: 8}}
train: {{steps: 1}}
checkpoint: {{at_end: false}}
"""
EDITABLE = """
import sys
from importlib.machinery import PathFinder

class Finder:  # behind all others, as that of an editable install is
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [{root!r}]) if path is None else None

sys.meta_path.append(Finder)
"""


@pytest.fixture
def run(tmp_path):
    """`run(...)` is the command in `tmp_path`, as in an editable install."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(EDITABLE.format(root=str(packages.ROOT)), encoding="utf-8")
    (tmp_path / "here").mkdir()
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "run"
    script.write_text("from meshwright.__main__ import main\n\nmain()\n", encoding="utf-8")
    others = [path for path in sys.path if path and Path(path).resolve() != packages.ROOT]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), *others])}

    def call(*words, start=script, path=()):
        line = [sys.executable, str(start), *words]
        own = environment | {"PYTHONPATH": os.pathsep.join([*path, environment["PYTHONPATH"]])}
        return subprocess.run(line, cwd=tmp_path / "here", env=own, capture_output=True, encoding="utf-8", check=False)

    return call


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def folders_of_all_names(folder: Path, init: bool) -> None:
    """User files in folders with the names of the project's packages."""
    mine = NET.format(sibling="models.layers", name="Mine")
    files = {
        "models/layers.py": "WIDTH = 1\n",
        "models/mine.py": mine,
        "models/gpt.py": NET.format(sibling="models.layers", name="GPT"),
        "models/quickstart.py": "raise RuntimeError('not for shipped recipes')\n",
        "models/matmul.py": "raise RuntimeError('not for shipped recipes')\n",
        "recipes/mine.yaml": RECIPE.format(model="models.mine.Mine", data="conf.rows.Rows"),
        "recipes/other.yaml": RECIPE.format(model="models.gpt.GPT", data="runner.rows.Rows"),
        "conf/rows.py": DATA,
        "conf/config.yaml": "nothing: here\n",
        "conf/cluster/laptop_gloo.yaml": "nothing: here\n",
        "strategies/rows.py": DATA,
        "runner/rows.py": DATA,
        "tests/rows.py": DATA,
    }
    if init:
        files |= {f"{name}/__init__.py": "" for name in ("models", "recipes", "conf", "strategies", "runner", "tests")}
    write(folder, files)


@pytest.mark.slow
@pytest.mark.parametrize("init", [pytest.param(False, id="folders"), pytest.param(True, id="packages")])
def test_ours_are_ours_and_theirs_are_theirs(run, tmp_path, init):
    folders_of_all_names(tmp_path / "here", init)
    options = ("parallel.plan_cache=null", "hydra.run.dir=out")
    done = run("plan", "+recipe=quickstart", *options)
    assert done.returncode == 0, done.stderr
    assert "model.target" not in done.stdout  # no hint is needed
    config = json.loads((tmp_path / "here" / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["model"]["target"] == "meshwright.models.quickstart.Net"
    done = run("+recipe=mine", *options)  # on ranks
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "here" / "out" / "plan.json").read_text(encoding="utf-8"))
    assert list(plan["parameters"]) == ["mine.weight"]
    done = run(
        "plan",
        "+recipe=other",
        "data.target=tests.rows.Rows",
        "verify.reference.target=models.ffn.FFN",
        "parallel.plan_cache=null",
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("model.target")]
    assert "models/gpt.py" in line and "meshwright.models.gpt.GPT" in line


@pytest.mark.slow
@pytest.mark.parametrize("words", [("launch=torchrun",), ("verify", "launch=local")], ids=["torchrun", "verify"])
def test_theirs_are_found_by_ranks_of_launchers(run, tmp_path, words):
    folders_of_all_names(tmp_path / "here", init=True)
    done = run("+recipe=mine", *words, "hydra.run.dir=out")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_files_called_like_packages_of_ours_add_to_them(run, tmp_path):
    loss = "from strategies import Mine\nfrom torch import nn\n\nclass Loss(nn.CrossEntropyLoss):\n    pass\n"
    recipe = RECIPE.format(model="strategies.Mine", data="runner.Rows").replace(
        "torch.nn.CrossEntropyLoss", "conf.Loss"
    )
    write(
        tmp_path / "here",
        {
            "strategies.py": NET.format(sibling="recipes", name="Mine"),
            "recipes.py": "WIDTH = 1\n",
            "runner.py": DATA,
            "conf.py": loss,
            "recipes/mine.yaml": recipe,
        },
    )
    done = run("+recipe=mine", "parallel.plan_cache=null", "hydra.run.dir=out", path=["."])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_file_of_the_name_of_a_package_is_the_users(run, tmp_path):
    mine = NET.format(sibling="layers_of_mine", name="Mine")
    write(tmp_path / "here", {"models.py": mine, "layers_of_mine.py": "WIDTH = 1\n", "rows_of_mine.py": DATA})
    write(tmp_path / "here", {"recipes/mine.yaml": RECIPE.format(model="models.Mine", data="rows_of_mine.Rows")})
    done = run("plan", "+recipe=mine", "parallel.plan_cache=null", "hydra.run.dir=out")
    assert done.returncode == 0, done.stderr


def test_a_folder_of_weights_hides_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"models/weights.txt": ""})
    assert packages.ours_alone("models.gpt.GPT") == "models.gpt.GPT" and packages.hidden("models.gpt.GPT") is None
    write(tmp_path, {"models/gpt.py": ""})
    assert packages.ours_alone("models.gpt.GPT") == "meshwright.models.gpt.GPT"
    assert packages.hidden("models.gpt.GPT") == tmp_path / "models" / "gpt.py"
    assert packages.ours_alone("models.llama.Llama") == "models.llama.Llama"
    assert packages.hidden("models.mine.Net") is None


def test_launchers_start_ours_where_a_folder_is_called_runner(run, tmp_path):
    write(tmp_path / "here", {"runner/__init__.py": "raise RuntimeError('not this one')\n"})
    done = run("launch", "--dry-run", "+recipe=quickstart", "launch=torchrun")
    assert str(packages.ROOT / "runner" / "join.py") in done.stdout and done.returncode == 0, done.stderr
    done = run("none", start=packages.ROOT / "runner" / "join.py")
    assert "holds no run to join" in done.stderr
    done = run("recipes", start=packages.ROOT / "runner" / "__main__.py")
    assert done.returncode == 0 and "quickstart" in done.stdout


@pytest.mark.parametrize(("file", "is_package"), [("weights.bin", False), ("deep/er/net.py", True)])
def test_a_folder_without_code_is_not_taken_for_a_library(tmp_path, file, is_package):
    """torch asks for `z3` and `triton` by importing them."""
    (tmp_path / "z3" / file).parent.mkdir(parents=True)
    (tmp_path / "z3" / file).touch()
    program = f"import sys; sys.path[:0] = [{str(packages.ROOT)!r}, '']; import runner; import z3"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, encoding="utf-8")
    assert (done.returncode == 0) == is_package and ("No module named 'z3'" in done.stderr) != is_package
