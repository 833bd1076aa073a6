"""Compiled programs: the same numbers bit for bit where the backend only traces, no graph breaks at collectives or
random operators, one order of communication on all ranks, and parts of the requested size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from strategies.core.errors import StrategyError
from strategies.core.graph import Ref, TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.program import Fused, LoweringOptions, Redistribute
from strategies.core.request import Request
from strategies.lowering.lowering import lower
from strategies.planner.planner import make_plan
from strategies.resharding.path import resharding_path
from strategies.runtime import compiled
from strategies.runtime.communicator import Communicator
from strategies.runtime.compiled import as_key
from strategies.runtime.module_tree import build
from strategies.runtime.redistributions import redistributing, starting, waiting
from strategies.runtime.slices import slices_of
from tests.ranks import start_ranks
from tests.strategies.compiled_entries import Case, Ran
from tests.strategies.simulated_model import MESH, Model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.25))


def scales(size: int, tokens: Tensor | None = None) -> np.ndarray:
    return np.random.rand(size) + (0 if tokens is None else tokens.numpy().mean())


class Net(nn.Module):
    """Tied weights, dropout with and without a rule for slices, an operator with several results, and numbers that
    numpy draws."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 16)
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        for layer in self.layers:
            h = layer(h)
        a, b = F.alpha_dropout(h, 0.1, True).split(4, -1)
        noise = torch.bernoulli(torch.full_like(b, 0.8)) * torch.from_numpy(scales(4))
        a = a * torch.tensor(scales(4, x))
        return self.head(torch.cat([a * noise, b], -1))


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    tokens = torch.randint(0, 16, (8,))
    return Model(Net(), nn.CrossEntropyLoss(), (tokens, tokens.roll(1)))


def case_of(model: Model, draw: Any, seed: int, folder: Any, mesh: Mesh = MESH) -> Case:
    from strategies.runtime import initial_weights as weights

    file = folder / f"{seed}.pt"
    weights.write(file, {name: model.values[name] for name in model.captured.tensors})
    return Case(model.graph, model.random_plan(draw, seed, mesh), file, dict(zip("01", model.batch, strict=True)))


def on_ranks(cases: list[Case], modes: list[str], folder: Any) -> list[list[dict[str, Any]]]:
    """The results of every rank, by case."""
    entry = "tests.strategies.compiled_entries:compare"
    count = cases[0].plan.mesh.size
    found = start_ranks(entry, (cases, modes), count, folder, timeout=300.0)
    return [list(ranks) for ranks in zip(*found, strict=True)]


def check(ranks: list[dict[str, Any]]) -> None:
    assert len({one["order"] for one in ranks}) == 1 and ranks[0]["order"] > 0
    for one in ranks:
        plain: Ran = one["plain"]
        assert plain.losses[0] != plain.losses[1] and plain.graphs == 0
        for way in one.keys() - {"order", "plain"}:
            ran: Ran = one[way]
            assert ran.losses == plain.losses
            for mine, other in zip(ran.gradients, plain.gradients, strict=True):
                assert mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in other)
            assert ran.breaks == [] and ran.sent == plain.sent
            assert ran.graphs == 1 if way == "units" else ran.graphs >= 8


@pytest.mark.slow
def test_compiled_ranks_compute_and_send_the_same(model: Model, draw: Any, tmp_path: Any) -> None:
    for ranks in on_ranks([case_of(model, draw, 0, tmp_path, Mesh((("a", 2),)))], ["plain", "units"], tmp_path):
        check(ranks)


@pytest.mark.slow
def test_compiled_ranks_under_many_plans(model: Model, draw: Any, tmp_path: Any) -> None:
    cases = [case_of(model, draw, seed, tmp_path) for seed in (1, 2, 3, 5)]
    for ranks in on_ranks(cases, ["plain", "units", "leaves"], tmp_path):
        check(ranks)


def alone(model: Model, draw: Any, exact: bool = False, compiling: bool = True) -> tuple[fx.GraphModule, list[Tensor]]:
    """The module of the one rank of a mesh of one, and its entries."""
    program = lower(model.graph, model.random_plan(draw, 0, Mesh((("a", 1),))), LoweringOptions(exact))
    tensors, communicator = slices_of(model.values, program, 0), Communicator(program.mesh, 0)
    module = build(program, tensors, communicator, "cpu", compiled=compiling)
    return module, list(model.batch)


@pytest.mark.parametrize("exact", [False, True])
def test_random_operators_keep_their_numbers_and_gradients(model: Model, draw: Any, exact: bool) -> None:
    """Without compilation: the opaque operators alone."""
    (plain, batch), (opaque, _) = alone(model, draw, exact, compiling=False), alone(model, draw, exact)
    for key in (3, 2**63 - 1):
        first, second = plain(*batch, key), opaque(*batch, as_key(key))
        assert torch.equal(first, second)
        mine = torch.autograd.grad(first, list(plain.parameters()))
        other = torch.autograd.grad(second, list(opaque.parameters()))
        assert all(map(torch.equal, mine, other))
    code = "\n".join(unit.code for unit in opaque.modules() if isinstance(unit, fx.GraphModule))
    assert (
        code.count("opaque_random_dropout_slice(random_key") + code.count("opaque_random_dropout_block(random_key") == 2
    )


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = getattr(nn, kind)(4, 8, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x.sin())[0][:, -1].relu())


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
@pytest.mark.filterwarnings("ignore")  # the compiler's own warnings
def test_the_compiler_does_not_unroll_recurrent_networks(kind: str, draw: Any) -> None:
    """Inductor took four minutes for a GRU of two layers and 24 time steps."""
    torch.manual_seed(0)
    recurrent = Model(Recurrent(kind), nn.CrossEntropyLoss(), (torch.randn(4, 24, 4), torch.tensor([0, 1, 2, 0])))
    (plain, batch), (module, _) = alone(recurrent, draw, compiling=False), alone(recurrent, draw)
    seen: list[str] = []

    def backend(graph: fx.GraphModule, _: list[Tensor]) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    compiled.compile_units(module, "cpu", backend=backend)
    first, second = plain(*batch), module(*batch)
    assert torch.equal(first, second)
    mine, other = (torch.autograd.grad(one, list(on.parameters())) for one, on in ((first, plain), (second, module)))
    assert all(map(torch.equal, mine, other))
    assert "aten.linear.default" in seen and not any("gru" in one or "lstm" in one or "rnn" in one for one in seen)


@pytest.mark.few(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.filterwarnings("ignore")  # the compiler's own warnings
def test_local_steps_keep_their_gradients(dim: int, rank: int) -> None:
    """Steps that send nothing are no opaque operators. A slice of rows is a contiguous view."""
    mesh, shape = Mesh((("a", 2),)), (4, 6)
    given, summed = Layout(((), ())), Layout(((), ()), frozenset("a"))
    sliced = Layout((("a",), ()) if dim == 0 else ((), ("a",)))
    spec = TensorSpec(shape, "float64")

    def carried(name: str, before: Layout, forward: Layout, backward: Layout, after: Layout) -> Redistribute:
        forth, back = resharding_path(before, forward, shape, mesh), resharding_path(backward, after, shape, mesh)
        return Redistribute(name, Ref(name), forth, back, 0.5, True, spec, name, 0, ())

    cut, filled = carried("x", given, sliced, sliced, summed), carried("y", sliced, summed, given, sliced)
    communicator = Communicator(mesh, rank)
    slicing, padding = (redistributing(one, communicator, compiled=True) for one in (cut, filled))
    both = redistributing(Fused("both", (cut, cut), ()), communicator, compiled=True)
    compiler = torch.compile(backend="eager", dynamic=False, fullgraph=True)

    def computed(x: Tensor) -> Tensor:
        first, second = both(x, x * 3)
        return (padding(torch.sin(slicing(x * 2))).exp() * x).sum() + (first * second).square().sum()

    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    for function in (slicing, computed):
        plain, other = function(x).sum(), compiler(function)(x).sum()
        (mine,), (wanted,) = torch.autograd.grad(other, x), torch.autograd.grad(plain, x)
        assert torch.equal(plain, other) and torch.equal(mine, wanted) and wanted.any()


@pytest.mark.parametrize("compiled", [False, True])
def test_joined_values_that_need_no_gradient_come_back_without_one(compiled: bool) -> None:
    """soft_margin_loss, among others, refuses a target that has one."""
    mesh, shape = Mesh((("a", 2),)), (4, 6)
    path = resharding_path(Layout(((), ())), Layout((("a",), ())), shape, mesh)
    cut = Redistribute("x", Ref("x"), path, path[::-1], 1.0, True, TensorSpec(shape, "float32"), "x", 0, ())
    both, communicator = Fused("both", (cut, cut), ()), Communicator(mesh, 0)
    start, wait = starting(both, communicator), waiting(both, communicator)
    carried = redistributing(both, communicator, compiled)
    for function in (carried, lambda *values: wait(start(*values))):
        learned, given = function(torch.ones(shape, requires_grad=True), torch.ones(shape))
        assert learned.requires_grad and not given.requires_grad


def test_parts_are_as_large_as_they_may_be(model: Model, draw: Any) -> None:
    module, _ = alone(model, draw)
    names = {unit: name for name, unit in module.named_modules()}

    def parts(largest: int) -> list[str]:
        return [names[unit] for unit in compiled._parts(module, largest)]

    assert parts(10_000) == [""]
    blocks = parts(40)
    assert "layers.0" in blocks and "layers.1" in blocks and "" not in blocks
    leaves = parts(0)
    assert {"layers.0.norm", "layers.0.up", "layers.1.down"} <= set(leaves) and "layers.0" not in leaves


def test_missing_compilers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder, exc

    def none() -> str:
        raise exc.InvalidCxxCompiler

    assert compiled.missing("cpu") is None
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(StrategyError, match=r"train\.compile = true cannot be done here: there is no C\+\+ compiler"):
        compiled.check("cpu")
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    assert compiled.missing("cuda") == "the package triton is not installed"
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    assert "there is no C compiler" in str(compiled.missing("cuda"))


class Codebook(nn.Module):
    """Rows nearest to those of a batch, which the forward moves towards it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.register_buffer("rows", torch.randn(4, 8))
        self.register_buffer("sums", torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        nearest = torch.cdist(h, self.rows).argmin(-1)
        found = self.rows[nearest]
        with torch.no_grad():
            self.sums.mul_(0.9).add_(F.one_hot(nearest, 4).to(h.dtype).T @ h, alpha=0.1)
            self.rows.copy_(self.sums / 2)
        return F.mse_loss(h, found)


@pytest.mark.filterwarnings("ignore")  # of the compiler itself
def test_buffers_that_a_forward_writes() -> None:
    """As in a pipeline, a forward comes before the backward of the one before; inductor (torch 2.13) adds the product
    in `add(alpha=)` without the multiple, and keeps buffers instead of what a backward reads of them."""
    torch.manual_seed(0)
    batches = [torch.randn(8, 6, dtype=torch.float64) for _ in range(3)]
    model = Model(Codebook(), None, (batches[0],))
    program = lower(model.graph, make_plan(model.graph, Request("data_parallel", 1)), LoweringOptions())
    found: list[list[Tensor]] = []
    for compiling in (False, True):
        tensors = {
            name: nn.Parameter(value.clone()) if name in program.trainable_names else value.clone()
            for name, value in model.values.items()
            if name in program.tensors
        }
        module = build(program, tensors, Communicator(program.mesh, 0), "cpu", compiled=compiling)
        if compiling:
            compiled.compile_units(module, "cpu")
        losses = [module(batch) for batch in batches]
        losses[0].backward()
        gradients = [one.grad for one in tensors.values() if one.grad is not None]
        found.append([*map(Tensor.detach, losses), *gradients, tensors["rows"], tensors["sums"]])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
