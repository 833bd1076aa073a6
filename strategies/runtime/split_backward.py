"""Backward in two halves: first the input gradients that the previous stage waits for, then the weight gradients.

A node of the autograd graph is on the path if it leads to a received value. The first half runs the nodes on the path
and stores the incoming gradient where a parameter branches off; the second runs the branches. A parameter that branches
off in several places or in none, or from a custom autograd function, whose backward cannot be split, gets its gradient
in the first half: its branches could not run separately. Invariant: each branch gets the gradient of an unsplit
backward, and every rank that runs one program runs its branches, and their collectives, in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from strategies.runtime.recompute import unpacked_twice

DeferredBackward = Callable[[], None]
"""The second half. It adds to `grad` of the parameters."""


@dataclass
class _Branch:
    """A node where parameters branch off, what came in, and the parameters that nothing else leads to."""

    node: Node
    parameters: list[Tensor]
    arrived: list[tuple[int, Tensor]] = field(default_factory=list)

    def arrive(self, gradients: tuple[Tensor | None, ...]) -> None:
        self.arrived = [(index, one) for index, one in enumerate(gradients) if one is not None]

    def run(self) -> None:
        edges = [GradientEdge(self.node, index) for index, _ in self.arrived]
        if edges:
            torch.autograd.backward(edges, [one for _, one in self.arrived], inputs=self.parameters)


def backward_to(
    inputs: Sequence[Tensor], parameters: Sequence[Tensor], outputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> DeferredBackward:
    """Adds to `grad` of `inputs` what comes back from `outputs` with `gradients`; returns what does the same for
    `parameters`. All of them are leaves that learn."""
    roots = [get_gradient_edge(output).node for output in outputs]
    leaves = {get_gradient_edge(one).node: one for one in parameters}
    order = _inner_first(roots)
    on_the_way = {get_gradient_edge(one).node for one in inputs}
    for node in order:
        if any(child in on_the_way for child in _children(node)):
            on_the_way.add(node)
    branches = _branches(order, roots, on_the_way, leaves)
    deferred = {id(one) for branch in branches for one in branch.parameters}
    first = [one for one in parameters if id(one) not in deferred]
    hooks: list[Any] = [branch.node.register_prehook(branch.arrive) for branch in branches]
    try:
        with unpacked_twice():
            torch.autograd.backward(
                list(outputs), list(gradients), retain_graph=bool(branches), inputs=[*inputs, *first] or None
            )
    finally:
        for hook in hooks:
            hook.remove()

    def run() -> None:
        while branches:
            branches.pop(0).run()

    return run


def _branches(
    order: Sequence[Node], roots: Sequence[Node], on_the_way: set[Node], leaves: dict[Node, Tensor]
) -> list[_Branch]:
    """The branches of parameters that are reached from one node on the way alone; the others are in none."""
    reached: dict[Node, list[Node | None]] = {}
    for node in reversed(order):
        if node in on_the_way:
            for leaf in _reached([child for child in _children(node) if child not in on_the_way], leaves):
                reached.setdefault(leaf, []).append(node)
    for leaf in _reached([root for root in roots if root not in on_the_way], leaves):
        reached.setdefault(leaf, []).append(None)
    branches: dict[Node, _Branch] = {}
    for leaf, nodes in reached.items():
        only = nodes[0] if len(nodes) == 1 else None
        if only is not None and not isinstance(only, BackwardCFunction):
            branches.setdefault(only, _Branch(only, [])).parameters.append(leaves[leaf])
    return list(branches.values())


def _reached(start: Sequence[Node], leaves: dict[Node, Tensor]) -> list[Node]:
    """The parameters below some nodes that are not on the way."""
    return [node for node in _inner_first(start) if node in leaves]


def _inner_first(roots: Sequence[Node]) -> list[Node]:
    """All nodes below and with `roots`, each after those below it, in an order that depends on the graph alone."""
    children: dict[Node, list[Node]] = {}
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node not in children:
            children[node] = _children(node)
            waiting += children[node]
    return list(TopologicalSorter(children).static_order())


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]
