"""Maliciously changed files with valid checksums: refused at once in one paragraph, and nothing outside of the
checkpoint is read or copied."""

import json
import os
import pickle
import shutil
from dataclasses import replace

import pytest
import torch
from made_checkpoints import checkpoint, halves

from runner import checkpoint as checkpoints
from runner.build import pretrained
from runner.checkpoint import manifest as header
from runner.checkpoint.folder import HEADER, INDEX
from runner.config import load as config
from runner.config.schema import Model
from runner.errors import ConfigError
from runner.run_folder.plan_file import read_content
from strategies.core.errors import StrategyError
from strategies.core.plan import Plan
from strategies.planner import plan_cache
from strategies.runtime import tensor_files as stored

DEEP = "[" * 10_000 + "]" * 10_000
TENSORS = {"model/weight": torch.arange(12.0).reshape(2, 6), "model/bias": torch.arange(4.0)}


def stamped(path, **changes):
    """Update sizes and checksums in the header to match the files."""
    found = header.read_header(path)
    names = [*found.files, *changes.pop("more", ())]
    files = {name: header.stamp(path / name) for name in names}
    (path / HEADER).write_text(header.to_text(replace(found, files=files, **changes)), encoding="utf-8")


def reindexed(path, change):
    (content,) = json.loads((path / INDEX).read_text(encoding="utf-8"))
    changed = change(content)
    (path / INDEX).write_text(changed if isinstance(changed, str) else json.dumps([content]), encoding="utf-8")
    stamped(path)


def parts(content, key="model/weight"):
    return content["tensors"][key][2]


def first(number, value):
    def change(content):
        parts(content)[0][number] = value

    return change


def named(name):
    return lambda content: content["files"].__setitem__(0, name)


def shaped(shape):
    return lambda content: content["tensors"]["model/weight"].__setitem__(0, shape)


INDICES = {
    "absolute": named("/etc/hostname"),
    "outside": named("../secret"),
    "unlisted": named("other.safetensors"),
    "negative offset": first(1, -8),
    "behind the end": first(1, 10_000),
    "fraction": first(1, 0.5),
    "text": first(1, "0"),
    "no such file": first(0, 7),
    "last file": first(0, -1),
    "negative start": first(2, [-1, 0]),
    "behind the shape": first(3, [2, 7]),
    "backwards": first(3, [0, 0]),
    "fewer dims": first(3, [2]),
    "overlap": first(3, [2, 4]),
    "gap": first(3, [2, 2]),
    "missing block": lambda content: parts(content).pop(),
    "twice": lambda content: parts(content).append(parts(content)[0]),
    "same bytes": lambda content: parts(content)[0].__setitem__(1, parts(content, "model/bias")[0][1]),
    "dtype": lambda content: content["tensors"]["model/weight"].__setitem__(1, "float3"),
    "attribute of torch": lambda content: content["tensors"]["model/weight"].__setitem__(1, "nn"),
    "negative shape": shaped([-2, -6]),
    "overflow": shaped([2**40, 2**40]),
    "overflow beside zero": shaped([0, 2**80]),
    "nested": lambda content: DEEP,
    "empty": lambda content: "[]",
    "a text": lambda content: '"abc"',
}


@pytest.mark.parametrize("change", INDICES.values(), ids=INDICES.keys())
def test_an_index_that_cannot_be_right_is_refused(tmp_path, change):
    path = checkpoint(tmp_path, TENSORS, halves)
    (tmp_path / "secret").write_bytes(b"x" * 1000)
    (path / "other.safetensors").write_bytes(b"x" * 1000)
    reindexed(path, change)
    for use in (checkpoints.read, checkpoints.verify, checkpoints.weights):
        with pytest.raises(ConfigError, match="is damaged") as caught:
            use(path)
        assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize("text", ["null", "[1, 2]", '"x"', "7", "true"])
def test_a_header_that_is_no_object_is_named(tmp_path, text):
    path = checkpoint(tmp_path, TENSORS)
    (path / "checkpoint.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"ValueError: checkpoint\.json holds .* in place of an object\)"):
        checkpoints.read(path)


def test_a_link_is_no_file_of_a_checkpoint(tmp_path):
    path = checkpoint(tmp_path, TENSORS)
    (path / "rank-00000.safetensors").rename(tmp_path / "secret")
    (path / "rank-00000.safetensors").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match=r"rank-00000\.safetensors: it is not a regular file"):
        checkpoints.verify(path)


@pytest.mark.parametrize(
    "changes",
    [{"step": -7}, {"world_size": 0}, {"position": (1,)}, {"plain": (("../x.pt",),)}, {"plan": []}, {"step": "7"}],
    ids=str,
)
def test_a_header_that_cannot_be_right_is_refused(tmp_path, changes):
    path = checkpoint(tmp_path, TENSORS)
    stamped(path, **changes)
    with pytest.raises(ConfigError, match="is damaged"):
        checkpoints.read(path)


def test_a_header_that_names_a_file_outside_is_refused(tmp_path, command):
    path = checkpoint(tmp_path, TENSORS)
    (tmp_path / "secret.pt").write_bytes(b"secret")
    stamped(path, more=["../secret.pt"])
    done = command("convert", str(path), "merged")
    assert done.code == 2 and len(done.paragraphs) == 1 and "outside" in done.err
    assert not (tmp_path / "merged").exists()


def test_convert_carries_no_foreign_pickles(tmp_path, command):
    path = checkpoint(tmp_path, TENSORS)
    torch.save({"random": {}}, path / "rank-00000.pt")
    for name in ("evil.pt", "rank-00007.pt"):
        (path / name).write_bytes(pickle.dumps(os.getcwd))
    stamped(path, more=["rank-00000.pt", "evil.pt", "rank-00007.pt"])
    assert command("convert", str(path), "merged").code == 0
    assert {file.name for file in (tmp_path / "merged").iterdir()} == {
        *("checkpoint.json", "index.json", "model.safetensors", "rank-00000.pt")
    }


def test_convert_gives_no_checkpoint_the_name_of_another_step(tmp_path, command):
    path = checkpoint(tmp_path, TENSORS, step=7)
    done = command("convert", str(path), "step-00000009")
    assert done.code == 2 and "step-00000007" in done.err and not (tmp_path / "step-00000009").exists()
    assert command("convert", str(path), "other/step-00000007").code == 0


def written(path, content):
    text = json.dumps(content).encode() if not isinstance(content, bytes) else content
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 64)


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADERS = {
    "negative": {"a": entry([2], -8, 0)},
    "backwards": {"a": entry([-2], 8, 0)},
    "overlap": {"a": entry([4], 0, 16), "b": entry([4], 8, 24)},
    "behind the end": {"a": entry([40], 0, 160)},
    "dtype": {"a": entry([2], 0, 8, "F8_E4M3")},
    "dtype of another kind": {"a": entry([2], 0, 8, [])},
    "overflow": {"a": entry([2**62, 4], 0, 0)},
    "overflow beside zero": {"a": entry([2**70, 0], 0, 0)},
    "fraction": {"a": entry([2.0], 0, 8)},
    "a list": [1, 2],
    "nested": DEEP.encode(),
}


@pytest.mark.parametrize("content", HEADERS.values(), ids=HEADERS.keys())
def test_a_safetensors_header_that_cannot_be_right_is_refused(tmp_path, content):
    written(tmp_path / "x.safetensors", content)
    with pytest.raises(StrategyError, match=r"x\.safetensors"):
        stored.index(tmp_path / "x.safetensors")


def test_a_safetensors_header_of_30_gib_is_refused(tmp_path):
    with (tmp_path / "x.safetensors").open("wb") as file:
        file.write((30 * 2**30).to_bytes(8, "little"))
        file.truncate(31 * 2**30)
    with pytest.raises(StrategyError, match="length of a header"):
        stored.index(tmp_path / "x.safetensors")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/hostname", "a\0b", 7, "x.txt"])
def test_an_index_of_weights_names_files_beside_it(tmp_path, name):
    written(tmp_path / "secret.safetensors", {"a": entry([2], 0, 8)})
    place = tmp_path / "weights"
    place.mkdir()
    (place / "x.txt").write_text("secret", encoding="utf-8")
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}), encoding="utf-8")
    with pytest.raises(StrategyError, match=r"model\.safetensors\.index\.json: it names"):
        stored.index(place)


def link(path):
    path.symlink_to("/dev/zero")


def large(path):
    with path.open("wb") as file:
        file.truncate(2**40)


STRANGE = {
    "nested": lambda path: path.write_text(DEEP, encoding="utf-8"),
    "nested inside": lambda path: path.write_text('{"sha256": "", "plan": ' + DEEP + "}", encoding="utf-8"),
    "device": link,
    "fifo": os.mkfifo,
    "large": large,
    "folder": os.mkdir,
    "not text": lambda path: path.write_bytes(b"\xff\xfe\0"),
    "number": lambda path: path.write_text("7", encoding="utf-8"),
}


@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE.keys())
def test_strange_json_files_are_refused_or_ignored(tmp_path, make):
    said = []
    make(tmp_path / "key.json")
    assert plan_cache.load(tmp_path, "key", said.append, Plan.from_json) is None
    assert len(said) == 1 and "key.json cannot be used" in said[0]
    if make is not STRANGE["number"] and make is not os.mkdir:
        with pytest.raises(ConfigError, match=r"key\.json"):
            read_content(tmp_path / "key.json")
    with pytest.raises(ConfigError, match=r"key\.json"):
        config.read(tmp_path / "key.json")


@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE.keys())
def test_strange_files_in_a_checkpoint_do_not_end_a_resume(tmp_path, make, capsys):
    older, path = checkpoint(tmp_path, TENSORS, step=6), checkpoint(tmp_path, TENSORS, step=7)
    make(path / "damaged.json")
    make(tmp_path / ".step-00000008.partial")
    assert checkpoints.to_continue("auto", tmp_path) == path
    (path / HEADER).unlink()
    make(path / HEADER)
    assert checkpoints.to_continue("auto", tmp_path) == older
    assert "step-00000007" in capsys.readouterr().out


def test_a_checkpoint_without_its_header_costs_a_warning(tmp_path, capsys):
    older, path = checkpoint(tmp_path, TENSORS, step=6), checkpoint(tmp_path, TENSORS, step=7)
    (path / HEADER).unlink()
    assert checkpoints.to_continue("auto", tmp_path) == older
    said = capsys.readouterr().out
    assert said.startswith("warning: ") and "step-00000007" in said and HEADER in said
    shutil.rmtree(older)
    with pytest.raises(ConfigError, match="every checkpoint"):
        checkpoints.to_continue("auto", tmp_path)


def test_a_checkpoint_under_the_name_of_another_is_refused(tmp_path, capsys):
    older, path = checkpoint(tmp_path, TENSORS, step=6), checkpoint(tmp_path, TENSORS, step=7)
    moved = path.rename(tmp_path / "step-00000009")
    with pytest.raises(ConfigError, match="step-00000007"):
        checkpoints.read(moved)
    assert checkpoints.to_continue("auto", tmp_path) == older
    assert checkpoints.read(moved.rename(tmp_path / "anything")).step == 7


def test_one_bit_of_pretrained_weights_is_noticed(tmp_path, command):
    """The path may name the checkpoint, its folder, or the file of weights in it."""
    path = checkpoint(tmp_path / "checkpoints", TENSORS)
    assert command("convert", str(path), "merged").code == 0
    merged = tmp_path / "merged"
    for file in (path / "rank-00000.safetensors", merged / "model.safetensors"):
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(bytes(content))
    model = torch.nn.Linear(6, 2)
    model.bias = torch.nn.Parameter(torch.zeros(4))
    for place in (path, tmp_path, merged, merged / "model.safetensors"):
        wanted = Model(target="torch.nn.Linear", args={}, config=None, weights=str(place), rename=())
        with pytest.raises(ConfigError, match=r"is damaged: (rank-00000|model)\.safetensors: its checksum"):
            pretrained.locate(wanted, model)
    done = command("convert", str(merged / "model.safetensors"), "again")
    assert done.code == 2 and "is damaged: model.safetensors" in done.err and not (tmp_path / "again").exists()
