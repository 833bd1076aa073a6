"""One architecture under one plan, compared with eager: the loss on every rank, every gradient, every buffer.

Both sides start from the same weights, batch and random key. The sharded side runs on simulated ranks, and as generated
modules in a thread per rank.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn

from runner.commands.verify import ROUNDING
from runner.training.reference import ExactRandom
from strategies.capture import Objective, capture, loss_in
from strategies.core.graph import OperatorGraph
from strategies.core.plan import Plan
from strategies.core.program import LoweringOptions
from strategies.lowering.lowering import lower
from strategies.runtime.simulate import Simulation
from tests.matrix.plans import Mode, plan_for
from tests.matrix.precision import as_double, in_double
from tests.matrix.zoo.architecture import Architecture
from tests.strategies.threads import Trees

Precision = Literal["fp64", "fp32"]
Kinds = tuple[type[Simulation] | type[Trees], ...]
BOTH: Kinds = (Simulation, Trees)
TOLERANCE: dict[Precision, float] = {"fp64": 1e-10, "fp32": 1e-5}
KEY = 5
DROPOUT = 0.1
ROUNDINGS, MOST_ROUNDING = 3.0, 1e-4
"""A run may differ by this multiple of one device's rounding, and never by more than this."""
CHANGES = 3
"""Random changes of all weights in their last bits that are tried."""
ZERO = 1e-12
"""A gradient that such a change moves, and that is smaller than this share of the largest, is nothing but rounding."""
NOISE = 1e5
"""A gradient that such a change moves by more than its size divided by this is compared with what it moves by."""


@dataclass(frozen=True)
class Subject:
    """A captured architecture with what one device gets from one batch. `values` are the tensors before the step;
    `rounding` are gradients of terms that cancel, with the size of their rounding."""

    name: str
    precision: Precision
    graph: OperatorGraph
    values: Mapping[str, Tensor]
    loss: float
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    rounding: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Differences:
    """Relative to the size of each: the loss, the worst gradient and buffer with their names."""

    loss: float
    gradient: tuple[float, str]
    buffer: tuple[float, str]

    @property
    def worst(self) -> float:
        return max(self.loss, self.gradient[0], self.buffer[0])


def subject(architecture: Architecture, dropout: float, precision: Precision, seed: int = 0) -> Subject:
    """Build, capture, and run one step eagerly."""
    torch.manual_seed(seed)
    with in_double() if precision == "fp64" else nullcontext():
        net, batch = architecture.build(dropout)
        wide = torch.float64 if precision == "fp64" else torch.float32
        tensors = tuple(t.to(wide) if t.is_floating_point() else t for t in batch.values())
        objective = Objective(net, None, tuple(batch), ()).to(wide)
        captured = capture(objective, tensors, training=True)
        values = {name: tensor.clone() for name, tensor in captured.tensors.items()}
        values |= dict(zip(batch, tensors, strict=True))
        objective.train()
        with ExactRandom(KEY):
            loss = loss_in(objective(*(tensor.clone() for tensor in tensors)))
        assert isinstance(loss, Tensor)
        loss.backward()
    named = dict(net.named_parameters())
    trained = [source.name for source in captured.graph.sources if source.trainable]
    gradients = {n: torch.zeros_like(named[n]) if (g := named[n].grad) is None else g for n in trained}
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    return Subject(architecture.name, precision, captured.graph, values, loss.item(), gradients, buffers)


def run(subject: Subject, plan: Plan, kinds: Kinds = (Simulation,)) -> Differences:
    """The largest error of the sharded step, run in each of these kinds, relative to the eager one."""
    program = lower(subject.graph, plan, LoweringOptions(exact=True))
    return max((_apart(subject, kind(program, subject.values)) for kind in kinds), key=lambda one: one.worst)


def _apart(subject: Subject, simulation: Simulation | Trees) -> Differences:
    with in_double() if subject.precision == "fp64" else nullcontext():  # modules that are one operator cast, too
        (losses,) = simulation.run(KEY)
        simulation.backward(losses)
    loss = max(abs(loss.item() - subject.loss) / max(abs(subject.loss), 1e-30) for loss in losses)
    gradients = worst(simulation.gradients(), subject.gradients, subject.precision, subject.rounding)
    written = simulation.buffers()  # those that the graph needs
    buffers = worst(written, {n: b for n, b in subject.buffers.items() if n in written}, subject.precision)
    return Differences(math.inf if math.isnan(loss) else loss, gradients, buffers)


def worst(
    found: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    precision: Precision,
    rounding: Mapping[str, float] = MappingProxyType({}),
) -> tuple[float, str]:
    """The largest difference relative to the largest element of its tensor, and whose it is. A gradient that cancels
    out is nothing but rounding: below the rounding of the largest one both must be, or their difference below its
    own."""
    floating = [tensor for tensor in truth.values() if tensor.is_floating_point()]
    noise = ROUNDING[precision] * max((float(t.abs().max()) for t in floating if t.numel()), default=0.0)
    most = (0.0, "")
    for name, expected in truth.items():
        if name in found and name in rounding and float((found[name] - expected).abs().max()) <= rounding[name]:
            continue
        gap = _gap(found[name], expected, noise, precision) if name in found else math.inf
        if gap > most[0]:
            most = (gap, name)
    return most


def _gap(found: Tensor, expected: Tensor, noise: float, precision: Precision) -> float:
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else math.inf
    if not expected.numel() or torch.equal(found, expected):
        return 0.0
    largest = float(expected.abs().max())
    size = largest if largest > noise else noise / TOLERANCE[precision]
    gap = float((found - expected).masked_fill(found == expected, 0.0).abs().max()) / size
    return math.inf if math.isnan(gap) else gap


def own_rounding(architecture: Architecture, dropout: float, seed: int = 0) -> float:
    """The error of one device's single-precision gradients relative to double precision, with either set of
    torch's kernels: which no other order of additions can reproduce."""
    torch.manual_seed(seed)
    net, batch = architecture.build(dropout)
    with as_double():
        exact = _gradients(copy.deepcopy(net).double(), {k: _wide(t) for k, t in batch.items()})
    found = []
    for fast in (True, False):
        with torch.backends.mkldnn.flags(enabled=fast):
            found.append(worst(_gradients(copy.deepcopy(net), batch), exact, "fp32")[0])
    return max(found)


def last_bits(architecture: Architecture, seed: int = 0) -> float:
    """How much one device's double-precision gradients change, relatively, where every weight changes in its last bit:
    which no other order of additions can reproduce. Linear networks change by 1e-16, normalizations over few elements
    of little variance by 1e-8."""
    exact, changed = _last_bits_changed(architecture, seed)
    return max(worst(other, exact, "fp64")[0] for other in changed)


def cancelling(architecture: Architecture, seed: int = 0) -> dict[str, float]:
    """Gradients of terms that cancel, as of what a normalization takes out again, with the most that they change by
    where every weight changes in its last bit: by about themselves where they are zero in exact arithmetic, so these
    may be as wrong as they are large."""
    exact, changed = _last_bits_changed(architecture, seed)
    sizes = {name: float(one.abs().max()) for name, one in exact.items() if one.numel()}
    tiny = MOST_ROUNDING * max(sizes.values())
    moved = {name: max(float((other[name] - exact[name]).abs().max()) for other in changed) for name in sizes}
    noisy = {name: size for name, size in moved.items() if 0 < sizes[name] / NOISE < size < tiny}
    zero = ZERO * max(sizes.values())
    return {name: max(size, sizes[name]) if sizes[name] < zero else size for name, size in noisy.items()}


def _last_bits_changed(architecture: Architecture, seed: int) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """One device's double-precision gradients, and those with weights whose last bits are changed at random."""
    torch.manual_seed(seed)
    with in_double():
        net, batch = architecture.build(0.0)
        net, batch = net.double(), {name: _wide(tensor) for name, tensor in batch.items()}
        exact, found = _gradients(copy.deepcopy(net), batch), []
        for _ in range(CHANGES):
            other = copy.deepcopy(net)
            for weight in other.parameters():
                weight.data *= 1 + torch.finfo(torch.float64).eps * torch.sign(torch.rand_like(weight) - 0.5)
            found.append(_gradients(other, batch))
    return exact, found


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _gradients(net: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    with ExactRandom(KEY):
        loss = loss_in(net.train()(**batch))
    assert isinstance(loss, Tensor)
    loss.backward()
    return {name: p.grad.double() for name, p in net.named_parameters() if p.grad is not None}


@dataclass(frozen=True)
class Run:
    """One cell of the matrix. `allowed` is the tolerance: in single precision it is widened for networks for which one
    device's own rounding is above it."""

    mode: Mode
    dropout: float
    precision: Precision
    differences: Differences | None
    error: str
    seconds: float
    plan: Plan | None
    allowed: float

    @property
    def passed(self) -> bool:
        return self.differences is not None and self.differences.worst <= self.allowed

    def widened(self, rounding: float) -> Run:
        """The run, compared within a few times one device's rounding, if that is above the tolerance."""
        return replace(self, allowed=max(self.allowed, min(ROUNDINGS * rounding, MOST_ROUNDING)))


def matrix_run(subject: Subject, mode: Mode, dropout: float, world: int = 4, seed: int = 0, kinds: Kinds = BOTH) -> Run:
    """Plan and run one cell; its row records any error of the planner or the program."""
    started, plan = time.process_time(), None
    try:
        plan = plan_for(subject.graph, mode, world, seed)
        differences, error = run(subject, plan, kinds), ""
    except Exception as problem:  # the table shows it, and the run counts as failed
        differences, error = None, f"{type(problem).__name__}: {str(problem).splitlines()[0]}"
    seconds, allowed = time.process_time() - started, TOLERANCE[subject.precision]
    return Run(mode, dropout, subject.precision, differences, error, seconds, plan, allowed)
