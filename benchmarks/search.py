"""The exact search on the shapes of large models: CPU seconds of one core, and the certified gap.

    python -m benchmarks.search [--only 8b|70b] [--repeat 3]

Models are captured on meta tensors, so no weights exist. `search` is the CPU time of `strategies.search.exact.search`;
capture and the rules are timed apart. Goals: Llama 3 8B on (8), (2, 4) and (8, 8) at most 0.2 s, on six axes at most
10 s; the 70B shape on (8, 8, 8) at most 1 s; gaps of at most 1 %; capture and search of the 8B at most 8 s.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace

import torch
from torch import nn

from models.llama import Llama
from strategies.capture import Objective, capture
from strategies.cost.cluster import Cluster, Level, Link
from strategies.graph import OperatorGraph
from strategies.layout import Layout
from strategies.mesh import Mesh
from strategies.rules import rule_of
from strategies.search.exact import search
from strategies.search.problem import Problem

SHAPES = {
    "8b": (128256, 8192, 4096, 32, 32, 8, 14336),
    "70b": (128256, 8192, 8192, 80, 64, 8, 28672),
}
CASES = {
    "8b": ((64, 4096), [(8,), (2, 4), (8, 8), (2, 2, 2, 2, 2, 2)]),
    "70b": ((512, 4096), [(8, 8, 8)]),
}
NODES = Cluster(
    "nodes of 8",
    (Level("node", 64, Link(4e10, 1e-5)), Level("device", 8, Link(3e11, 5e-6))),
    {"bfloat16": 4e14, "float32": 5e13},
    80 * 2**30,
    2.5e12,
    3e-6,
)


class NextToken(nn.Module):
    """Cross-entropy of logits [b, s, v] and tokens [b, s]."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def graph_of(name: str, rows: int, length: int) -> OperatorGraph:
    with torch.device("meta"):
        model = Llama(*SHAPES[name]).bfloat16()
        tokens = torch.zeros(rows, length, dtype=torch.long)
    return capture(Objective(model, NextToken(), ("0", "1"), ("1",)), (tokens, tokens), training=True).graph


def problem_of(graph: OperatorGraph, sizes: tuple[int, ...]) -> Problem:
    mesh = Mesh(tuple(zip("abcdef", sizes, strict=False)))
    inputs = {s.name: Layout((("a",), *((),) * (len(s.spec.shape) - 1))) for s in graph.of_kind("input")}
    return Problem(graph, mesh, {o.id: rule_of(o, graph) for o in graph.operators}, inputs, {}, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(CASES), help="one model (default: all)")
    parser.add_argument("--repeat", type=int, default=1, help="searches of each problem, of which the fastest counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    heads = f"{'model':6} {'mesh':11} {'operators':>9} {'rules':>7} {'search':>7} {'cost':>9} {'bound':>9}"
    print(f"{heads} {'gap':>8}  limit")
    for name, ((rows, length), meshes) in CASES.items():
        if options.only not in (None, name):
            continue
        begun = time.process_time()
        graph = graph_of(name, rows, length)
        captured = time.process_time() - begun
        for sizes in meshes:
            begun = time.process_time()
            problem = problem_of(graph, sizes)
            ruled = time.process_time() - begun
            free = None
            for share in (None, 0.8):
                asked = problem if free is None or share is None else replace(problem, memory=share * free)
                seconds = math.inf
                for _ in range(options.repeat):
                    begun = time.process_time()
                    found = search(asked, NODES)
                    seconds = min(seconds, time.process_time() - begun)
                free = found.bytes if free is None else free
                mesh = "x".join(map(str, sizes))
                limit = "none" if share is None else f"{share * free / 2**30:.0f} GiB"
                print(
                    f"{name:6} {mesh:11} {len(graph.operators):9} {ruled:7.3f} {seconds:7.3f} {found.cost:9.4f} "
                    f"{found.lower_bound:9.4f} {100 * found.gap:7.3f}%  {limit}",
                    flush=True,
                )
        print(f"{name}: capture {captured:.2f} s")


if __name__ == "__main__":
    main()
