"""The search package has at most five levels of imports, those inside functions included."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import strategies.search

FOLDER = Path(strategies.search.__file__).parent
MOST_LEVELS = 5


def imported(name: str) -> set[str]:
    """Modules of the folder that a module imports, anywhere in its source."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "strategies.search":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("strategies.search."):
            names.add(str(node.module).split(".")[2])
        elif isinstance(node, ast.Import):
            names |= {one.name.split(".")[2] for one in node.names if one.name.startswith("strategies.search.")}
    return names


@cache
def level(name: str) -> int:
    return 1 + max(map(level, imported(name)), default=0)


def test_at_most_five_levels() -> None:
    levels = {path.stem: level(path.stem) for path in FOLDER.glob("*.py")}
    assert max(levels.values()) <= MOST_LEVELS, levels
    assert levels["solution"] == levels["elimination"] == 1 and levels["algorithms"] == MOST_LEVELS


def test_the_drawing_names_every_module() -> None:
    diagram = (FOLDER / "__init__.py").read_text(encoding="utf-8")
    assert all(path.stem in diagram for path in FOLDER.glob("[a-z]*.py"))
