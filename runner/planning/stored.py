"""Reading plan.json, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runner.errors import ConfigError

PLAN = "plan.json"


def read_content(file: Path) -> Any:
    """What a plan.json, or the one in a run folder, holds. Raises ConfigError."""
    file = file / PLAN if file.is_dir() else file
    try:
        return json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"the plan {str(file)!r} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"the plan {str(file)!r} is not JSON: {error}.") from None
