"""Which files of a folder are data: not the hidden ones, which editors and systems keep there for themselves."""

from __future__ import annotations

from pathlib import PurePath


def is_visible(below: PurePath) -> bool:
    """Whether no part of a path below a folder of data begins with a dot, as `.ipynb_checkpoints` and `._1.png` do."""
    return not any(part.startswith(".") for part in below.parts)
