"""Rescale and normalize, as arguments of the shipped images."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runner.data.mnist import MEAN, STD, Mnist
from runner.data.synthetic import LargeImages
from runner.errors import ConfigError


def test_mnist_is_standardised_by_default() -> None:
    raw = Mnist(train=False, rescale=1.0, normalize=None)[3][0]
    assert raw.max() > 200 and torch.equal(raw, raw.round())
    assert torch.equal(Mnist(train=False)[3][0], (raw / 255 - torch.tensor(MEAN)) / torch.tensor(STD))
    assert torch.equal(Mnist(train=False, normalize=None)[3][0], raw / 255)
    found = Mnist(train=False, rescale=[2, -1], normalize={"mean": [0.5], "std": 4})[3][0]
    assert torch.equal(found, (raw * 2 - 1 - 0.5) / 4)


def test_every_channel_has_its_own_numbers_in_slices_too() -> None:
    sizes = {"rows": 2, "channels": 3, "height": 4, "width": 5}
    levels = LargeImages(**sizes, rescale=1)[1][0]
    assert torch.equal(LargeImages(**sizes)[1][0], levels / 255)
    mean, std = [0.1, 0.2, 0.3], [1.0, 2.0, 4.0]
    images = LargeImages(**sizes, normalize={"mean": mean, "std": std})
    expected = (levels / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert torch.equal(images[1][0], expected)
    block = (slice(1, 3), slice(0, 2), slice(3, 5))
    assert torch.equal(images.read(1, (block, ()))[0], expected[block])
    assert images.read(1, ((slice(0, 0),) * 3, ()))[0].shape == (0, 0, 0)


@pytest.mark.parametrize(
    "args",
    [
        {"rescale": "much"},
        {"rescale": [1, 2, 3]},
        {"rescale": True},
        {"normalize": 3},
        {"normalize": {"mean": 0}},
        {"normalize": {"mean": [0, 0], "std": 1}},
        {"normalize": {"mean": 0, "std": 0}},
        {"normalize": {"mean": float("nan"), "std": 1}},
    ],
)
def test_other_arguments_are_refused(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"data\.args\.(rescale|normalize)"):
        LargeImages(**args)
