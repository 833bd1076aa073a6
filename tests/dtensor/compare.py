"""Our sharding rules beside those of torch's DTensor, operator by operator.

For random calls of an operator (those of the fuzz) and every placement of its operands on a mesh of two ranks, or of
two by two: does the rule compute the result from these slices as they are, and how is the result placed? A rule of ours
answers by its factors. DTensor is called with redistribution forbidden, all ranks simulated in this process. Where the
answers differ, results and gradients of both are compared with one device.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode, local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.testing._internal.distributed.fake_pg import FakeStore

from strategies.core.graph import Operator, OperatorGraph, Ref, rewrite
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.rules import rule_of
from strategies.rules.random import draws
from strategies.rules.registry import resolve
from tests.fuzz.cases import Case, _loss, difference, failure, weights
from tests.fuzz.generators import GENERATORS
from tests.fuzz.pool import Pool

AXES = "ab"
MOST = 60
"""How many placements of operands are tried in one call, per mesh."""

Placed = tuple[str, ...]
"""The placements of one tensor along the axes of the mesh: "R", "S0", "P"."""
Taken = tuple[Placed, ...]
"""Those of all operands."""
Verdict = Literal["exact", "wrong", "no backward", "redistributed", "unknown", "refused"]


@dataclass(frozen=True)
class Call:
    """One call of an operator: `graph` holds it alone, `values` are its operands by name."""

    operator: Operator
    graph: OperatorGraph
    values: Mapping[str, Tensor]

    @cached_property
    def one_device(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Weights, results and gradients; zeros for an operand without a gradient."""
        pairs = zip(self.operands, self.trained, strict=True)
        leaves = [value.clone().requires_grad_(trained) for value, trained in pairs]
        results = [each for each in _result(self.operator, leaves) if isinstance(each, Tensor)]
        by = weights(results)
        loss = _loss(results, by)
        if loss is not None:
            loss.backward()
        zeros = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        return by, [each.detach() for each in results], zeros

    @property
    def operands(self) -> list[Tensor]:
        return [self.values[ref.id] for ref in self.operator.operands]

    @property
    def trained(self) -> list[bool]:
        by_name = {source.name: source.trainable for source in self.graph.sources}
        return [by_name[ref.id] for ref in self.operator.operands]


@dataclass(frozen=True)
class Answer:
    """What DTensor makes of one placement of the operands: `results` are the placements of what it returns."""

    verdict: Verdict
    results: Taken = ()
    problem: str = ""


def random_calls(op: str, count: int, seed: int) -> list[Call]:
    """Up to `count` calls of `op` whose operands differ."""
    rng, calls = random.Random(f"{seed} {op}"), []
    for _ in range(20 * count):
        pool = Pool(rng)
        if not pool.attempt(lambda pool: GENERATORS[op](pool, op)):
            continue
        operator = next((operator for operator in reversed(pool.operators) if operator.op == op), None)
        operands = operator.operands if operator else ()
        if operator is None or not operands or len(set(operands)) < len(operands) or draws(operator):
            continue
        call = _alone(operator, pool, True)
        try:
            call.one_device  # noqa: B018
        except RuntimeError:  # it has no derivative
            call = _alone(operator, pool, False)
        calls.append(call)
        if len(calls) == count:
            break
    return calls


def _alone(operator: Operator, pool: Pool, learns: bool) -> Call:
    """The operator in a graph of its own; with `learns` its operands have gradients, where they had one."""
    names = {ref: Ref(f"x{at}") for at, ref in enumerate(operator.operands)}
    swap = lambda leaf: names[leaf] if isinstance(leaf, Ref) else leaf  # noqa: E731
    alone, trained = Pool(random.Random(0)), {Ref(source.id): source.trainable for source in pool.sources}
    for ref in operator.operands:
        value = pool.values[ref].clone()
        alone.source(value, trainable=learns and value.is_floating_point() and trained.get(ref, True))
    args, keywords = rewrite(operator.args, swap), rewrite(operator.keywords, swap)
    moved = replace(operator, args=args, kwargs=tuple(keywords.items()))
    alone.operators.append(moved)
    graph = alone.graph([Ref(operator.id, at) for at in range(len(operator.results))])
    return Call(moved, graph, {source.name: alone.values[Ref(source.id)] for source in graph.sources})


# ours


def ours(call: Call, mesh: Mesh) -> dict[Taken, tuple[Taken, dict[str, tuple[str, ...]]]]:
    """The placements of operands that our rule takes as they are -> those of the results, and the assignment."""
    sharding = rule_of(call.operator, call.graph)
    found: dict[Taken, tuple[Taken, dict[str, tuple[str, ...]]]] = {}
    for chosen in itertools.product((None, *sharding.factors), repeat=len(mesh.axes)):
        assignment: dict[str, tuple[str, ...]] = {}
        for (axis, _), factor in zip(mesh.axes, chosen, strict=True):
            if factor is not None:
                assignment[factor] = (*assignment.get(factor, ()), axis)
        divides = all(
            all(size % mesh.product(axes) == 0 for size in (sharding.sizes[factor], *sharding.lengths_of(factor)))
            for factor, axes in assignment.items()
        )
        if divides:
            taken = tuple(_placed(layout, mesh) for layout in sharding.operand_layouts(assignment))
            results = tuple(_placed(layout, mesh) for layout in sharding.result_layouts(assignment))
            if set(itertools.chain(*taken)) != {"R"}:
                found[taken] = results, assignment
    return found


def _placed(layout: Layout, mesh: Mesh) -> Placed:
    dim_of = {axis: dim for dim, axes in enumerate(layout.dims) for axis in axes}
    return tuple(
        f"S{dim_of[axis]}" if axis in dim_of else "P" if axis in layout.partial else "R" for axis, _ in mesh.axes
    )


def proved(call: Call, mesh: Mesh, assignment: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether the call under our rule equals one device on simulated ranks, in results and gradients."""
    replicated = {source.name: Layout.replicated(len(source.spec.shape)) for source in call.graph.sources}
    inputs = {source.name: replicated[source.name] for source in call.graph.sources if source.kind == "input"}
    tensors = {name: layout for name, layout in replicated.items() if name not in inputs}
    plan = Plan(mesh, {call.operator.name: OperatorPlan(assignment, "configured")}, inputs, tensors)
    return failure(Case(call.graph, call.values, plan, False, 0)) is None


# DTensor


def simulate_ranks(size: int) -> None:
    """Makes this process rank 0 of a group that sends nothing; `LocalTensorMode` computes for all ranks."""
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())


def placements_of(call: Call, mesh: Mesh) -> list[Taken]:
    """The placements of the operands along one axis whose slices divide: all of them, or if these are too many, those
    in which one dim of some operands, counted from the right, is sliced and all others are replicated."""

    def of_operand(value: Tensor) -> list[str]:
        sums = ["P"] if value.is_floating_point() else []
        return ["R", *(f"S{dim}" for dim in range(value.dim()) if _divides(value, (f"S{dim}",), mesh)), *sums]

    single = list(map(of_operand, call.operands))
    if math.prod(map(len, single)) <= MOST:
        every = list(itertools.product(*single))
    else:
        every = []
        for each in {text for texts in single for text in texts} - {"R"}:
            alone = [tuple(each if at == only else "R" for at in range(len(single))) for only in range(len(single))]
            every += [tuple(each if each in texts else "R" for texts in single), *alone]
        every = [texts for texts in every if all(text in some for text, some in zip(texts, single, strict=True))]
    return list(dict.fromkeys(tuple((text,) for text in texts) for texts in every if set(texts) != {"R"}))


def paired(call: Call, mesh: Mesh, along_one: Sequence[Taken]) -> list[Taken]:
    """The placements along two axes that are any two (or one) of `along_one`; a random sample if these are too many."""
    replicated = tuple(("R",) for _ in call.operands)
    pairs = list(itertools.product([replicated, *along_one], repeat=2))[1:]
    every = [tuple((*a, *b) for a, b in zip(first, second, strict=True)) for first, second in pairs]
    every = [
        taken
        for taken in every
        if all(_divides(v, placed, mesh) for v, placed in zip(call.operands, taken, strict=True))
    ]
    return every if len(every) <= MOST // 3 else random.Random(0).sample(every, MOST // 3)


def _divides(value: Tensor, placed: Placed, mesh: Mesh) -> bool:
    counts = [1] * value.dim()
    for text, (_, size) in zip(placed, mesh.axes, strict=True):
        if text.startswith("S"):
            counts[int(text[1:])] *= size
    return all(size and size % count == 0 for size, count in zip(value.shape, counts, strict=True))


def _placement(text: str) -> Placement:
    return Shard(int(text[1:])) if text.startswith("S") else Partial() if text == "P" else Replicate()


def _text(placement: Placement) -> str:
    return {"Replicate()": "R", "Partial(sum)": "P"}.get(repr(placement)) or (
        f"S{placement.dim}" if type(placement) is Shard else repr(placement)
    )


def theirs(call: Call, mesh: Mesh, taken: Taken) -> Answer:
    """DTensor's answer to one placement of the operands."""
    by, expected, wanted = call.one_device
    with LocalTensorMode(frozenset(range(mesh.size))):
        devices = init_device_mesh("cpu", tuple(size for _, size in mesh.axes))
        operands = zip(call.operands, call.trained, taken, strict=True)
        leaves = [_leaf(value, placed, mesh, devices).requires_grad_(trained) for value, trained, placed in operands]
        with ExplicitRedistributionContext(strict=True):
            try:
                found = _result(call.operator, leaves)
            except Exception as problem:  # whatever DTensor raises is its answer
                return _refusal(problem)
        results = [each for each in found if isinstance(each, DTensor)]
        placed = tuple(tuple(map(_text, each.placements)) for each in results)
        try:
            with ExplicitRedistributionContext(enable=False):
                full = [each.full_tensor() for each in results]
                loss = _loss(full, by)
                if loss is not None:
                    loss.backward()
                outputs = [_agreed(each.detach()) for each in full]
                gradients = [None if leaf.grad is None else _agreed(leaf.grad.full_tensor()) for leaf in leaves]
        except NotImplementedError as problem:
            return Answer("no backward", placed, _first_line(problem))
        except Exception as problem:
            return Answer("wrong", placed, _first_line(problem))
    pairs = [*zip(outputs, expected, strict=True)]
    pairs += [
        (torch.zeros_like(want) if got is None else got, want) for got, want in zip(gradients, wanted, strict=True)
    ]
    gap = max(difference(got, want) for got, want in pairs)
    return Answer("exact" if gap <= 1e-10 else "wrong", placed, "" if gap <= 1e-10 else f"differs by {gap:.1e}")


def _first_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {str(problem).partition(chr(10))[0]}"


def _leaf(value: Tensor, placed: Placed, mesh: Mesh, devices: DeviceMesh) -> DTensor:
    """The slices of a value; of partial sums, every rank holds a share."""
    mode = local_tensor_mode()
    assert mode is not None

    def of_rank(rank: int) -> Tensor:
        piece = value.detach().clone()
        for text, (axis, size) in zip(placed, mesh.axes, strict=True):
            at = mesh.coordinate(rank, axis)
            if text == "P":
                piece = piece * (0.25 if at else 1 - 0.25 * (size - 1))
            elif text.startswith("S"):
                piece = piece.chunk(size, int(text[1:]))[at]
        return piece.contiguous()

    placements = [_placement(text) for text in placed]
    local = mode.rank_map(of_rank)
    made = DTensor.from_local(
        local, devices, placements, run_check=False, shape=value.shape, stride=value.contiguous().stride()
    )
    return made.detach()


def _agreed(value: Tensor) -> Tensor:
    """The tensor that all ranks have; raises AssertionError if they do not agree."""
    return value.reconcile() if isinstance(value, LocalTensor) else value


def _result(operator: Operator, operands: Sequence[Tensor]) -> Sequence[Any]:
    by_ref = dict(zip(operator.operands, operands, strict=True))
    place = lambda leaf: by_ref[leaf] if isinstance(leaf, Ref) else leaf  # noqa: E731
    found = resolve(operator.target)(*rewrite(operator.args, place), **rewrite(operator.keywords, place))
    return found if isinstance(found, (tuple, list)) else (found,)


def _refusal(problem: Exception) -> Answer:
    text, first = str(problem), _first_line(problem)
    if "redistribut" in text:
        return Answer("redistributed", (), first)
    unknown = isinstance(problem, NotImplementedError) or "sharding strategy" in text
    return Answer("unknown" if unknown else "refused", (), first)
