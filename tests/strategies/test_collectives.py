"""Collectives of hybrid modules: on four ranks each returns its documented result and has the exact adjoint; on one
rank it is the identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies import collectives
from strategies.core.errors import StrategyError
from strategies.core.layout import Layout
from tests.ranks import start_ranks

# ranks 0..3 on the mesh a 2 x b 2: rank = 2 a + b


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("run")
    result: dict[str, Any] = start_ranks("tests.strategies.on_ranks:adjoints", None, 4, folder, timeout=60.0)
    return result


EXPECTED: dict[str, Callable[[list[Tensor], int], Tensor]] = {
    "all_reduce": lambda x, rank: x[rank % 2] + x[rank % 2 + 2],
    "all_reduce over both": lambda x, rank: x[0] + x[1] + x[2] + x[3],
    "all_gather": lambda x, rank: torch.cat([x[rank // 2 * 2], x[rank // 2 * 2 + 1]], 1),
    "all_gather over both": lambda x, rank: torch.cat([x[0], x[2], x[1], x[3]]),
    "reduce_scatter": lambda x, rank: sum(x).chunk(4, 1)[rank],  # type: ignore[arg-type, union-attr]
    "all_to_all": lambda x, rank: torch.cat([x[rank // 2 * 2 + i].chunk(2, 1)[rank % 2] for i in (0, 1)]),
    "split": lambda x, rank: x[rank].chunk(4, 1)[rank % 2 * 2 + rank // 2],
    "broadcast": lambda x, rank: x[rank // 2 * 2 + 1],
    "composed": lambda x, rank: sum(x[rank // 2 * 2 + i].chunk(2, 1)[rank // 2].exp() for i in (0, 1)),  # type: ignore[return-value]
}


@pytest.mark.parametrize("name", EXPECTED)
def test_values_and_adjoints(found: dict[str, Any], name: str) -> None:
    case = found[name]
    for rank in range(4):
        assert torch.allclose(case["y"][rank], EXPECTED[name](case["x"], rank), rtol=1e-12, atol=1e-12)
    assert case["outwards"] == pytest.approx(case["back"], rel=1e-8)


def test_sharded_parameters(found: dict[str, Any]) -> None:
    tensor = torch.arange(32.0).view(4, 8)
    pieces = found["shard_parameter"]["pieces"]
    assert all(torch.equal(pieces[rank], tensor.chunk(4, 1)[rank % 2 * 2 + rank // 2]) for rank in range(4))
    assert found["shard_parameter"]["declared"] == (Layout(((), ("b", "a"))), (4, 8))


def test_a_broadcast_ignores_the_tensors_of_other_ranks(found: dict[str, Any]) -> None:
    assert all(torch.equal(received, torch.ones(2)) for received in found["broadcast past infinity"])


def test_wrong_calls(found: dict[str, Any]) -> None:
    unknown, odd, twice, size = found["errors"]
    assert unknown.startswith("StrategyError: A hybrid module names mesh axis 'c'. Known: a, b.")
    assert odd.startswith("StrategyError: Dim 1 of a tensor of shape (4, 3) cannot be cut into 2 equal slices")
    assert twice.startswith("StrategyError: ") and "more than once" in twice
    assert size == "StrategyError: Dim 0 of a tensor of shape (3,) cannot be cut into 2 equal slices."


def test_alone_every_collective_returns_its_input() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    for call in (
        lambda: collectives.all_reduce(x, "tp"),
        lambda: collectives.all_gather(x, "tp", 1),
        lambda: collectives.reduce_scatter(x, ("dp", "tp"), -1),
        lambda: collectives.all_to_all(x, "tp", 0, 1),
        lambda: collectives.split(x, "tp", 1),
    ):
        assert call() is x
    assert torch.equal(collectives.broadcast(x, "tp"), x)
    parameter = nn.Parameter(torch.randn(3, 5), requires_grad=False)
    piece = collectives.shard_parameter(parameter, 0, "tp")
    assert torch.equal(piece, parameter) and not piece.requires_grad
    assert collectives.declared(nn.Parameter(torch.zeros(3))) == (Layout(((),)), (3,))


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dim_that_is_not_there(dim: int) -> None:
    with pytest.raises(StrategyError, match=r"has 2 dims, so there is no dim"):
        collectives.shard_parameter(nn.Parameter(torch.zeros(4, 4)), dim, "world")
    for call in (
        lambda: collectives.all_gather(torch.zeros(4, 4), "world", dim),
        lambda: collectives.split(torch.zeros(4, 4), "world", dim),
        lambda: collectives.all_to_all(torch.zeros(4, 4), "world", dim, 0),
    ):
        with pytest.raises(StrategyError, match=r"has 2 dims, so there is no dim"):
            call()
