"""Conversion copies every element once to its place in the new form, in bounded memory."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import made_checkpoints as made
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runner import checkpoint as checkpoints
from runner.checkpoint import index, writing
from runner.checkpoint.folder import INDEX
from runner.checkpoint.manifest import Stamp, faults, read_header, stamp, to_text
from runner.commands.convert import run
from runner.errors import ConfigError

LAYOUTS = {
    "a.weight": [["dp"], ["tp"]],
    "a.bias": [["tp"]],
    "b.weight": [[], ["dp", "tp"]],
    "b.uneven": [["tp"], []],
    "count": [],
}
WEIGHTS = {
    "a.weight": torch.arange(48.0).reshape(8, 6),
    "a.bias": torch.arange(6).bfloat16(),
    "b.weight": torch.randn(3, 12, generator=torch.Generator().manual_seed(0)),
    "b.uneven": torch.arange(10.0).reshape(5, 2),  # 3 rows and 2, the last padded in memory
    "count": torch.tensor(7),
}
STATES = {"optimizer/exp_avg/a.weight": -WEIGHTS["a.weight"], "optimizer/row/a.weight": torch.arange(8.0)}
TENSORS = {**{f"model/{name}": tensor for name, tensor in WEIGHTS.items()}, **STATES}
PLAN = {
    "mesh": {"dp": 2, "tp": 2},
    "assignments": {},
    "inputs": {},
    "tensors": {name: {"dims": dims, "partial": []} for name, dims in LAYOUTS.items()},
    "search": {},
}


@pytest.fixture
def plan(tmp_path) -> Path:
    (tmp_path / "plan.json").write_text(json.dumps(PLAN), encoding="utf-8")
    return tmp_path / "plan.json"


@pytest.fixture
def stored(tmp_path) -> Path:
    return made.checkpoint(tmp_path / "made", TENSORS, made.halves)


def tensors_in(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint. Asserts that its files are intact and store every element once."""
    assert faults(path, read_header(path).files) == {}
    (form,) = map(index.from_json, json.loads((path / INDEX).read_text(encoding="utf-8")))
    assert all(sum(part.elements for part in entry.parts) == entry.elements for entry in form.values())
    opened = checkpoints.read(path)
    return {key: opened.read(key) for key in opened.tensors}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[key].dtype == tensor.dtype and found[key].equal(tensor) for key, tensor in expected.items()
    )


def convert(*words: object) -> Path:
    assert run([str(word) for word in words]) == 0
    return Path(str(words[1]))


def test_sharded_to_merged_for_anybody(stored, tmp_path):
    target = convert(stored, tmp_path / "merged")
    assert same(tensors_in(target), TENSORS)
    assert same(load_file(target / "model.safetensors"), WEIGHTS)
    assert (read_header(target).form, read_header(target).step) == ("merged", 7)
    assert checkpoints.locate(target) == target
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "merged"]


def test_to_a_plan_and_to_another(stored, plan, tmp_path):
    target = convert(convert(stored, tmp_path / "merged"), tmp_path / "sharded", f"plan={plan}")
    assert same(tensors_in(target), TENSORS)
    entry = checkpoints.read(target).tensors["model/a.weight"]
    assert {part.file: part.block for part in entry.parts} == {
        "rank-00000.safetensors": ((0, 4), (0, 3)),
        "rank-00001.safetensors": ((0, 4), (3, 6)),
        "rank-00002.safetensors": ((4, 8), (0, 3)),
        "rank-00003.safetensors": ((4, 8), (3, 6)),
    }
    uneven = checkpoints.read(target).tensors["model/b.uneven"]
    assert sorted(part.block[0] for part in uneven.parts) == [(0, 3), (3, 5)]
    plan.write_text(json.dumps(PLAN | {"mesh": {"dp": 4, "tp": 1}}), encoding="utf-8")
    back = convert(target, tmp_path / "other", f"plan={plan.parent}", "form=sharded")
    assert same(tensors_in(back), TENSORS)


@pytest.mark.parametrize(
    ("stage", "pipeline"),
    [
        (1, {"stages": 2}),
        (3, {"stages": 2, "virtual_stages": 2}),
        (2, {"stages": 2, "virtual_stages": 2, "groups": [0, 1, 1, 0]}),
    ],
    ids=["one per group", "round robin", "in a V"],
)
def test_stages_of_a_pipeline_hold_their_own(stored, plan, tmp_path, stage, pipeline):
    stages = {name: {"shape": list(WEIGHTS[name].shape), "stages": [stage * name.startswith("b")]} for name in LAYOUTS}
    plan.write_text(json.dumps(PLAN | {"pipeline": pipeline, "parameters": stages}), encoding="utf-8")
    target = convert(stored, tmp_path / "sharded", f"plan={plan}")
    assert same(tensors_in(target), TENSORS)
    groups = {
        key: {int(part.file[5:10]) // 4 for part in entry.parts}
        for key, entry in checkpoints.read(target).tensors.items()
    }
    assert groups.pop("model/b.weight") == groups.pop("model/b.uneven") == {1}
    assert set(map(tuple, groups.values())) == {(0,)}


@pytest.mark.parametrize("kind", ["torch", "nested", "safetensors", "index"])
def test_files_of_others_become_checkpoints(tmp_path, plan, kind):
    source = tmp_path / "weights"
    source.mkdir()
    if kind in ("torch", "nested"):
        torch.save(WEIGHTS if kind == "torch" else {"model": WEIGHTS, "epoch": 3}, source / "all.pt")
        source = source / "all.pt"
    elif kind == "safetensors":
        save_file(WEIGHTS, source / "model.safetensors")
    else:
        named = {name: f"{name[0]}.safetensors" for name in WEIGHTS}
        for file in set(named.values()):
            save_file({name: WEIGHTS[name] for name in named if named[name] == file}, source / file)
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}), encoding="utf-8")
    expected = {f"model/{name}": tensor for name, tensor in WEIGHTS.items()}
    assert same(tensors_in(convert(source, tmp_path / "merged")), expected)
    assert same(tensors_in(convert(source, tmp_path / "sharded", f"plan={plan}")), expected)


def test_no_more_than_a_chunk_is_read_at_once(stored, plan, tmp_path, monkeypatch):
    read, largest = checkpoints.Checkpoint.read, []

    def watched(self, key, block=None):
        found = read(self, key, block)
        largest.append(found.nbytes)
        return found

    monkeypatch.setattr(checkpoints.Checkpoint, "read", watched)
    monkeypatch.setattr(writing, "CHUNK", 16)  # less than a row of a.weight
    unsharded = convert(stored, tmp_path / "merged")
    sharded = convert(unsharded, tmp_path / "sharded", f"plan={plan}")
    assert max(largest) == 16
    monkeypatch.undo()
    assert same(tensors_in(sharded), TENSORS)


def test_what_is_no_tensor_comes_along(stored, tmp_path):
    header = read_header(stored)
    torch.save({"scheduler": None, "random": None}, stored / "rank-00000.pt")
    lost = Stamp(3, "0" * 64)  # of a missing file
    files = {**header.files, "rank-00000.pt": stamp(stored / "rank-00000.pt"), "rank-00001.pt": lost}
    changed = replace(header, files=files, plain=(("rank-00001.pt", "rank-00000.pt"),))
    (stored / "checkpoint.json").write_text(to_text(changed), encoding="utf-8")
    target = convert(stored, tmp_path / "merged")
    assert list(checkpoints.read(target).plain()) == [{"scheduler": None, "random": None}]


def test_a_damaged_checkpoint_is_not_converted(stored, tmp_path):
    file = stored / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(ConfigError, match="its checksum"):
        convert(stored, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made"]


def test_a_full_disk_leaves_nothing(stored, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("runner.checkpoint.writing.write", full)
    with pytest.raises(ConfigError, match="No space left"):
        convert(stored, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "needs a source and a target, but got 0 paths"),
        (("made", "new", "frm=merged"), "Did you mean 'form'?"),
        (("made", "new", "form=marged"), "Did you mean 'merged'?"),
        (("made", "new", "form=sharded"), "add plan=FILE"),
        (("made", "new", "form=merged", "plan=plan.json"), "would be ignored"),
        (("nowhere", "new"), "nowhere does not exist"),
        (("made", "made"), "exists already"),
        (("empty", "new"), "no file of weights"),
        (("made", "new", "plan=nothing.json"), "cannot be read"),
        (("made", "new", "plan=other.json"), "says nothing of"),
        (("made", "new", "plan=sizes.json"), "with shape [9, 9]"),
        (("code.pt", "new"), "could run code"),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, tuple) else "",
)
def test_bad_input_is_one_paragraph(command, stored, plan, tmp_path, words, says):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.json").write_text(json.dumps(PLAN | {"tensors": {}}), encoding="utf-8")
    (tmp_path / "sizes.json").write_text(
        json.dumps(PLAN | {"parameters": {"a.weight": {"shape": [9, 9]}}}), encoding="utf-8"
    )
    torch.save({"code": print}, tmp_path / "code.pt")
    done = command("convert", *words)
    assert done.code == 2
    (paragraph,) = done.paragraphs
    assert re.search(re.escape(says), paragraph), paragraph
    assert not (tmp_path / "new").exists()
