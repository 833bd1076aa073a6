"""The exact search on the shapes of large models: CPU seconds of one core, and the certified gap.

    python -m benchmarks.search --only speed

Models are captured on meta tensors, so no weights exist. `search` is the CPU time of
`strategies.search.dynamic_programming.search`, the fastest of a few; capture and the rules are timed apart. Every
search is done without a memory limit, and within 0.8 of the bytes that its plan then needs.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch
from torch import nn

from benchmarks.search import charts
from benchmarks.search.outcome import Claim, Outcome, Setting
from models.llama import Llama
from strategies.capture import Objective, capture
from strategies.core.graph import OperatorGraph
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.cost.cluster import Cluster, Level, Link
from strategies.cost.problem import Problem
from strategies.rules import rule_of
from strategies.search.dynamic_programming import search
from strategies.search.solution import Solution

TITLE = "The exact search on large models"
SHAPES = {
    "8b": (128256, 8192, 4096, 32, 32, 8, 14336),
    "70b": (128256, 8192, 8192, 80, 64, 8, 28672),
}
CASES = (
    ("8b", 2048, 64, [(8,), (2, 4), (8, 8)]),
    ("8b", 4096, 64, [(8,), (2, 4), (8, 8)]),
    ("8b", 8192, 64, [(8,), (2, 4), (8, 8)]),
    ("70b", 4096, 512, [(8, 8, 8)]),
)
"""Model, length of a sequence, sequences, meshes."""
EXACT = 1e-6
GOALS = {
    ("8b", (8,)): (0.2, EXACT),
    ("8b", (2, 4)): (0.2, EXACT),
    ("8b", (8, 8)): (0.2, EXACT),
    ("70b", (8, 8, 8)): (1.0, 0.01),
}
"""Seconds and gap at most."""
REPEAT, TIGHT = 3, 0.8
HEAD = ("model", "sequence", "mesh", "operators", "memory", "rules, s", "search, s", "cost", "lower bound", "gap")
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


@dataclass(frozen=True)
class Result:
    """One search. `ruled`: seconds of the rules; `memory`: the limit, if there was one."""

    model: str
    length: int
    mesh: tuple[int, ...]
    operators: int
    ruled: float
    seconds: float
    found: Solution
    memory: float | None

    @property
    def name(self) -> str:
        return f"{self.model} on ({', '.join(map(str, self.mesh))})"

    def row(self) -> tuple[str, ...]:
        return (
            self.model,
            str(self.length),
            " x ".join(map(str, self.mesh)),
            str(self.operators),
            "none" if self.memory is None else f"{self.memory / 2**30:.0f} GiB",
            f"{self.ruled:.3f}",
            f"{self.seconds:.3f}",
            f"{1e3 * self.found.cost:.1f} ms",
            f"{1e3 * self.found.lower_bound:.1f} ms",
            f"{self.found.gap:.3%}",
        )


def searched(name: str, length: int, graph: OperatorGraph, sizes: tuple[int, ...], repeat: int) -> list[Result]:
    """Without a limit of memory, and with one."""
    started = time.process_time()
    problem = problem_of(graph, sizes)
    ruled = time.process_time() - started
    results: list[Result] = []
    for share in (None, TIGHT):
        limit = None if share is None else share * results[0].found.bytes
        limited = replace(problem, memory=limit)
        seconds = math.inf
        for _ in range(repeat):
            started = time.process_time()
            found = search(limited, NODES)
            seconds = min(seconds, time.process_time() - started)
        results.append(Result(name, length, sizes, len(graph.operators), ruled, seconds, found, limit))
        print("  ".join(results[-1].row()), flush=True)
    return results


def measure(setting: Setting) -> Outcome:
    """All cases; of a quick run those of short sequences."""
    results: list[Result] = []
    captures: dict[str, float] = {}
    for name, length, rows, meshes in CASES[:1] if setting.quick else CASES:
        started = time.process_time()
        graph = graph_of(name, rows, length)
        captures[name] = max(captures.get(name, 0.0), time.process_time() - started)
        print(f"{name}, sequences of {length}: captured in {captures[name]:.1f} s", flush=True)
        for sizes in meshes:
            results += searched(name, length, graph, sizes, 1 if len(sizes) > 3 else REPEAT)
    claims, bars = [], []
    for (model, sizes), (goal, gap) in GOALS.items():
        free = [one for one in results if (one.model, one.mesh) == (model, sizes) and one.memory is None]
        if not free:
            continue
        worst, widest = max(one.seconds for one in free), max(one.found.gap for one in free)
        claim = f"{free[0].name}: at most {goal:g} s, {'exact' if gap == EXACT else f'gap at most {gap:.0%}'}"
        claims.append(Claim(claim, f"{worst:.2f} s, gap {widest:.2%}", worst <= goal and widest <= gap))
        bars.append((free[0].name, worst, goal))
    total = captures["8b"] + max(one.ruled + one.seconds for one in results if one.model == "8b" and len(one.mesh) < 3)
    claims.append(Claim("capture and search of the 8B: at most 8 s", f"{total:.1f} s", total <= 8))
    bars.append(("capture and search of 8b", total, 8.0))
    charts.goals(setting.pictures / "speed.svg", bars, "CPU seconds")
    return Outcome(tuple(claims), HEAD, tuple(one.row() for one in results), ("search/speed.svg",))
