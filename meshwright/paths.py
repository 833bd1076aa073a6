"""The paths that users name."""

from __future__ import annotations

import os
from pathlib import Path

from runner.errors import ConfigError


def path_of(file: object, what: str) -> Path:
    """Raises ConfigError, for the call `what`, unless it is a path."""
    if not isinstance(file, str | os.PathLike) or "\0" in os.fspath(file):
        raise ConfigError("MW204", f"{what}: {file!r} is no path; give a string or pathlib.Path without null bytes.")
    return Path(file)
