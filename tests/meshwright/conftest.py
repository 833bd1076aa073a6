"""`on_ranks` runs an entry of `loops`, or of another module here, on real processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import start_ranks

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "runner")]  # for `loops`, which ranks import by its name, and `networks`


@pytest.fixture
def on_ranks(tmp_path: Path) -> Callable[..., Any]:
    def call(entry: str, payload: Any, world_size: int = 4, module: str = "loops") -> Any:
        return start_ranks(f"{module}:{entry}", payload, world_size, tmp_path, timeout=60.0)

    return call
