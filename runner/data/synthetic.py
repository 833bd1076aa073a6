"""Datasets that are computed instead of read: the same rows on every rank, on every machine, from a seed.

The invariant: a sample is a pure function of the constructor's arguments and its index.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from runner.data.scaling import Normalize, Rescale, Scaling
from runner.errors import ConfigError


class Regression:
    """Samples (x, y) with x ~ N(0, 1) and y = W x + noise, both float32; W is one random matrix, scaled so that
    y has variance 1.

    `features` and `targets` are the shapes of x and y, a size or several: 32, or [4, 32]. `noise` is the standard
    deviation of the noise. Raises ConfigError: a size below 1, or a negative noise.
    """

    def __init__(
        self,
        rows: int,
        features: int | Sequence[int],
        targets: int | Sequence[int],
        seed: int = 0,
        noise: float = 0.01,
    ) -> None:
        inside, outside = _shape("features", features), _shape("targets", targets)
        _shape("rows", rows)
        if noise < 0:
            raise ConfigError("MW315", f"data.args.noise = {noise} is negative; a standard deviation is 0 or more.")
        draw = torch.Generator().manual_seed(seed)
        width, height = math.prod(inside), math.prod(outside)
        x = torch.randn(rows, width, generator=draw)
        weight = torch.randn(width, height, generator=draw) / width**0.5
        y = x @ weight + noise * torch.randn(rows, height, generator=draw)
        self._x, self._y = x.reshape(rows, *inside), y.reshape(rows, *outside)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._x[index], self._y[index]


class Quickstart(Regression):
    """What the quickstart network (32 -> 16 -> relu -> 16) learns: x [32] and y [16], linear with little noise."""

    def __init__(self, rows: int = 256, seed: int = 0) -> None:
        super().__init__(rows, features=32, targets=16, seed=seed)


class LargeImages:
    """Samples (image, label): float32 [channels, height, width] in 0..1 and an int64 scalar, made on demand.

    Nothing is stored: `read` computes only the block that is requested, as a file on disk would be read, and
    `elements_read` counts the pixels computed so far. An image is a slanted ramp that repeats every 256 levels and
    climbs `label + 1` levels per line, so that the label can be learnt. `rescale` and `normalize` are those of
    `runner.data.scaling`: without them levels are divided by 255. Raises ConfigError: a size below 1, as `Scaling`.
    """

    def __init__(
        self,
        rows: int = 64,
        channels: int = 3,
        height: int = 1024,
        width: int = 1024,
        classes: int = 10,
        rescale: Rescale = None,
        normalize: Normalize = None,
    ) -> None:
        sizes = {"rows": rows, "channels": channels, "height": height, "width": width, "classes": classes}
        for name, size in sizes.items():
            _shape(name, size)
        self._rows, self._classes = rows, classes
        self._image_shape = (channels, height, width)
        self._scaling = Scaling(rescale, normalize, channels)
        self.elements_read = 0

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.read(index, ((slice(None),) * 3, ()))

    def read(self, index: int, slices: tuple[tuple[slice, ...], ...]) -> tuple[Tensor, Tensor]:
        """Sample `index` with only the block `slices[0]` of its image; see `runner.data.loader.Read`."""
        block, () = slices
        return self._image(index, block), torch.tensor(index % self._classes)

    def _image(self, index: int, block: tuple[slice, ...]) -> Tensor:
        levels = self._levels(index, block)
        self.elements_read += levels.numel()
        return torch.from_numpy(self._scaling(levels.to(torch.float32).numpy(), block[0]))

    def _levels(self, index: int, block: tuple[slice, ...]) -> Tensor:
        if not 0 <= index < self._rows:
            raise IndexError(f"index {index} is not one of the {self._rows} images")
        channel, line, column = (torch.arange(size)[part] for size, part in zip(self._image_shape, block, strict=True))
        # In integers, so that a block is bit for bit the same part of the image, however it is cut.
        slope = (index % self._classes + 1) * line[:, None] + column
        return (17 * index + 5 * channel[:, None, None] + slope) % 256


class LargeMasks(LargeImages):
    """Samples (image, mask): the images of `LargeImages`, and int64 [height, width], 1 where the first channel of the
    pixel 8 lines further down is in the upper half of the levels, so that the mask is learnt from a neighbourhood."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.read(index, ((slice(None),) * 3, (slice(None),) * 2))

    def read(self, index: int, slices: tuple[tuple[slice, ...], ...]) -> tuple[Tensor, Tensor]:
        """Sample `index` with only the block `slices[0]` of its image and `slices[1]` of its mask."""
        block, part = slices
        below = 8 * (index % self._classes + 1)
        levels = (self._levels(index, (slice(1), *part))[0] + below) % 256
        return self._image(index, block), (levels >= 128).long()


def _shape(name: str, sizes: int | Sequence[int]) -> tuple[int, ...]:
    shape = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    if not shape or any(size < 1 for size in shape):
        raise ConfigError("MW315", f"data.args.{name} = {sizes} must be 1 or more.")
    return shape
