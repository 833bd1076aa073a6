"""Counting the bytes of live tensors: each storage once, until it is really freed, with or without numbers."""

from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from strategies.optimizer.bytes_per_element import Need, needed
from strategies.runtime.live_tensors import Live
from strategies.runtime.offload import on_side

MIB = 2**20


def test_a_storage_counts_once_until_its_last_view_is_gone():
    with Live("cpu") as live:
        base = torch.zeros(MIB // 4)
        view = base.view(2, -1)[1]
        assert live.now == live.peak == MIB
        del base
        view + 1  # a temporary
        assert (live.now, live.peak) == (MIB, MIB + MIB // 2)
        live.restart()
        assert live.peak == MIB
        del view
        assert live.now == 0


def test_earlier_tensors_count_when_they_are_used():
    old = torch.zeros(256)
    with Live("cpu") as live:
        assert live.now == 0
        live.counting = False
        kept = torch.zeros(256)
        assert live.now == 0
        live.counting = True
        old + kept
        assert (live.now, live.peak) == (2048, 3072)


def test_tensors_made_on_the_host_or_from_host_tensors_are_on_the_host():
    with Live("cpu") as live:
        with on_side(True):
            host = torch.zeros(256)
        state = torch.zeros_like(host)
        with on_side(False):
            back = host.clone()
        assert (live.host, live.now) == (2048, 1024)
        live.hosted([back])
        assert (live.host, live.now) == (3072, 0)
        del state
        assert (live.host, live.host_peak) == (2048, 3072)


def test_convolutions_on_a_gpu_copy_operands_whose_channels_are_not_last():
    with FakeTensorMode() as shapes:
        x, weight = torch.empty(4, 8, 6, 6, device="cuda"), torch.empty(8, 8, 3, 3, device="cuda")
        for form, copied in ((x, True), (x.to(memory_format=torch.channels_last), False)):
            live = Live("cuda", shapes)
            with live:
                live.see([form, weight])
                y = torch.nn.functional.conv2d(form, weight)
            operands = form.nbytes + weight.nbytes + y.nbytes
            assert live.now == operands
            assert live.peak == operands + operands * copied


def test_a_step_takes_the_same_without_numbers():
    def step() -> list[int]:
        net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))
        with Live("cpu") as live:
            loss = net(torch.ones(8, 64)).square().mean()
            forward = live.now, live.peak
            live.restart()
            loss.backward()
            return [*forward, live.now, live.peak]

    with FakeTensorMode():
        shapes = step()
    assert shapes == step()


@pytest.mark.parametrize(
    ("optimizer", "need"),
    [
        (
            lambda groups: torch.optim.SGD(groups, lr=0.1),
            Need(0, 0, 0, 0, 12, 2, 1, 4),  # two are read, one is written
        ),
        (lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9), Need(4, 0, 0, 0, 32, 2, 3, 4)),
        (lambda groups: torch.optim.AdamW(groups, lr=0.1), Need(8, 8, 4, 0, 80, 2, 10, 4)),
        (lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True), Need(8, 0, 0, 0, 32, 4, 0, 4)),
    ],
)
def test_memory_needs_of_an_optimizer(optimizer, need):
    assert needed(optimizer, torch.float32) == need


def test_a_gpu_updates_all_at_once():
    need = needed(lambda groups: torch.optim.AdamW(groups, lr=0.1), torch.float32, "foreach")
    assert need == Need(8, 0, 0, 4, 80, 12, 2, 4)
    assert need.during([10, 30]) == 160
    assert Need(8, 8, 4, 0, 80, 2, 10, 4).during([30, 10]) == 240
    assert Need(8, 8, 4, 0, 80, 2, 10, 4).during([30, 20]) == 280
    dtypes = (torch.bfloat16, torch.float32, torch.complex64, torch.float64)
    assert [Need(8, 8, 4, 0, 80, 2, 10, 4).elements(3, dtype) for dtype in dtypes] == [3, 3, 6, 6]


def test_a_fused_kernel_needs_no_temporaries_on_a_gpu():
    for kind in (torch.optim.AdamW, torch.optim.Adam):
        assert needed(partial(kind, lr=0.1), torch.float32, "fused") == Need(8, 0, 0, 0, 32, 4, 0, 4)
    assert needed(partial(torch.optim.SGD, lr=0.1), torch.float32, "fused").moved == 16
    loop = needed(partial(torch.optim.Adagrad, lr=0.1, foreach=False), torch.float32, "fused")
    assert loop == needed(partial(torch.optim.Adagrad, lr=0.1), torch.float32)
