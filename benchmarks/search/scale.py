"""Recursive programming on the largest problems, and its time against operators and devices."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from benchmarks.search import charts
from benchmarks.search.outcome import Claim, Outcome, Setting
from strategies.cost.cluster import Cluster
from strategies.cost.problem import Problem
from strategies.search.recursive_programming import recursive_search
from tests.strategies.search.problems import line, llama, nodes, prime_mesh, problem

TITLE = "Recursive programming at scale"
Series = dict[str, list[tuple[float, float]]]
SLOPE = 1.1
"""Of the seconds against the operators, both logarithmic, over the last decade: 1 is linear."""


def seconds(made: Problem, machine: Cluster) -> float:
    """CPU seconds of one search."""
    _ = made.graph.users, made.graph.specs, made.graph.trained, made.graph.returning
    started = time.process_time()
    recursive_search(made, machine)
    return time.process_time() - started


def on(ranks: int) -> Cluster:
    return nodes(max(1, ranks // 8))


def by_operators(most: int) -> Series:
    """Chains on 64 devices; at most 1,000 operators if all layers differ."""
    found: Series = {"equal layers, 64 devices": [], "different layers, 64 devices": []}
    for repeating, name in zip((True, False), found, strict=True):
        count = 100
        while count <= (most if repeating else min(most, 1000)):
            spent = seconds(problem(line(count, repeating=repeating), prime_mesh(64)), on(64))
            found[name].append((count, spent))
            print(f"{name:32s} {count:6d} operators {spent:8.3f} s", flush=True)
            count = {1: 3, 3: 10}[int(str(count)[0])] * 10 ** (len(str(count)) - 1)
    return found


def by_devices(most: int) -> Series:
    """A chain and a model on 2 to `most` devices."""
    found: Series = {"1000 operators, equal layers": [], "Llama 8B, 4 layers": []}
    for name, graph in zip(found, (line(1000), llama(4, batch=2048)), strict=True):
        for power in range(1, most.bit_length()):
            spent = seconds(problem(graph, prime_mesh(2**power)), on(2**power))
            found[name].append((2**power, spent))
            print(f"{name:32s} {2**power:6d} devices   {spent:8.3f} s", flush=True)
    return found


@dataclass(frozen=True)
class Large:
    """A model of the shape of 405B: `seconds` are those of the fastest of a few searches."""

    layers: int
    operators: int
    seconds: float


def large(layers: int, repeat: int = 1) -> Large:
    """A model of `layers` layers on 16,384 devices."""
    graph = llama(layers, batch=2048, width=16384, hidden=53248, length=8192)
    made = problem(graph, prime_mesh(16384))
    found = Large(layers, len(graph.operators), min(seconds(made, on(16384)) for _ in range(repeat)))
    print(f"Llama of {layers} layers, {found.operators} operators, 16384 devices: {found.seconds:.3f} s", flush=True)
    return found


def measure(setting: Setting) -> Outcome:
    """The shape of 405B on 16,384 devices, then chains of up to 10,000 operators."""
    shape = large(8 if setting.quick else 126, 1 if setting.quick else 3)
    operators = by_operators(1000 if setting.quick else 10_000)
    devices = by_devices(64 if setting.quick else 16_384)
    charts.curves(setting.pictures / "scale.svg", {"operators": operators, "devices": devices}, "CPU seconds")
    repeated, *_ = operators.values()
    (few, fast), (many, slow) = next(point for point in repeated if point[0] >= repeated[-1][0] / 10), repeated[-1]
    slope = math.log(slow / fast) / math.log(many / few)
    claims = (
        Claim(
            f"405B shape, {shape.layers} layers, {shape.operators} operators, 16,384 devices: at most 1 s",
            f"{shape.seconds:.2f} s",
            shape.seconds <= 1,
        ),
        Claim(f"linear in operators: slope at most {SLOPE} to {many:,.0f} operators", f"{slope:.2f}", slope <= SLOPE),
    )
    rows = [
        (name, f"{size:,.0f} {what}", f"{seconds:.3f}")
        for what, series in (("operators", operators), ("devices", devices))
        for name, points in series.items()
        for size, seconds in points
    ]
    return Outcome(claims, ("problem", "size", "CPU seconds"), tuple(rows), ("search/scale.svg",))
