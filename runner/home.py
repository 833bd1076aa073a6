"""The user's home and cache folders. There may be none: HOME unset and no system entry for the account."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from runner.errors import ConfigError


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with its leading `~` replaced. Raises ConfigError: that home folder is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            "MW804",
            f"{os.fspath(path)}: the home folder that ~ stands for is unknown here; write the path in full, or set the "
            "environment variable HOME.",
        ) from error


def cache() -> Path | None:
    """The cache folder, by the XDG base directory specification; None without a home folder."""
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "meshwright"
    try:
        return Path.home() / ".cache" / "meshwright"
    except RuntimeError:
        return None


def plan_cache(wanted: str | None, say: Callable[[str], None]) -> Path | None:
    """The folder of the plan cache; `auto` is in that of the user, and None, which is said, for a user without one."""
    if wanted != "auto":
        return None if wanted is None else Path(wanted)
    folder = cache()
    if folder is None:
        say("plan cache: none, as there is no home folder here; parallel.plan_cache or XDG_CACHE_HOME can name one")
        return None
    return folder / "plans"
