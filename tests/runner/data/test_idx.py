"""The IDX reader: exact on good files, one paragraph with the file's name on bad ones."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from runner.data import idx
from runner.errors import ConfigError

IMAGES = (np.arange(2 * 3 * 4) % 251).astype(np.uint8).reshape(2, 3, 4)
GOOD = idx.encode(IMAGES)


def test_the_bytes_are_those_of_the_format() -> None:
    assert GOOD[:16] == struct.pack(">4I", 2051, 2, 3, 4)
    assert idx.encode(np.array([7, 9], np.uint8)) == struct.pack(">2I2B", 2049, 2, 7, 9)


@settings(deadline=None)
@given(
    array=npst.arrays(np.uint8, npst.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5)), packed=st.booleans()
)
def test_read_is_the_inverse_of_encode(
    tmp_path_factory: pytest.TempPathFactory, array: np.ndarray, packed: bool
) -> None:
    path = tmp_path_factory.mktemp("idx") / ("file.gz" if packed else "file")
    content = idx.encode(array)
    path.write_bytes(gzip.compress(content, 1) if packed else content)
    found = idx.read(path, dims=array.ndim)
    assert found.shape == array.shape and found.dtype == np.uint8
    np.testing.assert_array_equal(found, array)


def test_plain_files_are_mapped_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "plain"
    path.write_bytes(GOOD)
    found = idx.read(path, dims=3)
    assert isinstance(found, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        found[0, 0, 0] = 1


BAD = {
    "empty": (b"", "is empty"),
    "magic": (b"\x50\x4b" + GOOD[2:], "50 4b 08 03"),
    "type": (b"\x00\x00\x0d\x03" + GOOD[4:], "magic number 2051"),
    "dims": (idx.encode(IMAGES[0]), "in 3 dims starts with 00 00 08 03"),
    "header": (GOOD[:10], "is cut off inside its header of 16 bytes"),
    "truncated": (GOOD[:-1], "is cut off: its header states 2x3x4 = 24 bytes, and 23 follow"),
    "longer": (GOOD + b"\x00", "has bytes left over: its header states 2x3x4 = 24 bytes, and 25 follow"),
    "count": (GOOD[:4] + b"\xff" * 12 + GOOD[16:], "is cut off"),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused(tmp_path: Path, name: str, packed: bool) -> None:
    content, expected = BAD[name]
    path = tmp_path / ("images.gz" if packed else "images")
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(ConfigError) as caught:
        idx.read(path, dims=3)
    assert str(caught.value).startswith(f"{path}: ")
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "flipped", "not gzip"])
def test_a_damaged_gzip_file_is_refused(tmp_path: Path, damage: str) -> None:
    packed = bytearray(gzip.compress(GOOD))
    if damage == "cut":
        del packed[-9:]
    elif damage == "flipped":
        packed[-6] ^= 0xFF  # the checksum
    path = tmp_path / "images.gz"
    path.write_bytes(GOOD if damage == "not gzip" else bytes(packed))
    with pytest.raises(ConfigError, match=r"images\.gz: cannot be read: "):
        idx.read(path, dims=3)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        idx.read(tmp_path / "absent", dims=3)


def test_find_prefers_plain_and_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        idx.find(tmp_path / "absent", "labels")
    with pytest.raises(ConfigError, match=r"neither labels nor labels\.gz; it holds nothing"):
        idx.find(tmp_path, "labels")
    (tmp_path / "labels.gz").touch()
    assert idx.find(tmp_path, "labels").name == "labels.gz"
    (tmp_path / "labels").touch()
    assert idx.find(tmp_path, "labels").name == "labels"
    with pytest.raises(ConfigError, match=r"it holds labels, labels\.gz"):
        idx.find(tmp_path, "images")
