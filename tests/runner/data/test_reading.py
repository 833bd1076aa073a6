"""Workers that read ahead return what the rank itself reads, whatever their number, and end with the rank."""

import errno
import os
import re
import signal
import tempfile
import time

import pytest
import torch
from observed import ranks_of_this_process
from small import MODES, SMALL
from torch.utils.data import get_worker_info

from runner.config.schema import Data
from runner.data import loader
from runner.data.reading import BatchReader, RowRequest
from runner.errors import RunFailed
from runner.launch.failure import Reported, from_exception

REQUESTS = [RowRequest((row, row + 1), row // 8) for row in range(0, 24, 2)]


def plain(request):
    return [torch.tensor(request.rows), torch.tensor([request.epoch])]


def reader(load=plain, **keys):
    return BatchReader(load, lambda: load, REQUESTS, Data(target="a.b", **keys), pinned=False)


def read(reader):
    with reader.reading():
        return [[tensor.tolist() for tensor in reader.next()] for _ in REQUESTS]


@pytest.mark.parametrize(
    "keys", [{"workers": 1}, {"workers": 3, "prefetch": 1}, {"workers": 2, "persistent_workers": False}]
)
def test_workers_keep_the_order(keys):
    before = torch.default_generator.get_state()
    assert read(reader(**keys)) == [[[*one.rows], [one.epoch]] for one in REQUESTS]
    assert torch.equal(torch.default_generator.get_state(), before)


def pids(request):
    return [torch.tensor([os.getpid()])]


def test_workers_stay_over_epochs_unless_told_otherwise():
    alive, fresh = (
        {pid for ((pid,),) in read(reader(pids, workers=1, persistent_workers=stay))} for stay in (True, False)
    )
    assert (len(alive), len(fresh)) == (1, 3)
    assert os.getpid() not in alive | fresh


def slow(request):
    time.sleep(0.015)
    return pids(request)


def test_workers_begin_where_reading_takes_time():
    fast, waited = ([pid for ((pid,),) in read(reader(load))] for load in (pids, slow))
    assert set(fast) == {os.getpid()} == set(waited[:7])
    assert os.getpid() not in waited[7:]


def only_here(request):
    if get_worker_info() is not None:
        raise PermissionError("one process alone may read this")
    return [*slow(request), *plain(request)]


def test_what_only_the_rank_can_read_is_read_by_the_rank():
    reads = read(reader(only_here))
    assert [read[1:] for read in reads] == [[[*one.rows], [one.epoch]] for one in REQUESTS]
    with pytest.raises(Reported, match="PermissionError: one process alone may read this"):
        read(reader(only_here, workers=2))


def killed(request):
    if request.rows[0] == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(request)


def test_a_worker_that_is_killed_is_named_and_leaves_no_file(monkeypatch):
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        with pytest.raises(Reported, match=r"lost its data worker, process \d+, which was killed by SIGKILL") as caught:
            read(reader(killed, workers=1))
        assert caught.value.failure.code == "MW820"
        assert not os.listdir(folder)


def test_temporary_folders_of_long_names_do(tmp_path, monkeypatch):
    """Tensors of workers are fetched from a socket, of whose name Unix takes 107 bytes: all waited for them forever."""
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert len(read(reader(workers=1))) == len(REQUESTS)


def killed_slowly(request):
    if request != REQUESTS[0]:
        time.sleep(1)  # its first tensors are fetched
        os.closerange(3, 256)  # as the kernel does before a process has an exit code
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(request)


def test_a_worker_whose_connection_is_reset_before_it_has_an_exit_code_is_named():
    reads = reader(killed_slowly, workers=1)

    def reset():
        raise ConnectionResetError
        yield

    with pytest.raises(Reported, match="killed by SIGKILL"), reads.reading():
        reads.next()
        reads._ahead = reset()
        reads.next()


def test_an_error_that_is_none_of_workers_is_not_held_up():
    """Of a rank whose peer is down: the others wait for its end."""
    reads = reader(workers=1)
    with pytest.raises(RuntimeError, match="closed by peer"), reads.reading():
        reads.next()
        began = time.monotonic()
        raise RuntimeError("connection closed by peer")
    assert time.monotonic() < began + 3


def test_shared_memory_that_is_full_is_named(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")  # as of a semaphore
        yield

    reads = reader(workers=1)
    monkeypatch.setattr(reads, "_read", full)
    with pytest.raises(OSError, match=r"/dev/shm, .* \(data\.workers=0 does without\)") as caught:
        read(reads)
    assert from_exception(0, caught.value).code == "MW720"
    text = "unable to allocate shared memory(shm) for file </torch_1_0>: No space left on device (28)"
    monkeypatch.setattr(loader, "default_collate", raising(RuntimeError(text)))
    with pytest.raises(OSError, match="/dev/shm"):
        loader._stack([torch.ones(2)], 0)


def raising(error):
    def call(*_):
        raise error

    return call


PARALLEL = (*SMALL, *MODES["data_parallel"], "world_size=2")


@pytest.mark.slow
def test_training_is_the_same_with_any_number_of_workers(start):
    words = (*PARALLEL, "data.target=augmented.Augmented", "train.steps=null", "train.epochs=2", "train.accumulate=2")
    words = (*words, "data.args.rows=36", "data.batch_size=8", "data.drop_last=false", "parallel=data_parallel")
    alone = start(*words, "data.workers=0", folder="alone").losses
    assert len(alone) == 10
    assert start(*words, "data.workers=2", folder="two").losses == alone


@pytest.mark.slow
def test_a_killed_rank_leaves_no_sockets_of_its_workers(start, monkeypatch):
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        fault = "launch={faults: [{kind: kill, rank: 1, step: 2, phase: data}], max_restarts: 0}"
        with pytest.raises(RunFailed, match="killed by SIGKILL"):
            start(*PARALLEL, "train.steps=4", "data.workers=1", fault)
        assert [name for name in os.listdir(folder) if name.startswith(".")] == []


@pytest.mark.parametrize(
    ("way", "says"),
    [
        pytest.param(
            "raise",
            r"rank \d of 2 failed: LookupError: row (4\d) is not to be had.* row \1 of the data, .*networks\.py:\d+ ",
        ),
        pytest.param(
            "kill", r"rank \d of 2 lost its data worker, process \d+.* SIGKILL.*\[MW820\]", marks=pytest.mark.slow
        ),
    ],
)
def test_trouble_in_a_worker_ends_the_run(command, way, says):
    words = ("data={target: networks.Trouble}", f"data.args.way={way}", "data.shuffle=false", "data.batch_size=4")
    done = command(*PARALLEL, *words, "train.steps=16", "data.workers=2")
    assert done.code == 1
    assert re.match(f"run: {says}", done.err), done.err
    assert ranks_of_this_process() == []
