"""`run recipes` lists the recipes, `run recipes NAME` prints the file of one, comments included."""

from __future__ import annotations

from collections.abc import Sequence

from runner.cli.recipes import catalogue, table
from runner.errors import ConfigError, allowed


def run(words: Sequence[str]) -> int:
    """Print the table, or the recipes that are named. Raises ConfigError for a name that does not exist."""
    found = catalogue()
    for name in words:
        if name not in found:
            raise ConfigError("MW110", f"there is no recipe {name!r}.{allowed(name, found)}")
    for name in words:
        print(found[name].read_text(encoding="utf-8"), end="")
    if not words:
        print(table())
    return 0
