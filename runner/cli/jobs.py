"""The job of one config in its run folder: composed from words, the folder occupied, the verb carried out. For the
command, for each job of a sweep, and for Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import hydra

from runner.cli import arguments, recipes
from runner.cli.hydra_errors import COMPOSITION_ERRORS, reword
from runner.cli.libyaml import read_by_libyaml
from runner.cli.run_folders import check_files
from runner.cli.verbs import VERBS
from runner.config import exclusive
from runner.config.load import load
from runner.config.origins import Origins
from runner.config.schema import Config
from runner.errors import RunFailed
from runner.run_folder import CONFIG_FILE, lineage
from runner.run_folder.atomic import replace_text
from runner.run_folder.lock import occupied
from strategies.core.errors import CodedError


def composed(words: Sequence[str]) -> Config:
    """The config of a command's words, such as `+recipe=gpt`, `train.steps=2`. Raises ConfigError."""
    given = arguments.for_hydra(None, words)
    recipes.search(None)
    recipes.register()
    try:
        with hydra.initialize_config_module("conf", version_base="1.3"), read_by_libyaml():
            return load(hydra.compose("config", given), Origins(tuple(given)))
    except COMPOSITION_ERRORS as error:
        raise reword(error, list(words)) from None


def occupying(config: Config, run_dir: Path, recipe: str | None) -> AbstractContextManager[None]:
    """Hold the folder for the job of a config. Raises ConfigError where another command holds it."""
    if not lineage.leads(config):
        return nullcontext()
    return occupied(run_dir, lineage.occupant(config, run_dir, recipe))


def alone(config: Config, run_dir: Path) -> float | None:
    """The job of a config in a locked folder. If it is rejected, the previous config there is restored."""
    check_files(run_dir)
    lineage.check_folder(config, run_dir)
    file = run_dir / CONFIG_FILE
    before = file.read_bytes() if file.exists() else None
    try:
        return carried_out(config, run_dir)
    except CodedError as error:
        if before is not None and not isinstance(error, RunFailed):
            file.write_bytes(before)
        raise


def carried_out(config: Config, run_dir: Path) -> float | None:
    """The result of a config's verb, whose folder holds the config."""
    for notice in exclusive.notices(config):
        print(notice, flush=True)
    replace_text(run_dir / CONFIG_FILE, config.model_dump_json(indent=2) + "\n")
    result: float | None = VERBS[config.job.name].function()(config, run_dir)
    return result
