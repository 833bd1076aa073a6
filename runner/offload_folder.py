"""The folder on the disk for a run that offloads to it. Does not import torch: the parent makes it.

Invariant: it is gone after the run, whatever became of the ranks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.errors import ConfigError
from runner.schema import Config


@contextmanager
def offload_folder(config: Config, run_dir: Path) -> Iterator[Path | None]:
    """A fresh folder in `parallel.offload.folder`, or else in the run folder; None where no disk is used."""
    wanted = config.parallel.offload
    if not wanted.on_disk:
        yield None
        return
    place = run_dir if wanted.folder is None else Path(wanted.folder)
    if not place.is_dir():
        raise ConfigError(f"parallel.offload.folder = {wanted.folder!r}: there is no such folder; make it first.")
    with tempfile.TemporaryDirectory(prefix=".offload-", dir=place) as folder:
        yield Path(folder).absolute()
