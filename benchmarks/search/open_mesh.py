"""The exact search with an open mesh: every factorisation of many devices into at most three axes.

    python -m benchmarks.search --only open_mesh

Each row is `strategies.search.algorithms.dynamic_programming` once, on nodes of 8 devices, with one sequence per
device: Llama 3's 8B and 70B, GPT-2 with tied weights, and a mixture of experts of 8 layers. `before` is what the plan
of an earlier commit costs (8464346 searched all prime axes); a plan is to cost at most 0.5 % more.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.search.outcome import Claim, Outcome, Setting
from benchmarks.search.speed import NODES, graph_of
from models.gpt import GPT
from models.losses import NextTokenLoss
from models.moe import MoE
from strategies.core.graph import OperatorGraph
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh, primes
from strategies.cost.cluster import Cluster, Level, Link
from strategies.cost.problem import Problem
from strategies.rules import rule_of
from strategies.search.algorithms import dynamic_programming
from tests.strategies.search.problems import shaped, tokens

TITLE = "The exact search on open meshes"
LENGTH = 2048
DEVICES = (64, 128, 256, 512)
SECONDS, GAP, DEARER = 5.0, 0.01, 0.005
"""CPU seconds, gap, and cost above `BEFORE` at most."""
LARGEST = 4.0
"""GiB of the process at most."""
HEAD = ("model", "devices", "mesh", "pruned", "search, s", "cost", "before", "lower bound", "gap", "process, GiB")
BEFORE = {
    ("8b", 64): 239.148,
    ("8b", 128): 239.718,
    ("8b", 256): 240.120,
    ("8b", 512): 241.228,
    ("8b, 4096 tokens", 64): 886.099,
    ("gpt2, tied", 64): 5.92589,
    ("gpt2, tied", 128): 5.98549,
    ("gpt2, tied", 256): 6.02047,
    ("gpt2, tied", 512): 6.05544,
    ("moe", 64): 11.10081,
    ("moe", 128): 11.38978,
    ("moe", 256): 11.48360,
    ("moe", 512): 11.57742,
    ("70b", 512): 1919.112,
}
"""Milliseconds of the plans of commit 8464346; of mixtures of experts on more devices and of the 70B of commit
f44dcc42."""


def machine(devices: int) -> Cluster:
    """Nodes of 8 devices as in `conf/cluster/dgx_h100.yaml`, with achieved rates."""
    levels = (Level("node", devices // 8, Link(41e9, 4e-6, 10e-6)), Level("gpu", 8, Link(369e9, 1.9e-6, 10e-6)))
    flops = {"bfloat16": 692e12, "float32": 47e12}
    return Cluster("dgx_h100", levels, flops, 83 * 10**9, 3e12, 5e-6, overlap=0.9)


def tied(devices: int) -> OperatorGraph:
    """GPT-2 of 12 layers, whose output layer is its embedding."""
    with torch.device("meta"):
        net = GPT(50304, 1024, 768, 12, 12).bfloat16()
    return shaped(net, NextTokenLoss(), *tokens(devices, 1024))


def open_mesh(graph: OperatorGraph, devices: int) -> Problem:
    """Nothing configured; the batch is sliced over all axes."""
    mesh = Mesh(tuple((f"d{place}", prime) for place, prime in enumerate(primes(devices))))
    inputs = {one.name: Layout((mesh.names, *((),) * (len(one.spec.shape) - 1))) for one in graph.of_kind("input")}
    return Problem(graph, mesh, {one.id: rule_of(one, graph) for one in graph.operators}, inputs, {}, {})


def experts(devices: int) -> OperatorGraph:
    """A mixture of 8 experts in each of 8 layers."""
    with torch.device("meta"):
        net = MoE(32000, 1024, 1024, 8, 16, 4096, 8, 2).bfloat16()
    return shaped(net, NextTokenLoss(), *tokens(devices, 1024))


def cases(devices: int) -> Iterator[tuple[str, OperatorGraph, Cluster]]:
    """Models, on `machine`; the longer sequences on the machine of `speed`."""
    yield "8b", graph_of("8b", devices, LENGTH), machine(devices)
    yield "gpt2, tied", tied(devices), machine(devices)
    yield "moe", experts(devices), machine(devices)
    if devices == DEVICES[-1]:
        yield "70b", graph_of("70b", devices, LENGTH), machine(devices)
    if devices == DEVICES[0]:
        outer, inner = NODES.levels
        nodes = replace(NODES, levels=(replace(outer, size=devices // inner.size), inner))
        yield "8b, 4096 tokens", graph_of("8b", devices, 2 * LENGTH), nodes


def measure(setting: Setting) -> Outcome:
    """All numbers of devices; of a quick run the smallest."""
    claims, rows = [], []
    for devices in DEVICES[:1] if setting.quick else DEVICES:
        for model, graph, cluster in cases(devices):
            problem = open_mesh(graph, devices)
            started = time.process_time()
            found = dynamic_programming(problem, cluster, None)(None).search
            seconds = time.process_time() - started
            size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            mesh, every = " x ".join(map(str, found["mesh"]["mesh"])), found["meshes"] + found["left_out"]
            cost, before, gap = 1e3 * found["cost"], BEFORE[model, devices], found["gap"]
            shown = (f"{cost:.2f} ms", f"{before:.2f} ms", f"{1e3 * found['lower_bound']:.2f} ms")
            pruned = f"{found['left_out']} of {every}"
            rows.append((model, str(devices), mesh, pruned, f"{seconds:.1f}", *shown, f"{gap:.2%}", f"{size:.2f}"))
            print("  ".join(rows[-1]), flush=True)
            goal = f"{model} on {devices} devices: at most {SECONDS:g} s and {LARGEST:g} GiB, gap at most {GAP:.0%}"
            met = seconds <= SECONDS and gap <= GAP and size <= LARGEST
            claims.append(Claim(goal, f"{seconds:.1f} s, {size:.2f} GiB, gap {gap:.2%}", met))
            dearer = cost / before - 1
            goal = f"{model} on {devices} devices: at most {DEARER:.1%} dearer than before"
            claims.append(Claim(goal, f"{dearer:+.2%}", dearer <= DEARER))
    return Outcome(tuple(claims), HEAD, tuple(rows))
