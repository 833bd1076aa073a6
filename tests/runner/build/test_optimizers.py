"""Every parameter is in one group, the first matching glob counts, and every error names its config key."""

import pytest
import torch

from runner.build.optimizers import check_scheduler, frozen, need_of, optimizer_factory, parameter_groups, scheduler
from runner.config.schema import Optimizer, Scheduler
from runner.errors import ConfigError
from strategies.core.errors import StrategyError

NAMES = ("emb.weight", "layers.0.norm.weight", "layers.0.norm.bias", "layers.0.dense.weight", "head.bias")
NO_SCHEDULER = {"target": None, "args": {}, "per": "step"}


def config(**changes):
    given = {"target": "torch.optim.SGD", "args": {"lr": 0.1}, "groups": [], "freeze": [], "scheduler": NO_SCHEDULER}
    return Optimizer.model_validate({**given, **changes})


def parameters(*names):
    return [{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in names]


def test_what_an_optimizer_needs_is_tried_once():
    lr = {"lr": 0.1}
    assert optimizer_factory(config()) == optimizer_factory(config(groups=[{"match": ["*"], "args": {"lr": 0.5}}]))
    assert optimizer_factory(config()) != optimizer_factory(config(args={**lr, "momentum": 0.9}))
    assert optimizer_factory(config(args=lr)) != optimizer_factory(config(target="torch.optim.Adam", args=lr))
    assert need_of(config()) is need_of(config())


def test_without_groups_there_is_one():
    assert parameter_groups(NAMES, NAMES, config()) == [{"names": list(NAMES)}]


def test_the_first_group_that_matches_counts():
    groups = [
        {"match": ["*.bias", "*.norm.*"], "args": {"weight_decay": 0.0}},
        {"match": ["layers.*"], "args": {"lr": 0.5}},
    ]
    found = parameter_groups(NAMES, NAMES, config(groups=groups))
    assert found == [
        {"names": ["emb.weight"]},
        {"names": ["layers.0.norm.weight", "layers.0.norm.bias", "head.bias"], "weight_decay": 0.0},
        {"names": ["layers.0.dense.weight"], "lr": 0.5},
    ]


def test_frozen_parameters_are_in_no_group():
    chosen = config(freeze=["emb.*", "head.bias"], groups=[{"match": ["head.*"], "args": {"lr": 1.0}}])
    still = frozen(NAMES, chosen)
    assert still == {"emb.weight", "head.bias"}
    found = parameter_groups(NAMES, [name for name in NAMES if name not in still], chosen)
    assert found == [{"names": ["layers.0.norm.weight", "layers.0.norm.bias", "layers.0.dense.weight"]}]


def test_a_glob_that_matches_nothing_is_reported_with_the_closest_name():
    with pytest.raises(ConfigError) as caught:
        frozen(NAMES, config(freeze=["*.bias", "emb.wieght"]))
    assert str(caught.value).startswith("optimizer.freeze[1] = 'emb.wieght' matches no parameter of the model.")
    assert "Did you mean 'emb.weight'?" in str(caught.value)
    with pytest.raises(ConfigError, match=r"optimizer\.groups\[0\]\.match\[1\] = 'tail\.\*' matches no parameter"):
        parameter_groups(NAMES, NAMES, config(groups=[{"match": ["emb.*", "tail.*"], "args": {}}]))


def test_the_optimizer_is_made_with_arguments_and_groups():
    chosen = config(target="torch.optim.AdamW", args={"lr": 0.1, "weight_decay": 0.2})
    made = optimizer_factory(chosen)([parameters("a")[0], {**parameters("b")[0], "lr": 0.5}])
    assert isinstance(made, torch.optim.AdamW)
    assert [group["lr"] for group in made.param_groups] == [0.1, 0.5]
    assert [group["weight_decay"] for group in made.param_groups] == [0.2, 0.2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "torch.optim.SDG"}, r"optimizer\.target = 'torch\.optim\.SDG'.* Did you mean 'SGD'"),
        (
            {"target": "builtins.repr", "args": {}},
            r"made a str; a torch\.optim\.Optimizer is needed",
        ),
        (
            {"args": {"lr": 0.1, "momentun": 0.9}},
            r"optimizer\.args: .* no argument 'momentun'.* Did you mean 'momentum'",
        ),
        ({"args": {"lr": "abc"}}, r"optimizer\.args\.lr = 'abc': torch\.optim\.SGD takes a finite number"),
        ({"args": {"lr": float("nan")}}, r"optimizer\.args\.lr = nan: .* takes a finite number"),
        ({"args": {"lr": True}}, r"optimizer\.args\.lr = True: .* takes a finite number"),
        ({"args": {"lr": 0.1, "nesterov": "maybe"}}, r"optimizer\.args\.nesterov = 'maybe': .* takes true or false"),
        ({"target": "torch.optim.AdamW", "args": {"betas": [0.9]}}, r"optimizer\.args\.betas = .* takes a list of 2"),
        ({"target": "torch.optim.AdamW", "args": {"betas": ["a", "b"]}}, r"optimizer\.args\.betas = .* a list of 2"),
        ({"groups": [{"match": ["*"], "args": {"lr": "abc"}}]}, r"optimizer\.groups\[0\]\.args\.lr = 'abc'"),
        ({"args": {"lr": -1.0}}, r"optimizer: .*Invalid learning rate: -1\.0"),
        ({"groups": [{"match": ["*"], "args": {"decay": 1}}]}, r"optimizer\.groups\[0\]\.args: .* no argument 'decay'"),
        (
            {"groups": [{"match": ["*"], "args": {"lr": -1.0}}]},
            r"optimizer\.groups\[0\]: .*Invalid learning rate: -1\.0",
        ),
    ],
)
def test_an_error_of_an_optimizer_is_reported_before_it_is_needed(changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        optimizer_factory(config(**changes))
    assert "\n" not in str(caught.value)


def test_schedulers():
    optimizer = torch.optim.SGD(parameters("a"), lr=1.0)
    assert scheduler(Scheduler.model_validate(NO_SCHEDULER), optimizer) is None
    step = {"target": "torch.optim.lr_scheduler.StepLR", "args": {"step_size": 1, "gamma": 0.5}, "per": "epoch"}
    made = scheduler(Scheduler.model_validate(step), optimizer)
    assert made is not None
    for _ in range(2):
        optimizer.step()
        made.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    ("target", "args", "message"),
    [
        ("StepLR", {"gama": 0.5, "step_size": 1}, r"optimizer\.scheduler\.args: .* no argument 'gama'.* 'gamma'"),
        ("StepLR", {}, r"optimizer\.scheduler\.args: .* needs 'step_size'"),
        ("StepLR", {"step_size": "abc"}, r"optimizer\.scheduler\.args\.step_size = 'abc': .* takes an integer"),
        ("MultiStepLR", {"milestones": "abc"}, r"optimizer\.scheduler\.args\.milestones = 'abc': .* takes a list"),
        ("CosineAnnealingLR", {"T_max": 0}, "fails in a step: ZeroDivisionError"),
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 7}, "fails in step 8, the last of this run: .*step 8 times"),
        (
            "SequentialLR",
            {
                "milestones": [3],
                "schedulers": [
                    {"_target_": "torch.optim.lr_scheduler.ConstantLR"},
                    {
                        "_target_": "torch.optim.lr_scheduler.ChainedScheduler",
                        "schedulers": [{"_target_": "torch.optim.lr_scheduler.ConstantLR"}],
                    },
                ],
            },
            "fails in step 3, a milestone: NotImplementedError",
        ),
        ("StepLN", {}, r"optimizer\.scheduler\.target = .*Did you mean 'StepLR'"),
        ("EPOCH_DEPRECATION_WARNING", {}, "a class or function is needed"),
        ("Optimizer.__repr__", {}, r"made a str; a torch\.optim\.lr_scheduler\.LRScheduler is needed"),
    ],
)
def test_an_error_of_a_scheduler_is_reported(target, args, message):
    optimizer = torch.optim.SGD(parameters("a"), lr=1.0)
    given = {"target": f"torch.optim.lr_scheduler.{target}", "args": args, "per": "step"}
    with pytest.raises(ConfigError, match=message):
        check_scheduler(Scheduler.model_validate(given), optimizer, steps=8)


@pytest.mark.parametrize(
    ("target", "args", "kept"),
    [
        ("SGD", {"lr": 0.1}, 0),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, 1),
        ("RMSprop", {}, 1),
        ("Adam", {}, 2),
        ("Adam", {"amsgrad": True}, 3),
        ("Adafactor", {}, 2 / 64),  # one state per row and one per column
    ],
)
def test_how_many_numbers_an_optimizer_keeps(target, args, kept):
    assert need_of(config(target=f"torch.optim.{target}", args=args)).kept / 4 == kept


def test_an_optimizer_that_no_plan_supports_is_reported():
    with pytest.raises(StrategyError, match="Optimizer LBFGS cannot be used here"):
        need_of(config(target="torch.optim.LBFGS"))


def test_an_optimizer_that_fails_in_a_step_is_reported():
    with pytest.raises(ConfigError, match="Adam fails in a step: AssertionError: If capturable"):
        need_of(Optimizer(target="torch.optim.Adam", args={"lr": 0.1, "capturable": True}))
