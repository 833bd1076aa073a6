"""Saved tensors on the host or on disk: bitwise equal, every storage once, and its memory really freed."""

import copy
import os

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from strategies.runtime.activation_offload import Activations, look_up_parameters
from strategies.runtime.disk import Disk
from strategies.runtime.offload import OffloadTraffic

CPU = torch.device("cpu")


class Block(nn.Module):
    """Views of one storage, an expanded and a transposed tensor, a tensor that is saved twice, a small one."""

    def __init__(self, width=32):
        super().__init__()
        self.joined, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.scale = nn.LayerNorm(width), nn.Parameter(torch.full((1,), 0.5))
        self.register_buffer("shift", torch.linspace(0, 1, width))

    def forward(self, x):
        q, k, v = self.joined(self.norm(x)).chunk(3, -1)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        x = x + self.out(torch.relu(weights @ v) * self.shift)
        return x * torch.sigmoid(x) * self.scale.expand(x.shape[-1])


def step(net, x):
    loss = net(x).square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in net.parameters())]


@pytest.fixture(params=["host", "disk"])
def home(request, tmp_path):
    disk = Disk(tmp_path) if request.param == "disk" else None
    yield lambda larger_than=0: Activations(CPU, larger_than, disk)
    if disk is not None:
        disk.close()
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_same_bits(home, dtype):
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block()).to(dtype)
    moving, away = copy.deepcopy(plain), home()
    away.attach(moving.modules(), [*moving.parameters(), *moving.buffers()])
    for _ in range(3):
        x = torch.randn(4, 8, 32, dtype=dtype)
        for one, other in zip(step(plain, x), step(moving, x), strict=True):
            assert torch.equal(one, other)
    assert away.away == 0, "backward gave everything back"
    assert away.moved.stored * 3 == away.moved.out > 0


class Products(nn.Module):
    """Saves y (for both tanh and its user) and, of the same storage, its transpose; x is an input."""

    def forward(self, x):
        y = torch.tanh(x)
        return (y @ y.t()).sum()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_have_the_same_bits(home, kind):
    """The chunks of their gates share a storage, not its version counter, and are written one after the other."""
    torch.manual_seed(0)
    plain = kind(4, 6, bidirectional=True).double()
    moving, away = copy.deepcopy(plain), home()
    away.attach(moving.modules(), [*moving.parameters()])
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    for net in (plain, moving):
        net(x)[0].square().mean().backward()
    for one, other in zip(plain.parameters(), moving.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert away.away == 0 and away.moved.out > 0


def test_each_storage_travels_once(home):
    """y is saved by tanh and, twice, by the product, and returns once for each of the two; x is not saved."""
    away, net = home(), Products()
    away.attach([net], [])
    x = torch.randn(10, 10, requires_grad=True)
    loss = net(x)
    assert away.moved == OffloadTraffic(400, 0, 400)
    loss.backward()
    assert away.moved == OffloadTraffic(400, 800, 400)


def test_small_tensors_stay(home):
    away, net = home(401), Products()
    away.attach([net], [])
    net(torch.randn(10, 10, requires_grad=True)).backward()
    assert away.moved == OffloadTraffic()


def test_tensors_that_stay_alive_are_not_offloaded(home):
    away, net = home(), nn.Linear(50, 50, bias=False)
    away.attach([net], list(net.parameters()))
    x = torch.randn(2, 50, requires_grad=True)
    net(x).sum().backward()
    assert away.moved == OffloadTraffic(400, 400, 400), "x, not the weight"


def test_parameters_are_looked_up_in_backward():
    """Stage 3 frees a parameter after forward and gathers it again, in other memory, before backward."""
    net, away = nn.Linear(4, 4), Activations(CPU)
    away.attach([net], [])
    x = torch.randn(2, 4, requires_grad=True)
    loss, weight = net(x).sum(), net.weight.detach().clone()
    net.weight.data = torch.empty(0)
    with pytest.raises(RuntimeError, match="has not gathered"):
        loss.backward()
    net.weight.data = weight.clone()
    loss = net(x).sum()
    net.weight.data = weight.clone()
    loss.backward()
    assert torch.equal(x.grad, torch.ones(2, 4) @ weight)


@pytest.mark.parametrize("attached", [False, True])
def test_memory_is_let_go_between_forward_and_backward(home, attached):
    seen = []

    class Net(nn.Module):
        def forward(self, x):
            y = torch.exp(x)
            seen.append(StorageWeakRef(y.untyped_storage()))
            return y.square().sum()

    net, away = Net(), home()
    if attached:
        away.attach([net], [])
    loss = net(torch.randn(1000, requires_grad=True))
    if away.disk is not None and away.writing is not None:
        away.disk.wait(away.writing)
    assert seen[0].expired() == attached
    loss.backward()


def test_other_modules_and_evaluation_keep_as_before(home):
    away, net = home(), nn.Sequential(nn.Tanh(), nn.Tanh())
    away.attach([net[1]], [])
    x = torch.randn(10, requires_grad=True)
    with torch.no_grad():
        net(x)
    assert away.moved == OffloadTraffic()
    net(x).sum().backward()
    assert away.moved.out == 40


def test_a_full_disk_is_reported(tmp_path, monkeypatch):
    disk = Disk(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("strategies.runtime.disk.os.pwrite", full)
    extent = disk.put(torch.zeros(8))
    with pytest.raises(OSError, match="No space left"):
        disk.get(extent, torch.empty(8))
    disk.close()


def test_space_is_used_again(tmp_path):
    disk = Disk(tmp_path)
    for value in range(4):
        extent = disk.put(torch.full((2048,), float(value)))
        found = torch.empty(2048)
        disk.get(extent, found)
        assert (found == value).all()
        disk.free(extent)
    assert os.fstat(disk.file.fileno()).st_blocks * 512 == 8192
    disk.close()


class Swapped(nn.Module):
    """Frees its weight while it runs, and saves an activation for backward in the same memory."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((64,), 2.0))

    def forward(self, x):
        there = self.weight.detach()
        self.weight.data = torch.full((64,), 2.0)
        h = there.copy_(x * 3)
        return (h * h * self.weight).sum()


@pytest.mark.parametrize("way", ["away", "looked up"])
def test_an_activation_in_the_memory_of_a_freed_parameter_is_no_parameter(way):
    net, x = Swapped(), torch.full((64,), 5.0, requires_grad=True)
    activations = Activations(CPU)
    if way == "away":
        activations.attach([net], [net.weight])
    else:
        look_up_parameters(net)
    net(x).backward()
    assert torch.equal(x.grad, torch.full((64,), 2 * 5.0 * 9 * 2))
    assert (activations.moved.out > 0) == (way == "away")
