"""Removes training-only settings from a config."""

from __future__ import annotations

from runner.config.parallel import Parallel
from runner.config.schema import Config

TRAINING_ONLY = ("zero", "offload", "recompute", "memory_limit")
"""Keys of `parallel`."""


def without_training(config: Config) -> Config:
    """`config` for prediction: there are no gradients and no optimizer, so ZeRO, offload, recompute and the memory
    limit of training have their defaults. The slices of the weights are those of the plan."""
    defaults = Parallel()
    parallel = config.parallel.model_copy(update={name: getattr(defaults, name) for name in TRAINING_ONLY})
    train = config.train.model_copy(update={"resume": None, "compile": False, "measure_memory": False})
    return config.model_copy(update={"parallel": parallel, "train": train})
