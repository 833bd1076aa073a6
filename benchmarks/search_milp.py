"""The exact search against a mixed-integer program (scipy.optimize.milp, HiGHS) on the same costs.

    python -m benchmarks.search_milp [--only WORD] [--out docs/search_milp.md]

GPT-2 small of up to 12 layers and llamas of 2 to 8, on meshes of one and two axes. CPU seconds of one core, without
capture; `difference` is how much more the search's plan costs than the program's optimum. Goal: none.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from strategies.core.graph import OperatorGraph
from strategies.search.dynamic_programming import search
from tests.strategies.search.integer_program import evaluated, integer_optimum
from tests.strategies.search.test_factor_graph import NODES, gpt, llama, problem_of

Make = Callable[[int], OperatorGraph]
CASES: tuple[tuple[str, Make, int, tuple[int, ...]], ...] = (
    *(("llama", llama, layers, (8,)) for layers in (2, 4, 8)),
    *(("gpt2", gpt, layers, (8,)) for layers in (2, 12)),
    *(("llama", llama, layers, (2, 4)) for layers in (2, 4, 8)),
    *(("gpt2", gpt, layers, (2, 4)) for layers in (2, 12)),
)


@dataclass(frozen=True)
class Result:
    name: str
    layers: int
    mesh: tuple[int, ...]
    variables: int
    cost: float
    seconds: float
    optimum: float
    program_seconds: float

    @property
    def difference(self) -> float:
        return self.cost / self.optimum - 1


def compare(name: str, make: Make, layers: int, mesh: tuple[int, ...]) -> Result:
    problem = problem_of(make(layers), *mesh)
    started = time.process_time()
    found = search(problem, NODES)
    searched = time.process_time() - started
    network = evaluated(problem, NODES)
    started = time.process_time()
    optimum = integer_optimum(network)
    spent = time.process_time() - started
    return Result(name, layers, mesh, len(network.sizes), found.cost, searched, optimum, spent)


def table(results: Sequence[Result]) -> str:
    """The page, in markdown."""
    lines = [
        "# The exact search against an integer program",
        "",
        "`python -m benchmarks.search_milp`: scipy.optimize.milp on the same costs. CPU seconds of one core.",
        "",
        "| model | layers | mesh | operators | search, seconds | program, seconds | cost of a step | difference |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for one in results:
        lines.append(
            f"| {one.name} | {one.layers} | {' x '.join(map(str, one.mesh))} | {one.variables} | {one.seconds:.2f} | "
            f"{one.program_seconds:.1f} | {1e3 * one.cost:.4f} ms | {one.difference:.1e} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose model, layers or mesh hold this text")
    parser.add_argument("--out", type=Path, help="where to write the page, after every row")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for name, make, layers, mesh in CASES:
        if options.only in f"{name} {layers} {'x'.join(map(str, mesh))}":
            results.append(compare(name, make, layers, mesh))
            print(table(results[-1:]).splitlines()[-1], flush=True)
            if options.out is not None:
                options.out.write_text(table(results), encoding="utf-8")


if __name__ == "__main__":
    main()
