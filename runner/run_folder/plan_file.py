"""plan.json, read without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runner.errors import ConfigError
from strategies.core.bounded_files import read_json

PLAN = "plan.json"


def read_content(file: Path) -> Any:
    """The content of a plan.json, or of the one in a run folder. Raises ConfigError."""
    file = file / PLAN if file.is_dir() else file
    try:
        return read_json(file)
    except OSError as error:
        raise ConfigError("MW420", f"the plan {str(file)!r} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError("MW420", f"the plan {str(file)!r} is not JSON: {error}.") from None
