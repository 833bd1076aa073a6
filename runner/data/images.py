"""Images in a folder per class, read by Pillow, with random augmentation; without a folder, drawn shapes.

The invariant: a sample follows from its file alone, and with `augment` from the global random numbers, which are seeded
for every row before it is read (`runner.data.row_seeds`): it is the same whatever rank or worker reads it.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import zlib
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner import home
from runner.data.scaling import Normalize, Scaling
from runner.data.text import TEST_SHARE
from runner.data.visible import is_visible
from runner.errors import ConfigError

ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"})
IMAGENET: Normalize = MappingProxyType({"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)})
"""Of its pixels, red, green and blue, scaled to 0..1."""
SHAPES = ("circle", "cross", "square", "triangle")
DRAWN, SIDE = 300, 40
"""Files of each class, and their pixels along a side."""


class ImageFolder:
    """Samples (image, class): float32 [3, size, size] and an int64 scalar, of the files CLASS/NAME.png below `path`
    (or .jpg and other formats of Pillow, in folders below CLASS too). Classes are numbered in sorted order.

    An image is scaled so that its shorter side is `size`, and its middle is cut out. With `augment` a random part is
    cut out (80 to 100 % of the shorter side), mirrored or not, and its brightness is changed by up to 20 %.

    Args:
        path: the folder; None: drawn shapes (300 each of circles, crosses, squares and triangles), which are written
            into the cache once.
        size: pixels along a side of a sample.
        train: the training part, the test part (one file in ten, by its path), or with None all files.
        augment: whether to draw random changes.
        normalize: {mean, std} of pixels from 0 to 1, numbers or one per channel; None leaves them.
        cache: the folder for the drawn shapes; None: `meshwright` in the user's cache.

    Attributes:
        classes: the names of the classes by their numbers.

    Raises:
        ConfigError: no such folder, fewer than two folders with images, no image in this part, or Pillow is missing. A
            file that cannot be read is reported when its row is read.
    """

    def __init__(
        self,
        path: str | None = None,
        size: int = 32,
        train: bool | None = True,
        augment: bool = False,
        normalize: Normalize = IMAGENET,
        cache: str | None = None,
    ) -> None:
        if size < 1:
            raise ConfigError("MW315", f"data.args.size = {size} must be 1 or more pixels.")
        self._pillow = _pillow()
        self._decode = self._pillow.open
        self._scaling = Scaling(None, normalize, channels=3)
        folder = shapes(cache) if path is None else home.expanded(path).absolute()
        try:
            inside = sorted(one.name for one in folder.iterdir() if one.is_dir() and is_visible(Path(one.name)))
        except OSError as error:
            raise ConfigError("MW314", f"{folder} cannot be read: {error.strerror}.") from error
        files = {name: _images_below(folder / name) for name in inside}
        self.classes = [name for name in inside if files[name]]
        if len(self.classes) < 2:
            raise ConfigError(
                "MW870",
                f"{folder}: images are needed in a folder for each of two or more classes, such as "
                f"{folder.name}/cat/1.png and {folder.name}/dog/1.png; there are {len(inside)} folders, "
                f"{len(self.classes)} of them with images ({', '.join(sorted(ENDINGS))}).",
            )
        self._files = [
            (file, number)
            for number, name in enumerate(self.classes)
            for file in files[name]
            if train is None or train != _in_test(file.relative_to(folder))
        ]
        if not self._files:
            part = "training" if train else "test"
            raise ConfigError("MW870", f"{folder}: no image is in the {part} part; data.args.train=null takes all.")
        self._size, self._augment = size, augment

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        file, number = self._files[index]
        try:
            with file.open("rb") as stored, self._decode(stored) as opened:
                image = self._in_8_bits(opened, file).convert("RGB")
        except ConfigError:
            raise
        except Exception as error:  # Pillow has no exception that all of its decoders raise
            raise ConfigError("MW870", f"{file} is no image that Pillow can read: {error}.") from error
        side = min(image.size)
        left, top = ((length - side) // 2 for length in image.size)
        if self._augment:
            side = round(side * random.uniform(0.8, 1.0))
            left, top = (random.randint(0, length - side) for length in image.size)
        cut = image.crop((left, top, left + side, top + side))
        pixels = np.asarray(cut.resize((self._size,) * 2, self._pillow.Resampling.BILINEAR), np.float32)
        if self._augment:
            pixels = np.clip(pixels * np.float32(random.uniform(0.8, 1.2)), 0, 255)
            pixels = pixels[:, ::-1] if random.random() < 0.5 else pixels
        scaled = self._scaling(np.ascontiguousarray(pixels.transpose(2, 0, 1)), slice(0, 3))
        return torch.from_numpy(scaled), torch.tensor(number)

    def _in_8_bits(self, opened: Any, file: Path) -> Any:
        """An image of 16 bits per pixel in 8 bits, to which Pillow would clip its values; others unchanged."""
        if opened.mode.startswith("I;16") or (opened.mode == "I" and opened.format == "PNG"):
            return self._pillow.fromarray((np.asarray(opened, np.int32) // 257).astype(np.uint8))
        if opened.mode in ("I", "F"):
            raise ConfigError(
                "MW870",
                f"{file} has pixels of 32 bits, whose range the file does not give; save it with 8 or 16.",
            )
        return opened


def shapes(cache: str | None = None) -> Path:
    """A folder of small PNG files, drawn if it is not there: a shape of random colour, place and size for each, on a
    dark background. Raises ConfigError: it cannot be written, or Pillow is missing."""
    folder = home.cache() if cache is None else home.expanded(cache)
    if folder is None:
        raise ConfigError(
            "MW804",
            "The drawn shapes cannot be kept, as there is no home folder here. Give a folder as data.args.cache, or in "
            "the environment variable XDG_CACHE_HOME.",
        )
    complete = folder / f"shapes-{DRAWN}-{SIDE}-bright"
    if complete.is_dir():
        return complete
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{complete.name}-", dir=folder))
        try:
            for name in SHAPES:
                (unfinished / name).mkdir()
                draw = random.Random(name)
                for number in range(DRAWN):
                    _drawn(name, draw).save(unfinished / name / f"{number:03}.png")
            os.rename(unfinished, complete)
        except OSError:
            if not complete.is_dir():  # another process was faster
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            "MW603",
            f"{folder}: the drawn shapes cannot be kept there: {error.strerror or error}. Give a folder that can be "
            "written as data.args.cache.",
        ) from error
    return complete


def _drawn(name: str, draw: random.Random) -> Any:
    pillow = _pillow()
    background = [draw.randint(0, 90) for _ in range(3)]
    colour = [draw.randint(150, 255) for _ in range(3)]
    image = pillow.new("RGB", (SIDE, SIDE), tuple(background))
    pen = import_module("PIL.ImageDraw").Draw(image)
    half = draw.randint(9, 13)
    x, y = (draw.randint(half + 3, SIDE - half - 4) for _ in range(2))
    box = (x - half, y - half, x + half, y + half)
    if name == "circle":
        pen.ellipse(box, fill=tuple(colour))
    elif name == "square":
        pen.rectangle(box, fill=tuple(colour))
    elif name == "triangle":
        pen.polygon([(x, y - half), (x - half, y + half), (x + half, y + half)], fill=tuple(colour))
    else:
        bar = max(2, half // 3)
        pen.rectangle((x - half, y - bar, x + half, y + bar), fill=tuple(colour))
        pen.rectangle((x - bar, y - half, x + bar, y + half), fill=tuple(colour))
    return image


def _pillow() -> Any:
    try:
        return import_module("PIL.Image")
    except ImportError as error:
        raise ConfigError("MW802", 'The package Pillow is needed: pip install "meshwright[images]".') from error


def _images_below(folder: Path) -> list[Path]:
    return sorted(
        Path(parent, name)
        for parent, _, names in os.walk(folder)
        for name in names
        if Path(name).suffix.lower() in ENDINGS and is_visible(Path(parent, name).relative_to(folder))
    )


def _in_test(name: Path) -> bool:
    return zlib.crc32(name.as_posix().encode("utf-8", "surrogateescape")) % TEST_SHARE == 0
