"""Linear layers on merged dims, `x.reshape(s * b, e)` -> linear -> `reshape(s, b, f)`, on the dims as they were.

Of merged dims only the leading one can be sliced. torch's multi-head attention merges sequence and batch in this order
for its output projection, so ranks that slice the batch would exchange its activations. A linear layer takes any
leading dims, and merges them itself for its product: the same numbers without the two reshapes.
"""

from __future__ import annotations

from dataclasses import replace

from strategies.core.graph import Operator, OperatorGraph, Ref, TensorSpec, with_refs

RESHAPES = frozenset(("view", "reshape", "_unsafe_view"))
"""Their second argument is the shape."""


def unmerged(graph: OperatorGraph) -> OperatorGraph:
    """The graph with linear layers on the dims that come out of the reshape behind them."""
    changed: dict[str, Operator] = {}
    renamed: dict[Ref, Ref] = {}
    for split in graph.operators:
        found = _layer(graph, split)
        if found is None:
            continue
        merge, layer = found
        lead, spec = split.results[0].shape[:-1], merge.results[0]
        apart = TensorSpec((*lead, spec.shape[-1]), spec.dtype)
        changed[layer.id] = replace(layer, results=split.results)
        renamed[Ref(split.id)] = Ref(layer.id)
        source = merge.operands[0]
        if graph.specs[source].shape == apart.shape:
            renamed[Ref(merge.id)] = source
        else:
            changed[merge.id] = replace(merge, args=(merge.args[0], apart.shape, *merge.args[2:]), results=(apart,))

    def new(ref: Ref) -> Ref:
        while ref in renamed:
            ref = renamed[ref]
        return ref

    if not renamed:
        return graph
    left = (changed.get(one.id, one) for one in graph.operators if Ref(one.id) not in renamed)
    return replace(
        graph,
        operators=tuple(with_refs(one, new) for one in left),
        outputs=tuple(map(new, graph.outputs)),
        updates=tuple((id, new(ref)) for id, ref in graph.updates),
    )


def _layer(graph: OperatorGraph, split: Operator) -> tuple[Operator, Operator] | None:
    """The reshape that merges the dims which `split` separates again, and the linear layer between them."""
    if split.op not in RESHAPES:
        return None
    layer = graph.by_id[split.operands[0].id]
    if not isinstance(layer, Operator) or layer.op != "linear" or len(split.results[0].shape) < 3:
        return None
    merge = graph.by_id[layer.operands[0].id]
    if not isinstance(merge, Operator) or merge.op not in RESHAPES or len(merge.results[0].shape) != 2:
        return None
    kept = {*graph.outputs, *(ref for _, ref in graph.updates)}
    alone = all(len(graph.users[Ref(one.id)]) == 1 and Ref(one.id) not in kept for one in (merge, layer))
    return (merge, layer) if alone and split.results[0].shape[-1] == layer.results[0].shape[-1] else None
