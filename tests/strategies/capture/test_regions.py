"""Regions: a graph of a model with autocast and no_grad regions computes what the model does, in its precisions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strategies.capture import Objective, capture, loss_in
from strategies.capture.regions import flatten
from strategies.capture.tracing import traceable
from strategies.core.errors import StrategyError
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.lowering.lowering import lower
from strategies.runtime.simulate import Simulation


class Net(nn.Module):
    """A transformer layer, norms, a convolution and a tied head under `body`."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.dense, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.conv = nn.Conv1d(4, 4, 1)
        self.group = nn.GroupNorm(2, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def transformer(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = net.norm(net.dense(x)) + x
        h = net.group(net.conv(net.layer(h)))
        weight = net.dense.weight
        scores = torch.einsum("bsi,bti->bst", h @ weight, h).softmax(-1)
        return F.cross_entropy((scores @ h).flatten(0, 1), torch.arange(32) % 8)


def off_inside(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = net.dense(x)
        with torch.autocast("cpu", enabled=False):
            h = net.dense(h.float()).exp()
        with torch.no_grad():
            scale = net.dense(h).float().mean()
        h = torch.cat([net.dense(h), h], -1) * scale
    return (h.float() ** 2).mean() + net.dense(x).square().mean()


def twice(net: Net, x: Tensor) -> Tensor:
    """One weight used twice, in one region, adds up its gradients in the lower precision."""
    with torch.autocast("cpu", torch.bfloat16):
        return net.dense(net.dense(x)).float().square().mean()


def written(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = net.dense(x)
        h[:, 0] = 1
        h += x
        return F.mse_loss(h @ h.transpose(1, 2), torch.zeros(8, 4, 4))


def counted(net: Net, x: Tensor) -> Tensor:
    """A region whose only effect is a write."""
    with torch.no_grad():
        net.seen.add_(net.dense(x).mean())
    return net.dense(x).square().mean()


@torch.inference_mode()
def scale(net: Net, x: Tensor) -> float:
    return net.dense(x).abs().mean().item()


def inferred(net: Net, x: Tensor) -> Tensor:
    return (net.dense(x) * scale(net, x)).square().mean()


def returned(net: Net, x: Tensor) -> Tensor:
    """An operator that changes nothing returns its operand, which needs a gradient outside of the region as before."""
    h = net.dense(x)
    with torch.no_grad():
        scale = h.to(net.dense.weight.dtype).contiguous().contiguous().abs().mean() + net.dense(x).contiguous().mean()
        unchanged, other = h.contiguous(), h.exp().contiguous()
    return (net.norm(h) * scale).square().mean() + (unchanged * other).mean()


def switched(net: Net, x: Tensor) -> Tensor:
    """A parameter whose gradient is off for a while, as in the loss of a generator."""
    h = net.dense(x)
    net.dense.requires_grad_(False)
    net.norm.weight.requires_grad = False
    scores = net.norm(net.dense(h)).sigmoid() + torch.stack([net.dense.bias, net.norm.weight]).sum()
    net.norm.weight.requires_grad = True
    net.dense.requires_grad_()
    return scores.square().mean() + net.norm(net.dense(h.detach())).mean()


def eager(model: Objective, x: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients and buffers of the graph, with nothing sliced, on one simulated rank."""
    captured = capture(model, (x,), training=True)
    layouts = {s.name: Layout.replicated(len(s.spec.shape)) for s in captured.graph.sources}
    plan = Plan(
        Mesh((("world", 1),)), {o.name: OperatorPlan({}, "default") for o in captured.graph.operators}, layouts, layouts
    )
    simulation = Simulation(lower(captured.graph, plan), {**captured.tensors, "x": x})
    ((loss,),) = simulation.run()
    simulation.backward([loss])
    return loss.detach(), simulation.gradients(), simulation.buffers()


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "body",
    [transformer, off_inside, twice, written, counted, inferred, returned, switched],
    ids=lambda body: body.__name__,
)
def test_regions_become_operators(body: Callable[[Any, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    net = Net(body)
    objective, x = Objective(net, None, ("x",), ()), torch.randn(8, 4, 8)
    found, gradients, buffers = eager(objective, x)
    loss: Any = loss_in(objective(x))
    loss.backward()
    assert torch.equal(found, loss.detach())
    for name, parameter in net.named_parameters():
        truth = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert torch.equal(gradients[name], truth), name
    assert all(torch.equal(buffer, net.seen) for buffer in buffers.values())


def test_the_callers_autocast_is_not_the_models() -> None:
    net = Net(lambda net, x: net.dense(x).sum())
    with torch.autocast("cpu", torch.bfloat16):
        graph = capture(Objective(net, None, ("x",), ()), (torch.randn(8, 4, 8),), training=True).graph
    assert {spec.dtype for spec in graph.specs.values()} == {"float32"}


def test_what_is_shaped_by_values_is_refused_under_autocast() -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net.dense(x).tensor_split(x[0].detach().argsort()[:2])[0].float().sum()

    with pytest.raises(StrategyError) as refusal:
        capture(Objective(Net(body), None, ("x",), ()), (torch.randn(8, 8),), training=True)
    assert refusal.value.code == "MW902"


def test_casts_inside_of_an_operator_are_its_own() -> None:
    """With dropout, attention on a CPU casts queries in bf16 to fp32, and takes masks in their dtype alone."""

    def body(net: Net, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = net.dense(x)
            return F.scaled_dot_product_attention(h, h, h, net.norm(x)[:, :, :4], 0.1).float().mean()

    graph = capture(Objective(Net(body), None, ("x",), ()), (torch.randn(8, 4, 8),), training=True).graph
    (attention,) = (operator for operator in graph.operators if operator.op == "scaled_dot_product_attention")
    assert {spec.dtype for spec in graph.operand_specs(attention)} == {"bfloat16"}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "layer", [nn.GRU(8, 6), nn.LSTM(8, 6, proj_size=3), nn.LSTM(8, 6, bidirectional=True)], ids=["gru", "proj", "lstm"]
)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
def test_recurrent_layers_under_autocast(layer: nn.Module, half: bool) -> None:
    """Autocast casts inside of some: they compute in fp32, with results in its dtypes.

    One device computes without oneDNN, which has no LSTM in bfloat16 for processors without AVX-512.
    """

    def body(net: Net, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            first, second = net.layer(net.dense(x) if half else x)
            return first.float().square().mean() + sum(one.float().square().mean() for one in second)

    torch.manual_seed(0)
    net = Net(body)
    net.layer = copy.deepcopy(layer)
    objective, x = Objective(net, None, ("x",), ()), torch.randn(8, 4, 8)
    found, gradients, _ = eager(objective, x)
    with torch.backends.mkldnn.flags(enabled=False):
        loss: Any = loss_in(objective(x))
        loss.backward()
    assert abs(found - loss) <= 1e-2 * abs(loss)
    for name, parameter in net.layer.named_parameters(prefix="layer"):
        assert parameter.grad is not None
        assert (gradients[name] - parameter.grad).abs().max() <= 3e-2 * parameter.grad.abs().max()


def test_autocast_of_another_device_is_refused() -> None:
    with traceable(nn.Module()):
        graph = torch.export.export(Net(twice), (torch.randn(8, 4, 8),), strict=False).graph
    (border,) = (node for node in graph.nodes if node.target is torch.amp.autocast_mode._enter_autocast)
    border.args = ("cuda", *border.args[1:])
    with pytest.raises(StrategyError, match=r"torch.autocast\('cuda'\) around linear.* is of another device"):
        flatten(graph, lambda node: False)
