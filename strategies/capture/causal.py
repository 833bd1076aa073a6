"""Replace causal attention masks by `is_causal`, and keys and values that are repeated for groups of queries by one
copy.

A mask that the model builds from sizes alone (as Hugging Face models do while they are exported) is computed at
capture. If it is the lower triangle, attention takes `is_causal` in its place, which needs no memory and allows the
fast kernels; if it hides nothing, it is dropped. Equality of the masks is the proof; a mask that depends on the batch,
a parameter or a buffer is left unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from strategies.capture.nodes import op_of
from strategies.rules.traits import traits

aten = torch.ops.aten
MASK, CAUSAL = 3, 5
"""Positions of the arguments of attention, after query, key and value."""
LARGEST = 1 << 28
"""Elements of a mask beyond which it is not computed."""


def shorten_masks(graph: fx.Graph, constants: Mapping[str, Tensor]) -> None:
    """Rewrite the attentions of `graph`; `constants` are the values of placeholders that never change."""
    known: dict[fx.Node, Tensor | None] = {}
    for node in list(graph.nodes):
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        args = [*node.args, *(None, 0.0, False)[len(node.args) - MASK :]]
        args[MASK:] = [
            node.kwargs.get(n, a) for n, a in zip(("attn_mask", "dropout_p", "is_causal"), args[MASK:], strict=True)
        ]
        mask: Any = args[MASK]
        if isinstance(mask, fx.Node) and mask.meta["val"].numel() <= LARGEST:
            visible = _shown(_computed(mask, constants, known))
            if visible is None:
                continue
            if torch.equal(visible, torch.ones_like(visible).tril()) and visible.shape[-1] > 1:
                args[MASK], args[CAUSAL] = None, True
            elif visible.all():
                args[MASK] = None
        keywords = {name: node.kwargs[name] for name in ("scale", "enable_gqa") if name in node.kwargs}
        if args[MASK] is None and not keywords.get("enable_gqa"):
            key, value = _repeated(args[1]), _repeated(args[2])
            if key is not None and value is not None and key.meta["val"].shape[1] == value.meta["val"].shape[1]:
                args[1:MASK] = key, value
                keywords["enable_gqa"] = True
        node.args, node.kwargs = tuple(args), keywords


def _computed(node: fx.Node, constants: Mapping[str, Tensor], known: dict[fx.Node, Any]) -> Any:
    """The value of a node that depends on nothing but sizes and constants; None for any other."""
    waiting = [node]
    while waiting:
        now = waiting[-1]
        if now in known:
            waiting.pop()
        elif now.op != "call_function":
            known[now] = constants.get(now.name)
        elif torch.Tag.nondeterministic_seeded in getattr(now.target, "tags", ()):
            known[now] = None
        elif fresh := [before for before in now.all_input_nodes if before not in known]:
            waiting += fresh
        elif any(known[before] is None for before in now.all_input_nodes):
            known[now] = None
        else:
            args, kwargs = fx.map_arg((now.args, dict(now.kwargs)), known.__getitem__)
            with torch.no_grad():
                known[now] = now.target(*args, **kwargs)  # type: ignore[operator]
    return known[node]


def _shown(mask: Tensor | None) -> Tensor | None:
    """Which keys a query sees [queries, keys], if that is the same for all samples and heads."""
    if mask is None:
        return None
    flat = mask.reshape(-1, *mask.shape[-2:])
    if mask.dtype == torch.bool:
        seen = flat
    else:
        seen, hidden = flat == 0, flat <= torch.finfo(mask.dtype).min
        if not (seen | hidden).all():
            return None
    return seen[0] if bool((seen == seen[0]).all()) else None


def _repeated(node: Any) -> fx.Node | None:
    """What `node` [batch, heads, length, width] repeats head by head, by unsqueeze, expand and reshape, or None."""
    merged = _origin(node)
    if op_of(merged) not in ("reshape", "view", "_unsafe_view"):
        return None
    wide = _origin(merged.args[0])
    if op_of(wide) != "expand":
        return None
    single = _origin(wide.args[0])
    if op_of(single) != "unsqueeze" or single.args[1] != 2:
        return None
    start = _origin(single.args[0])
    base, shape = tuple(start.meta["val"].shape), tuple(node.meta["val"].shape)
    if len(base) != 4:
        return None
    times = shape[1] // base[1]
    repeats = tuple(wide.meta["val"].shape) == (*base[:2], times, *base[2:])
    return start if repeats and shape == (base[0], base[1] * times, *base[2:]) else None


def _origin(node: Any) -> fx.Node:
    """The node before copies and slices that take everything."""
    while traits(op_of(node)).equal or (
        op_of(node) == "slice" and node.meta["val"].shape == node.args[0].meta["val"].shape
    ):
        node = node.args[0]
    return node  # type: ignore[no-any-return]
