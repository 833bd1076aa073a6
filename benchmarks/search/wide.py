"""The exact search with nothing said about the mesh: all prime axes of very many devices, and a certificate.

    python -m benchmarks.search --only wide

Each row is `strategies.search.exact.search` alone, once, on the finest mesh of nodes of 8 devices: Llama 3's 8B with
one sequence per device.
"""

from __future__ import annotations

import resource
import time

from benchmarks.search.outcome import Claim, Outcome, Setting
from benchmarks.search.speed import graph_of
from strategies.core.graph import OperatorGraph
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh, primes
from strategies.cost.cluster import Cluster, Level, Link
from strategies.rules import rule_of
from strategies.search.exact import search
from strategies.search.problem import Problem

TITLE = "The exact search on very many devices"
LENGTH = 2048
CASES = ((64, 10.0, 0.01), (128, 20.0, 0.01), (256, 40.0, 0.01), (512, 60.0, 0.01))
"""Devices; seconds and gap at most."""
LARGEST = 4.0
"""GiB of the process at most."""
HEAD = ("devices", "axes", "operators", "search, s", "cost", "lower bound", "gap", "process, GiB")


def machine(devices: int) -> Cluster:
    """Nodes of 8 devices as `conf/cluster/dgx_h100.yaml` describes them, with what is achieved."""
    levels = (Level("node", devices // 8, Link(41e9, 4e-6, 10e-6)), Level("gpu", 8, Link(369e9, 1.9e-6, 10e-6)))
    flops = {"bfloat16": 692e12, "float32": 47e12}
    return Cluster("dgx_h100", levels, flops, 83 * 10**9, 3e12, 5e-6, overlap=0.9)


def open_mesh(graph: OperatorGraph, devices: int) -> Problem:
    """Nothing configured; the batch lies over all axes."""
    mesh = Mesh(tuple((f"d{place}", prime) for place, prime in enumerate(primes(devices))))
    inputs = {one.name: Layout((mesh.names, *((),) * (len(one.spec.shape) - 1))) for one in graph.of_kind("input")}
    return Problem(graph, mesh, {one.id: rule_of(one, graph) for one in graph.operators}, inputs, {}, {})


def measure(setting: Setting) -> Outcome:
    """All numbers of devices; of a quick run the smallest."""
    claims, rows = [], []
    for devices, goal, gap in CASES[:1] if setting.quick else CASES:
        graph = graph_of("8b", devices, LENGTH)
        asked = open_mesh(graph, devices)
        cluster = machine(devices)
        begun = time.process_time()
        found = search(asked, cluster)
        seconds = time.process_time() - begun
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        axes, operators = len(asked.mesh.names), len(graph.operators)
        costs = (f"{1e3 * found.cost:.1f} ms", f"{1e3 * found.lower_bound:.1f} ms", f"{found.gap:.2%}")
        rows.append((str(devices), str(axes), str(operators), f"{seconds:.1f}", *costs, f"{held:.2f}"))
        print("  ".join(rows[-1]), flush=True)
        told = f"8b on {devices} devices ({axes} axes): at most {goal:g} s and {LARGEST:g} GiB, gap at most {gap:.0%}"
        met = seconds <= goal and found.gap <= gap and held <= LARGEST
        claims.append(Claim(told, f"{seconds:.1f} s, {held:.2f} GiB, gap {found.gap:.2%}", met))
    return Outcome(tuple(claims), HEAD, tuple(rows))
