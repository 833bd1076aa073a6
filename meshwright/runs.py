"""Runs of the command from Python: a config is composed from a recipe, and trained in a run folder."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.paths import path_of
from runner.cli.jobs import alone, composed, occupying
from runner.cli.run_folders import remove_if_unused, require_writable
from runner.config.load import validated
from runner.config.origins import Origins
from runner.config.schema import Config
from runner.errors import ConfigError, RunFailed
from runner.run_folder.metrics import records
from strategies.core.errors import CodedError


@dataclass(frozen=True)
class Run:
    """A finished training run.

    Attributes:
        folder: with plan.json, metrics.jsonl, checkpoints/ and logs.
        config: with which it ran.
        loss: of the last step; None where rank 0 ran on another host.
    """

    folder: Path
    config: Config
    loss: float | None

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return list(records(self.folder))

    @property
    def losses(self) -> list[float]:
        """The loss of every step."""
        return [record["loss"] for record in self.records if "loss" in record]

    @property
    def evaluation(self) -> dict[str, float]:
        """The last evaluation; empty without one."""
        measured: list[dict[str, float]] = [one["evaluation"] for one in self.records if "evaluation" in one]
        return measured[-1] if measured else {}


def compose(recipe: str | None = None, overrides: Sequence[str] = ()) -> Config:
    """The config of a recipe, as the command composes it.

    Args:
        recipe: one that ships (`run recipes` lists them), or recipes/NAME.yaml in the working directory; None: the
            defaults, where overrides name model and data.
        overrides: as on the command line, ["train.steps=2", "parallel=auto"].

    Raises:
        ConfigError: a paragraph per wrong key or value.
    """
    _check_words(overrides, "meshwright.compose", "train.steps=2")
    return composed([*([] if recipe is None else [f"+recipe={recipe}"]), *overrides])


def train(config: Config | Sequence[str], folder: str | Path | None = None) -> Run:
    """Train in ranks of their own, as `run train` does, and wait for them.

    Args:
        config: of `compose`, or the words of a command, ["+recipe=quickstart", "train.steps=2"].
        folder: of the run; None: a new one in runs/.

    Raises:
        ConfigError, StrategyError: something is wrong with the input; the folder is left as it was.
        RunFailed: a rank failed.
    """
    if not isinstance(config, Config):
        _check_words(config, "meshwright.train", "+recipe=quickstart")
    checked = config if isinstance(config, Config) else composed(config)
    checked = validated(checked.model_dump() | {"job": {"name": "train"}}, Origins())
    own = f"runs/python/{time.strftime('%Y-%m-%d_%H-%M-%S')}-{secrets.token_hex(2)}"
    place = path_of(folder or own, "meshwright.train")
    known = (place / "config.json").exists()
    require_writable(str(place), "folder")
    try:
        with occupying(checked, place, None):
            loss = alone(checked, place)
    except CodedError as error:
        if not known and not isinstance(error, RunFailed):
            remove_if_unused(place.absolute())
        raise
    return Run(place, checked, loss)


def _check_words(given: object, what: str, example: str) -> None:
    """Raises ConfigError, for the call `what`, unless it is a list of strings."""
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(word, str) for word in given):
        raise ConfigError("MW103", f"{what}: {given!r} is no list of words; give one, such as [{example!r}].")
