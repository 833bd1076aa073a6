"""Run folders that hold nothing worth keeping."""

from __future__ import annotations

from pathlib import Path

CONFIG_FILE = "config.json"


def remove_if_unused(run_dir: Path) -> None:
    """Remove a run folder that holds nothing but the config, and the folders of runs that are empty then."""
    if {file.name for file in run_dir.iterdir()} - {CONFIG_FILE}:
        return
    (run_dir / CONFIG_FILE).unlink(missing_ok=True)
    run_dir.rmdir()
    here = Path.cwd()
    for folder in run_dir.parents:
        if here not in folder.parents or any(folder.iterdir()):
            return
        folder.rmdir()
