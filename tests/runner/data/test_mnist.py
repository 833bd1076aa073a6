"""The shipped digits, and a user's own MNIST folder."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from runner.data import idx
from runner.data.mnist import MEAN, SHIPPED, STD, Mnist
from runner.errors import ConfigError

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 28, 28), np.uint8)
LABELS = np.array([3, 1, 4, 1, 5], np.uint8)


def folder(path: Path, labels: np.ndarray = LABELS, packed: bool = False) -> str:
    for name, array in (("images-idx3", PIXELS), ("labels-idx1", labels)):
        content = idx.encode(array)
        file = path / f"t10k-{name}-ubyte{'.gz' if packed else ''}"
        file.write_bytes(gzip.compress(content) if packed else content)
    return str(path)


def test_the_shipped_digits_have_a_fixed_balanced_split() -> None:
    train, test = Mnist(), Mnist(train=False)
    assert (len(train), len(test)) == (1437, 360)
    for dataset in (train, test):
        counts = torch.bincount(torch.stack([dataset[i][1] for i in range(len(dataset))]), minlength=10)
        assert len(counts) == 10
        assert counts.min() >= 0.095 * len(dataset) and counts.max() <= 0.105 * len(dataset)
    assert [int(test[i][1]) for i in range(12)] == [0, 2, 4, 7, 1, 6, 8, 9, 5, 3, 0, 2]
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 500_000


def test_no_image_is_in_both_splits_and_the_constants_are_those_of_the_training_pixels() -> None:
    train = idx.read(SHIPPED / "train-images-idx3-ubyte.gz", dims=3)
    test = idx.read(SHIPPED / "t10k-images-idx3-ubyte.gz", dims=3)
    assert not {image.tobytes() for image in train} & {image.tobytes() for image in test}
    assert (train / 255).mean() == pytest.approx(MEAN, abs=5e-5)
    assert (train / 255).std() == pytest.approx(STD, abs=5e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_a_users_folder_is_read_as_written(tmp_path: Path, packed: bool) -> None:
    dataset = Mnist(train=False, path=folder(tmp_path, packed=packed))
    assert len(dataset) == 5
    image, label = dataset[2]
    assert image.shape == (784,) and image.dtype == torch.float32
    assert label.shape == () and label.dtype == torch.int64 and label == 4
    expected = (torch.from_numpy(PIXELS[2].reshape(-1).astype(np.float64)) / 255 - MEAN) / STD
    torch.testing.assert_close(image.double(), expected, rtol=1e-6, atol=1e-6)


def test_read_returns_the_slice_of_the_sample(tmp_path: Path) -> None:
    dataset = Mnist(train=False, path=folder(tmp_path))
    image, label = dataset[3]
    part, same = dataset.read(3, ((slice(100, 300),), ()))
    assert torch.equal(part, image[100:300]) and torch.equal(same, label)
    empty, _ = dataset.read(3, ((slice(0, 0),), ()))
    assert empty.shape == (0,)


def test_images_with_a_channel_and_digits_as_numbers(tmp_path: Path) -> None:
    flat = Mnist(train=False, path=folder(tmp_path))
    dataset = Mnist(train=False, flat=False, number=True, path=folder(tmp_path))
    image, digit = dataset[4]
    assert image.shape == (1, 28, 28) and torch.equal(image.flatten(), flat[4][0])
    assert digit.dtype == torch.float32 and digit.tolist() == [5.0]
    part, none = dataset.read(4, ((slice(0, 1), slice(7, 14), slice(3, 28)), (slice(0, 0),)))
    assert torch.equal(part, image[:, 7:14, 3:]) and none.shape == (0,)


def test_a_folder_without_the_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither train-images-idx3-ubyte nor"):
        Mnist(path=folder(tmp_path))


def test_labels_of_another_data_set_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="5 images and t10k-labels-idx1-ubyte beside it 4 labels"):
        Mnist(train=False, path=folder(tmp_path, labels=LABELS[:4]))
