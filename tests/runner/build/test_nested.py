"""Nested objects in args: schedulers of a scheduler, transforms of a dataset, modules of a model."""

from __future__ import annotations

import json

import networks
import pytest
import torch
from small import DOUBLE, SMALL

from runner.build import targets
from runner.build.optimizers import check_scheduler, scheduler
from runner.config.schema import Scheduler
from runner.errors import ConfigError

SEQUENCE = {
    "target": "torch.optim.lr_scheduler.SequentialLR",
    "args": {
        "milestones": [2],
        "schedulers": [
            {"target": "torch.optim.lr_scheduler.LinearLR", "args": {"start_factor": 0.5, "total_iters": 2}},
            {"_target_": "torch.optim.lr_scheduler.ExponentialLR", "gamma": 0.5},
        ],
    },
}
CHAIN = {
    "target": "torch.optim.lr_scheduler.ChainedScheduler",
    "args": {
        "schedulers": [
            {"target": "torch.optim.lr_scheduler.ConstantLR", "args": {"factor": 0.5, "total_iters": 2}},
            {"_target_": "torch.optim.lr_scheduler.ExponentialLR", "gamma": 0.5},
        ],
    },
}
WORDS = (
    *(*SMALL, "parallel=data_parallel", "model.target=networks.Composed", "data.target=networks.Transformed"),
    "model.args={body: {target: torch.nn.Linear, args: {in_features: 12, out_features: 12}}, "
    "head: {_target_: networks.Classifier, hidden: 8}}",
    "data.args={transforms: [{target: networks.Shift, args: {by: 0.5}}, {_target_: networks.Shift}]}",
)
SCHEDULED = (
    "optimizer.scheduler.target=torch.optim.lr_scheduler.SequentialLR",
    "optimizer.scheduler.args={milestones: [2], schedulers: ["
    "{target: torch.optim.lr_scheduler.LinearLR, args: {start_factor: 0.5, total_iters: 2}}, "
    "{_target_: torch.optim.lr_scheduler.ExponentialLR, gamma: 0.5}]}",
)


def test_objects_are_made_wherever_they_stand():
    made = targets.nested(
        {
            "plain": {"target": "label", "args": 3, "b": [1, (2, {"target": 5})]},
            "inner": [
                {"target": "networks.Shift"},
                {"_target_": "networks.Shift", "by": {"_target_": "builtins.float"}},
            ],
            "partial": {"_target_": "networks.Shift", "_partial_": True, "by": 2.0},
            "positional": {"_target_": "networks.Shift", "_args_": [3.0]},
            "named": {"_target_": "builtins.dict", "target": {"_target_": "networks.Shift", "by": 4.0}},
            "dotted": {"_target_": "builtins.dict", "target": "networks.Shift"},
            "data": {
                "_target_": "builtins.dict",
                "_recursive_": False,
                "_convert_": "all",
                "a": {"_target_": "networks.Shift"},
            },
        },
        "data.args",
    )
    assert made["plain"] == {"target": "label", "args": 3, "b": [1, (2, {"target": 5})]}
    assert [one.by for one in made["inner"]] == [1.0, 0.0]
    assert made["data"] == {"a": {"_target_": "networks.Shift"}}
    assert made["named"]["target"].by == 4.0 and made["dotted"] == {"target": "networks.Shift"}
    assert made["partial"]().by == 2.0 and made["positional"].by == 3.0


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ({"a": [{"target": "networks.Shfit"}]}, ("data.args.a[0].target = 'networks.Shfit'", "'Shift'")),
        ({"a": {"_target_": "nowhere.Shift"}}, ("data.args.a._target_ = 'nowhere.Shift'", "no module 'nowhere'")),
        ({"a": {"target": "networks.Shift", "args": {"bye": 1}}}, ("data.args.a.args: networks.Shift", "'bye'", "by")),
        ({"a": {"target": "networks.Points", "args": {"rows": -1}}}, ("data.args.a: networks.Points cannot be made",)),
        ({"a": {"_target_": "networks.Shift", "_convert_": "some"}}, ("data.args.a._convert_ = 'some'", "all")),
    ],
)
def test_a_wrong_object_is_refused_with_its_key(value, parts):
    with pytest.raises(ConfigError) as caught:
        targets.call(networks.Transformed, {"transforms": value}, "networks.Transformed", "data")
    text = str(caught.value).replace("data.args.transforms", "data.args")
    assert "\n" not in text and [part for part in parts if part not in text] == []


@pytest.mark.parametrize(("given", "expected"), [(SEQUENCE, [0.5, 0.75, 1.0, 0.5]), (CHAIN, [0.5, 0.25, 0.25, 0.125])])
def test_schedulers_of_a_scheduler_have_its_optimizer(given, expected):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    made = scheduler(Scheduler.model_validate(given), optimizer)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    assert rates == expected


def test_a_wrong_scheduler_of_a_scheduler_is_refused_with_its_key():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    wrong = SEQUENCE | {"args": SEQUENCE["args"] | {"schedulers": [{"target": "torch.optim.lr_scheduler.LinarLR"}]}}
    with pytest.raises(ConfigError, match=r"optimizer\.scheduler\.args\.schedulers\[0\]\.target = .*'LinearLR'"):
        check_scheduler(Scheduler.model_validate(wrong), optimizer)


def test_a_model_and_a_dataset_of_objects_are_verified_and_stay_plain_data(start):
    ended = start(*WORDS, *SCHEDULED, DOUBLE, "verify.steps=2", verb="verify")
    assert ended.verdict["passed"]


def test_a_scheduler_of_schedulers_resumes(start, command, tmp_path):
    full = start(*WORDS, *SCHEDULED, "train.log_every=1", folder="full")
    start(*WORDS, *SCHEDULED, "train.steps=3", "train.log_every=1", folder="parts")
    parts = start(*WORDS, *SCHEDULED, "train.resume=auto", "train.log_every=1", folder="parts")
    assert parts.value == full.value
    done = command("plan", *WORDS, *SCHEDULED, "hydra.run.dir=out")
    assert done.code == 0, done.err
    content = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert content["optimizer"]["scheduler"]["args"] == SEQUENCE["args"]
    assert content["data"]["args"]["transforms"][1] == {"_target_": "networks.Shift"}
