"""Time of recursive programming against operators and devices.

    python -m benchmarks.search_scale [--most 10000] [--layers 126]

CPU seconds of one core from the problem to the assignments (rules and capture excluded): chains of matrix products and
relus of up to 10,000 operators, all layers equal or each of a different width, on up to 16,384 devices in nodes of 8;
and with --layers N a Llama of the shape of 405 billion parameters on 16,384. Goal: 405B at most 1 s; slopes of at most
1 in operators, and the square of the logarithm of the devices (a test checks them by operation counts).
`benchmarks.search` plots them.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

from strategies.cost.cluster import Cluster
from strategies.cost.problem import Problem
from strategies.search.recursive_programming import recursive_search
from tests.strategies.search.problems import line, llama, nodes, prime_mesh, problem

Series = dict[str, list[tuple[float, float]]]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=10_000, help="operators of the longest chain")
    parser.add_argument("--layers", type=int, default=0, help="of a Llama of the shape of 405B (126); 0: none")
    options = parser.parse_args()
    by_operators(options.most)
    by_devices(16_384)
    if options.layers:
        large(options.layers)


if __name__ == "__main__":
    main()
