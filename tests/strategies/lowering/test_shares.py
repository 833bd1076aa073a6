"""Ranks with different numbers of rows: every rank lowers the plan for its own share, and together they compute what
one device computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from strategies.core.errors import StrategyError
from strategies.core.mesh import Mesh, Share
from strategies.core.program import LoweringOptions, RankValue
from strategies.core.request import OperatorStrategy, Request
from strategies.lowering.lowering import lower
from strategies.planner.planner import make_plan
from strategies.runtime.simulate import Simulation
from tests.strategies.simulated_model import TOLERANCE, Model

ROWS = (5, 5, 2)


class Tokens(nn.Module):
    """Positions, causal attention, and scores of tokens of which some count."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, 8), nn.Embedding(6, 8)
        self.attention, self.norm, self.head = nn.Linear(8, 24), nn.LayerNorm(8), nn.Linear(8, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        q, k, v = self.attention(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(x).flatten(0, 1)


class Counted(nn.Module):
    """A mean over the rows that a mask counts, one over all rows, and a sum divided by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.GRU(6, 3, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y, _ = self.second(torch.tanh(self.first(x)))
        y = y[:, -1]
        counted = (y.square().sum(1) * mask).sum() / mask.sum()
        return counted + y.abs().mean() + (y * torch.ones(len(y), 1)).sum() / len(y) + y.pow(4).mean(0).sum()


class Normed(nn.Module):
    """Norms by statistics of all rows, with and without a history; and the extremes of all rows, some of them tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(3, 4, 2, bias=False), nn.Linear(4, 6, bias=False)
        self.norms = nn.ModuleList((nn.BatchNorm1d(4), nn.BatchNorm1d(6, track_running_stats=False)))
        self.samples = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norms[0](self.first(self.samples(x).square())))  # many zeros
        y = y + y.amin(0) + y.amax((0, 2), keepdim=True)
        z = self.norms[1](self.second(y.square().sum(2)))
        return (z.square() * z.max(0).values).mean() + z.max() + (z.argmin(0) * z.mean(0)).sum()


class Sorted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sort(0).values


class FlattenedCrossEntropy(nn.CrossEntropyLoss):
    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return super().forward(scores, target.flatten())


def _integers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1))


def _numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _tokens() -> Model:
    target = _integers(20, 12, 6)
    target[target < 12] = -100
    target[10:] = -100  # the last rank counts nothing
    return Model(
        Tokens(), FlattenedCrossEntropy(weight=torch.rand(20), label_smoothing=0.1), (_integers(20, 12, 6), target)
    )


MODELS = {
    "tokens that count": _tokens,
    "means and counts": lambda: Model(Counted(), None, (_numbers(12, 5, 4), _integers(2, 12).double())),
    "probabilities": lambda: Model(
        nn.Linear(4, 3), nn.CrossEntropyLoss(), (_numbers(12, 4), _numbers(12, 3).softmax(1))
    ),
    "norms of rows": lambda: Model(Normed(), None, (_numbers(12, 3, 5),)),
    "elements": lambda: Model(nn.Linear(4, 3), nn.HuberLoss(), (_numbers(12, 4), _numbers(12, 3))),
}


def _difference(model: Model, rows: Sequence[int], request: Request, sharded: bool) -> float:
    plan = replace(make_plan(model.graph, request), batch_rows=tuple(rows))
    options = LoweringOptions(exact=True, sharded_optimizer=sharded, partial_loss=True)
    programs = [lower(model.graph, plan.of_rank(rank), options) for rank in range(plan.mesh.size)]
    simulation = Simulation(programs[0], model.values, programs)
    (losses,) = simulation.run()
    simulation.backward(losses)
    replicas = plan.mesh.size // plan.mesh.product(programs[0].loss_axes)
    scale = plan.mesh.size if sharded else 1
    gaps = [abs(sum(loss.item() for loss in losses) / replicas - model.loss.item())]
    for name, found in simulation.gradients().items():
        truth = model.gradients[name]
        gaps.append(((found / scale - truth).abs().max() / truth.abs().max().clamp_min(1e-3)).item())
    gaps += [(found - model.buffers[name]).abs().max().item() for name, found in simulation.buffers().items()]
    return max(gaps)


@pytest.mark.few(6)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", [ROWS, (1, 1, 10), (4, 4, 4)])
def test_every_gradient_is_that_of_one_device(name: str, rows: tuple[int, ...], sharded: bool) -> None:
    torch.manual_seed(0)
    assert _difference(MODELS[name](), rows, Request("data_parallel", 3), sharded) < TOLERANCE


def test_slices_of_rows_go_with_sliced_weights() -> None:
    """Ranks that share rows slice the weights between them."""
    torch.manual_seed(0)
    model = Model(
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), nn.MSELoss(), (_numbers(12, 4), _numbers(12, 3))
    )
    strategies = {
        "0.matmul": OperatorStrategy(((3, 1), (1, 2)), None),
        "2.matmul": OperatorStrategy(((3, 2), (2, 1)), None),
    }
    mesh, batch = (("dp", 3), ("tp", 2)), ((3, 1), (3, 1))
    request = Request("semi_auto", 6, mesh=mesh, strategies=strategies, dataset_strategy=batch)
    assert _difference(model, (4, 6, 2), request, False) < TOLERANCE


def test_a_model_that_mixes_rows_is_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 3), Sorted())
    model = Model(net, nn.MSELoss(), (_numbers(12, 4), _numbers(12, 3)))
    plan = replace(make_plan(model.graph, Request("data_parallel", 3)), batch_rows=ROWS)
    with pytest.raises(StrategyError) as refused:
        lower(model.graph, plan.of_rank(0))
    assert refused.value.code == "MW414"
    assert "sort" in str(refused.value)


def test_a_share_is_part_of_every_dim_that_its_axis_slices() -> None:
    mesh = Mesh((("dp", 3), ("tp", 2)), Share("dp", 5, 10, 12))
    assert mesh.length(24, ("dp",)) == 10
    assert mesh.length(24, ("dp", "tp")) == 5
    assert mesh.length(24, ("tp",)) == 12
    assert [mesh.start(rank, 24, ("dp", "tp")) for rank in (2, 3)] == [10, 15]
    assert float(mesh.parts(("dp", "tp"))) == 4.8
    assert RankValue(("dp",)).of(mesh, 2) == 1
    assert RankValue(("dp", "tp"), 5).of(mesh, 3) == 15
    assert mesh.even == Mesh(mesh.axes)
    with pytest.raises(StrategyError):
        mesh.length(13, ("dp",))
