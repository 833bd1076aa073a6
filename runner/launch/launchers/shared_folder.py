"""Whether hosts that were started by hand share the run folder: what is saved must come together in one."""

from __future__ import annotations

import secrets
from pathlib import Path

import torch.distributed as dist

from runner.config.schema import Config
from runner.errors import ConfigError
from runner.launch.gather import gather

TOKEN = ".shared"


def require_shared(config: Config, run_dir: Path) -> None:
    """Raise ConfigError, on all ranks, where checkpoints are to be saved and a rank has another run folder than rank 0
    (collective)."""
    wanted = config.checkpoint
    if not (wanted.at_end or wanted.every or wanted.minutes or wanted.best):
        return
    file, first = run_dir / TOKEN, dist.get_rank() == 0
    token = secrets.token_hex(8) if first else ""
    if first:
        file.write_text(token, encoding="utf-8")
    token = gather(token)[0]
    found = gather(file.is_file() and file.read_text(encoding="utf-8") == token)
    if first:
        file.unlink()
    if not all(found):
        raise ConfigError(
            f"rank {found.index(False)} has another run folder than rank 0, so checkpoints would lack its slices; give "
            "all hosts one shared hydra.run.dir, or checkpoint.at_end=false and no other checkpoints."
        )
