"""Scheduler states are restored under a plan with other parameter groups."""

import torch
from torch.optim import lr_scheduler

from runner.checkpoint.loading import regrouped


def optimizer(rates):
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates])


def sequence(given):
    first = lr_scheduler.LambdaLR(given, lambda step: 1 / (step + 1))
    return lr_scheduler.SequentialLR(given, [first, lr_scheduler.CosineAnnealingLR(given, 9)], [3])


def rates_after(scheduler, steps):
    found = []
    for _ in range(steps):
        scheduler.optimizer.step()
        scheduler.step()
        found.append(scheduler.get_last_lr())
    return found


def test_every_group_takes_the_entries_of_its_parameters():
    """Parameter groups [a, b], [c] become [c], [a], [b], also across two pipeline groups that hold some each."""
    before = sequence(optimizer([0.1, 0.5]))
    rates_after(before, 5)
    stored = {"groups": [{"names": ["a", "b"]}, {"names": ["c"]}], "scheduler": before.state_dict()}
    after = sequence(optimizer([0.5, 0.1, 0.1]))
    for group, rate in zip(after.optimizer.param_groups, (1, 0, 0), strict=True):
        group["lr"] = before.optimizer.param_groups[rate]["lr"]
    state = regrouped([stored], [["c"], ["a"], ["b"]])
    assert [one["base_lrs"] for one in state["_schedulers"]] == [[0.5, 0.1, 0.1]] * 2
    after.load_state_dict(state)
    for old, new in zip(rates_after(before, 4), rates_after(after, 4), strict=True):
        assert new == [old[1], old[0], old[0]]
    one = {"groups": [{"names": ["c"]}], "scheduler": {"base_lrs": [0.5], "last_epoch": 2}}
    other = {"groups": [{"names": ["a"]}], "scheduler": {"base_lrs": [0.1], "last_epoch": 2}}
    assert regrouped([one, other], [["a"], ["c"]]) == {"base_lrs": [0.1, 0.5], "last_epoch": 2}


def test_groups_without_parameters_change_nothing():
    """A stage of a pipeline has no parameters of some groups."""
    one = {"groups": [{"names": []}, {"names": ["c"]}], "scheduler": {"base_lrs": [0.1, 0.5], "last_epoch": 2}}
    other = {"groups": [{"names": ["a"]}, {"names": []}], "scheduler": {"base_lrs": [0.1, 0.5], "last_epoch": 2}}
    assert regrouped([one, other], [["c"], ["a"]])["base_lrs"] == [0.5, 0.1]
    assert regrouped([one, other], [["a"], []])["base_lrs"][0] == 0.1


def test_the_same_groups_take_what_they_had():
    scheduler = sequence(optimizer([0.1, 0.5]))
    rates_after(scheduler, 5)
    state = scheduler.state_dict()
    assert regrouped([{"groups": [{"names": ["a"]}, {"names": ["b"]}], "scheduler": state}], [["a"], ["b"]]) == state
