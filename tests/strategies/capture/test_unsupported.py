"""Unsupported constructs are rejected by name and line, and all patches are restored."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn import functional as F
from torch.nn.modules.module import register_module_full_backward_hook
from torch.utils.checkpoint import checkpoint

from strategies.capture import Captured, LossFunction, Objective, capture
from strategies.core.errors import StrategyError


class Net(nn.Module):
    """x [8, 4] -> a scalar, by `body`."""

    def __init__(self, body: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.table, self.body = nn.Linear(4, 4), nn.Embedding(4, 4, sparse=True), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x).square().mean()


def captured(net: nn.Module, training: bool = True) -> Captured:
    return capture(Objective(net, None, ("x",), ()), (torch.randn(8, 4),), training=training)


def hooked(net: Net, x: Tensor) -> Tensor:
    h = net.inner(x)
    h.register_hook(lambda gradient: gradient / 2)
    return h


def hooked_once(register: Callable[[Net], Any]) -> Callable[[Net, Tensor], Tensor]:
    def body(net: Net, x: Tensor) -> Tensor:
        register(net)
        return net.inner(x)

    return body


def packed(net: Net, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.half(), lambda saved: saved.float()):
        return net.inner(x).tanh()


def drawn(net: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return grad(F.dropout(net.inner(x), 0.5).tanh().sum(), x, create_graph=True)[0]


def propagated(net: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    net.inner(x).tanh().sum().backward()
    return net.inner(x)


def under_autocast(net: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        return grad(net.inner(x).sum(), x, create_graph=True)[0]


def matched(net: Net, x: Tensor) -> Tensor:
    """As with scipy's linear_sum_assignment."""
    return net.inner(x)[torch.as_tensor(net.inner(x).detach().cpu().numpy().argsort(0)[:, 0])]


def forked(net: Net, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return net.inner(x) * torch.rand(4)


REFUSED: dict[str, tuple[Callable[[Net, Tensor], Tensor], str]] = {
    "hook": (hooked, r"registers a hook on a gradient at capture/test_unsupported.py:\d+, which would never be called"),
    "hook of a module": (
        hooked_once(lambda net: net.inner.register_full_backward_hook(lambda *_: None)),
        r"registers a hook on a gradient at capture/test_unsupported.py:\d+, which would never be called",
    ),
    "hook of a module, before": (
        hooked_once(lambda net: net.inner.register_full_backward_pre_hook(lambda *_: None)),
        r"registers a hook on a gradient at capture/test_unsupported.py:\d+, which would never be called",
    ),
    "hook after accumulation": (
        hooked_once(lambda net: net.inner.weight.register_post_accumulate_grad_hook(lambda _: None)),
        r"registers a hook on a gradient at capture/test_unsupported.py:\d+, which would never be called",
    ),
    "hook of a node": (
        lambda net, x: (net.inner(x).grad_fn.register_hook(lambda into, out: into), x)[1],
        r"registers a hook on a gradient at capture/test_unsupported.py:\d+, which would never be called",
    ),
    "a copy": (
        lambda net, x: copy.deepcopy(net.inner)(x),
        r"copies tensors \(copy.deepcopy\) at capture/test_unsupported.py:\d+",
    ),
    "packed for backward": (packed, r"keeps values for backward by a function .* at capture/test_unsupported.py:\d+"),
    "derivative of a random value": (
        drawn,
        r"computes a derivative at capture/test_unsupported.py:\d+, which is not captured: it goes through dropout",
    ),
    "derivative by backward": (propagated, r"which is not captured: backward\(\) writes to .grad"),
    "derivative under autocast": (under_autocast, r"which is not captured: it is under autocast"),
    "numbers of an array": (
        lambda net, x: net.inner(x) / float(net.inner(x).detach().numpy().max()),
        r"leaves torch at capture/test_unsupported.py:\d+: .*custom_op",
    ),
    "a branch by an array": (
        lambda net, x: net.inner(x) * (2 if net.inner(x).detach().numpy().max() > 0 else 3),
        r"leaves torch at capture/test_unsupported.py:\d+: .*custom_op",
    ),
    "an array times a tensor": (
        lambda net, x: net.inner(x) * net.inner(x).detach().numpy(),
        r"leaves torch at capture/test_unsupported.py:\d+: .*custom_op",
    ),
    "numpy": (matched, r"leaves torch at capture/test_unsupported.py:\d+: .*argsort.*custom_op"),
    "vmap": (
        lambda net, x: torch.vmap(F.dropout, randomness="same")(net.inner(x)),
        r"torch.vmap at .* draws random numbers",
    ),
    "sparse": (lambda net, x: net.table(torch.arange(4)), r"embedding at .* has sparse=True"),
    "products of a selection": (
        lambda net, x: net.inner(x)[x[:, 0] > 0].T @ net.inner(x)[x[:, 0] > 0],
        r"^T at .* takes a tensor whose shape depends on values",
    ),
    "mask": (
        lambda net, x: net.inner(x)[x[:, 0] > 0].exp().sort(0)[0].tanh(),
        r"^sort at .* takes a tensor whose shape depends on values \(indexed with a mask",
    ),
    "seed": (
        lambda net, x: (torch.manual_seed(3), net.inner(x) * torch.rand(4))[1],
        r"sets the state of torch's random numbers \(manual_seed\) at capture/test_unsupported.py:\d+",
    ),
    "a collective": (
        lambda net, x: (dist.broadcast(x, 0), net.inner(x))[1],
        r"calls torch.distributed.broadcast at capture/test_unsupported.py:\d+, but the program of the ranks has",
    ),
    "numbers drawn apart": (forked, r"sets the state of torch's random numbers \(fork_rng\) at .*unsupported.py:\d+"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    body, message = REFUSED[name]
    before = Tensor.register_hook, torch.autograd._engine_run_backward
    with pytest.raises(StrategyError, match=message):
        captured(Net(body))
    assert (Tensor.register_hook, torch.autograd._engine_run_backward) == before


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_a_forward_in_a_process_group_is_that_of_one_device() -> None:
    def synchronised(net: Net, x: Tensor, reduce: Callable[..., Any] = dist.all_reduce) -> Tensor:
        reduce(mean := net.inner(x).detach().mean(0).clone())
        return net.inner(x) - mean

    with pytest.raises(StrategyError, match=r"calls _c10d_functional::all_reduce at capture/test_unsupported.py:\d+"):
        captured(Net(synchronised))
    alone = captured(Net(lambda net, x: synchronised(net, x) if dist.is_initialized() else net.inner(x)))
    assert [operator.op for operator in alone.graph.operators] == ["linear", "square", "mean"]
    assert dist.is_initialized()


def test_packing_of_torch_changes_nothing() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            x = x.tanh()
        return checkpoint(net.inner, x, use_reentrant=False)

    assert [operator.op for operator in captured(Net(body)).graph.operators] == ["tanh", "linear", "square", "mean"]


def test_evaluation_has_no_gradients() -> None:
    watching = Net(lambda net, x: net.inner(x) + net.table(torch.arange(4)).sum())
    watching.inner.weight.register_hook(lambda gradient: gradient / 2)
    ops = [operator.op for operator in captured(watching, training=False).graph.operators]
    assert "linear" in ops and "embedding" in ops


ADDED: dict[str, tuple[Callable[[nn.Linear], Any], str]] = {
    "of a parameter": (lambda layer: layer.weight.register_hook(lambda g: g / 2), "Parameter inner.weight has a hook"),
    "after accumulation": (
        lambda layer: layer.bias.register_post_accumulate_grad_hook(lambda p: None),
        "Parameter inner.bias has a hook",
    ),
    "of a module": (
        lambda layer: layer.register_full_backward_hook(lambda module, into, out: None),
        "Module inner has a backward hook",
    ),
    "of a module, before": (
        lambda layer: layer.register_full_backward_pre_hook(lambda module, out: None),
        "Module inner has a backward hook",
    ),
    "of all modules": (
        lambda layer: register_module_full_backward_hook(lambda module, into, out: None),
        "All modules have a backward hook",
    ),
}


@pytest.mark.parametrize("name", ADDED)
def test_hooks_are_refused(name: str) -> None:
    add, message = ADDED[name]
    net = Net(lambda net, x: net.inner(x))
    handle = add(net.inner)
    with pytest.raises(StrategyError, match=message):
        captured(net)
    handle.remove()
    assert captured(net).graph.operators


PLACES, ZEROS = torch.tensor([0, 2]), torch.zeros(1, 2, 2, 2, dtype=torch.float64)
OPERANDS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "linear": (lambda x: F.linear(x, torch.ones(4, 4).bfloat16()), "linear.*multiplies float32 and bfloat16"),
    "matmul": (lambda x: x.bfloat16() @ torch.ones(4, 4), "matmul.*multiplies bfloat16 and float32"),
    "norm": (lambda x: F.layer_norm(x, (4,), torch.ones(4).bfloat16()), "layer_norm.*float32 and weights of bfloat16"),
    "matrix": (lambda x: x.index_select(0, torch.zeros(2, 4, dtype=torch.long)), "indices of .2, 4.* vector"),
    "labels": (lambda x: F.cross_entropy(x, torch.ones(8, dtype=torch.int32)), "labels of int32.*int64"),
    "boolean labels": (lambda x: F.cross_entropy(x, torch.ones(8).bool()), "labels of bool.*int64"),
    "classes": (lambda x: F.one_hot(PLACES.int(), 4) * x[:2], "one_hot takes int64, not torch.int32"),
    "index_add": (lambda x: torch.zeros(4).double().index_add(0, PLACES, x[0, :2]), "writes float32 into float64"),
    "index_copy": (lambda x: torch.zeros(4).double().index_copy(0, PLACES, x[0, :2]), "writes float32 into float64"),
    "index_put": (lambda x: torch.zeros(4).double().index_put((PLACES,), x[0, :2]), "writes float32 into float64"),
    "index_reduce": (
        lambda x: torch.zeros(4).double().index_reduce(0, PLACES, x[0, :2], "mean"),
        "writes float32 into float64",
    ),
    "conv1d": (lambda x: F.conv1d(x[None], torch.ones(2, 8, 1).double()), "conv1d.*takes float32 and float64"),
    "conv_transpose1d": (lambda x: F.conv_transpose1d(x[None], torch.ones(8, 2, 1).double()), "float32 and float64"),
    "grid": (lambda x: F.grid_sample(x[None, None], ZEROS, align_corners=False), "takes float32 and float64"),
    "cdist": (lambda x: torch.cdist(x, torch.ones(3, 4).double()), "takes float32 and float64"),
    "entropy": (lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones(8, 4).double()), "takes float32 and float64"),
    "complex": (lambda x: torch.complex(x, x.double()).abs(), "takes float32 and float64"),
    "cross": (lambda x: torch.linalg.cross(x[:, :3], torch.ones(8, 3).double()), "takes float32 and float64"),
}


def test_a_module_of_torch_jit_is_refused() -> None:
    net = Net(lambda net, x: net.inner(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit itself
        net.inner = torch.jit.script(net.inner)
    with pytest.raises(StrategyError, match=r"Module inner is compiled by torch\.jit\.script") as refusal:
        captured(net)
    assert refusal.value.code == "MW906"


def test_sparse_tensors() -> None:
    net = Net(lambda net, x: torch.sparse.mm(net.adjacency, net.inner(x)[:4]).sum())
    net.register_buffer("adjacency", torch.eye(4).to_sparse())
    with pytest.raises(StrategyError, match=r"sparse_mm.*sparse tensor.*to_dense") as error:
        captured(net)
    assert error.value.code == "MW906"


def test_labels_of_other_pictures_than_the_scores() -> None:
    net = Net(lambda net, x: F.cross_entropy(net.inner(x).view(2, 4, 2, 2), torch.zeros(2, 1, 2, dtype=torch.long)))
    with pytest.raises(RuntimeError, match="size mismatch"):
        net(torch.randn(8, 4))
    with pytest.raises(StrategyError, match=r"scores of \[2, 4, 2, 2\] and labels of \[2, 1, 2\]") as error:
        captured(net)
    assert error.value.code == "MW901"


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_that_torch_refuses_only_when_it_computes(name: str) -> None:
    body, message = OPERANDS[name]
    net = Net(lambda net, x: body(net.inner(x)))
    with pytest.raises((RuntimeError, IndexError), match=r"dtype|scalar type|a vector|index tensor"):
        net(torch.randn(8, 4))
    with pytest.raises(StrategyError, match=message) as error:
        captured(net)
    assert error.value.code == "MW901"


@pytest.mark.parametrize(
    "body",
    [
        lambda x: F.layer_norm(x.bfloat16(), (4,), torch.ones(4)),
        lambda x: F.batch_norm(x.bfloat16(), None, None, torch.ones(4), torch.zeros(4), training=True),
        lambda x: F.cross_entropy(x, torch.ones(8, 4)),
    ],
)
def test_dtypes_that_torch_mixes(body: Callable[[Tensor], Tensor]) -> None:
    net = Net(lambda net, x: body(net.inner(x)).float())
    assert net(torch.randn(8, 4)).isfinite()
    captured(net)


def test_a_loss_or_model_that_takes_other_arguments_is_refused() -> None:
    linear, x = nn.Linear(4, 4), torch.randn(8, 4)

    def message(loss: nn.Module | None, names: tuple[str, ...], targets: tuple[str, ...]) -> str:
        with pytest.raises(StrategyError) as error:
            capture(Objective(linear, loss, names, targets), (x,) * len(names), training=True)
        assert error.value.code == "MW901"
        return str(error.value)

    assert "The model's forward takes (input)" in message(None, ("0", "1"), ())
    assert "loss takes (output, sample)" in message(
        LossFunction(lambda output, sample: 0, {}), ("input", "a", "b"), ("a", "b")
    )
    assert "would get weight of a sample as its y" in message(
        LossFunction(lambda output, y, weight: 0, {}), ("input", "weight", "y"), ("y", "weight")
    )
    assert "unexpected keyword argument 'scale'" in message(LossFunction(F.mse_loss, {"scale": 2}), ("0", "1"), ("1",))
