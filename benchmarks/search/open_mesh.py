"""The exact search with an open mesh: every factorisation of many devices into at most three axes.

    python -m benchmarks.search --only open_mesh

Each row is `strategies.search.algorithms.dynamic_programming` once, on nodes of 8 devices, with one sequence per
device: Llama 3's 8B and GPT-2 with tied weights.
"""

from __future__ import annotations

import resource
import time

import torch

from benchmarks.search.outcome import Claim, Outcome, Setting
from benchmarks.search.speed import graph_of
from models.gpt import GPT
from models.losses import NextTokenLoss
from strategies.core.graph import OperatorGraph
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh, primes
from strategies.cost.cluster import Cluster, Level, Link
from strategies.rules import rule_of
from strategies.search.algorithms import dynamic_programming
from strategies.search.problem import Problem
from tests.strategies.search.problems import shaped, tokens

TITLE = "The exact search on open meshes"
LENGTH = 2048
DEVICES = (64, 128, 256, 512)
SECONDS, GAP = 5.0, 0.01
"""CPU seconds and gap at most."""
LARGEST = 4.0
"""GiB of the process at most."""
HEAD = ("model", "devices", "mesh", "pruned", "search, s", "cost", "lower bound", "gap", "process, GiB")


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


def measure(setting: Setting) -> Outcome:
    """All numbers of devices; of a quick run the smallest."""
    claims, rows = [], []
    for devices in DEVICES[:1] if setting.quick else DEVICES:
        for model, graph in (("8b", graph_of("8b", devices, LENGTH)), ("gpt2, tied", tied(devices))):
            problem, cluster = open_mesh(graph, devices), machine(devices)
            started = time.process_time()
            found = dynamic_programming(problem, cluster, None)(None).search
            seconds = time.process_time() - started
            size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            mesh, every = " x ".join(map(str, found["mesh"]["mesh"])), found["meshes"] + found["left_out"]
            costs = (f"{1e3 * found['cost']:.2f} ms", f"{1e3 * found['lower_bound']:.2f} ms", f"{found['gap']:.2%}")
            pruned = f"{found['left_out']} of {every}"
            rows.append((model, str(devices), mesh, pruned, f"{seconds:.1f}", *costs, f"{size:.2f}"))
            print("  ".join(rows[-1]), flush=True)
            goal = f"{model} on {devices} devices: at most {SECONDS:g} s and {LARGEST:g} GiB, gap at most {GAP:.0%}"
            met = seconds <= SECONDS and found["gap"] <= GAP and size <= LARGEST
            claims.append(Claim(goal, f"{seconds:.1f} s, {size:.2f} GiB, gap {found['gap']:.2%}", met))
    return Outcome(tuple(claims), HEAD, tuple(rows))
