"""Files that others read while they are written: the content goes to a hidden file, which then takes their place.

Commands on several hosts may write the same file at once, so the hidden file has a random name.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write `text` in place of what `path` holds; whoever reads it sees one or the other."""
    replace_lines(path, [text.encode()])


def replace_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Write `lines`, which may be made of what `path` holds, in its place."""
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with hidden.open("wb") as file:
        file.writelines(lines)
    os.replace(hidden, path)
