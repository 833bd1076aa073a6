"""The kernels of an update: chosen where the user has chosen none, and no part of a checkpoint. torch's fused kernels
run on CPUs too, so what a GPU would do is tried here."""

import pytest
import torch
from torch import nn

from strategies.optimizer.kernels import choose, choose_for_device
from strategies.optimizer.state import OptimizerScalars, groups_of, placed, set_groups


def parameters(dtype=torch.float64):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(5, 3, dtype=dtype)), nn.Parameter(torch.randn(3, dtype=dtype))]


@pytest.mark.parametrize(
    ("kind", "args"),
    [("Adam", {"amsgrad": True}), ("AdamW", {}), ("SGD", {"momentum": 0.9, "nesterov": True}), ("RMSprop", {})],
)
@pytest.mark.parametrize("kernels", ["foreach", "fused"])
def test_updates_do_not_depend_on_the_kernels(kind, args, kernels):
    found = []
    for chosen in ("loop", kernels):
        values = parameters()
        optimizer = getattr(torch.optim, kind)([{"params": values[:1]}, {"params": values[1:]}], lr=0.1, **args)
        choose(optimizer, chosen)
        for step in range(3):
            for value in values:
                value.grad = torch.full_like(value, 0.3 + step) * value.detach()
            optimizer.step()
        found.append((values, optimizer.param_groups))
    (expected, _), (values, groups) = found
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=0)
    fused = kernels == "fused" and kind != "RMSprop"
    assert all(group.get("fused", False) is (True if fused else groups[0].get("fused", False)) for group in groups)
    assert all(bool(group["foreach"]) is not fused for group in groups)


@pytest.mark.parametrize("given", [{"foreach": False}, {"foreach": True}, {"fused": False}, {"fused": True}])
def test_what_the_user_has_chosen_stays(given):
    optimizer = torch.optim.AdamW(parameters(), lr=0.1, **given)
    choose(optimizer, "fused")
    untouched = torch.optim.AdamW(parameters(), lr=0.1, **given).param_groups[0]
    assert all(optimizer.param_groups[0][name] == untouched[name] for name in ("foreach", "fused"))


def test_complex_parameters_and_cpus_are_left_to_torch():
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1)
    choose(optimizer, "fused")
    assert optimizer.param_groups[0]["fused"] is None
    optimizer = torch.optim.Adam(parameters(), lr=0.1)
    choose_for_device(optimizer)
    assert optimizer.param_groups[0]["fused"] is optimizer.param_groups[0]["foreach"] is None


def test_a_checkpoint_moves_between_kernels():
    saved = torch.optim.Adam(parameters(), lr=0.3)
    choose(saved, "fused")
    loaded = torch.optim.Adam(parameters(), lr=0.1)
    set_groups(loaded, [["a", "b"]], OptimizerScalars(groups_of(saved, [["a", "b"]])))
    (group,) = loaded.param_groups
    assert (group["lr"], group["fused"], group["foreach"]) == (0.3, None, None)
    beside, step = torch.zeros(5, device="meta"), torch.tensor(3.0)
    assert placed("step", step, beside, {"fused": True}).device.type == "meta"
    assert placed("step", step, beside, group).device.type == "cpu"
