"""Make the handwritten digits that are shipped in runner/data/digits; needs scikit-learn, and is not needed to run.

    python benchmarks/make_digits.py

Source: the 1797 images of 8x8 pixels in 17 tones (0 to 16) that scikit-learn carries (`load_digits`).
Scaling: bilinear from 8x8 to 28x28, pixel centres at half coordinates, edges repeated, in integers throughout, so
that every machine makes the same pixels; then rounded to the source's own 17 tones and stretched to 0..255.
Split: sort by class (keeping the order within a class) and take every fifth image as test, the first included:
360 test and 1437 training images, each class in both to within one image of its share. Files keep source order.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from runner.data import idx

FOLDER = Path(__file__).parents[1] / "runner" / "data" / "digits"
SMALL, LARGE, TONES = 8, 28, 16


def weights() -> NDArray[np.int64]:
    """[28, 8]: how many fourteenths of each source pixel make a target pixel."""
    # Centre of target pixel i in source pixels: (i + 1/2) * 8/28 - 1/2 = (4i - 5) / 14.
    unit = 14
    table = np.zeros((LARGE, SMALL), np.int64)
    for target in range(LARGE):
        left, part = divmod(4 * target - 5, unit)
        table[target, np.clip(left, 0, SMALL - 1)] += unit - part
        table[target, np.clip(left + 1, 0, SMALL - 1)] += part
    return table


def enlarge(images: NDArray[np.int64]) -> NDArray[np.uint8]:
    """[n, 8, 8] of tones 0..16 to [n, 28, 28] of 0..255."""
    table = weights()
    scale = int(table[0].sum()) ** 2
    tones = (2 * np.einsum("ia,nab,jb->nij", table, images, table) + scale) // (2 * scale)
    return ((2 * 255 * tones + TONES) // (2 * TONES)).astype(np.uint8)


def main() -> None:
    digits = load_digits()
    labels = digits.target.astype(np.uint8)
    images = enlarge(digits.images.astype(np.int64))
    is_test = np.zeros(len(labels), bool)
    is_test[np.argsort(labels, kind="stable")[::5]] = True
    for prefix, chosen in (("train", ~is_test), ("t10k", is_test)):
        for name, array in (("images-idx3", images[chosen]), ("labels-idx1", labels[chosen])):
            content = gzip.compress(idx.encode(array), 9, mtime=0)
            (FOLDER / f"{prefix}-{name}-ubyte.gz").write_bytes(content)
    pixels = images[~is_test] / 255
    print(f"train {np.sum(~is_test)}, test {np.sum(is_test)}, mean {pixels.mean():.4f}, std {pixels.std():.4f}")


if __name__ == "__main__":
    main()
