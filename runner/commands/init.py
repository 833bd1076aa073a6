"""`run init NAME`: a project that trains at once, with a recipe, a model, a dataset, a test and a Makefile.

The files are those of `runner/commands/project`, in which PROJECT stands for the name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from runner.errors import ConfigError
from runner.report.units import shown_path

FILES = Path(__file__).with_name("project")
PLACEHOLDER = "PROJECT"
HIDDEN = {"gitignore": ".gitignore"}
"""Files that packages of Python would leave out under the name that they have in a project."""
NAME = re.compile(r"[A-Za-z][\w-]*", re.ASCII)


def run(words: Sequence[str]) -> int:
    """Write the project.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: The name is missing or no name of a recipe, or the folder holds something or cannot be written.
    """
    if len(words) != 1:
        raise ConfigError("MW112", f"init takes the name of one project, such as `run init mine`, not {len(words)}.")
    folder = Path(words[0])
    name = folder.name
    if not NAME.fullmatch(name):
        raise ConfigError(
            "MW112",
            f"init: {words[0]!r} ends in no name for a project, which has letters, digits, - and _ and begins with a "
            "letter, such as `run init mine`.",
        )
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(
                "MW860", f"init: the folder {folder} holds files already; choose another name, or empty the folder."
            )
        for file in sorted(path for path in FILES.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
            place = file.relative_to(FILES)
            target = folder / place.parent / HIDDEN.get(place.name, place.name.replace(PLACEHOLDER, name))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(file.read_text(encoding="utf-8").replace(PLACEHOLDER, name), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "MW603", f"init: {folder} cannot be written: {error.strerror}; choose another place."
        ) from None
    print(f"{shown_path(folder)}/ holds a model, data, a recipe, a test and a Makefile. It trains at once:")
    print(f"    cd {folder}\n    run +recipe={name}\nand `make test` compares it with one device.")
    return 0
