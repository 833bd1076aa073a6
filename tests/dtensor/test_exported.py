"""Functions that DTensor computes wrongly, as an exported program computes them: equal to one device."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Mapping
from functools import partial
from itertools import permutations
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional

from runner.export import plain_torch
from strategies.core.mesh import Mesh
from tests.dtensor import compare


def _halved(x: Tensor) -> Tensor:
    """Every other row, in slices like the rows."""
    return x.unflatten(0, (4, 2)).select(1, 0)


def _places(x: Tensor) -> Tensor:
    return _halved(x).argsort(-1)


def _bags(x: Tensor, mode: str) -> Tensor:
    """Bags of rows, one of them of padding alone."""
    return functional.embedding_bag(torch.tensor([[1, 7, 2], [3, 1, 1], [2, 2, 2]]), x, mode=mode, padding_idx=2)


def _placed_anew(x: Tensor) -> Tensor:
    return plain_torch._as(x, x.placements).mean(0) if isinstance(x, DTensor) else x.mean(0)


def _recurrent(x: Tensor, rows_first: bool) -> Tensor:
    weights = [torch.linspace(-1.0, 1.0, math.prod(shape)).view(shape) for shape in ((6, 3), (6, 2), (6,), (6,))]
    states = torch.zeros(1, x.shape[not rows_first], 2)
    return torch.gru(x, states, weights, True, 1, 0.0, True, False, rows_first)[0]


def _cell(x: Tensor) -> Tensor:
    weights = [torch.linspace(-1.0, 1.0, math.prod(shape)).view(shape) for shape in ((8, 3), (8, 2))]
    states = torch.zeros(len(x), 2), torch.ones(len(x), 2)
    return torch.cat(torch.lstm_cell(x, states, *weights))


def _strided(x: Tensor) -> Tensor:
    """Every other step of a window, of memory in another order."""
    return (x * 2).transpose(0, 1).as_strided((6, 4, 3), (1, 48, 12))


def _rows(x: Tensor) -> Tensor:
    """Two look-ups, the second one with padding."""
    ids = torch.tensor([[1, 7, 2], [3, 1, 4]])
    return functional.embedding(ids, x).sin() + functional.embedding(ids[:1] % 4, x, 2)


def _normalised(x: Tensor) -> Tensor:
    """Rows beside their new statistics."""
    x = x.sin()
    mean, variance = (x.new_full((6,), number) for number in (0.5, 2.0))
    rows = functional.batch_norm(x, mean, variance, x.detach()[0, :, 0], x[1, :, 1], True, 0.3)
    return rows + mean.view(1, 6, 1) * variance.view(1, 6, 1)


FUNCTIONS: dict[str, tuple[Callable[..., Any], str, tuple[int, ...]]] = {
    **{
        f"bags of rows, {mode}": (partial(_bags, mode=mode), placed, (8, 4))
        for mode, placed in (("max", "S0"), ("mean", "S0"), ("sum", "S1"))
    },
    "bags without padding": (lambda x: functional.embedding_bag(torch.tensor([[1, 7], [3, 1]]), x), "S0", (8, 4)),
    "sums of looked-up rows": (lambda x: functional.embedding(torch.tensor([[1, 7], [3, 1]]), x).sum(1), "S0", (8, 4)),
    **{f"a batch norm, {placed}": (_normalised, placed, (4, 6, 2)) for placed in ("S0", "S1", "P")},
    "the imaginary part of a conjugate": (lambda x: torch.complex(x, x.cos()).conj().imag.exp(), "S0", (4, 4)),
    "gathered conjugates": (lambda x: torch.complex(x, x.cos()).conj().cumsum(0).abs(), "S0", (4, 4)),
    "a vector times rows": (lambda x: x[0] @ x, "S0", (4, 4)),
    "adaptive pool of rows": (lambda x: functional.adaptive_avg_pool2d(x, 3), "S1", (2, 8, 8)),
    "adaptive pool of slices of channels": (lambda x: functional.adaptive_avg_pool2d(x, (3, 2)), "S1", (1, 4, 6, 8)),
    "a diagonal filled in place": (lambda x: x.sin().fill_diagonal_(2.0), "S0", (4, 4)),
    "a part along the last dim": (lambda x: x.select(-1, 1), "S0", (4, 4, 4)),
    "heads behind an empty cache": (lambda x: torch.cat([torch.tensor([]), x.sin()], dim=-2) * 2, "S1", (2, 4, 3)),
    "rows and sums": (lambda x: torch.stack([x.sum(0), x[:, 0]]), "S0", (4, 4)),
    "all parts": (lambda x: torch.stack(x.unbind(-1)[::-1]), "S1", (4, 4)),
    **{
        f"stripes in other parts, {shape}": (lambda x, shape=shape: x.flatten().view(shape) * 2, "S1", (3, 8))
        for shape in ((2, 12), (4, 6), (8, 3), (6, 4))
    },
    "the place of the largest in stripes": (lambda x: x * x.detach().flatten().argmax(), "S1", (3, 8)),
    "a view of gathered columns": (lambda x: functional.hardswish(x.view(4, 6, 8).mT), "S0", (24, 8)),
    "rows that are no multiple, flattened": (lambda x: x.flatten() * 2, "S0", (3, 4)),
    "rows that are no multiple, in other placements": (_placed_anew, "S0", (3, 4)),
    **{
        f"a recurrent layer, {placed}{', rows first' * rows_first}": (
            partial(_recurrent, rows_first=rows_first),
            placed,
            (4, 2, 3),
        )
        for placed, rows_first in (("S1", True), ("S0", True), ("S0", False))
    },
    **{f"strides of memory, {placed}": (_strided, placed, (4, 8, 6)) for placed in ("S0", "S1", "S2", "P", "S0 S2")},
    **{f"a recurrent cell, {placed}": (_cell, placed, (4, 3)) for placed in ("S0", "S1", "P")},
    "slices added to sums in place": (lambda x: x.sum(0).add_(x[:, 0]), "S0", (4, 4)),
    "sums of reflections": (lambda x: torch.linalg.householder_product(x, x[0, :2]), "P", (4, 2)),
    "slices written to sums": (lambda x: (x * 2).clamp_(x.sin().select(0, 1)), "P", (4, 4)),
    "a sum filled with a sum": (lambda x: (x * 2).masked_fill_(x.new_ones(4, 4).tril() > 0, x.sum()), "P", (4, 4)),
    "rows of a table in parts of parts": (_rows, "S0 S0", (8, 4)),
    "elements of parts of parts": (lambda x: x.gather(0, torch.tensor([[1, 0, 3, 7]])), "S0 S0", (8, 4)),
    "sums written in place": (lambda x: (x * 2).remainder_(0.7), "P", (4, 4)),
    "a number by sums": (lambda x: torch.true_divide(2.0, x), "P", (4, 4)),
    "weights that are sums": (lambda x: torch.lerp(x.sin(), x.cos(), x), "P", (4, 4)),
    "the smallest of all": (lambda x: torch.amin(x), "S0", (4,)),
    "rms norm of features": (lambda x: functional.rms_norm(x, (8,), eps=0.1), "S1", (4, 8)),
    "numbers of all": (lambda x: x * float(x.detach().max()) if bool((x > 1.5).any()) else x, "S0", (8, 4)),
    **{
        f"divided by a norm, {placed}, {order}, over {dims}": (
            lambda x, order=order, dims=dims: x / torch.linalg.vector_norm(x, order, dims, keepdim=True),
            placed,
            (4, 4),
        )
        for placed in ("S1", "P")
        for order, dims in ((2, -1), (1, 0), (3, None), (math.inf, 1))
    },
    **{
        f"sums of exponentials, {placed}, over {dim}": (
            lambda x, dim=dim: x.sin() + torch.logsumexp(x, dim, keepdim=True),
            placed,
            (2, 4, 6),
        )
        for placed, dim in (("S1", 0), ("S2", 1), ("S2", -3), ("S0", 0))
    },
    "spectra of windows": (
        lambda x: torch.stft(x, 8, 4, window=torch.ones(8), return_complex=True).abs(),
        "S1",
        (2, 16),
    ),
    "combinations": (lambda x: torch.combinations(x).prod(1), "S0", (4,)),
    "a loss of alignments": (
        lambda x: functional.ctc_loss(
            x.log_softmax(-1), torch.tensor([[1, 2], [2, 2]]), torch.tensor([6, 5]), torch.tensor([2, 1])
        ),
        "S1",
        (6, 2, 4),
    ),
    "products with means": (lambda x: x.sin() * x.mean((0, 1)), "S1", (4, 4)),
    "products with means of sums": (lambda x: (x @ x.sum(0)) * x.mean((0, 1)), "S0", (4, 4)),
    "less the variance": (lambda x: x.sin() - x.var(0, keepdim=True), "S0", (4, 4)),
    "no dims, so all": (lambda x: x.square().sum(()), "S1", (4, 4)),
    "gathered places of fewer rows": (lambda x: x.gather(1, _places(x)), "S0", (8, 4)),
    "scattered places of fewer rows": (lambda x: x.sin().scatter_add(1, _places(x), _halved(x)), "S0", (8, 4)),
}
"""Name -> function of one tensor, its placement, its shape."""


def _call(function: Callable[..., Any], value: Tensor) -> list[Tensor]:
    """The result, and the gradient."""
    result = function(value)
    full = result.full_tensor() if isinstance(result, DTensor) else result
    (full * torch.arange(1.0, full.numel() + 1, dtype=full.dtype).view(full.shape)).sum().backward()
    assert value.grad is not None
    gradient = value.grad.full_tensor() if isinstance(value.grad, DTensor) else value.grad
    return [compare._agreed(full.detach()), compare._agreed(gradient)]


def _compute(pipe: Connection, axes: int) -> None:
    """Every function of so many placements on simulated ranks, two along each axis, in a process of its own, since a
    program corrects rules of DTensor."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    compare.simulate_ranks(2**axes)
    plain_torch._replicated("aten.hardswish_backward.default")
    plain_torch._corrected()
    mesh, found = Mesh((("a", 2), ("b", 2))[:axes]), dict[str, Any]()
    for name, (function, placed, shape) in FUNCTIONS.items():
        if len(placed.split()) != axes:
            continue
        value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        try:
            with LocalTensorMode(frozenset(range(2**axes))):
                devices = init_device_mesh("cpu", (2,) * axes)
                leaf = compare._leaf(value, tuple(placed.split()), mesh, devices).requires_grad_()
                with plain_torch.running(devices):
                    results = _call(function, leaf)
            expected = _call(function, value.requires_grad_())
            found[name] = [(got - want).abs().max().item() for got, want in zip(results, expected, strict=True)]
        except Exception as error:
            found[name] = repr(error)
    found["tried"] = plain_torch.DecompShardingStrategy._get_candidate_placements.func is plain_torch._ordered
    pipe.send(found)


@pytest.fixture(scope="module")
def gaps() -> Mapping[str, Any]:
    context, found = multiprocessing.get_context("fork"), dict[str, Any]()
    for axes in (1, 2):
        ours, theirs = context.Pipe()
        child = context.Process(target=_compute, args=(theirs, axes))
        child.start()
        theirs.close()
        found |= ours.recv()
        child.join()
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_slices_are_those_of_one_device(gaps: Mapping[str, Any], name: str) -> None:
    assert gaps[name] == pytest.approx([0.0, 0.0], abs=1e-10)


@pytest.mark.slow
def test_all_ranks_try_placements_in_one_order(gaps: Mapping[str, Any]) -> None:
    """torch takes them from sets, whose order follows the hashes of strings, which differ between processes."""
    candidates = [(one, Replicate()) for one in (Partial(), Replicate(), Shard(0), Shard(1))]
    orders = [plain_torch._ordered(lambda _, some=some: some, None) for some in permutations(candidates)]
    assert gaps["tried"] and all(order == orders[0] for order in orders) and orders[0][-1] == candidates[0]
