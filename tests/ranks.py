"""How tests start real ranks: on CPUs, with one thread each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runner.launch import run_ranks


def start_ranks(
    entry: str, payload: Any, world_size: int, folder: Path, timeout: float = 120.0, name: str | None = None
) -> Any:
    """What `entry` (module:function) returns on rank 0; the ranks' files are in `folder`."""
    return run_ranks(
        entry, payload, world_size=world_size, run_dir=folder, device="cpu", timeout=timeout, threads=1, name=name
    )
