"""The data of a run: augmented alike on all ranks, and the same data everywhere."""

import pytest
from small import ALONE, DOUBLE, SMALL

from runner.errors import ConfigError, RunFailed

AUGMENTED = ("data.target=augmented.Augmented", DOUBLE)


@pytest.mark.parametrize(
    "how",
    [
        ("parallel=data_parallel", "train.accumulate=2"),
        ("parallel=semi_auto", "parallel.dataset_strategy=[[2,2],[2]]", "model.args.dropout=0.3"),
        ("parallel=data_parallel", "parallel.pipeline.stages=2", "parallel.pipeline.micro_batches=2"),
    ],
)
def test_random_augmentation_verifies(start, how):
    assert start(*SMALL, *AUGMENTED, *how, "verify.steps=5", verb="verify").verdict["passed"]


def test_a_resumed_run_augments_as_the_first_did(start):
    more = (
        *SMALL,
        *AUGMENTED,
        *ALONE,
        "train.steps=6",
        "train.log_every=1",
        "checkpoint.every=3",
        "model.args.dropout=0.2",
    )
    whole = start(*more, folder="whole").losses
    start(*more, "train.steps=3", folder="parts")
    assert start(*more, "train.resume=auto", folder="parts").losses == whole


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ("{less: 8}", "the number of training rows: 56 instead of 64"),
        ("{shift: 1.0}", "training row"),
    ],
)
def test_other_data_on_a_rank_is_named(start, args, named):
    how = ("parallel=data_parallel", "data.target=augmented.OfRank", f"data.args={args}")
    with pytest.raises(RunFailed, match=named):
        start(*SMALL, *how, "world_size=3", "data.batch_size=12")


def test_a_collate_makes_a_row_of_every_sample(start):
    with pytest.raises(ConfigError, match="makes '0' with 8 rows from 16 samples"):
        start(*SMALL, "data.collate=augmented.halves", "parallel=data_parallel")
