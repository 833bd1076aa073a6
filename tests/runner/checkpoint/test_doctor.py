"""`run doctor CHECKPOINT`: the state of every file, and which ranks' files can be lost."""

import json

import pytest
from six_ranks import cut, flip, largest, save

from runner.commands.doctor import run
from runner.errors import ConfigError


def write_plan(folder, stages=1, zero=0):
    """32 ranks in a mesh (8, 4), or two stages of 16; the recorded products ((8,1),(1,4)), ((32,1),(1,1)) and
    ((8,4),(4,1))."""
    weights = {"a": [[], ["d1"]], "b": [[], []], "c": [["d1"], []]}
    plan = {
        "mesh": {"d0": 8 // stages, "d1": 4},
        "tensors": {name: {"dims": dims, "partial": []} for name, dims in weights.items()},
        "parameters": {name: {"stages": [number % 2]} if stages > 1 else {} for number, name in enumerate(weights)},
    } | ({"pipeline": {"stages": stages}} if stages > 1 else {})
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"parallel": {"zero": {"stage": zero}}}), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("stages", "zero", "groups"),
    [
        (1, 0, [tuple(range(first, 32, 4)) for first in range(4)]),
        (1, 1, [(rank,) for rank in range(32)]),
        (2, 0, [*(tuple(range(first, 16, 4)) for first in range(4)), tuple(range(16, 32))]),
    ],
    ids=["recorded", "ZeRO 1", "two stages"],
)
def test_a_plan_reports_the_groups_of_replicas(tmp_path, capsys, stages, zero, groups):
    path = write_plan(tmp_path, stages, zero)
    for word in (path, path / "plan.json"):
        assert run([str(word)]) == 0
        first, second = capsys.readouterr().out.splitlines()
        assert first.startswith(f"plan {path / 'plan.json'}: 32 ranks, mesh d0 {8 // stages} d1 4; nothing")
        assert second.endswith(": " + " ".join(f"[{', '.join(map(str, group))}]" for group in groups))


def test_what_is_no_plan_is_refused(tmp_path):
    path = write_plan(tmp_path)
    with pytest.raises(ConfigError, match="neither a checkpoint nor a plan"):
        run([str(path / "config.json")])


def test_a_good_checkpoint(tmp_path, capsys):
    path = save(tmp_path, 7)
    assert run([str(tmp_path)]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"checkpoint {path}: step 7, sharded, 6 ranks, unknown mode, ")
    files = sorted(file.name for file in path.iterdir() if file.name != "checkpoint.json")
    assert sorted(line.split()[1] for line in lines[:-1]) == files
    assert all(line.startswith("ok ") for line in lines[:-1])
    listed = lines[-1].removeprefix("ranks whose files could be lost, one at a time: ").split(", ")
    holding = {int(part.name[5:10]) for part in path.glob("rank-*.safetensors") if part.stat().st_size > 80}
    assert {int(rank) for rank in listed} == set(range(6)) - holding - {0}


def test_copies_make_every_rank_dispensable(tmp_path, capsys):
    save(tmp_path, 7, copies=2)
    assert run([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(": 0, 1, 2, 3, 4, 5")


def test_damage_is_reported_and_ends_with_1(tmp_path, capsys):
    path = save(tmp_path, 7)
    flip(largest(path))
    assert run([str(path)]) == 1
    out = capsys.readouterr().out
    assert f"failed  {largest(path).name}" in out and "its checksum is" in out
    assert out.splitlines()[-1].startswith("lost: the content of the damaged files is in no other file")
    (path / "checkpoint.json").write_text("{", encoding="utf-8")
    assert run([str(path)]) == 1
    assert capsys.readouterr().out.startswith(f"failed  The checkpoint {path} is damaged")


def test_damage_that_copies_make_good_ends_with_1_too(tmp_path, capsys):
    path = save(tmp_path, 7, copies=2)
    cut(largest(path))
    assert run([str(path)]) == 1
    assert "nothing is lost: other files hold the same" in capsys.readouterr().out


def test_what_is_no_checkpoint_is_refused(command):
    done = command("doctor", "nowhere")
    assert done.code == 2
    assert done.paragraphs == [
        "run: doctor = 'nowhere': this folder does not exist. Give a run folder, its checkpoints, or one of them. "
        "[MW604]"
    ]
    assert command("doctor", "a", "b").code == 2
