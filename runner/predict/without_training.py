"""A config with nothing in it that only training needs."""

from __future__ import annotations

from runner.config.offload import ActivationOffload, OffloadForm
from runner.config.parallel import Zero
from runner.config.recompute import Recompute
from runner.config.schema import Config

NOTHING = OffloadForm(
    optimizer="none",
    parameters="none",
    activations=ActivationOffload(to="none", modules=(), larger_than=0),
    folder=None,
)
NO_RECOMPUTE = Recompute(operators="none", modules=None, communication=None, slice_inputs=False)


def without_training(config: Config) -> Config:
    """`config` for prediction: there are no gradients and no optimizer, so ZeRO, offload, recompute and a limit of
    memory that holds for training do not matter. The slices of the weights are those of the plan."""
    parallel = config.parallel.model_copy(
        update={
            "zero": Zero(stage=0, options={}),
            "offload": NOTHING,
            "recompute": NO_RECOMPUTE,
            "memory_limit": None,
        }
    )
    train = config.train.model_copy(update={"resume": None, "compile": False, "measure_memory": False})
    return config.model_copy(update={"parallel": parallel, "train": train})
