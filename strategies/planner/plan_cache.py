"""Plans that were found before, in a folder: one file per question.

The question is everything that decides a plan: the graph, the request, and the code of the planner.
Invariant: an entry is complete or absent (it is written beside its place and renamed), and what it holds is known by
its hash, so a damaged one is never believed. A folder that cannot be written costs a warning, never a run.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from strategies.core.bounded_files import read_json
from strategies.core.graph import OperatorGraph

Entry = TypeVar("Entry")
MOST = 256
"""Entries that are kept; the oldest go first."""


def key_of(graph: OperatorGraph, *request: object) -> str:
    """The name of the entry for a graph and a request; values are equal where their `repr` is."""
    text = "\n".join(map(repr, (graph.signature(), *request)))
    return hashlib.sha256(f"{code_of(Path(__file__).parents[1])}\n{text}".encode()).hexdigest()[:32]


def load(folder: Path, key: str, warn: Callable[[str], None], read: Callable[[Any], Entry]) -> Entry | None:
    """What `read` makes of the content of an entry; None where there is none or it is damaged, which `warn` reports."""
    file = folder / f"{key}.json"
    try:
        entry = read_json(file)
        if not isinstance(entry, dict) or entry.get("sha256") != _hash(entry.get("plan")):
            raise ValueError("its content is not what was written")
        return read(entry["plan"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, ArithmeticError, TypeError, AttributeError, RuntimeError) as error:
        warn(f"plan cache: {file} cannot be used ({_words(error)}), so the plan is searched anew.")
        return None


def store(folder: Path, key: str, content: object, warn: Callable[[str], None]) -> None:
    """Write an entry of JSON, and drop the oldest of too many; `warn` reports a failure."""
    text = json.dumps({"sha256": _hash(content), "plan": content})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, folder / f"{key}.json")
        except BaseException:
            os.unlink(name)
            raise
        entries = sorted(folder.glob("*.json"), key=_written)
        for path in entries[:-MOST]:
            path.unlink(missing_ok=True)
    except OSError as error:
        warn(f"plan cache: the plan cannot be kept in {folder} ({_words(error)}).")


def _written(file: Path) -> float:
    """When it was; for one that another process has dropped by now, never."""
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return math.inf


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _words(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"


@cache
def code_of(folder: Path) -> str:
    """A hash of the sources below a folder: another version of the planner may plan otherwise."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
