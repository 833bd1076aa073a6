"""Asynchronous saves store the same data as blocking ones, and a failed save ends the run."""

import errno
import hashlib
import math
import multiprocessing
import os
import threading
import time

import pytest
import torch
from six_ranks import SHAPES, content
from small import MODES, SMALL

from runner import checkpoint as checkpoints
from runner.checkpoint import file_writer, writing
from runner.checkpoint.manifest import Stamp
from runner.checkpoint.saving import Copies
from runner.checkpoint.shared_buffers import SharedBuffers
from runner.config.schema import CheckpointForm
from runner.errors import ConfigError
from runner.training.checkpointing import Calendar, Keeper
from strategies.runtime.shards import replicated

WORDS = (*SMALL, "model.args={norm: true, dropout: 0.2}", "optimizer.target=torch.optim.AdamW", "train.steps=3")
NEVER = CheckpointForm(
    every=None,
    minutes=None,
    best=None,
    best_mode=None,
    at_end=False,
    keep=None,
    form="sharded",
    background=False,
    copies=1,
)
PLANS = {
    "stage 0": MODES["semi_auto"],
    "stage 3": (*MODES["data_parallel"], "parallel.zero.stage=3"),
    "pipeline": (*MODES["data_parallel"], "parallel.pipeline.cuts={outer: 1}", "parallel.pipeline.stages=2"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", [pytest.param(p, marks=[pytest.mark.slow] * (p == "stage 3")) for p in PLANS])
def test_every_step_is_stored_as_it_was(start, plan):
    found = {}
    for background in ("false", "true"):
        saving = ("checkpoint.every=1", f"checkpoint.background={background}", "checkpoint.form=both")
        folder = start(*WORDS, *PLANS[plan], *saving, folder=background).folder
        opened = [checkpoints.read(path) for path in sorted((folder / "checkpoints").iterdir())]
        assert [one.step for one in opened] == [1, 2, 3]
        found[background] = [{key: one.read(key) for key in one.tensors} for one in opened]
        random = [one.load("rank-00001.pt")["random"]["torch"] for one in opened]
        found[background].append(dict(enumerate(random)))
    for ours, theirs in zip(found["true"], found["false"], strict=True):
        assert ours.keys() == theirs.keys()
        assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


def test_copies_have_the_numbers_of_the_moment(monkeypatch):
    """State that changes before the next update is copied at once, the rest before `wait_for_copies` returns."""
    mine = content(0)
    pieces = {key: found for batch in mine.updates.pieces() for key, found in batch.items()}
    truth = {key: [one.view.clone() for one in found] for key, found in pieces.items()}
    copies = Copies()
    made = copies.begin(pieces, {"model/complete"})
    pieces["model/complete"][0].view.fill_(-1.0)
    waited = threading.Thread(target=copies.wait_for_copies)
    waited.start()
    waited.join(0.2)
    assert waited.is_alive()
    copies.carry_out()
    waited.join(5)
    assert not waited.is_alive()
    pieces["model/sliced"][0].view.fill_(-1.0)
    for name in SHAPES:
        assert torch.equal(made[f"model/{name}"][0].view, truth[f"model/{name}"][0])
    buffers = made["model/sliced"][0].view.data_ptr()
    assert copies.begin(pieces, ())["model/sliced"][0].view.data_ptr() == buffers
    assert copies.bytes == (4 * 5 + 7) * 4


def test_another_process_writes_the_copies(tmp_path):
    """At the lowest priority. It passes on the errors of the disk; if it is killed, the save fails."""
    buffers = SharedBuffers({"model/a": [((2, 3), torch.float32)], "model/b": [((5,), torch.int64)]}, False)
    buffers.tensors["model/a"][0].copy_(torch.arange(6.0).view(2, 3))
    buffers.tensors["model/b"][0].copy_(torch.arange(5))
    found = {key: [replicated(own)] for key, (own,) in buffers.tensors.items()}
    path = tmp_path / "rank.safetensors"
    stamp, tensors = writing.write(path, writing.of_shards(found), buffers.opener())
    assert stamp == Stamp(path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    assert stamp == writing.write(tmp_path / "by-itself", writing.of_shards(found))[0] and [*tensors] == [*found]
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []
    process = buffers._writer._process
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == file_writer.LOWEST
    with pytest.raises(FileNotFoundError, match="missing"):
        writing.write(tmp_path / "missing" / "rank.safetensors", writing.of_shards(found), buffers.opener())
    writing.write(path, writing.of_shards(found), buffers.opener())
    process.kill()
    with pytest.raises(OSError, match=r"process that writes rank[.]safetensors is down"):
        writing.write(path, writing.of_shards(found), buffers.opener())
    buffers.close()
    writing.write(path, writing.of_shards(found), buffers.opener())
    again = buffers._writer._process
    buffers.close()
    assert again.poll() == 0


def test_the_process_ends_though_a_data_worker_has_its_socket(tmp_path):
    buffers = SharedBuffers({"model/a": [((2, 3), torch.float32)]}, False)
    buffers.tensors["model/a"][0].fill_(1.0)
    path, found = tmp_path / "rank.safetensors", {"model/a": [replicated(buffers.tensors["model/a"][0])]}
    writing.write(path, writing.of_shards(found), buffers.opener())
    writer = buffers._writer._process
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(10,))
    worker.start()
    try:
        buffers.close()
        assert writer.poll() == 0 and worker.is_alive()
    finally:
        worker.kill()
        worker.join()


def test_a_system_that_refuses_shared_memory_has_its_own(monkeypatch):
    def refused(_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refused)
    buffers = SharedBuffers({"model/a": [((2, 3), torch.float32)]}, False)
    buffers.tensors["model/a"][0].fill_(1.0)
    assert buffers.opener() is None


def test_no_file_of_a_dead_trainer_gets_its_name(tmp_path):
    with pytest.raises(EOFError):
        list(file_writer.write(str(tmp_path / "rank"), [b"head", (0, 2)], memoryview(b"body"), parent=-1))
    assert [one.name for one in tmp_path.iterdir()] == [".rank"]


def test_a_failed_save_ends_the_run(tmp_path, monkeypatch):
    """The error is raised at the next step or at the end, with the reason."""
    saver = checkpoints.Saver()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("runner.checkpoint.writing.write", full)
    keeper = Keeper.__new__(Keeper)
    keeper._saver, keeper._calendar = saver, Calendar(NEVER, tmp_path, 1, 1)
    saver.save(tmp_path, 1, content(1))
    saver._thread.join()
    pattern = r"rank 1 could not write its part of step-00000001: .*No space left"
    with pytest.raises(checkpoints.SaveFailed, match=pattern):
        keeper.after(2, 9, None)
    saver.save(tmp_path, 3, content(1))
    with pytest.raises(checkpoints.SaveFailed, match="step-00000003"):
        keeper.finish()


def due(section, steps, tmp_path, evaluations=None):
    calendar = Calendar(section, tmp_path, 0, 1)
    return [step for step in range(1, steps + 1) if calendar.due(step, steps, (evaluations or {}).get(step))[0]]


def test_when(tmp_path, monkeypatch):
    assert due(NEVER, 6, tmp_path) == []
    assert due(NEVER.model_copy(update={"every": 2, "at_end": True}), 5, tmp_path) == [2, 4, 5]
    now = [0.0]
    monkeypatch.setattr("runner.training.checkpointing.time.monotonic", lambda: now[0])
    calendar = Calendar(NEVER.model_copy(update={"minutes": 0.5}), tmp_path, 0, 1)
    saved = []
    for step in range(1, 10):
        now[0] += 12.0
        if calendar.due(step, 9, None)[0]:
            saved.append(step)
    assert saved == [3, 6, 9]


def test_the_best_so_far_is_saved(tmp_path):
    losses = {step: {"loss": loss, "accuracy": 1 - loss} for step, loss in enumerate((0.5, 0.7, 0.4, 0.4, 0.1), 1)}
    assert due(NEVER.model_copy(update={"best": "loss"}), 5, tmp_path, losses) == [1, 3, 5]
    assert due(NEVER.model_copy(update={"best": "accuracy"}), 5, tmp_path, losses) == [1, 3, 5]
    assert due(NEVER.model_copy(update={"best": "loss", "best_mode": "max"}), 5, tmp_path, losses) == [1, 2]
    losses[1]["loss"] = math.nan
    assert due(NEVER.model_copy(update={"best": "loss"}), 5, tmp_path, losses) == [2, 3, 5]
    with pytest.raises(ConfigError, match=r"checkpoint.best = 'acuracy' is not .* Did you mean 'accuracy'\?"):
        due(NEVER.model_copy(update={"best": "acuracy"}), 5, tmp_path, losses)


@pytest.mark.slow
def test_the_best_of_a_real_run_stays(start):
    words = (*SMALL, *MODES["data_parallel"], "evaluate.metric=accuracy", "evaluate.every=1", "train.steps=4")
    wanted = "checkpoint={best: accuracy, keep: 1, background: true}"
    folder = start(*words, wanted, "evaluate.args={rows: 40, seed: 3}", "optimizer.args.lr=0.3").folder
    kept = [checkpoints.read(path).header for path in sorted((folder / "checkpoints").iterdir())]
    assert kept[-1].step == 4 and len(kept) in (1, 2)
    assert kept[0].metric >= kept[-1].metric
