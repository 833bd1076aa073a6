"""The launcher interface: a pure function from the config and a launch site to commands and files.

`run launch --dry-run` prints what the function returns, `run train` starts it. Every launcher finally starts `python -m
runner.join FOLDER`, which reads its rank from the launcher's environment.
"""

from __future__ import annotations

import fnmatch
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runner.packages import ROOT

JOIN = "runner.join"


@dataclass(frozen=True)
class LaunchSite:
    """Where a run is started from.

    Attributes:
        folder: the only argument of a rank; holds all of its inputs.
        world_size: how many ranks.
        address: where the others reach rank 0's host; loopback where there are none.
        port: free there, for launchers that need one.
        python: the interpreter.
        directory: the working directory, of all ranks too.
        environment: variables of this environment for ranks on other hosts.
        overrides: the words of the command, for scripts that repeat it.
    """

    folder: Path
    world_size: int
    address: str
    port: int
    python: str
    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()

    def module(self, name: str, option: str = "-m") -> tuple[str, ...]:
        """The arguments after the interpreter that start one of our modules: by its name, or by its file where a
        folder of the user's is called `runner` too, which python would look into first."""
        if any((self.directory / taken).exists() for taken in ("runner", "runner.py")):
            file = ROOT.joinpath(*name.split("."))
            return (str(file / "__main__.py" if file.is_dir() else file.with_suffix(".py")),)
        return (option, name)

    @property
    def join(self) -> tuple[str, ...]:
        """The arguments after the interpreter that start a rank."""
        return (*self.module(JOIN), str(self.folder))


@dataclass(frozen=True)
class Command:
    """One command. `host` is where it has to run, None here; `environment` extends the existing environment."""

    words: tuple[str, ...]
    host: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def shell(self, directory: Path) -> str:
        """The command for a shell of another host."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([f"cd {shlex.quote(str(directory))} && exec env", *variables, shlex.join(self.words)])


@dataclass(frozen=True)
class Started:
    """All that a launcher needs: `files` are written first, by name in the folder of the place; `script` is for a
    scheduler, and printed only."""

    commands: tuple[Command, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    script: str | None = None


def exported(globs: Sequence[str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables whose names match one of `globs`."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if any(fnmatch.fnmatchcase(name, one) for one in globs)
    }
