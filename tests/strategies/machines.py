"""Described machines for tests."""

from __future__ import annotations

from strategies.cost.cluster import Cluster, Level, Link

NODE, GPU = Link(50e9, 1e-5, 2e-5), Link(400e9, 1e-6, 1e-5)


def cluster(*sizes: int) -> Cluster:
    names = ("pod", "node", "gpu")[-len(sizes) :]
    links = (Link(20e9, 2e-5), NODE, GPU)[-len(sizes) :]
    levels = tuple(Level(name, size, link) for name, size, link in zip(names, sizes, links, strict=True))
    return Cluster("described", levels, {"float32": 1e13, "bfloat16": 4e14}, 80 * 2**30, 2e12, 5e-6)
