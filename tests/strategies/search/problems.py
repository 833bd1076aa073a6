"""Graphs of models on meta tensors, search problems with nothing configured, and clusters to estimate them on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from models.gpt import GPT
from models.llama import Llama
from models.losses import NextTokenLoss
from strategies.capture import Objective, capture
from strategies.core.graph import Operator, OperatorGraph, Ref, Source, TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh, primes
from strategies.core.mesh_refinement import meshing
from strategies.cost.cluster import Cluster, Level, Link
from strategies.cost.problem import Problem
from strategies.planner.default_strategies import batch_parallel
from strategies.rules import rule_of
from strategies.rules.sharding import Assignment
from strategies.search.sharding_propagation import PlanSeconds, Propagated, sharding_propagation

FLOPS = {"float32": 47e12, "bfloat16": 692e12}
NVLINK, NETWORK = Link(369e9, 1.9e-6, 10e-6), Link(41e9, 4e-6, 10e-6)


def node(devices: int, overlap: float = 0.9) -> Cluster:
    """One node of fast devices."""
    return Cluster("node", (Level("gpu", devices, NVLINK),), FLOPS, 83 * 10**9, 3e12, 5e-6, overlap=overlap)


def nodes(count: int, devices: int = 8) -> Cluster:
    """Nodes of fast devices, a slower link between them."""
    levels = (Level("node", count, NETWORK), Level("gpu", devices, NVLINK))
    return Cluster("nodes", levels, FLOPS, 83 * 10**9, 3e12, 5e-6, overlap=0.9)


def shaped(net: nn.Module, loss: nn.Module, *batch: Tensor) -> OperatorGraph:
    """The training graph of a model on meta tensors."""
    names = tuple(map(str, range(len(batch))))
    return capture(Objective(net, loss, names, names[-1:]), batch, training=True).graph


def tokens(batch: int, length: int) -> tuple[Tensor, Tensor]:
    found = torch.zeros(batch, length, dtype=torch.int64, device="meta")
    return found, found.clone()


@cache
def llama(layers: int, batch: int = 16, width: int = 4096, hidden: int = 14336, length: int = 2048) -> OperatorGraph:
    """Llama 3 in bfloat16, of 8 billion parameters with 32 layers."""
    with torch.device("meta"):
        net = Llama(128256, length, width, layers, width // 128, 8, hidden).bfloat16()
    return shaped(net, NextTokenLoss(), *tokens(batch, length))


@cache
def gpt(layers: int, batch: int = 64, vocabulary: int = 50304) -> OperatorGraph:
    """GPT-2 small with a vocabulary that divides."""
    with torch.device("meta"):
        net = GPT(vocabulary, 1024, 768, layers, 12).bfloat16()
    return shaped(net, NextTokenLoss(), *tokens(batch, 1024))


def prime_mesh(ranks: int) -> Mesh:
    return Mesh(tuple((f"d{i}", prime) for i, prime in enumerate(primes(ranks))))


def problem(graph: OperatorGraph, mesh: Mesh, fixed: dict[str, Assignment] | None = None) -> Problem:
    """Nothing configured but `fixed` (by plan name); the batch is sharded over as many axes as divide it."""
    inputs = {}
    for source in graph.of_kind("input"):
        axes: tuple[str, ...] = ()
        for axis in mesh.names:
            if source.spec.shape and source.spec.shape[0] % mesh.product((*axes, axis)) == 0:
                axes = (*axes, axis)
        inputs[source.name] = Layout((axes, *((),) * (len(source.spec.shape) - 1))[: len(source.spec.shape)])
    shardings = {operator.id: rule_of(operator, graph) for operator in graph.operators}
    ids = {graph.by_name[name].id: assignment for name, assignment in (fixed or {}).items()}
    return Problem(graph, mesh, shardings, inputs, ids, {})


def all_layouts(dims: int, axes: Sequence[str], partial: bool) -> list[Layout]:
    """Every layout in which the axes of a dim are in mesh order."""
    found = [Layout(((),) * dims)]
    for axis in axes:
        more = list(found)
        for layout in found:
            for dim in range(dims):
                grown = tuple((*have, axis) if d == dim else have for d, have in enumerate(layout.dims))
                more.append(Layout(grown, layout.partial))
            if partial:
                more.append(Layout(layout.dims, layout.partial | {axis}))
        found = more
    return found


def line(operators: int, *, repeating: bool = True, batch: int = 2**20, width: int = 2**14) -> OperatorGraph:
    """A chain of products and relus, made without capture: all layers equal, or each with a different width."""
    widths = [width if repeating else width * (1 + place) for place in range(operators // 2 + 1)]
    sources = [Source("x", "input", "0", TensorSpec((batch, widths[0]), "bfloat16"))]
    found: list[Operator] = []
    value = Ref("x")
    for place in range(operators // 2):
        weight = Source(
            f"w{place}",
            "parameter",
            f"l{place}.weight",
            TensorSpec((widths[place + 1], widths[place]), "bfloat16"),
            True,
        )
        sources.append(weight)
        result = TensorSpec((batch, widths[place + 1]), "bfloat16")
        for op, args in (("linear", (value, Ref(weight.id))), ("relu", (Ref(f"linear{place}"),))):
            name = f"l{place}.{op}"
            one = Operator(
                f"{op}{place}", name, f"l{place}", op, f"aten.{op}.default", args, (), (result,), False, "", ()
            )
            found.append(one)
            value = Ref(one.id)
    return OperatorGraph(tuple(sources), tuple(found), (value,), tuple(source.name for source in sources[1:]))


def propagated(made: Problem, machine: Cluster, seconds: PlanSeconds | None = None) -> Propagated:
    """The plan of sharding propagation on the problem's own axes; operators it does not reach are sharded by batch."""
    shape = meshing(made.mesh.size, made.mesh.axes, {}, [])
    return sharding_propagation(made, machine, shape.fixed, lambda one: batch_parallel(made, shape, one), seconds)
