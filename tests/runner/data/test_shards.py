"""Files of samples: every format has the same rows, shuffled by blocks, and what cannot be read is named."""

import json

import fsspec
import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import ipc, parquet

from runner.data import shards
from runner.data.order import Order
from runner.data.shards import Shards
from runner.errors import ConfigError

TABLE = pyarrow.table(
    {
        "x": pyarrow.array([[row, row / 2] for row in range(40)], pyarrow.list_(pyarrow.float32())),
        "y": pyarrow.array(range(40), pyarrow.int64()),
        "text": [f"row {row}" for row in range(40)],
    }
)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(shards, "LINES", 5)


def write(folder, suffix, open_=open):
    """Two files, of 25 and 15 rows, in blocks of 5 or 10."""
    for number, part in enumerate((TABLE.slice(0, 25), TABLE.slice(25))):
        with open_(f"{folder}/part-{number}.{suffix}", "wb") as file:
            if suffix == "parquet":
                parquet.write_table(part, file, row_group_size=10)
            elif suffix == "arrow":
                make = ipc.new_file if number else ipc.new_stream  # as pyarrow, and as Hugging Face writes it
                with make(file, TABLE.schema) as writer:
                    writer.write_table(part, max_chunksize=10)
            else:
                file.write("".join(json.dumps(row) + "\n" * (1 + row["y"] % 2) for row in part.to_pylist()).encode())


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl"])
def test_every_format_has_the_same_rows(tmp_path, suffix):
    write(tmp_path, suffix)
    (tmp_path / ".ipynb_checkpoints").mkdir()
    write(tmp_path / ".ipynb_checkpoints", suffix)
    rows = Shards(str(tmp_path), cache=str(tmp_path / "cache"))
    assert len(rows) == 40
    for row in (0, 39, 24, 25, 3):
        sample = rows[row]
        assert torch.equal(sample["x"], torch.tensor([row, row / 2]))
        assert (sample["y"].dtype, sample["y"].item(), sample["text"]) == (torch.int64, row, f"row {row}")
    again = Shards(
        [f"{tmp_path}/part-1.*", f"{tmp_path}/part-0.{suffix}"], columns=["y"], cache=str(tmp_path / "cache")
    )
    assert [again[row] for row in (0, 15)] == [{"y": torch.tensor(25)}, {"y": torch.tensor(0)}]


def test_a_bucket_is_read_through_fsspec(tmp_path):
    bucket = fsspec.filesystem("memory")
    bucket.makedirs("/bucket", exist_ok=True)
    write("/bucket", "parquet", bucket.open)
    rows = Shards("memory://bucket/part-*.parquet", cache=str(tmp_path))
    assert [rows[row]["y"].item() for row in range(40)] == [*range(40)]


def test_blocks_are_read_once_in_an_epoch(tmp_path, monkeypatch):
    write(tmp_path, "parquet")
    rows, opened = Shards(str(tmp_path), window=2, cache=str(tmp_path)), []
    reads = shards._FORMATS["parquet"][1]
    monkeypatch.setitem(shards._FORMATS, "parquet", (None, lambda *a: opened.append(a[1:3]) or reads(*a)))
    order = Order(40, 8, 0, shuffled=rows.shuffled)
    epochs = [[row for step in range(5) for row in order.rows(5 * epoch + step)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [*range(40)] and epochs[0] != epochs[1]
    assert np.abs(np.diff(epochs[0])).max() > 10
    assert [rows[row]["y"].item() for row in epochs[0]] == epochs[0]
    assert len(opened) == len({*opened}) == 5


def test_what_cannot_be_read_is_named(tmp_path):
    write(tmp_path, "parquet")
    for path, says in (("none-*.parquet", "there is no file"), ("none.jsonl", "FileNotFoundError")):
        with pytest.raises(ConfigError, match=says) as caught:
            Shards(str(tmp_path / path), cache=str(tmp_path))
        assert caught.value.code == "MW821"
    rows = Shards(str(tmp_path), cache=str(tmp_path))
    (tmp_path / "part-1.parquet").write_bytes(b"cut off")
    assert rows[24]["y"] == 24
    with pytest.raises(ConfigError, match=r"the shard .*part-1\.parquet cannot be read: ArrowInvalid"):
        rows[25]
    with pytest.raises(ConfigError, match=r"the shard .*part-1\.parquet cannot be read: ArrowInvalid"):
        Shards(str(tmp_path), cache=str(tmp_path))


def test_nested_columns_have_their_types(tmp_path):
    columns = {
        "lists": pyarrow.array([[[0.1, 0.2], [0.3, 0.4]]], pyarrow.list_(pyarrow.list_(pyarrow.float64()))),
        "ragged": pyarrow.array([[["a"], ["b", "c"]]]),
        "lacking": pyarrow.array([[[1, None]]]),
        "struct": pyarrow.array([{"name": "a", "at": 3}]),
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    row = Shards(str(tmp_path), cache=str(tmp_path / "cache"))[0]
    assert torch.equal(row["lists"], torch.tensor([[0.1, 0.2], [0.3, 0.4]], dtype=torch.float64))
    assert row["ragged"] == [["a"], ["b", "c"]] and row["lacking"] == [[1, None]]
    assert row["struct"] == {"name": "a", "at": 3}
