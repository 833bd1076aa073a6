"""The processes of a launch by host, as text; nothing is started, and no file is left."""

from __future__ import annotations

import shlex
import sys
from math import prod
from pathlib import Path

from runner.cli.arguments import DRY_RUN
from runner.cli.run_folders import remove_if_unused
from runner.config.schema import Config
from runner.errors import ConfigError
from runner.launch.launchers.commands import Started
from runner.launch.launchers.host_assignment import meeting
from runner.launch.launchers.start import described

FOLDER = "join"
"""Stands for the folder that a run makes for its ranks, whose name differs every time."""


def dry_run(config: Config, run_dir: Path) -> None:
    """Print the commands, files and scripts of the launch. Raises ConfigError where the number of ranks is open."""
    if config.launch.launcher == "local" or config.launch.by_hand:
        print("the ranks are forks of this command; nothing else is started")
    else:
        typed = tuple(word for word in sys.argv[1:] if word != DRY_RUN and not word.startswith("job="))
        folder = run_dir.absolute() / FOLDER
        site = meeting(config.launch, resolve=False)
        started = described(config.launch, world_size_of(config), folder, site, typed)
        print(text(started, folder, Path.cwd()))
    remove_if_unused(run_dir)


def world_size_of(config: Config) -> int:
    """The number of ranks of a config, without probing the machine. Raises ConfigError."""
    stages = config.parallel.pipeline.known or 1
    known = [config.world_size, *(prod(shape) * stages for _, shape in config.parallel.meshes())]
    if config.parallel.mode == "stand_alone":
        known = [1]
    found = next((one for one in known if one is not None), None)
    if found is None:
        raise ConfigError(
            "MW704",
            "world_size is null, so the number of ranks is that of the devices at hand; a launcher needs it: set "
            "world_size=N or launch.hosts.",
        )
    return found


def text(started: Started, folder: Path, directory: Path) -> str:
    """The commands by host, ready for a shell; then the files written beforehand, and the script."""
    lines = []
    for command in started.commands:
        if command.host is None:
            lines += ["# on this machine", shlex.join(command.words)]
        else:
            lines += [f"# on {command.host}", command.shell(directory)]
    for name, content in started.files.items():
        lines += [f"# {folder / name}", content.rstrip()]
    if started.script is not None:
        lines += ["# or a script for sbatch", started.script.rstrip()]
    return "\n".join(lines)
