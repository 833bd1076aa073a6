"""`run completion`: completion of the command line in bash, zsh and fish; `--install` sets it up for new shells."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from runner.cli.completion import SCRIPTS, SHELLS
from runner.errors import ConfigError, allowed
from runner.home import expanded

INSTALL = "--install"
MARK = "  # completion of Meshwright"


def run(words: Sequence[str]) -> int:
    """Print the script of a shell, or install it: a file of the user's config folder, which the shell's start file
    reads. Installing again changes nothing else.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: The shell is unknown, or a file cannot be written.
    """
    named = [word for word in words if word != INSTALL]
    shell = named[0] if named else Path(os.environ.get("SHELL", "")).name
    if len(named) > 1 or shell not in SHELLS:
        given = " ".join(named) or f"SHELL = {shell!r}"
        raise ConfigError("MW112", f"completion: {given} is no shell that it knows; name one.{allowed(shell, SHELLS)}")
    if INSTALL not in words:
        print(SCRIPTS[shell], end="")
        return 0
    try:
        files = _installed(shell)
    except OSError as error:
        raise ConfigError("MW603", f"completion: {error.filename} cannot be written: {error.strerror}.") from None
    print(f"new shells complete `run` and `meshwright`: {', '.join(map(str, files))}")
    return 0


def _installed(shell: str) -> list[Path]:
    """Write the script, and let the shell find it. Returns the files. Raises OSError, ConfigError."""
    settings = Path(os.environ.get("XDG_CONFIG_HOME") or expanded("~/.config"))
    if shell == "fish":  # which reads the file of a command by its name
        files = [settings / "fish" / "completions" / f"{name}.fish" for name in ("run", "meshwright")]
    else:
        files = [settings / "meshwright" / f"completion.{shell}"]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(SCRIPTS[shell], encoding="utf-8")
    if shell == "fish":
        return files
    own = {"bash": "~", "zsh": os.environ.get("ZDOTDIR") or "~"}[shell]
    start = expanded(own) / f".{shell}rc"
    lines = start.read_text(encoding="utf-8").splitlines(keepends=True) if start.exists() else []
    others = [line for line in lines if not line.rstrip().endswith(MARK)]
    if others and not others[-1].endswith("\n"):
        others[-1] += "\n"
    start.write_text("".join([*others, f"source '{files[0]}'{MARK}\n"]), encoding="utf-8")
    return [*files, start]
