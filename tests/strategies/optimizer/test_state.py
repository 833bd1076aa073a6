"""Options of parameter groups by name, from one plan to the next."""

import pytest
import torch
from torch import nn

from strategies.core.errors import StrategyError
from strategies.optimizer.state import OptimizerScalars, groups_of, set_groups


def optimizer(*rates: float) -> torch.optim.Optimizer:
    """One group for each rate, of one parameter."""
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates])


def test_groups_name_the_parameters_of_their_own_plan() -> None:
    """Not those of the stage from which they have their options."""
    stage, all_stages, other_stage = optimizer(0.5), optimizer(0.1), optimizer(0.1)
    set_groups(all_stages, [["a", "b"]], OptimizerScalars(groups_of(stage, [["a"]])))
    saved = groups_of(all_stages, [["a", "b"]])
    assert saved[0]["names"] == ["a", "b"]
    set_groups(other_stage, [["b"]], OptimizerScalars(saved))
    assert other_stage.param_groups[0]["lr"] == 0.5


def test_a_group_that_names_too_little_is_taken_where_it_is_the_only_one() -> None:
    one, two = optimizer(0.5), optimizer(0.5, 0.25)
    set_groups(loaded := optimizer(0.1), [["b"]], OptimizerScalars(groups_of(one, [["a"]])))
    assert loaded.param_groups[0]["lr"] == 0.5
    several = OptimizerScalars(groups_of(two, [["a"], ["c"]]))
    set_groups(loaded, [[]], several)
    assert loaded.param_groups[0]["lr"] == 0.5
    with pytest.raises(StrategyError, match="no options of the optimizer for b") as caught:
        set_groups(loaded, [["b"]], several)
    assert caught.value.code == "MW607"
