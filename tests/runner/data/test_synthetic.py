"""Synthetic datasets: pure functions of arguments and index, learnable, and readable in slices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from runner.data.synthetic import LargeImages, LargeMasks, Quickstart, Regression
from runner.errors import ConfigError


def stacked(dataset: Regression) -> tuple[Tensor, Tensor]:
    samples = [dataset[i] for i in range(len(dataset))]
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


def test_quickstart_has_the_shapes_of_its_network_and_depends_on_the_seed_alone() -> None:
    x, y = stacked(Quickstart(rows=48))
    assert x.shape == (48, 32) and y.shape == (48, 16) and x.dtype == y.dtype == torch.float32
    again, _ = stacked(Quickstart(rows=48))
    other, _ = stacked(Quickstart(rows=48, seed=1))
    assert torch.equal(x, again) and not torch.equal(x, other)


def test_regression_is_linear_up_to_its_noise() -> None:
    x, y = stacked(Regression(rows=400, features=[3, 4], targets=[1, 5], noise=0.01))
    assert x.shape == (400, 3, 4) and y.shape == (400, 1, 5)
    x, y = x.flatten(1).double(), y.flatten(1).double()
    weight = torch.linalg.lstsq(x, y).solution
    assert (x @ weight - y).std().item() == pytest.approx(0.01, rel=0.1)
    assert y.std().item() == pytest.approx(1, rel=0.3)


@pytest.mark.parametrize("args", [{"rows": 0}, {"features": 0}, {"targets": [4, -1]}, {"noise": -0.5}])
def test_impossible_sizes_are_refused(args: dict[str, Any]) -> None:
    (name,) = args
    with pytest.raises(ConfigError, match=rf"data\.args\.{name} = "):
        Regression(**{"rows": 4, "features": 2, "targets": 2, **args})


def test_large_images_read_only_the_requested_slice() -> None:
    dataset = LargeImages(rows=20, channels=2, height=512, width=256)
    image, label = dataset[13]
    assert dataset.elements_read == 2 * 512 * 256 and image.shape == (2, 512, 256)
    assert label == 3 and label.dtype == torch.int64 and image.dtype == torch.float32
    assert 0 <= image.min() < image.max() <= 1
    block = (slice(1, 2), slice(100, 164), slice(32, 64))
    part, same = dataset.read(13, (block, ()))
    assert dataset.elements_read == 2 * 512 * 256 + 1 * 64 * 32
    assert torch.equal(part, image[block]) and torch.equal(same, label)


def test_large_masks_are_read_by_tiles() -> None:
    dataset = LargeMasks(rows=4, channels=1, height=64, width=32, classes=3)
    image, mask = dataset[1]
    assert mask.shape == (64, 32) and mask.dtype == torch.int64 and set(mask.unique().tolist()) == {0, 1}
    assert torch.equal(mask[:-8], (image[0, 8:] >= 128 / 255).long())
    rows, read = slice(16, 32), dataset.elements_read
    tile, part = dataset.read(1, ((slice(None), rows, slice(None)), (rows, slice(None))))
    assert torch.equal(tile, image[:, rows]) and torch.equal(part, mask[rows])
    assert dataset.elements_read - read == 16 * 32


def test_large_images_hold_nothing_and_end() -> None:
    dataset = LargeImages(rows=2, height=1 << 20, width=1 << 20)  # 12 TiB, if it were allocated
    part, _ = dataset.read(1, ((slice(0, 3), slice(5, 7), slice(9, 10)), ()))
    assert part.shape == (3, 2, 1)
    with pytest.raises(IndexError):
        dataset[2]
    with pytest.raises(ConfigError, match=r"data\.args\.height = 0"):
        LargeImages(height=0)
