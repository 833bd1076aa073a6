"""MNIST, or anything in its files: the digits shipped with this package, or a folder of the user's.

The invariant: sample i is (image, label), a float32 tensor [784] (or [1, 28, 28]) and an int64 scalar (or the digit as
a number, float32 [1]), the same on every rank and in every run, and `read` returns exactly a part of it while reading
no more of the file than that part.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from runner import home
from runner.data import idx
from runner.data.scaling import Normalize, Rescale, Scaling
from runner.errors import ConfigError

SHIPPED = Path(__file__).parent / "digits"

MEAN, STD = 0.3063, 0.3254
"""Of the shipped training pixels scaled to 0..1; used for every folder, so that one file means one tensor."""


STANDARD: Normalize = MappingProxyType({"mean": MEAN, "std": STD})


class Mnist:
    """Images with their labels. Pixels are rescaled (`rescale`: a factor, or a factor and a shift; None divides by 255)
    and normalized (`normalize`: {mean, std}; None leaves them), by default to (pixel / 255 - MEAN) / STD.

    `flat` images are [784], row by row; the others [1, 28, 28], one channel. `number` makes the label a float32 [1],
    for regression. `train` chooses the files `train-*` or `t10k-*`; `path` is a folder that holds them, plain
    (memory-mapped) or with `.gz`, and None means the shipped digits: 1437 to train, 360 to test.
    Raises ConfigError: a file is missing or damaged, or there are not as many labels as images.
    """

    def __init__(
        self,
        train: bool = True,
        flat: bool = True,
        number: bool = False,
        path: str | None = None,
        rescale: Rescale = None,
        normalize: Normalize = STANDARD,
    ) -> None:
        self._scaling = Scaling(rescale, normalize, channels=1)
        folder = SHIPPED if path is None else home.expanded(path)
        prefix = "train" if train else "t10k"
        images = idx.find(folder, f"{prefix}-images-idx3-ubyte")
        labels = idx.find(folder, f"{prefix}-labels-idx1-ubyte")
        pixels = idx.read(images, dims=3)
        self._labels = idx.read(labels, dims=1)
        if len(pixels) != len(self._labels):
            raise ConfigError(
                "MW314",
                f"{images} holds {len(pixels)} images and {labels.name} beside it {len(self._labels)} labels; "
                "both files must come from one data set.",
            )
        rows, height, width = pixels.shape
        self._pixels = pixels.reshape((rows, height * width) if flat else (rows, 1, height, width))
        self._number = number

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._image(index, ()), self._label(index, ())

    def read(self, index: int, slices: tuple[tuple[slice, ...], ...]) -> tuple[Tensor, Tensor]:
        """Sample `index` with only the pixels of `slices[0]`; see `runner.data.loader.Read`."""
        pixels, label = slices
        return self._image(index, pixels), self._label(index, label)

    def _image(self, index: int, pixels: tuple[slice, ...]) -> Tensor:
        return torch.from_numpy(self._scaling(np.asarray(self._pixels[index][pixels], np.float32)))

    def _label(self, index: int, part: tuple[slice, ...]) -> Tensor:
        label = int(self._labels[index])
        return torch.tensor([float(label)])[part] if self._number else torch.tensor(label, dtype=torch.int64)
