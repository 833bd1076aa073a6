"""All damage is detected and reported before loading, and repaired where another file holds a replica."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from six_ranks import SHAPES, content, cut, equal, expected, flip, largest, save, weights
from small import MODES, SMALL

from runner import checkpoint as checkpoints
from runner.checkpoint import manifest as header
from runner.checkpoint import saving, verification
from runner.errors import ConfigError


@pytest.mark.parametrize("damage", [flip, cut])
def test_auto_takes_the_newest_that_passes(tmp_path, capsys, damage):
    for step in (1, 2, 3):
        save(tmp_path, step, seed=step)
    victim = largest(tmp_path / "step-00000003")
    damage(victim)
    found = checkpoints.to_continue("auto", tmp_path)
    assert found == tmp_path / "step-00000002"
    assert equal(weights(found), expected(2))
    warning = capsys.readouterr().out
    assert warning.startswith(f"warning: The checkpoint {tmp_path / 'step-00000003'} is damaged: {victim.name}: ")
    assert warning.count("\n") == 1


def test_auto_says_that_it_passes_over_a_damaged_header(tmp_path, capsys):
    for step in (1, 2):
        save(tmp_path, step, seed=step)
    (tmp_path / "step-00000002" / "checkpoint.json").write_text("null", encoding="utf-8")
    assert checkpoints.to_continue("auto", tmp_path) == tmp_path / "step-00000001"
    assert capsys.readouterr().out.endswith("in place of an object). It is passed over.\n")


def test_every_byte_counts(tmp_path):
    """A flipped bit in any file is detected; the loss of one rank's RNG state alone is tolerated."""
    draw, path = random.Random(0), save(tmp_path, 1)
    for file in sorted(path.iterdir()):
        kept = file.read_bytes()
        for _ in range(3):
            content = bytearray(kept)
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            file.write_bytes(bytes(content))
            try:
                assert verification.verify(path).keys() == {file.name}
            except ConfigError as error:
                assert "is damaged" in str(error) or "of version" in str(error)
        file.write_bytes(kept)
    assert verification.verify(path) == {}


def test_all_damaged_is_an_error_and_so_is_a_damaged_path(tmp_path, capsys):
    for step in (1, 2):
        cut(largest(save(tmp_path, step)))
    with pytest.raises(ConfigError, match=r"every checkpoint in .* is damaged \(step-00000002, step-00000001\)"):
        checkpoints.to_continue("auto", tmp_path)
    with pytest.raises(ConfigError, match=r"step-00000001 is damaged: rank-0000\d\.safetensors: it has [\d,]+ bytes"):
        checkpoints.to_continue(str(tmp_path / "step-00000001"), tmp_path)


@pytest.mark.few(2)
@pytest.mark.parametrize("rank", range(6))
def test_copies_make_good_what_one_rank_loses(tmp_path, capsys, rank):
    path = save(tmp_path, 1, copies=2)
    for file in path.glob(f"rank-{rank:05d}.*"):
        file.unlink()
    assert checkpoints.to_continue("auto", tmp_path) == path
    assert "but other files hold the same" in capsys.readouterr().out
    assert equal(weights(path), expected())


@pytest.mark.slow
def test_an_older_one_is_better_than_lost_random_states(tmp_path, capsys):
    """Replicas of tensors do not replace the RNG state, which every rank stores for itself."""
    older, path = (save(tmp_path, step, copies=2, seed=step) for step in (1, 2))
    flip(path / "rank-00004.pt")
    assert checkpoints.to_continue("auto", tmp_path) == older
    said = capsys.readouterr().out
    assert "random states of rank 4" in said and "hold the same" not in said
    flip(largest(older))  # repaired from its replica
    assert checkpoints.to_continue("auto", tmp_path) == older
    flip(older / "rank-00003.pt")
    assert checkpoints.to_continue("auto", tmp_path) == path
    assert "except the random states of rank 4, which begin anew" in capsys.readouterr().out


def test_a_flipped_bit_is_not_loaded_where_a_copy_is_good(tmp_path):
    path = save(tmp_path, 1, copies=2)
    victim = largest(path)
    flip(victim)
    assert checkpoints.to_continue("auto", tmp_path) == path
    assert equal(weights(path), expected())
    assert json.loads((path / "damaged.json").read_text(encoding="utf-8")).keys() == {victim.name}


def test_without_copies_a_lost_file_is_an_error(tmp_path):
    path = save(tmp_path, 1)
    largest(path).unlink()
    with pytest.raises(ConfigError, match=r"is lost or damaged, and is in no other file"):
        checkpoints.read(path)


def test_a_merged_file_makes_good_too(tmp_path):
    path = save(tmp_path, 1, form="both")
    largest(path).unlink()
    assert equal(weights(path), expected())


def test_the_best_is_kept_beside_the_last(tmp_path):
    for step, metric in ((1, math.nan), (2, 0.2), (3, 0.4), (4, 0.3), (5, None)):
        save(tmp_path, step, metric=metric, keep=1, best="min")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000005"]


def test_a_save_that_fails_anywhere_fails_on_rank_0(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    savers = [saving.Saver() for _ in range(6)]
    for rank in range(1, 6):
        with monkeypatch.context() as patch:
            if rank == 4:
                patch.setattr(saving.writing, "write", full)
            savers[rank].save(tmp_path, 1, content(rank))
            if rank == 4:
                with pytest.raises(checkpoints.SaveFailed, match=r"rank 4 could not write .*No space left on device"):
                    savers[rank].wait()
            else:
                savers[rank].wait()
    savers[0].save(tmp_path, 1, content(0))
    with pytest.raises(checkpoints.SaveFailed, match=r"rank 4 could not write .*No space left on device"):
        savers[0].wait()
    assert checkpoints.newest(tmp_path) is None


def test_what_is_stored_is_what_was_there(tmp_path):
    """Training continues while the files are written."""
    mine = [content(rank) for rank in range(6)]
    truth = expected()
    savers = [saving.Saver() for _ in mine]
    for saver, one in zip(savers[::-1], mine[::-1], strict=True):
        saver.save(tmp_path, 1, one)
        saver.wait_for_copies()
        for name in SHAPES:
            one.updates.module.get_parameter(name).data.fill_(-5.0)
    for saver in savers:
        saver.wait()
    assert equal(weights(tmp_path / "step-00000001"), truth)
    assert all(saver.buffer_bytes > 0 for saver in savers[:2])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_copies_of_what_zero_splits_up(start, stage):
    """Any one of four real ranks loses its files, and the run ends like an undamaged one."""
    words = (*SMALL, *MODES["data_parallel"], f"parallel.zero.stage={stage}", "optimizer.target=torch.optim.AdamW")
    saved = start(*words, "train.steps=2", "checkpoint.copies=2", folder="saved").folder / "checkpoints"
    truth = start(*words, "train.steps=3", f"train.resume={saved}", folder="truth").folder
    path = checkpoints.newest(saved)
    for rank in (0, 3):
        kept = {file: file.read_bytes() for file in path.glob(f"rank-{rank:05d}.*")}
        assert len(kept) == 3
        for file in kept:
            file.unlink()
        found = start(*words, "train.steps=3", f"train.resume={saved}", folder=f"without-{rank}").folder
        ours, theirs = (checkpoints.read(checkpoints.newest(one / "checkpoints")) for one in (found, truth))
        assert ours.tensors.keys() == theirs.tensors.keys()
        assert all(torch.equal(ours.read(key), theirs.read(key)) for key in theirs.tensors)
        for file, content_ in kept.items():
            file.write_bytes(content_)


def test_no_code_runs_from_a_file(tmp_path):
    """Also with valid checksums: an attacker can forge those too."""
    path = save(tmp_path, 1)
    torch.save({"random": Evil(tmp_path / "ran"), "groups": [], "scalars": {}}, path / "rank-00000.pt")
    found = header.read_header(path)
    files = {**found.files, "rank-00000.pt": header.stamp(path / "rank-00000.pt")}
    (path / "checkpoint.json").write_text(header.to_text(replace(found, files=files)), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"is damaged: rank-00000\.pt: it holds more than plain data .Unpickling"):
        verification.verify(path)
    with pytest.raises(ConfigError, match=r"is damaged .UnpicklingError: Weights only load failed"):
        weights(path)
    assert not (tmp_path / "ran").exists()


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)
