"""Layers that a step leaves without a gradient are not moved, by momentum or weight decay, in any mode."""

import pytest
from small import DOUBLE, MODES, SMALL

EITHER = (
    *SMALL,
    DOUBLE,
    "model.target=networks.Either",
    "data.batch_size=4",
    "train.steps=12",
    "optimizer.target=torch.optim.SGD",
    "optimizer.args={lr: 0.1, momentum: 0.9, weight_decay: 0.2}",
)
TWO = (*MODES["data_parallel"], "world_size=2")
STAGES = (*TWO, "parallel.pipeline.stages=2", "parallel.pipeline.micro_batches=2", "parallel.pipeline.cuts={choice: 1}")


@pytest.mark.parametrize(
    "words",
    [
        TWO,
        (*TWO, "parallel.zero.stage=3"),
        STAGES,
        pytest.param((*TWO, "train.compile=true"), marks=pytest.mark.slow),
        pytest.param(
            ("world_size=4", "parallel=auto", "parallel.search=recursive_programming"), marks=pytest.mark.slow
        ),
        pytest.param((*STAGES, "parallel.pipeline.schedule=zero_bubble"), marks=pytest.mark.slow),
    ],
    ids=lambda words: " ".join(words[2:])[:60],
)
def test_a_layer_without_a_gradient_stays(start, words):
    """Joined redistributions, and the borders of stages, made gradients of zeros for the layer that is not taken."""
    micro_batches = ["train.accumulate=2"] if "parallel.pipeline.stages=2" in words else []
    alone = start(*EITHER, *MODES["stand_alone"], *micro_batches, folder="alone")
    assert start(*EITHER, *words, folder="ranks").losses == pytest.approx(alone.losses, rel=1e-12)
