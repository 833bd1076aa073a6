"""Runs on packed documents and on files: killed and resumed on other ranks and workers, or with a file cut off."""

import re

import pyarrow
import pytest
from observed import ranks_of_this_process
from pyarrow import parquet

from runner.errors import RunFailed

KILLED = "launch.faults=[{kind: kill, rank: 1, step: 4, phase: backward}]"
PACKED = (
    "+recipe=gpt_packed",
    "model.args={vocabulary: 257, length: 64, width: 32, layers: 1, heads: 2, dropout: 0.0}",
    "data.args={length: 64, limit: 200000}",
    "parallel=data_parallel",
    "parallel.mesh=null",
    "parallel.strategies=null",
    "checkpoint.every=2",
    "train.steps=6",
    "train.precision=fp64",
)
FILES = (
    "parallel=data_parallel",
    "model.target=torch.nn.Linear",
    "model.args={in_features: 2, out_features: 1}",
    "loss.target=torch.nn.MSELoss",
    "data.target=runner.data.shards.Shards",
    "data.batch_size=8",
    "checkpoint.every=2",
    "train.epochs=1",
    "train.precision=fp64",
)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """48 samples in 3 files; the model's argument is called `input`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "files").mkdir()
    for number in range(3):
        rows = range(16 * number, 16 * number + 16)
        x = pyarrow.array([[row / 9, row % 7] for row in rows], pyarrow.list_(pyarrow.float64()))
        y = pyarrow.array([[row % 5] for row in rows], pyarrow.list_(pyarrow.float64()))
        parquet.write_table(
            pyarrow.table({"input": x, "target": y}), tmp_path / f"files/{number}.parquet", row_group_size=4
        )
    return tmp_path / "files"


def losses(ended):
    found = {record["step"]: record["loss"] for record in ended.records if "loss" in record}
    return [found[step] for step in range(1, 7)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["packed", "files"])
def test_a_killed_run_ends_with_the_losses_of_another_plan(start, files, kind):
    words = PACKED if kind == "packed" else (*FILES, f"data.path={files}")
    alone = losses(start(*words, "world_size=1", "data.workers=0", folder="alone"))
    with pytest.raises(RunFailed, match="was killed by SIGKILL"):
        start(*words, KILLED, "world_size=4", "data.workers=2")
    resumed = start(*words, "train.resume=auto", "world_size=2", "data.workers=1")
    assert losses(resumed) == pytest.approx(alone, rel=1e-9)


@pytest.mark.slow
def test_a_file_that_is_cut_off_ends_the_run(command, files):
    words = (*FILES, f"data.path={files}", "world_size=2", "data.workers=2", "data.shuffle=false", "hydra.run.dir=out")
    assert command(*words, "train.epochs=null", "train.steps=1").code == 0  # the numbers of rows are known now
    path = files / "2.parquet"
    content = path.read_bytes()
    path.write_bytes(bytes(len(content) - 8) + content[-8:])
    done = command(*words, "run.overwrite=true")
    assert done.code in (1, 2) and len(done.paragraphs) == 1
    assert re.search(r"the shard .*2\.parquet cannot be read", done.err), done.err
    assert ranks_of_this_process() == []
