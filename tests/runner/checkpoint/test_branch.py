"""In a shared folder, a run resumes from, retains and counts only its own checkpoints."""

import json
from dataclasses import replace

import pytest
from six_ranks import content, save

from runner import checkpoint as checkpoints
from runner.checkpoint import branch, folder, rescue, saving
from runner.checkpoint import manifest as header
from runner.checkpoint.saving import better_of
from runner.errors import ConfigError
from runner.run_folder import lineage
from runner.run_folder.lineage import Lineage, RecordedRun
from runner.run_folder.lock import Occupant


def run(name, *history, resumed=None):
    return RecordedRun(Lineage(name, history), Occupant.now("train", None, name), resumed)


def saved(place, name, *steps, history=(), **wanted):
    for step in steps:
        save(place, step, lineage=Lineage(name, history), **wanted)


def recorded(place, of):
    (place.parent / lineage.FILE).write_text(
        json.dumps(vars(of.began) | {"history": of.lineage.history, "resumed": of.resumed}), encoding="utf-8"
    )


@pytest.mark.slow
def test_auto_takes_the_newest_on_the_branch(tmp_path):
    place = tmp_path / "checkpoints"
    saved(place, "a", 2, 4, 6)
    assert checkpoints.to_continue("auto", place, run("a")) == place / "step-00000006"
    assert checkpoints.to_continue("auto", place, None) == place / "step-00000006"
    assert checkpoints.to_continue("auto", place, run("b")) is None
    assert checkpoints.to_continue("auto", place, run("b", ("a", 4))) == place / "step-00000004"
    saved(place, "b", 5, history=(("a", 4),))
    assert checkpoints.to_continue("auto", place, run("b", ("a", 4))) == place / "step-00000005"
    (place / "step-00000005" / "checkpoint.json").write_text("{", encoding="utf-8")
    assert checkpoints.to_continue("auto", place, run("b", ("a", 4))) == place / "step-00000004"
    elsewhere = str(place / "step-00000002")
    assert checkpoints.to_continue("auto", tmp_path / "other", run("c", resumed=elsewhere)) == place / "step-00000002"


def test_a_folder_means_the_checkpoint_of_its_own_run(tmp_path):
    place = tmp_path / "checkpoints"
    saved(place, "a", 2, 8)
    recorded(place, run("b", ("a", 2)))
    for path in (tmp_path, place):
        assert checkpoints.locate(path) == checkpoints.newest(place) == place / "step-00000002"
    recorded(place, run("c"))
    assert checkpoints.newest(place) is None
    with pytest.raises(ConfigError, match=r"another one: step-00000002, step-00000008"):
        checkpoints.locate(tmp_path)
    assert checkpoints.locate(place / "step-00000008") == place / "step-00000008"


@pytest.mark.slow
def test_those_of_others_are_kept_until_they_are_passed(tmp_path):
    saved(tmp_path, "a", 2, 4, 8)
    saved(tmp_path, "b", 3, 5, history=(("a", 2),), keep=2)
    assert [path.name[-1] for path in folder.complete(tmp_path)] == ["3", "5", "8"]
    saved(tmp_path, "b", 8, history=(("a", 2),))
    assert header.read_header(tmp_path / "step-00000008").run == "b"


@pytest.mark.slow
def test_the_best_is_that_of_the_own_run(tmp_path):
    place = tmp_path / "checkpoints"
    saved(place, "a", 2, metric=0.1)
    saved(place, "b", 3, metric=0.5)
    recorded(place, run("b"))
    assert branch.best_metric(place, better_of("min")) == 0.5


def test_parts_of_two_runs_never_become_one_checkpoint(tmp_path):
    savers = [saving.Saver() for _ in range(6)]
    for rank in reversed(range(6)):
        savers[rank].save(tmp_path, 1, replace(content(rank), lineage=Lineage("b" if rank == 3 else "a")))
    with pytest.raises(checkpoints.SaveFailed, match="rank 3 is of run b"):
        savers[0].wait()
    assert folder.complete(tmp_path) == []


def test_a_file_of_another_run_is_noticed_although_every_checksum_is_right(tmp_path):
    saved(tmp_path / "a", "a", 1)
    saved(tmp_path / "b", "b", 1)
    path = tmp_path / "a" / "step-00000001"
    (path / "rank-00002.pt").write_bytes((tmp_path / "b" / path.name / "rank-00002.pt").read_bytes())
    found = header.read_header(path)
    files = {**found.files, "rank-00002.pt": header.stamp(path / "rank-00002.pt")}
    (path / "checkpoint.json").write_text(header.to_text(replace(found, files=files)), encoding="utf-8")
    assert "another run" in checkpoints.verify(path)["rank-00002.pt"]


def test_what_another_run_left_in_memory_is_not_rescued(tmp_path):
    for rank in range(6):
        intact = rescue.Intact()
        intact.after(3)
        intact.leave(tmp_path, lambda rank=rank: replace(content(rank), lineage=Lineage("a")), lambda step: (0, 0))
    kept = {file.name: file.read_bytes() for file in (tmp_path / ".step-00000003.rescue").iterdir()}
    assert rescue.collect(tmp_path, Lineage("b")) is None and not list(tmp_path.iterdir())
    (tmp_path / ".step-00000003.rescue").mkdir()
    for name, text in kept.items():
        (tmp_path / ".step-00000003.rescue" / name).write_bytes(text)


def test_a_rescue_under_zero_waits_for_no_other_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "TIMEOUT", 0.2)
    intact = rescue.Intact()
    intact.after(3)
    mine = content(4)
    zero = {"parallel": {"zero": {"stage": 1}}}
    intact.leave(tmp_path, lambda: replace(mine, config=mine.config | zero), lambda step: (0, 0))
    names = {file.name for file in (tmp_path / ".step-00000003.rescue").iterdir()}
    assert names == {rescue.RESCUED, *(f"rank-00004.{end}" for end in ("done", "pt", "safetensors"))}


def test_checkpoints_from_before_there_were_ids_can_be_continued(tmp_path):
    path = save(tmp_path, 4)
    content = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))
    for key in ("run", "history", "checksum"):
        del content[key]
    (path / "checkpoint.json").write_text(json.dumps(content | {"checksum": header._sum_of(content)}), encoding="utf-8")
    found = header.read_header(path)
    assert found.lineage == Lineage() and checkpoints.to_continue("auto", tmp_path, None) == path
    assert checkpoints.to_continue("auto", tmp_path, run("new", ("", 4))) == path
