"""Run folders written by an earlier version: checkpoints are read, resumed and converted as that version did.

`written_before` was made by `run train +recipe=quickstart` with the words below, on two ranks, as if stopped after
step 4: `plain` saves both forms, `zero` uses ZeRO 1 and saves the sharded form. `metrics.jsonl` continues to step 8.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runner import checkpoint as checkpoints
from runner.commands.convert import run

FOLDER = Path(__file__).parent / "written_before"
WORDS = (
    "+recipe=quickstart",
    "world_size=2",
    "parallel.strategies.matmul=[[1,2],[2,1]]",
    "optimizer={target: torch.optim.Adam, args: {lr: 0.01}}",
    "optimizer.scheduler={target: torch.optim.lr_scheduler.StepLR, args: {step_size: 3, gamma: 0.5}}",
    "train={steps: 8, log_every: 1, resume: auto}",
    "checkpoint.every=4",
    "report.progress=false",
)
KINDS = {"plain": ("checkpoint.form=both",), "zero": ("parallel.zero.stage=1",)}
SHAPES = {
    "model/matmul.weight": (32, 16),
    "model/matmul2.weight": (16, 16),
}


def tensors(path: Path) -> dict[str, torch.Tensor]:
    opened = checkpoints.read(path)
    return {key: opened.read(key) for key in opened.tensors}


def newest(folder: Path) -> Path:
    path = checkpoints.newest(folder / "checkpoints")
    assert path is not None
    return path


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


def test_it_is_complete_and_equals_the_merged_form(kind):
    path = newest(FOLDER / kind)
    assert dict(checkpoints.verify(path)) == {}
    opened = checkpoints.read(path)
    assert (opened.step, opened.header.world_size, opened.header.position) == (4, 2, (1, 0))
    content = tensors(path)
    assert {key: tuple(content[key].shape) for key in SHAPES} == SHAPES
    assert {key.split("/")[1] for key in opened.tensors if key.startswith("optimizer/")} == {"exp_avg", "exp_avg_sq"}
    merged_form = load_file(newest(FOLDER / "plain") / "model.safetensors")
    assert all(content[f"model/{name}"].allclose(tensor, rtol=1e-6, atol=1e-7) for name, tensor in merged_form.items())


def test_it_is_converted(kind, tmp_path):
    path = newest(FOLDER / kind)
    merged, sharded = tmp_path / "merged", tmp_path / "sharded"
    assert run([str(path), str(merged)]) == 0
    assert run([str(merged), str(sharded), f"plan={FOLDER / 'plain' / 'plan.json'}"]) == 0
    before = tensors(path)
    for made in (merged, sharded):
        after = tensors(made)
        assert after.keys() == before.keys() and all(after[key].equal(before[key]) for key in before)


def test_the_run_goes_on_as_it_did_then(start, kind, tmp_path):
    """Under the plan of that version, searched again or loaded from its plan.json."""
    shutil.copytree(FOLDER / kind, tmp_path / kind)
    plan = {"plain": (), "zero": (f"parallel.plan={FOLDER / 'zero' / 'plan.json'}",)}[kind]
    ended = start(*WORDS, *KINDS[kind], *plan, folder=kind)
    lines = (FOLDER / kind / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    then = [json.loads(line)["loss"] for line in lines]
    assert ended.losses[:4] == then[:4]
    assert ended.losses == pytest.approx(then, rel=1e-5)
    assert [record["lr"] for record in ended.records] == [json.loads(line)["lr"] for line in lines]
    assert (
        json.loads((ended.folder / "run.json").read_text(encoding="utf-8"))["run"]
        == json.loads((FOLDER / kind / "run.json").read_text(encoding="utf-8"))["run"]
    )
    assert newest(ended.folder).name == "step-00000008"
