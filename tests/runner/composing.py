"""Composes the config of a command line without running the command."""

import hydra

from runner.cli import arguments as words
from runner.cli import recipes
from runner.config import load as config
from runner.config.origins import Origins


def compose_config(*overrides: str) -> config.Config:
    given = words.for_hydra(None, overrides)
    recipes.register()
    with hydra.initialize_config_module("conf", version_base="1.3"):
        return config.load(hydra.compose("config", given), Origins(given))
