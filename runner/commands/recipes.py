"""`run recipes` lists the recipes, `run recipes NAME` prints the file of one, comments included, and `--copy` writes it
into the folder `recipes` here, where it can be changed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from runner.cli.recipes import GROUP, catalogue, shipped, table, text_of
from runner.errors import ConfigError, allowed

COPY = "--copy"


def run(words: Sequence[str]) -> int:
    """Print the table, or print or copy the recipes that are named.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: A recipe does not exist or cannot be read, or its copy cannot be written or is there already.
    """
    found = catalogue()
    names = [word for word in words if word != COPY]
    for name in names:
        if name not in found:
            raise ConfigError("MW110", f"there is no recipe {name!r}.{allowed(name, found)}")
    if COPY in words and not names:
        raise ConfigError("MW112", f"recipes {COPY} needs the name of a recipe, such as `run recipes gpt {COPY}`.")
    if COPY in words:
        for name in names:
            _copy(name, found[name])
        return 0
    for name in names:
        print(text_of(found[name]), end="")
    if not words:
        print(table())
    return 0


def _copy(name: str, file: Path) -> None:
    """Copy a recipe; what a shipped one calls by the name of a model keeps its meaning beside modules of the user's."""
    target = Path("recipes", f"{name}.yaml")
    if target.exists():
        raise ConfigError("MW860", f"recipes: {target} is there already; remove or rename it.")
    text = text_of(file)
    if file.is_relative_to(shipped()):
        text = re.sub(r"\b(target|inputs): models[.]", r"\1: meshwright.models.", text)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("MW603", f"recipes: {target} cannot be written: {error.strerror}.") from None
    print(f"{target} is a copy of the recipe {name}, and what +{GROUP}={name} means here from now on")
