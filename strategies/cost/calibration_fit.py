"""Fit the constants of a described machine to measured times.

Every law is linear in its constants (seconds of a call, per round, per byte, per flop), none of which is negative.
Errors are relative, so that short calls count as much as long ones. Invariant: the law that is fitted is the one that
`strategies.cost.collectives` prices with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from strategies.core.mesh import Mesh
from strategies.core.steps import ALL_REDUCE
from strategies.cost.cluster import Cluster, Link, Pace
from strategies.cost.roofline import operator_work
from strategies.cost.sample_operators import STACK, sample, stack
from strategies.rules import rule_of

ALONE = Mesh((("alone", 1),))
SEND = "send"
T = TypeVar("T")
Numbers = npt.NDArray[np.float64]
REPEATS, STEP, SHORTEST = 40, 0.9, 1e-12
"""Steps of the fit, the largest step of a logarithm, and the shortest fitted time (of no bytes and no call, say)."""
HIDDEN = 0.1
"""A share of the time of the largest call that cannot be distinguished from noise."""


@dataclass(frozen=True)
class Product:
    """A product of matrices of `dtype`, on every rank at once; `worked` are seconds of a rank's CPU, which ranks share:
    None where they were not measured."""

    dtype: str
    flops: float
    seconds: float
    worked: float | None = None


@dataclass(frozen=True)
class TimedCopy:
    """Reading and writing `bytes` in all, on every rank at once; `worked` as that of a product."""

    bytes: int
    seconds: float
    worked: float | None = None


@dataclass(frozen=True)
class TimedCollective:
    """A collective among groups of `ranks` in which each rank sends `bytes`, in all groups at once."""

    kind: str
    ranks: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Ran:
    """A sample of an operator on `tokens`, on every rank at once: seconds of forward and of backward, of a rank's CPU
    where products have such; those of `sample_operators.STACK` as plans are priced."""

    op: str
    tokens: int
    forward: float
    backward: float


@dataclass(frozen=True)
class Error:
    """How far fitted times are from measured ones, relative to these."""

    middle: float
    worst: float


@dataclass(frozen=True)
class Fit:
    """`flops` by dtype, `memory_bandwidth` (None: not measured), `links` by kind of collective, `operators` by name,
    forward and backward; `errors` by what was fitted; `achieved` is the share of `flops` and `memory_bandwidth` that
    operators reach in a step, which takes longer than the sum of its operators alone."""

    flops: Mapping[str, float]
    memory_bandwidth: float | None
    links: Mapping[str, Link]
    errors: Mapping[str, Error]
    operators: Mapping[str, tuple[Pace, Pace]] = field(default_factory=dict)
    achieved: float = 1.0


def fit(
    products: Iterable[Product],
    copies: Iterable[TimedCopy],
    calls: Iterable[TimedCollective],
    ran: Iterable[Ran] = (),
    launch: float = 0.0,
    view: float = 0.0,
) -> Fit:
    """The constants of what was measured; `launch` and `view` in seconds per operator. Those of which nothing is known
    are left out: kinds of collectives that were measured with one number of bytes, whose seconds per byte and per call
    cannot be separated, too."""
    errors, products, ran = dict[str, Error](), tuple(products), tuple(ran)
    flops: dict[str, float] = {}
    links: dict[str, Link] = {}
    for dtype, multiplied in _grouped(products, lambda one: one.dtype).items():
        rows = [[1.0, one.flops] for one in multiplied]
        (_, per_flop), errors[f"matmul {dtype}"] = law(rows, [one.seconds for one in multiplied])
        flops[dtype] = 1 / per_flop
    bandwidth: float | None = None
    if measured := list(copies):
        (_, per_byte), errors["memory"] = law([[1.0, one.bytes] for one in measured], [one.seconds for one in measured])
        bandwidth = 1 / per_byte
    for kind, group in _grouped(calls, lambda one: one.kind).items():
        if len({one.bytes for one in group}) > 1:
            rows = [[1.0, rounds(kind, one.ranks), one.bytes] for one in group]
            (call, latency, per_byte), errors[kind] = law(rows, [one.seconds for one in group])
            links[kind] = Link(1 / per_byte, latency, call)
    operators: dict[str, tuple[Pace, Pace]] = {}
    multiplied = [one for one in products if one.dtype == "float32"]
    if measured and multiplied:
        worked = [one.seconds if one.worked is None else one.worked for one in multiplied]
        (_, per_flop), _ = law([[1.0, one.flops] for one in multiplied], worked)
        worked = [one.seconds if one.worked is None else one.worked for one in measured]
        (_, per_byte), _ = law([[1.0, one.bytes] for one in measured], worked)
        own, shared = Cluster("own CPU", (), {"float32": 1 / per_flop}, 0, 1 / per_byte, 0.0), 1 / flops["float32"]
        for op, samples in _grouped((one for one in ran if one.op != STACK), lambda one: one.op).items():
            paces, errors[f"{op} forward"], errors[f"{op} backward"] = _paces(samples, own)
            ahead, back = (Pace(one.call * shared / per_flop, one.factor) for one in paces)
            operators[op] = ahead, back
    achieved = 1.0
    if bandwidth is not None and "float32" in flops:
        machine = Cluster("measured", (), flops, 0, bandwidth, launch, view, operators=operators)
        achieved, errors[STACK] = _achieved([one for one in ran if one.op == STACK], machine)
    return Fit(flops, bandwidth, links, errors, operators, achieved)


def _achieved(ran: Sequence[Ran], machine: Cluster) -> tuple[float, Error]:
    """The share of the rates of `machine` with which the sum of the operators of layers takes as long as the layers."""
    rates, calls, seconds = [], [], []
    for one in ran:
        graph = stack(one.tokens)
        works = [operator_work(rule_of(op, graph), {}, op, graph, ALONE, machine) for op in graph.operators]
        launches = sum(work.calls for work in works)
        rates.append(sum(work.forward + work.backward for work in works) - launches)
        calls.append(launches)
        seconds.append(one.forward + one.backward)
    if not ran:
        return 1.0, Error(0.0, 0.0)
    share = sum(rates) / max(sum(seconds) - sum(calls), sum(rates))
    times = np.array(calls) + np.array(rates) / share
    return share, _error(times[:, None], np.array(seconds), np.ones(1))


def _paces(ran: Sequence[Ran], machine: Cluster) -> tuple[tuple[Pace, Pace], Error, Error]:
    """The paces of one operator: the seconds of its samples by those that the roofline of `machine` has without
    calls."""
    works = []
    for one in ran:
        graph = sample(one.op, one.tokens)
        (operator,) = graph.operators
        works.append(operator_work(rule_of(operator, graph), {}, operator, graph, ALONE, machine))
    ahead, error_ahead = law([[1.0, work.forward] for work in works], [one.forward for one in ran])
    back, error_back = law([[1.0, work.backward] for work in works], [one.backward for one in ran])
    return (Pace(*ahead), Pace(*back)), error_ahead, error_back


def _grouped(measured: Iterable[T], key: Callable[[T], str]) -> dict[str, list[T]]:
    groups: dict[str, list[T]] = {}
    for one in measured:
        groups.setdefault(key(one), []).append(one)
    return groups


def rounds(kind: str, ranks: int) -> int:
    """Message rounds of one collective on a machine of one level, as a ring or directly to every peer."""
    if kind == SEND:
        return 1
    return (ranks - 1) * (2 if kind == ALL_REDUCE else 1)


def law(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], Error]:
    """The constants of `nonnegative`, of which the last one, of what grows, is above zero: where it is hidden by noise,
    it is that of the row with the highest rate. One row alone has no other constants."""
    table, times = np.array(rows, dtype=float), np.array(seconds)
    constants, error = nonnegative(rows, seconds)
    highest = float((times / table[:, -1]).min())
    if len(times) == 1:
        constants = [*(0.0 for _ in constants[:-1]), highest]
    elif constants[-1] < HIDDEN * highest:
        constants = [*constants[:-1], highest]
    else:
        return constants, error
    return constants, _error(table, times, np.array(constants))


def nonnegative(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], Error]:
    """Constants, none below zero, for which rows x constants is near `seconds`, too long counting as much as too short:
    least squares of the logarithms, each step of which is linear around what was found before. A time that is far off
    (something else ran) pulls no harder than one that is off by a factor of 2.5."""
    table, times = np.array(rows, dtype=float), np.array(seconds)
    constants = _least_squares(table, times, 1 / times)
    for _ in range(REPEATS):
        fitted = np.maximum(table @ constants, SHORTEST)
        wanted = fitted * (1 + np.log(times / fitted).clip(-STEP, STEP))
        constants = (constants + _least_squares(table, wanted, 1 / fitted)) / 2
    return [float(one) for one in constants], _error(table, times, constants)


def _error(table: Numbers, times: Numbers, constants: Numbers) -> Error:
    off = np.abs(table @ constants / times - 1)
    return Error(float(np.median(off)), float(off.max()))


def _least_squares(table: Numbers, times: Numbers, weights: Numbers) -> Numbers:
    """The best of all choices of constants that are zero."""
    count, best, least = table.shape[1], np.zeros(table.shape[1]), math.inf
    weighted, wanted = table * weights[:, None], times * weights
    scale = np.abs(weighted).max(axis=0)
    scale[scale == 0] = 1.0
    for used in (list(one) for size in range(1, count + 1) for one in combinations(range(count), size)):
        part = weighted[:, used] / scale[used]
        solution, *_ = np.linalg.lstsq(part, wanted, rcond=None)
        left = float(((part @ solution - wanted) ** 2).sum())
        if (solution >= 0).all() and left < least * (1 - 1e-9):
            best, least = np.zeros(count), left
            best[used] = solution / scale[used]
    return best
