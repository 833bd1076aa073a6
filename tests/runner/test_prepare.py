"""What is refused before any rank starts, although the config alone does not show it."""

import hydra
import pytest
from composing import compose_config
from small import HYBRID, SMALL

from runner import config
from runner.command import recipes
from runner.errors import ConfigError
from runner.origins import Origins
from runner.planning.prepare import prepare, request_of


def test_a_hybrid_mesh_must_have_the_ranks_that_are_at_hand():
    recipes.register()
    with hydra.initialize_config_module("conf", version_base="1.3"):
        overrides = [*SMALL, *HYBRID, "world_size=null", "device=cpu"]
        open_ended = config.load(hydra.compose("config", overrides), Origins(overrides))
    with pytest.raises(ConfigError, match=r"has 4 devices, but there are 8 ranks .*; set world_size=4 or another mesh"):
        prepare(open_ended, None)


@pytest.mark.parametrize(("momentum", "kept"), [(0.0, 0), (0.9, 1)])
def test_a_search_knows_what_the_optimizer_keeps(momentum, kept):
    optimizer = ("optimizer.target=torch.optim.SGD", f"+optimizer.args.momentum={momentum}")
    assert request_of(compose_config(*SMALL, "parallel=data_parallel", *optimizer), 4).states == kept


@pytest.mark.parametrize(
    ("words", "turns"),
    [
        ((), 1),
        (("train.accumulate=2",), 2),
        (("train.accumulate=2", "parallel.pipeline.stages=2", "parallel.pipeline.micro_batches=4"), 10),
    ],
    ids=str,
)
def test_a_search_knows_how_many_micro_batches_take_a_step(words, turns):
    """A pipeline of two stages waits for one more."""
    config = compose_config(*SMALL, "parallel=data_parallel", "data.batch_size=64", *words)
    assert request_of(config, 4).turns == turns
