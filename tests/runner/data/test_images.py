"""Folders of images: classes, parts, pixels, augmentation by row; the drawn shapes; errors."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from runner.data.images import DRAWN, ImageFolder, shapes
from runner.data.loader import build_dataset, global_batch
from runner.errors import ConfigError

RED, GREEN = (255, 0, 0), (0, 255, 0)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the shapes are drawn."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes and a folder without images; a wide image with a green middle, and one in a folder below; and what
    notebooks and macOS leave behind."""
    for name in ("b/deep", "a", "empty", ".ipynb_checkpoints", "a/.hidden"):
        (tmp_path / "photos" / name).mkdir(parents=True)
    wide = np.zeros((4, 8, 3), np.uint8)
    wide[:] = RED
    wide[:, 2:6] = GREEN
    Image.fromarray(wide).save(tmp_path / "photos/a/wide.png")
    Image.new("L", (4, 4), 51).save(tmp_path / "photos/b/deep/grey.PNG")
    for name in ("a/note.txt", "a/._wide.png", "a/.hidden/other.png", ".ipynb_checkpoints/wide.png"):
        (tmp_path / "photos" / name).write_text("no image", encoding="utf-8")
    return tmp_path / "photos"


def test_a_class_is_a_folder_and_the_middle_of_an_image_counts(folder):
    rows = ImageFolder(str(folder), 2, train=None, normalize=None)
    assert (rows.classes, len(rows)) == (["a", "b"], 2)
    (green, first), (grey, second) = rows[0], rows[1]
    assert (first.item(), second.item()) == (0, 1)
    assert green.shape == (3, 2, 2) and green.dtype == torch.float32
    assert green.tolist() == [[[0.0] * 2] * 2, [[1.0] * 2] * 2, [[0.0] * 2] * 2]
    assert torch.allclose(grey, torch.full((3, 2, 2), 0.2))
    normal = ImageFolder(str(folder), 2, train=None)[1][0]
    assert torch.allclose(
        normal[:, 0, 0], torch.tensor([(0.2 - 0.485) / 0.229, (0.2 - 0.456) / 0.224, (0.2 - 0.406) / 0.225])
    )


def test_shapes_are_drawn_once_and_a_file_is_in_one_part(cache):
    place = shapes(cache)
    before = {file: file.stat().st_mtime_ns for file in place.rglob("*.png")}
    parts = [ImageFolder(size=8, train=train, cache=cache) for train in (True, False, None)]
    assert len(before) == len(parts[2]) == 4 * DRAWN == len(parts[0]) + len(parts[1]) and 70 < len(parts[1]) < 170
    assert {file: file.stat().st_mtime_ns for file in place.rglob("*.png")} == before
    assert [one.name for one in Path(cache).iterdir()] == [place.name]
    assert {int(parts[1][index][1]) for index in range(len(parts[1]))} == {0, 1, 2, 3}


def test_augmentation_follows_from_seed_epoch_and_row(cache):
    args = {"size": 8, "augment": True, "cache": cache}
    rows = build_dataset("runner.data.images.ImageFolder", args, None, what="data")

    def images(chosen, seed=0, epoch=0):
        return global_batch(rows, None, chosen, seed, epoch)[0]

    batch = images([3, 4, 5])
    assert torch.equal(images([4])[0], batch[1])  # whatever was read before
    assert not torch.equal(images([4], epoch=1)[0], batch[1]) and not torch.equal(images([4], seed=1)[0], batch[1])
    plain = ImageFolder(size=8, cache=cache)
    assert torch.equal(plain[4][0], plain[4][0]) and not torch.equal(plain[4][0], batch[1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"path": "nowhere"}, "nowhere cannot be read: No such file"),
        ({"path": "photos/b"}, r"there are 1 folders, 1 of them with images"),
        ({"path": "photos", "train": False}, "no image is in the test part"),
        ({"path": "photos", "size": 0}, "must be 1 or more pixels"),
        ({"path": "photos", "normalize": {"mean": [1, 2], "std": 1}}, "normalize.mean"),
    ],
)
def test_a_folder_that_cannot_be_used_is_reported(folder, monkeypatch, given, message):
    monkeypatch.chdir(folder.parent)
    with pytest.raises(ConfigError, match=message) as caught:
        ImageFolder(**given)
    assert "\n" not in str(caught.value)


def test_pixels_of_16_bits_are_scaled(folder):
    grey = np.linspace(0, 255, 16, dtype=np.uint8).reshape(4, 4)
    Image.fromarray(grey).save(folder / "a/wide.png")
    of_8_bits = ImageFolder(str(folder), 4, train=None)[0][0]
    Image.fromarray(grey.astype(np.uint16) * 257).save(folder / "a/wide.png")
    assert torch.equal(ImageFolder(str(folder), 4, train=None)[0][0], of_8_bits)


def _of_floats() -> bytes:
    stored = io.BytesIO()
    Image.fromarray(np.zeros((4, 4), np.float32)).save(stored, "tiff")
    return stored.getvalue()


def _with_a_short_chunk() -> bytes:
    stored = io.BytesIO()
    Image.new("RGB", (4, 4)).save(stored, "png")
    start, size = stored.getvalue(), struct.pack(">I", 1)
    return start[:33] + size + b"gAMA" + b"1" + struct.pack(">I", zlib.crc32(b"gAMA1")) + start[33:]


@pytest.mark.parametrize(
    ("content", "message"),
    [(_of_floats(), r"a/wide\.png has pixels of 32 bits"), (_with_a_short_chunk(), r"a/wide\.png is no image .*gAMA")],
    ids=["floats", "short_chunk"],
)
def test_a_file_that_cannot_be_used_is_named(folder, content, message):
    (folder / "a/wide.png").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        ImageFolder(str(folder), 4, train=None)[0]


def test_a_file_that_is_no_image_is_named(folder):
    (folder / "a/wide.png").write_bytes(b"not a picture")
    with pytest.raises(ConfigError, match=r"a/wide\.png is no image that Pillow can read") as caught:
        ImageFolder(str(folder), 2, train=None)[0]
    assert "\n" not in str(caught.value)
