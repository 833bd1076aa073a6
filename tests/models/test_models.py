"""The shipped networks: shapes, names, seeds, and that they learn the data they are shipped with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from models.ffn import FFN, MatMulNet
from models.matmul import OneMatMul, ReduceMeanMatMul, TwoMatMul
from models.quickstart import Net
from runner.data.loader import global_batch
from runner.data.order import Order
from runner.data.synthetic import Quickstart


def parameters(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("model", "given", "returned", "names"),
    [
        (Net(), (4, 32), (4, 16), {"matmul.weight": (32, 16), "matmul2.weight": (16, 16)}),
        (OneMatMul(6, 3), (4, 6), (4, 3), {"matmul.weight": (6, 3)}),
        (TwoMatMul(6, 5, 3), (4, 6), (4, 3), {"matmul1.weight": (6, 5), "matmul2.weight": (5, 3)}),
        (ReduceMeanMatMul(6, 3), (4, 2, 6), (4, 1, 3), {"matmul.weight": (6, 3)}),
        (ReduceMeanMatMul(6, 3, dim=0), (4, 6), (1, 3), {"matmul.weight": (6, 3)}),
        (
            FFN([6, 5, 3]),
            (4, 6),
            (4, 3),
            {"dense1.weight": (5, 6), "dense1.bias": (5,), "dense2.weight": (3, 5), "dense2.bias": (3,)},
        ),
        (MatMulNet([6, 5, 3]), (4, 6), (4, 3), {"matmul1.weight": (6, 5), "matmul2.weight": (5, 3)}),
    ],
)
def test_shapes_and_names(
    model: nn.Module, given: tuple[int, ...], returned: tuple[int, ...], names: dict[str, tuple[int, ...]]
) -> None:
    assert model(torch.ones(given)).shape == returned
    assert parameters(model) == names


def test_one_relu_serves_the_ffn_and_each_product_of_the_matmul_net_has_its_own() -> None:
    ffn, net = FFN([784, 512, 256, 128, 64, 10]), MatMulNet([784, 512, 512, 10])
    assert [name for name, _ in ffn.named_children()] == ["dense1", "dense2", "dense3", "dense4", "dense5", "relu"]
    assert [name for name, _ in net.named_children()] == ["matmul1", "relu1", "matmul2", "relu2", "matmul3"]
    calls: list[Tensor] = []
    ffn.get_submodule("relu").register_forward_hook(lambda module, args, out: calls.append(out))
    ffn(torch.ones(2, 784))
    assert [tuple(out.shape) for out in calls] == [(2, 512), (2, 256), (2, 128), (2, 64)]


def test_the_networks_compute_what_they_say() -> None:
    net = MatMulNet([6, 5, 3])
    first, second = net.parameters()
    x = torch.randn(4, 6)
    torch.testing.assert_close(net(x), torch.relu(x @ first) @ second)
    mean = ReduceMeanMatMul(6, 3)
    x = torch.randn(4, 2, 6)
    torch.testing.assert_close(mean(x), x.mean(1, keepdim=True) @ next(mean.parameters()))


@pytest.mark.parametrize("make", [FFN, MatMulNet])
def test_a_network_without_layers_is_refused(make: type[FFN] | type[MatMulNet]) -> None:
    with pytest.raises(ValueError, match="names no layer"):
        make([784])


def test_the_seed_fixes_the_weights() -> None:
    def first(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return next(Net().parameters())

    assert torch.equal(first(1), first(1)) and not torch.equal(first(1), first(2))
    assert first(0).std().item() == pytest.approx(32**-0.5, rel=0.1)


def test_the_quickstart_learns_its_data() -> None:
    torch.manual_seed(0)
    model, dataset = Net(), Quickstart(rows=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.1)
    order, losses = Order(len(dataset), 16, seed=0), []
    for step in range(40):
        x, y = global_batch(dataset, None, order.rows(step))
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])


def test_the_hybrid_network_on_two_ranks_is_the_dense_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from models import hybrid

    torch.manual_seed(3)
    dense = hybrid.DenseMatMul(8, 5)
    x = torch.randn(4, 8)
    partial = []
    for rank in range(2):

        def shard(parameter: nn.Parameter, dim: int, axes: str, rank: int = rank) -> nn.Parameter:
            assert (dim, axes) == (0, "world")
            return nn.Parameter(parameter.detach().chunk(2, dim)[rank].clone())

        monkeypatch.setattr(hybrid.collectives, "shard_parameter", shard)
        monkeypatch.setattr(hybrid.collectives, "all_reduce", lambda product, axes: product)
        torch.manual_seed(3)
        model = hybrid.HybridMatMul(8, 5)
        assert parameters(model) == {"weight": (4, 5)}
        partial.append(model(x.chunk(2, 1)[rank]))
    torch.testing.assert_close(partial[0] + partial[1], dense(x))
