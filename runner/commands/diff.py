"""`run diff A B`: two plans side by side. A and B are files plan.json, or the folders of runs that wrote one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.errors import ConfigError
from runner.report.differences import differences
from runner.run_folder.plan_file import read_content


def run(words: Sequence[str]) -> int:
    """Print the differences. Returns 0. Raises ConfigError unless there are two plans."""
    if len(words) != 2:
        raise ConfigError(
            "MW112",
            f"diff compares two plans, but got {len(words)}; write `run diff A B` with two plan.json files or run "
            "folders.",
        )
    one, other = (read_content(Path(word)) for word in words)
    try:
        print(differences(one, other))
    except (LookupError, ArithmeticError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ConfigError(
            "MW420", f"{words[0]!r} and {words[1]!r} are not both a plan.json ({type(error).__name__}: {error})."
        ) from None
    return 0
