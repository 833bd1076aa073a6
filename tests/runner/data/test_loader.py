"""A rank's shards equal slices of the full batch, and nothing else is read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runner.data.loader import Block, LocalBatches, build_dataset, flatten_batch, global_batch, mixes_rows
from runner.data.mnist import Mnist
from runner.data.synthetic import LargeImages
from runner.errors import ConfigError

SHAPES = ((3, 4), (5,), ())


class Watched:
    """Rows of an image [3, 4], a numpy row [5] and a python number; records which rows are read."""

    def __init__(self, as_dict: bool = False) -> None:
        self.as_dict = as_dict
        self.read_rows: list[int] = []

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        self.read_rows.append(index)
        image = torch.arange(12).reshape(3, 4) + 100 * index
        row, number = np.arange(5, dtype=np.float32) - index, index
        return {"image": image, "row": row, "number": number} if self.as_dict else (image, row, number)


class WatchedSlices(Watched):
    """The same with `read`, which records how many values it returns."""

    values_read = 0

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a complete row is read although read() is offered")

    def read(self, index: int, slices: tuple[tuple[slice, ...], ...]) -> Any:
        image, row, number = Watched.__getitem__(self, index)
        image, row = image[slices[0]], row[slices[1]]
        assert slices[2] == ()
        self.values_read += image.numel() + row.size
        return image, row, number


def doubled(samples: list[Any]) -> dict[str, Tensor]:
    """A collate function with other results than stacking: [n, 4, 3], [n, 10], [n]."""
    return {
        "turned": torch.stack([image.T for image, _, _ in samples]),
        "twice": torch.stack([torch.from_numpy(np.concatenate([row, row])) for _, row, _ in samples]),
        "number": torch.tensor([number for *_, number in samples]),
    }


def span(size: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, size - 1), st.integers(1, size)).map(lambda ab: (min(ab[0], ab[1] - 1), ab[1]))


def blocks_of(rows: int, shapes: tuple[tuple[int, ...], ...]) -> st.SearchStrategy[tuple[Block, ...]]:
    return st.tuples(*(st.tuples(span(rows), *map(span, shape)) for shape in shapes))


ROWS = st.lists(st.integers(0, 29), min_size=6, max_size=6)


def check(
    dataset: Watched, collate: Callable[[list[Any]], Any] | None, blocks: tuple[Block, ...], rows: list[int]
) -> None:
    names, full_batch = flatten_batch(global_batch(Watched(dataset.as_dict), collate, rows))
    batches = LocalBatches(dataset, collate, blocks, names=names, shapes=[tensor.shape for tensor in full_batch])
    for part, tensor, block in zip(batches.load(rows), full_batch, blocks, strict=True):
        expected = tensor[tuple(slice(*one) for one in block)]
        assert part.dtype == tensor.dtype and part.is_contiguous()
        assert torch.equal(part, expected)
    needed = {position for block in blocks for position in range(*block[0])}
    assert dataset.read_rows == [rows[position] for position in sorted(needed)]


@settings(deadline=None)
@given(blocks=blocks_of(6, SHAPES), rows=ROWS, as_dict=st.booleans())
def test_blocks_are_cut_from_the_stacked_batch(blocks: tuple[Block, ...], rows: list[int], as_dict: bool) -> None:
    check(Watched(as_dict), None, blocks, rows)


@settings(deadline=None)
@given(blocks=blocks_of(6, ((4, 3), (10,), ())), rows=ROWS)
def test_blocks_are_cut_from_what_a_collate_makes(blocks: tuple[Block, ...], rows: list[int]) -> None:
    check(Watched(), doubled, blocks, rows)


@settings(deadline=None)
@given(blocks=blocks_of(6, SHAPES), rows=ROWS)
def test_where_slices_can_be_read_only_they_are(blocks: tuple[Block, ...], rows: list[int]) -> None:
    dataset = WatchedSlices()
    check(dataset, None, blocks, rows)
    assert dataset.values_read == sum(int(np.prod([b - a for a, b in block])) for block in blocks[:2])


def test_a_large_image_is_never_read_in_full() -> None:
    dataset = LargeImages(rows=8, channels=3, height=1 << 16, width=1 << 16)
    block = ((2, 4), (0, 3), (64, 128), (0, 32))
    image, label = LocalBatches(dataset, None, (block, ((2, 4),))).load([7, 6, 5, 4])
    assert image.shape == (2, 3, 64, 32) and label.tolist() == [5, 4]
    assert dataset.elements_read == 2 * 3 * 64 * 32


def test_the_shards_of_a_batch_make_up_the_full_batch() -> None:
    rows = [5, 17, 3, 99]
    images, labels = global_batch(Mnist(), None, rows)
    grid = [((a, a + 2), (b, b + 196)) for a in (0, 2) for b in range(0, 784, 196)]
    parts = [LocalBatches(Mnist(), None, (block, ((0, 4),))).load(rows) for block in grid]
    assert torch.equal(torch.cat([torch.cat([p for p, _ in parts[i : i + 4]], 1) for i in (0, 4)]), images)
    assert all(torch.equal(label, labels) for _, label in parts)


def test_a_read_method_of_another_meaning_is_not_used() -> None:
    class Archive(Watched):
        def read(self, count: int) -> bytes:
            raise AssertionError("not the read(index, slices) of a sliced dataset")

    check(Archive(), None, (((0, 2), (0, 3), (0, 4)), ((1, 3), (0, 5)), ((0, 6),)), [0, 1, 2, 3, 4, 5])


class Rows(list[Any]):
    """A list of samples as a dataset."""


def load(samples: list[Any], **more: Any) -> list[Tensor]:
    return LocalBatches(Rows(samples), more.pop("collate", None), (((0, 2), (0, 2)),), **more).load([0, 1])


@pytest.mark.parametrize(
    ("samples", "more", "expected"),
    [
        ([(torch.ones(2),), (torch.ones(3),)], {}, r"row 1 has '0' of shape \(3,\), where \(2,\) is expected"),
        ([(torch.ones(3),)] * 2, {"shapes": [(4, 2)]}, r"row 0 has '0' of shape \(3,\)"),
        ([(torch.ones(2, 1),)] * 2, {}, "row 0 has '0' of shape"),
        ([{"x": torch.ones(2)}, {"y": torch.ones(2)}], {}, "row 1 has the values 'y'; the others have 'x'"),
        ([{"x": torch.ones(2)}] * 2, {"names": ["z"]}, "row 0 has the values 'x'; the others have 'z'"),
        ([(np.array(["a", "b"]),)] * 2, {}, "value 0 of the samples cannot be stacked: TypeError"),
        ([(torch.ones(2),)] * 2, {"collate": lambda s: s[0]}, r"a batch of data\.collate has '0' of shape \(\)"),
        ([(torch.ones(2),)] * 2, {"collate": lambda s: torch.ones(5, 2)}, "'0' with 5 rows from 2 samples"),
        ([(torch.ones(2),)] * 2, {"collate": lambda s: [s]}, "the value '0' of a batch is a list, not a tensor"),
    ],
)
def test_rows_that_do_not_fit_are_refused(samples: list[Any], more: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load(samples, **more)


def test_a_string_is_refused_with_a_cure() -> None:
    with pytest.raises(ConfigError, match=r"value 0 of the samples is a str; .* set data\.collate"):
        LocalBatches(Rows([("a",), ("b",)]), None, (((0, 2),),)).load([0, 1])


def test_a_wrong_read_is_refused() -> None:
    class Uncut(Rows):
        def read(self, index: int, slices: tuple[tuple[slice, ...], ...]) -> Any:
            return self[index]

    with pytest.raises(ConfigError, match=r"row 0: read\(\) returns '0' of shape \(4,\) where \(2,\) was requested"):
        LocalBatches(Uncut([(torch.ones(4),)] * 2), None, (((0, 2), (0, 2)),)).load([0, 1])


def test_dict_samples_have_their_keys_in_any_order() -> None:
    samples = [{"x": torch.ones(2), "y": torch.zeros(1)}, {"y": torch.zeros(1), "x": torch.ones(2)}]
    batch = global_batch(samples, None, [0, 1])
    assert flatten_batch(batch, ("y", "x"))[0] == ("y", "x")
    assert [tensor.shape for tensor in flatten_batch(batch, ("y", "x"))[1]] == [(2, 1), (2, 2)]
    blocks = (((0, 2), (0, 1)), ((0, 2), (0, 2)))
    for collate in (None, lambda rows: {name: torch.stack([row[name] for row in rows]) for name in ("x", "y")}):
        y, x = LocalBatches(Rows(samples), collate, blocks, names=("y", "x")).load([0, 1])
        assert y.shape == (2, 1) and x.shape == (2, 2)
    for other in (None, {"x": torch.ones(2)}, {"x": torch.ones(2), "y": torch.ones(1), "z": torch.ones(1)}):
        with pytest.raises(ConfigError, match=r"row 1 (is None|has the values .*(lacks 'y'|has 'z' beside them))"):
            global_batch([samples[0], other], None, [0, 1])
    with pytest.raises(ConfigError, match=r"row 1 has None as 'y'"):
        LocalBatches(Rows([samples[0], {"x": torch.ones(2), "y": None}]), None, blocks[::-1]).load([0, 1])


def test_a_collate_returns_a_row_per_sample() -> None:
    with pytest.raises(ConfigError, match="makes '0' with 5 rows from 2 samples"):
        global_batch(Rows([1, 2]), lambda samples: torch.ones(5, 2), [0, 1])


def ranked(samples: list[Any]) -> Tensor:
    """Rows of which each depends on all."""
    return torch.tensor(samples, dtype=torch.float64).argsort(descending=True)[:, None]


def paired(samples: list[Any]) -> Tensor:
    """Rows of which each depends on its neighbour in a pair."""
    return torch.tensor(samples).view(-1, 2).flip(1).reshape(-1, 1) if len(samples) % 2 == 0 else ranked(samples)


def test_a_collate_that_makes_rows_of_several_samples_gets_all_of_them() -> None:
    samples, rows = Rows([3.0, 1.0, 4.0, 1.5]), [0, 1, 2, 3]
    stacked = lambda samples: torch.tensor(samples)[:, None]  # noqa: E731
    assert mixes_rows(samples, ranked, [rows], 0, 0) and not mixes_rows(samples, stacked, [rows], 0, 0)
    assert mixes_rows(samples, paired, [rows], 0, 0)
    rarely = lambda samples: (ranked if max(samples) > 3 else stacked)(samples)  # noqa: E731
    assert not mixes_rows(samples, rarely, [[0, 1]], 0, 0) and mixes_rows(samples, rarely, [[0, 1], [2, 3]], 0, 0)
    batch = global_batch(samples, ranked, rows)
    (part,) = LocalBatches(samples, ranked, [((2, 4), (0, 1))], together=True).load(rows)
    assert torch.equal(part, batch[2:])


def test_flatten_batch_takes_dicts_tuples_and_single_tensors_in_their_order() -> None:
    a, b = torch.ones(2), torch.zeros(2)
    assert flatten_batch({"b": b, "a": a})[0] == ("b", "a")
    assert flatten_batch((a, b))[0] == flatten_batch([a, b])[0] == ("0", "1")
    names, (only,) = flatten_batch(a)
    assert names == ("0",) and only is a


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({}, "without tensors"),
        ({"a": {"b": torch.ones(1)}}, "'a' of a batch is a dict, not a tensor"),
        ((torch.ones(1), "x"), "'1' of a batch is a str, not a tensor"),
        (torch.tensor(1), "is a scalar"),
        ({"two words": torch.ones(1)}, "'two words' of a batch cannot be the name"),
        ({1: torch.ones(1)}, "1 of a batch cannot be the name"),
    ],
)
def test_flatten_batch_names_what_it_found_instead(batch: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        flatten_batch(batch)


def test_errors_in_user_code_are_reported() -> None:
    with pytest.raises(ConfigError, match=r"data: row 9 cannot be read: IndexError"):
        global_batch(Rows([1]), None, [9])
    with pytest.raises(ConfigError, match=r"data: stacking fails on 2 samples: RuntimeError.*data\.collate"):
        global_batch(Rows([torch.ones(1), torch.ones(2)]), None, [0, 1])
    with pytest.raises(ConfigError, match=r"data: data\.collate fails on 1 samples: ZeroDivisionError"):
        global_batch(Rows([1]), lambda samples: 1 / 0, [0])


DATASETS = """
import torch

class Plain(list):
    def __init__(self, rows=2):
        super().__init__(range(rows))

class Once:
    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration

class Folder(Plain):
    def __init__(self, path):
        open(path).close()
        super().__init__(1)

class Lazy(Plain):
    def __len__(self):
        raise NotImplementedError("no length yet")

class Table(Plain):
    iloc = None

def batches():
    return torch.utils.data.DataLoader([1, 2, 3])

def columns():
    return torch.zeros(9, 2), torch.zeros(9)

def named():
    return {"x": torch.zeros(9, 2)}
"""


@pytest.fixture
def own_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "datasets_of_mine.py").write_text(DATASETS, encoding="utf-8")


@pytest.mark.usefixtures("own_datasets")
@pytest.mark.parametrize(
    ("name", "args", "path", "expected"),
    [
        ("Plain", {"rows": 0}, None, "data: datasets_of_mine.Plain has no rows"),
        ("Plain", {}, "here", r"data\.path = 'here', but datasets_of_mine\.Plain takes no argument 'path'"),
        ("Plain", {"row": 1}, None, "takes no argument 'row'"),
        ("Once", {}, None, "makes a Once without __len__ and __getitem__"),
        ("batches", {}, None, "makes a DataLoader of batches"),
        ("Table", {}, None, "makes a Table whose .* is a column"),
        ("columns", {}, None, "makes a tuple of columns"),
        ("named", {}, None, "makes a dict of columns"),
        ("Folder", {}, "absent", "FileNotFoundError.*absent"),
        ("Folder", {"path": "a"}, "b", r"data\.path and data\.args\.path are both set"),
        ("Lazy", {}, None, "length of datasets_of_mine.Lazy cannot be had: NotImplementedError: no length yet"),
        ("Plan", {}, None, "Did you mean 'Plain'"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_refused(
    name: str, args: dict[str, Any], path: str | None, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        build_dataset(f"datasets_of_mine.{name}", args, path, what="data")


@pytest.mark.usefixtures("own_datasets")
def test_a_path_reaches_the_dataset() -> None:
    assert len(build_dataset("datasets_of_mine.Folder", {}, "datasets_of_mine.py", what="data")) == 1
    assert len(build_dataset("runner.data.mnist.Mnist", {"train": False}, None, what="data")) == 360
    with pytest.raises(ConfigError, match="there is no such folder"):
        build_dataset("runner.data.mnist.Mnist", {}, "absent", what="data")
