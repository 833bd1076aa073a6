"""Run folders: checking that one is writable, the command's own files there, and removing all traces of a rejected
run."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from runner.errors import ConfigError
from runner.run_folder import CONFIG_FILE, lineage
from runner.run_folder import lock as occupancy
from strategies.core.errors import StrategyError

if TYPE_CHECKING:
    from runner.config.schema import Config

FILES = (CONFIG_FILE, "plan.json", "run.json", "metrics.jsonl", "restarts.jsonl", "error.txt", "job.json")
"""Files that a command or its ranks read or write."""
EARLIER = (lineage.FILE, "plan.json")
"""Files about the earlier run in a folder, which a refused run restores."""
START = "start"
"""Of the folder for what a command prepares; see `own_folder`."""
ROOM = 1 << 16
"""Bytes that must fit, so that a full disk is noticed before anything starts."""


def require_working_directory() -> None:
    """Raises ConfigError where the working directory has been removed."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(
            "MW805", f"the working directory is gone ({error.strerror}); change to another one."
        ) from None


def require_writable(folder: str, key: str) -> None:
    """Create `folder`, the value of `key`, if needed, and test writing with a temporary file.

    Raises:
        ConfigError: That fails; folders that were made are removed again. Or the name is empty, as that of an
            environment variable that is not set.
    """
    if not folder:
        raise ConfigError("MW204", f"{key} is empty; give a folder, or leave it out for one under outputs/.")
    made: list[Path] = []
    try:
        path = Path(folder).absolute()
        path.as_posix().encode()
        made = [parent for parent in (path, *path.parents) if not parent.exists()]
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(ROOM))
    except UnicodeEncodeError:
        raise ConfigError(
            "MW603",
            f"{key} = {folder!r}: the name is not ASCII, which Python takes for this system's encoding; set "
            "PYTHONUTF8=1 or a locale such as LC_ALL=C.UTF-8.",
        ) from None
    except (OSError, ValueError) as error:
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        shown = folder if len(folder) < 100 else f"{folder[:97]}..."
        reason = error.strerror if isinstance(error, OSError) else str(error)
        limited = getattr(error, "errno", None) == errno.EFBIG
        cure = "raise the limit on the size of files (ulimit -f)" if limited else f"choose another folder, {key}=DIR"
        raise ConfigError("MW603", f"{key} = {shown!r} cannot be written: {reason}; {cure}.") from None


def check_files(run_dir: Path) -> None:
    """Raise ConfigError if one of our file names is not a regular file: opening a FIFO would block, and a link to
    itself leads nowhere."""
    for name in FILES:
        try:
            usable = stat.S_ISREG((run_dir / name).stat().st_mode)
        except OSError as error:
            usable = error.errno == errno.ENOENT
        if not usable:
            raise ConfigError(
                "MW603", f"{run_dir / name} is not a regular file; remove it, or give another hydra.run.dir."
            )


def remove_if_unused(run_dir: Path) -> None:
    """Remove a run folder that holds only the config and its own lock, and parent folders that are then empty."""
    ours = {CONFIG_FILE} if occupancy.occupant_of(run_dir) is None else {CONFIG_FILE, occupancy.FILE}
    if {file.name for file in run_dir.iterdir()} - ours:
        return
    for name in ours:
        (run_dir / name).unlink(missing_ok=True)
    run_dir.rmdir()
    here = Path.cwd()
    for folder in run_dir.parents:
        if here not in folder.parents or any(folder.iterdir()):
            return
        folder.rmdir()


@contextmanager
def without_trace(config: Config, run_dir: Path) -> Iterator[None]:
    """Leave `run_dir` as it was before the block if the block raises ConfigError or StrategyError: wrong input may show
    only after the first files are written, because some of it is found in the ranks. Other commands of the same run,
    started by hand, may use the folder: then that of rank 0 leaves them the folders in it, and the others all."""
    before = set(run_dir.iterdir())
    contents = {file: file.read_bytes() for name in EARLIER if (file := run_dir / name).is_file()}
    try:
        yield
    except (ConfigError, StrategyError):
        leads, now = lineage.leads(config), set(run_dir.iterdir())
        others = config.launch.by_hand and any(one.name.startswith(f".{START}-") for one in now)
        if not leads and (others or (run_dir / occupancy.FILE).exists()):
            raise
        for path in now - before:
            if not path.is_dir():
                path.unlink()
            elif not others:
                shutil.rmtree(path)
        for file, content in contents.items():
            file.write_bytes(content)
        raise
