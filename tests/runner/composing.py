"""Composes the config of a command line without running the command."""

from runner.cli.jobs import composed
from runner.config.schema import Config


def compose_config(*overrides: str) -> Config:
    return composed(overrides)
