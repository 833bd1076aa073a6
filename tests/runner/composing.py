"""The config that a command line gives, without the command."""

import hydra

from runner import config
from runner.command import recipes, words
from runner.origins import Origins


def compose_config(*overrides: str) -> config.Config:
    given = words.for_hydra(None, overrides)
    recipes.register()
    with hydra.initialize_config_module("conf", version_base="1.3"):
        return config.load(hydra.compose("config", given), Origins(given))
