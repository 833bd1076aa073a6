"""One case: a random graph with its values, a random plan, and the comparison with one device.

Eager runs the graph's own calls on global tensors; simulated ranks run the lowered program. Every output on every rank,
every buffer and the gradient of every parameter must agree. The loss is a weighted sum of all outputs.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.training.reference import ExactRandom
from strategies.core.graph import Operator, OperatorGraph, Ref, rewrite
from strategies.core.plan import Plan
from strategies.core.program import LoweringOptions
from strategies.lowering.lowering import lower
from strategies.rules import RULES
from strategies.rules.random import draws
from strategies.rules.recurrent import NETWORKS
from strategies.rules.registry import resolve
from strategies.runtime.simulate import Simulation
from tests.fuzz.generators import GENERATORS
from tests.fuzz.plans import random_mesh, random_plan
from tests.fuzz.pool import Pool

TOLERANCE = 1e-10
KEY = 11
SPOKEN = {
    "dropout": F.dropout,
    "scaled_dot_product_attention": F.scaled_dot_product_attention,
    "exponential": lambda x, *args: torch.empty_like(x).exponential_(*args),
    "geometric": lambda x, *args: torch.empty_like(x).geometric_(*args),
    "log_normal": lambda x, *args: torch.empty_like(x).log_normal_(*args),
    "normal_functional": lambda x, *args: torch.empty_like(x).normal_(*args),
    "uniform": lambda x, *args: torch.empty_like(x).uniform_(*args),
}
"""Random operators that torch's namespace does not have under their own name."""


class Refused(Exception):
    """torch itself does not run the case on one device."""


@dataclass(frozen=True)
class Case:
    """`values` are the global tensors of all sources by name."""

    graph: OperatorGraph
    values: Mapping[str, Tensor]
    plan: Plan
    sharded_optimizer: bool
    seed: int


@dataclass(frozen=True)
class Outcome:
    """What one device gets: outputs, gradients and new buffers by name."""

    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def random_case(seed: int, operators: tuple[int, int] = (5, 30)) -> Case:
    """The case of this seed, whose minimum number of operators is random between the two bounds."""
    rng = random.Random(seed)
    pool, wanted = Pool(rng), rng.randint(*operators)
    names = sorted(GENERATORS.keys() & RULES.keys())
    by_rule: dict[object, list[str]] = {}
    for name in names:
        by_rule.setdefault(RULES[name], []).append(name)
    families = list(by_rule.values())  # rules of many operators are not generated so much more often than the others
    while len(pool.operators) < wanted:
        name = rng.choice(names if rng.random() < 0.3 else rng.choice(families))
        pool.attempt(lambda pool, name=name: GENERATORS[name](pool, name))  # type: ignore[misc]
    outputs = [*pool.unused, *(ref for ref in pool.values if rng.random() < 0.05 and ref not in pool.unused)]
    graph = pool.graph([ref for ref in outputs if ref.id not in {source.id for source in pool.sources}])
    plan = random_plan(rng, graph, random_mesh(rng))
    values = {source.name: pool.values[Ref(source.id)] for source in graph.sources}
    return Case(graph, values, plan, rng.random() < 0.5, seed)


def weights(outputs: Sequence[Tensor]) -> list[Tensor]:
    """A fixed weight for every element of every output."""
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(tuple(o.shape), generator=generator, dtype=torch.float64) + 0.5 for o in outputs]


def _loss(outputs: Sequence[Tensor], by: Sequence[Tensor]) -> Tensor | None:
    real = [torch.view_as_real(o.resolve_conj()).sum(-1) if o.is_complex() else o for o in outputs]
    terms = [(output * weight).sum() for output, weight in zip(real, by, strict=True) if output.requires_grad]
    return torch.stack(terms).sum() if terms else None


def _call(operator: Operator, args: Any, kwargs: Any) -> Any:
    """Random operators are called as a user calls them, so that the reference gives them their exact numbers."""
    spoken = operator.op in NETWORKS or draws(operator)
    function = SPOKEN.get(operator.op) or getattr(torch, operator.op) if spoken else resolve(operator.target)
    return function(*args, **kwargs)


def eager(case: Case, noise: float = 0.0) -> Outcome:
    """The case on one device. `noise` perturbs every intermediate value by this much, relative to its largest
    element. Raises Refused where torch does not run it."""
    try:
        return _eager(case, noise)
    except (RuntimeError, ValueError, IndexError) as problem:
        raise Refused(str(problem).partition("\n")[0]) from problem


def _eager(case: Case, noise: float) -> Outcome:
    graph, generator = case.graph, torch.Generator().manual_seed(2)
    values = {
        Ref(source.id): case.values[source.name].clone().requires_grad_(source.trainable) for source in graph.sources
    }
    with ExactRandom(KEY):
        for operator in graph.operators:
            place = lambda leaf: values[leaf] if isinstance(leaf, Ref) else leaf  # noqa: E731
            found = _call(operator, rewrite(operator.args, place), rewrite(operator.keywords, place))
            for index, value in enumerate(found if operator.multiple else (found,)):
                if noise and value.is_floating_point() and value.numel():
                    draw = torch.randn(value.shape, generator=generator, dtype=torch.float64)
                    value = value + draw * (noise * float(value.detach().abs().max()))
                values[Ref(operator.id, index)] = value
    outputs = tuple(values[ref] for ref in graph.outputs)
    loss = _loss(outputs, weights(outputs))
    if loss is not None:
        loss.backward()
    trained = [source for source in graph.sources if source.trainable]
    gradients = {}
    for source in trained:
        leaf = values[Ref(source.id)]
        gradients[source.name] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    names = {source.id: source.name for source in graph.sources}
    buffers = {names[buffer]: values[ref].detach() for buffer, ref in graph.updates}
    return Outcome(tuple(output.detach() for output in outputs), gradients, buffers)


def sharded(case: Case) -> tuple[list[list[Tensor]], dict[str, Tensor], dict[str, Tensor]]:
    """The case on simulated ranks: every output on every rank, global gradients, global buffers."""
    program = lower(case.graph, case.plan, LoweringOptions(exact=True, sharded_optimizer=case.sharded_optimizer))
    simulation = Simulation(program, case.values)
    outputs = simulation.run(KEY)
    by = weights([ranks[0] for ranks in outputs])
    losses = [_loss([ranks[rank] for ranks in outputs], by) for rank in range(program.mesh.size)]
    if losses[0] is not None:
        simulation.backward([loss for loss in losses if loss is not None])
    size = program.mesh.size if case.sharded_optimizer else 1
    gradients = {name: gradient / size for name, gradient in simulation.gradients().items()}
    return [[o.detach() for o in ranks] for ranks in outputs], gradients, simulation.buffers()


def failure(case: Case) -> str | None:
    """The failure of the case, in one line, or None. Errors of the program under test are failures too."""
    want = eager(case)
    try:
        outputs, gradients, buffers = sharded(case)
    except Exception as error:  # every error of lowering or running is a failure
        place = traceback.extract_tb(error.__traceback__)[-1]
        line = str(error).splitlines()[0] if str(error) else ""
        return f"{type(error).__name__}: {line} ({place.filename.rpartition('/')[2]}:{place.lineno})"
    return next(_differences(case, want, outputs, gradients, buffers), None)


def _differences(
    case: Case,
    want: Outcome,
    outputs: Sequence[Sequence[Tensor]],
    gradients: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
) -> Iterator[str]:
    for ref, ranks, expected in zip(case.graph.outputs, outputs, want.outputs, strict=True):
        for rank, got in enumerate(ranks):
            if (gap := difference(got, expected)) > TOLERANCE:
                yield f"output {ref.id}[{ref.index}] on rank {rank} differs by {gap:.1e}"
    for name, expected in want.gradients.items():
        if (gap := difference(gradients[name], expected)) > TOLERANCE:
            yield f"gradient of {name} differs by {gap:.1e}"
    for buffer, expected in want.buffers.items():
        if (gap := difference(buffers[buffer], expected)) > TOLERANCE:
            yield f"buffer {buffer} differs by {gap:.1e}"


def difference(got: Tensor, want: Tensor) -> float:
    """The largest difference, relative to the largest element where that is above 1; infinite if the kinds differ."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if not want.numel():
        return 0.0
    if not (want.is_floating_point() or want.is_complex()):
        return 0.0 if torch.equal(got, want) else float("inf")
    gap = (got - want).abs().max() / want.abs().max().clamp_min(1.0)
    return float("inf") if gap.isnan() else float(gap)


def sensitive(case: Case) -> bool:
    """Whether the case is ill-conditioned on one device: slightly larger rounding errors change results by more than
    the tolerance allows. Such a case proves nothing."""
    plain, disturbed = eager(case), eager(case, noise=1e-14)
    pairs = [
        *zip(disturbed.outputs, plain.outputs, strict=True),
        *((disturbed.gradients[name], plain.gradients[name]) for name in plain.gradients),
    ]
    gaps = [difference(a, b) for a, b in pairs]
    return any(not gap <= TOLERANCE / 10 for gap in gaps)
