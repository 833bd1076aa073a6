"""The ranks from which another can be restored, as recorded of another system."""

import pytest
import torch
from torch import nn

from strategies.capture import Objective, capture
from strategies.core.layout import Layout, recoverable
from strategies.core.mesh import Mesh
from strategies.core.request import OperatorStrategy, Request
from strategies.planner.planner import make_plan


class Three(nn.Module):
    """Three products in a row."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x):
        return self.three(self.two(self.one(x)))


def layouts(mode, strategies, ranks=32):
    torch.manual_seed(0)
    step = Objective(Three(), nn.MSELoss(), ("0", "1"), ("1",))
    graph = capture(step, (torch.randn(128, 64), torch.randn(128, 64)), training=True).graph
    wanted = {f"{name}.matmul": OperatorStrategy(counts, None) for name, counts in strategies.items()}
    plan = make_plan(graph, Request(mode, ranks, strategies=wanted))
    names = [source.name for source in graph.of_kind("parameter")]
    return [plan.tensors[name] for name in names], plan.mesh


STRATEGIES = {"one": ((8, 1), (1, 4)), "two": ((32, 1), (1, 1)), "three": ((8, 4), (4, 1))}


def test_matmuls_on_32_devices():
    parameters, mesh = layouts("semi_auto", STRATEGIES)
    assert recoverable(parameters, mesh, 0) == tuple(range(0, 32, 4))
    assert recoverable(parameters, mesh, 6) == tuple(range(2, 32, 4))
    assert recoverable(parameters, mesh, 0, split=True) == (0,)


def test_data_parallel():
    parameters, mesh = layouts("data_parallel", {})
    assert recoverable(parameters, mesh, 5) == tuple(range(32))


@pytest.mark.parametrize(("rank", "expected"), [(0, (0, 8, 16, 24)), (63, (39, 47, 55, 63))])
def test_two_stages_of_a_pipeline_on_64(rank, expected):
    """Every stage has 32 ranks and shards its matrices over 8 neighbouring ranks."""
    mesh = Mesh((("dp", 4), ("tp", 8)))
    parameters = [Layout((("tp",), ())), Layout(((), ("tp",))), Layout.replicated(1)]
    assert recoverable(parameters, mesh, rank, stage=rank // 32) == expected


def test_a_parameter_without_replicas_leaves_the_rank_alone():
    mesh = Mesh((("a", 2), ("b", 2)))
    assert recoverable([Layout.replicated(2), Layout((("a",), ("b",)))], mesh, 3) == (3,)
