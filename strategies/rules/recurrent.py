"""Recurrent networks: the batch is sliced; time, hidden units and weights stay replicated.

With dropout between the layers and `random=exact`, both sides run layer by layer with explicit masks, generated for the
global batch and sliced to the block; `fast` draws in torch's operator from a key per slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.random import dropout_block, mix
from strategies.rules.registry import arguments, local_function, resolve, rule
from strategies.rules.sharding import Dims, Local, Sharding, sharding, unsliced

NETWORKS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
BLOCK = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "bidirectional", "batch_first")
"""The arguments of torch's operators with which `recurrent_block` begins."""


@local_function
def recurrent_block(
    target: str,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    bidirectional: bool,
    batch_first: bool,
    key: int,
    ordinal: int,
    batch: int,
    start: int,
) -> tuple[Tensor, ...]:
    """A recurrent network in training, layer by layer; between them drops out what drops out of the rows from `start`
    on of a global `batch`. Returns what torch's operator returns: outputs and last states."""
    directions = 2 if bidirectional else 1
    each = len(params) // num_layers
    states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    ends: list[tuple[Tensor, ...]] = []
    for layer in range(num_layers):
        if layer:
            dim = 0 if batch_first else 1
            shape = [batch if i == dim else size for i, size in enumerate(input.shape)]
            starts = [start if i == dim else 0 for i in range(3)]
            input = dropout_block(input, dropout, mix(key, ordinal), layer, shape, starts)
        own = tuple(state[layer * directions : (layer + 1) * directions] for state in states)
        weights = params[layer * each : (layer + 1) * each]
        given: Any = own[0] if isinstance(hx, Tensor) else own
        input, *last = resolve(target)(input, given, weights, has_biases, 1, 0.0, True, bidirectional, batch_first)
        ends.append(tuple(last))
    return input, *(torch.cat(parts) for parts in zip(*ends, strict=True))


def drops(given: dict[str, Any]) -> bool:
    """Whether something drops out between layers."""
    return bool(given["train"] and given["dropout"] > 0 and given["num_layers"] > 1)


def _network(operator: Operator, local: Local) -> Ref:
    given = local.arguments
    if not drops(given):
        return local.itself()
    if not local.exact:
        own = local.key, local.ordinal, local.position("n")
        return local.several("local.seeded_slice", operator.target, *own, *local.args, **local.kwargs)
    dim = 0 if given["batch_first"] else 1
    start = local.position("n", local.operand_shape()[dim])
    seeds = local.key, local.ordinal, local.size("n"), start
    return local.several("local.recurrent_block", operator.target, *(given[name] for name in BLOCK), *seeds)


@rule(*NETWORKS)
def network(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x [t, n, i] (or [n, t, i]), states [layers, n, h], weights -> outputs like x, states. Packed sequences are not
    covered."""
    if not operator.target.endswith(".input"):
        return None
    given = arguments(operator)
    sequence: Dims = ("n", None, None) if given["batch_first"] else (None, "n", None)
    state: Dims = (None, "n", None)
    states = len(operator.results) - 1
    weights = specs[1 + states :]
    products = sum(spec.elements for spec in weights if len(spec.shape) == 2)
    return sharding(
        operator,
        specs,
        [sequence, *[state] * states, *unsliced(weights)],
        [sequence, *[state] * states],
        local=_network,
        flops=2.0 * products * specs[0].shape[0] * specs[0].shape[1],
        padded=() if drops(given) else ("n",),
    )


@rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def cell(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x [n, i], states [n, h], weights -> states [n, h]."""
    states, rows = len(operator.results), ("n", None)
    weights = specs[1 + states :]
    flops = 2.0 * sum(spec.elements for spec in weights if len(spec.shape) == 2) * specs[0].shape[0]
    operands: list[Dims] = [rows, *[rows] * states, *unsliced(weights)]
    return sharding(operator, specs, operands, [rows] * states, flops=flops, padded=("n",))
