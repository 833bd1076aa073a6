"""torch.vmap in an exported graph, replaced by the operators on complete tensors that its batching rules make.

Export keeps the calls that begin and end a vmap, with operators on single rows between them. Every stretch from the
outermost begin to its end is traced once more, below functorch, and takes the place of those nodes. Only such stretches
are: `ExportedProgram.run_decompositions`, which does it to a complete graph, loses no_grad regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from strategies.capture.nodes import mode_of

FUNCTIONAL = ("torch._functorch", "torch._C._functorch")
"""The modules of the calls that torch.func leaves in a graph."""
FIRST, BEGIN, END = "lazy_load_decompositions", "_vmap_increment_nesting", "_vmap_decrement_nesting"


def is_functional(node: fx.Node) -> bool:
    """Whether a node is a call that torch.vmap or torch.func has left."""
    return str(getattr(node.target, "__module__", "")).startswith(FUNCTIONAL)


def replace_vmap(graph: fx.Graph) -> None:
    """Replace every torch.vmap in `graph`, in place, but those of a function that draws random numbers or has a region
    such as no_grad in it."""
    stretch: list[fx.Node] = []
    depth = 0
    for node in list(graph.nodes):
        name = node.target.__name__ if is_functional(node) else ""
        if stretch or name in (FIRST, BEGIN):
            stretch.append(node)
        depth += (name == BEGIN) - (name == END)
        if name == END and not depth:
            if all(map(_is_operator, stretch)):
                _replace(graph, stretch)
            stretch = []


def _replace(graph: fx.Graph, stretch: Sequence[fx.Node]) -> None:
    within = set(stretch)
    inputs = list(dict.fromkeys(one for node in stretch for one in node.all_input_nodes if one not in within))
    outputs = [node for node in stretch if not within.issuperset(node.users)]
    rows = fx.Graph()
    copies = {node: rows.placeholder(node.name) for node in inputs}
    for node in stretch:
        copies[node] = rows.node_copy(node, copies.__getitem__)
    rows.output(tuple(copies[node] for node in outputs))
    interpreter = fx.Interpreter(fx.GraphModule({}, rows))
    with mode_of(graph), torch.no_grad(), preserve_node_meta():
        traced = make_fx(interpreter.run)(*(node.meta["val"].detach() for node in inputs))
    if not all(map(_is_plain, traced.graph.nodes)):
        return
    known = dict(zip((node for node in traced.graph.nodes if node.op == "placeholder"), inputs, strict=True))
    with graph.inserting_before(stretch[0]):
        for node in traced.graph.nodes:
            if node.op == "call_function":
                known[node] = graph.node_copy(node, known.__getitem__)
    results = next(node for node in traced.graph.nodes if node.op == "output").args[0]
    for node, result in zip(outputs, results, strict=True):
        node.replace_all_uses_with(known[result])
    for node in reversed(stretch):
        graph.erase_node(node)


def _is_operator(node: fx.Node) -> bool:
    """Whether a node is all that it does: the border of a region changes the nodes behind it."""
    return isinstance(node.target, torch._ops.OpOverload) or node.target is getitem or is_functional(node)


def _is_plain(node: fx.Node) -> bool:
    """Whether a traced node reads no constant and draws no random numbers."""
    return node.op != "get_attr" and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ())
