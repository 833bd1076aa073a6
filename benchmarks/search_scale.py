"""Time of recursive programming against operators and devices, as a table and a plot.

    python -m benchmarks.search_scale [--plot docs/search_scale.svg] [--most 10000]

CPU seconds of one core from the problem to the assignments (rules and capture excluded): chains of products and relus
of up to 10,000 operators, all layers alike or each with a width of its own, on up to 16,384 devices in nodes of 8; and
with --layers N a Llama of the shape of 405 billion parameters on 16,384. Goal: 405B at most 1 s; slopes of at most 1 in
operators, and the square of the logarithm of the devices (a test holds them, by counted work).
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

from strategies.cost.cluster import Cluster
from strategies.search.problem import Problem
from strategies.search.recursive import bisect
from tests.strategies.search.problems import line, llama, nodes, prime_mesh, problem

Series = dict[str, list[tuple[float, float]]]
COLOURS = ("#1b6ca8", "#c8553d", "#4f772d")


def seconds(made: Problem, machine: Cluster) -> float:
    """CPU seconds of one search."""
    _ = made.graph.users, made.graph.specs, made.graph.trained, made.graph.returning
    started = time.process_time()
    bisect(made, machine)
    return time.process_time() - started


def on(ranks: int) -> Cluster:
    return nodes(max(1, ranks // 8))


def svg(panels: dict[str, Series]) -> str:
    """Log-log plots side by side: one panel per entry, a line per series."""
    width, height, margin = 420, 320, 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width * len(panels)}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width * len(panels)}" height="{height}" fill="white"/>',
    ]
    for number, (title, series) in enumerate(panels.items()):
        points = [point for line_ in series.values() for point in line_]
        low, high = ([math.log10(pick(p[axis] for p in points)) for axis in (0, 1)] for pick in (min, max))
        left, right = number * width + margin, (number + 1) * width - 20

        def place(point: tuple[float, float], left: int = left, right: int = right, low=low, high=high) -> str:
            x, y = ((math.log10(value) - a) / ((b - a) or 1) for value, a, b in zip(point, low, high, strict=True))
            return f"{left + x * (right - left):.1f},{height - margin - y * (height - 2 * margin):.1f}"

        parts.append(f'<text x="{left}" y="24" font-size="13">{title}, CPU seconds</text>')
        parts.append(f'<path d="M{left},{margin} V{height - margin} H{right}" stroke="#444" fill="none"/>')
        for axis, ends in enumerate(zip(low, high, strict=True)):
            for end, value in enumerate(ends):
                x, y = (
                    ((left, right)[end], height - margin + 16)
                    if axis == 0
                    else (left - 44, (height - margin, margin)[end])
                )
                parts.append(f'<text x="{x}" y="{y}">{10**value:.3g}</text>')
        for colour, (name, line_) in zip(COLOURS, series.items(), strict=False):
            parts.append(
                f'<polyline points="{" ".join(map(place, line_))}" stroke="{colour}" fill="none" stroke-width="2"/>'
            )
            parts += [
                f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in (place(p).split(",") for p in line_)
            ]
            row = list(series).index(name)
            parts.append(f'<text x="{left + 8}" y="{48 + 15 * row}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, default=Path("docs/search_scale.svg"))
    parser.add_argument("--most", type=int, default=10_000, help="operators of the longest chain")
    parser.add_argument("--layers", type=int, default=0, help="of a Llama of the shape of 405B (126); 0: none")
    options = parser.parse_args()
    by_operators: Series = {"layers alike, 64 devices": [], "every layer another, 64 devices": []}
    for repeating, name in zip((True, False), by_operators, strict=True):
        count = 100
        while count <= (options.most if repeating else min(options.most, 1000)):
            found = seconds(problem(line(count, repeating=repeating), prime_mesh(64)), on(64))
            by_operators[name].append((count, found))
            print(f"{name:32s} {count:6d} operators {found:8.3f} s", flush=True)
            count = {1: 3, 3: 10}[int(str(count)[0])] * 10 ** (len(str(count)) - 1)
    by_devices: Series = {"1000 operators, layers alike": [], "Llama 8B, 4 layers": []}
    for name, graph in zip(by_devices, (line(1000), llama(4, batch=2048)), strict=True):
        for power in range(1, 15):
            found = seconds(problem(graph, prime_mesh(2**power)), on(2**power))
            by_devices[name].append((2**power, found))
            print(f"{name:32s} {2**power:6d} devices   {found:8.3f} s", flush=True)
    if options.layers:
        graph = llama(options.layers, batch=2048, width=16384, hidden=53248, length=8192)
        found = seconds(problem(graph, prime_mesh(16384)), on(16384))
        print(f"Llama of {options.layers} layers, {len(graph.operators)} operators, 16384 devices: {found:.3f} s")
    options.plot.write_text(svg({"operators": by_operators, "devices": by_devices}))
    print(f"plot: {options.plot}")


if __name__ == "__main__":
    main()
