"""Streams: every sample once per pass and in order, on any ranks and workers, and after a resume."""

import random

import pyarrow
import pytest
import streaming
import torch
from pyarrow import parquet

from runner.checkpoint.continuation import ENDLESS
from runner.data.loader import LocalBatches, build_dataset, global_batch
from runner.data.streams import Stream
from runner.errors import ConfigError, RunFailed


def stream(**more):
    options = {name: more.pop(name) for name in ("seed", "window") if name in more}
    return Stream(streaming.Numbers(**more), "streaming.Numbers", **options)


def values(*numbers, epoch=0):
    return [pytest.approx(streaming.value(number, epoch), abs=1e-6) for number in numbers]


def test_samples_are_counted_over_all_passes():
    endless = stream(rows=5)
    assert len(endless) == ENDLESS
    assert [float(endless[row][0]) for row in (0, 3, 4, 5, 11)] == [
        *values(0, 3, 4),
        *values(0, epoch=1),
        *values(1, epoch=2),
    ]
    assert [float(endless[row][0]) for row in (3, 2, 11)] == [*values(3, 2), *values(1, epoch=2)]


def test_a_stream_that_is_counted_has_epochs():
    counted = stream(rows=5).counted()
    assert len(counted) == 5
    counted.set_epoch(3)
    assert float(counted[4][0]) == values(4, epoch=3)[0]
    assert len(stream(rows=5).counted(most=3)) == 3
    short = stream(rows=5).counted(6)
    with pytest.raises(ConfigError, match="ends after 5 samples of epoch 1, of which it had 6"):
        short[5]


def test_random_numbers_follow_from_the_sample():
    rows, state = [4, 5, 6, 7], random.getstate()
    x, _ = global_batch(stream(noise=True, seed=3), None, rows, 3, 0)
    for first in range(4):
        own = LocalBatches(stream(noise=True, seed=3), None, (((first, 4), (0, 1)), ((first, 4), (0, 1))), seed=3)
        assert torch.equal(own.load(rows, 0)[0], x[first:])
    assert random.getstate() == state


def popping(samples):
    return torch.stack([sample.pop("x") for sample in samples])


@pytest.mark.parametrize("of", [list, lambda rows: Stream(rows, "rows")], ids=["dicts", "stream"])
def test_a_collate_may_take_samples_apart(of):
    """A trial of it changes no sample that is read again."""
    rows = [{"x": torch.full((2,), float(row))} for row in range(3)]
    dataset = of(rows if of is list else (dict(row) for row in rows))
    for _ in range(2):
        assert torch.equal(global_batch(dataset, popping, [0, 1]), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    assert [*dataset[1]] == ["x"]


def test_the_last_samples_can_be_read_again_without_another_pass():
    passes = []

    class Watched(streaming.Numbers):
        def __iter__(self):
            passes.append(1)
            return super().__iter__()

    watched = Stream(Watched(), "Watched", window=4)
    for row in (8, 9, 10, 11, 8, 9, 10, 11, 12):
        watched[row]
    assert len(passes) == 1


def test_streams_that_are_not(monkeypatch):
    with pytest.raises(ConfigError, match="yields no samples in pass 2"):
        stream(rows=5, passes=1)[7]
    with pytest.raises(LookupError) as caught:
        stream(fails=7)[12]
    assert caught.value.data_row == 7
    assert isinstance(build_dataset("streaming.Numbers", {}, None, what="data"), Stream)


WORDS = (
    "parallel=data_parallel",
    "model.target=streaming.Same",
    "loss.target=torch.nn.MSELoss",
    "data.target=streaming.Numbers",
    "data.batch_size=8",
    "train.accumulate=2",
    "optimizer.args.lr=0",
    "train.precision=fp64",
    "parallel.strategies=null",
)
ONCE = [sum(streaming.value(8 * step + number) ** 2 for number in range(8)) / 8 for step in range(6)]


@pytest.mark.parametrize(
    ("ranks", "workers"), [(2, 2), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 0), (4, 1), (1, 3)))]
)
def test_an_epoch_has_every_sample_once(start, ranks, workers):
    losses = start(*WORDS, "train.epochs=1", f"world_size={ranks}", f"data.workers={workers}").losses
    assert losses == pytest.approx(ONCE, rel=1e-6)


KILLED = "launch.faults=[{kind: kill, rank: 1, step: 4, phase: backward}]"


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, 2), (4, 1)), *(pytest.param(*one, marks=pytest.mark.slow) for one in (((4, 1), (1, 3)), ((2, 0), (2, 2))))],
)
def test_a_killed_run_goes_on_with_the_next_sample(start, before, after):
    words = (*WORDS, "train.epochs=1", "checkpoint.every=2")
    with pytest.raises(RunFailed, match="was killed by SIGKILL"):
        start(*words, KILLED, f"world_size={before[0]}", f"data.workers={before[1]}")
    resumed = start(*words, "train.resume=auto", f"world_size={after[0]}", f"data.workers={after[1]}")
    losses = {record["step"]: record["loss"] for record in resumed.records if "loss" in record}
    assert [losses[step] for step in range(1, 7)] == pytest.approx(ONCE, rel=1e-6)


def test_datasets_of_hugging_face_are_streams(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    table = pyarrow.table({"x": [[row, 2.0 * row] for row in range(20)], "label": range(20)})
    for number in range(2):
        parquet.write_table(table.slice(10 * number, 10), tmp_path / f"part-{number}.parquet")
    args = {"path": "parquet", "data_files": str(tmp_path / "part-*.parquet"), "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(ConfigError, match=r"makes several datasets: train; name one, with data\.args\.split=train"):
        build_dataset("datasets.load_dataset", {**args, "streaming": True}, None, what="data")
    streamed = build_dataset("datasets.load_dataset", {**args, "split": "train", "streaming": True}, None, what="data")
    assert isinstance(streamed, Stream)
    plain = build_dataset("datasets.load_dataset", {**args, "split": "train", "streaming": True}, None, what="data")
    passes = []
    for epoch in range(5):  # the order of the files follows from the epoch
        plain._dataset.set_epoch(epoch)
        passes += [sample["label"] for sample in plain._dataset]
    assert [sorted(passes[first : first + 20]) for first in range(0, 100, 20)] == [[*range(20)]] * 5
    for row in (0, 12, 3, 25, 4, 19, 59, 60, 85, 0, 45):
        sample, number = streamed[row], passes[row]
        assert torch.equal(sample["x"], torch.tensor([number, 2.0 * number])) and sample["label"] == number
