"""What a refused run leaves behind: nothing.

A wrong input may show only after the first files are written, because some of it is found in the ranks. Invariant:
after ConfigError or StrategyError the run folder holds what it held before.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.errors import ConfigError
from runner.run_folder import lineage
from strategies.core.errors import StrategyError

TOLD = (lineage.FILE, "plan.json")


@contextmanager
def without_trace(run_dir: Path) -> Iterator[None]:
    """Remove what is new in `run_dir`, and write back what tells of the run before, if the block refuses its input."""
    before = set(run_dir.iterdir())
    told = {file: file.read_bytes() for name in TOLD if (file := run_dir / name).is_file()}
    try:
        yield
    except (ConfigError, StrategyError):
        for path in set(run_dir.iterdir()) - before:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        for file, content in told.items():
            file.write_bytes(content)
        raise
