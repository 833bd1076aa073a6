"""Recurrent networks over sequences of different lengths, as torch computes them on a PackedSequence: padded tensors
with the length of each row. The batch is sliced; time, hidden units and weights stay replicated.

Each rank packs its own rows, calls torch's network, and pads the result to the length of its input, so a row's last
state is that of its own end, and the reverse direction begins there. Between layers drops out, with `random=exact`,
what drops out of the global batch: its numbers are drawn time first, so that they do not depend on the longest row.
Without values (tracing, estimates of memory) the network is that of rows which are all as long as the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import rnn

from strategies.core.errors import StrategyError
from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.compared import has_batch
from strategies.rules.random import dropout_block, mix
from strategies.rules.registry import arguments, local_function, resolve, rule
from strategies.rules.sharding import Dims, Local, Sharding, sharding, unsliced

NAME = "meshwright::packed_network"
LAYERS = ("params", "has_biases", "num_layers", "dropout", "bidirectional")
"""The arguments of torch's operators that `packed_layers` takes."""


@torch.library.custom_op(NAME, mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def packed_network(
    input: Tensor,
    lengths: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    network: str,
    has_biases: bool,
    num_layers: int,
    dropout_p: float,
    bidirectional: bool,
    batch_first: bool,
    enforce_sorted: bool,
) -> list[Tensor]:
    """The operator of a graph: outputs, padded with zeros, and last states. `dropout_p` is 0 where nothing drops."""
    options = network, has_biases, num_layers, dropout_p, bidirectional, batch_first, enforce_sorted
    return list(packed_block(input, lengths, hx, params, *options))


@packed_network.register_fake
def _shapes(input: Tensor, lengths: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    bidirectional, batch_first = rest[4], rest[5]
    width = hx[0].shape[-1] * (2 if bidirectional else 1)
    if input.dim() != 3 or lengths.shape != input.shape[0 if batch_first else 1 :][:1]:
        raise RuntimeError(f"sequences of {list(input.shape)} have lengths of {list(lengths.shape)}")
    return [input.new_empty((*input.shape[:2], width)), *(torch.empty_like(state) for state in hx)]


def _backward(*_: Any) -> Any:
    raise StrategyError(
        "MW906",
        "The model's forward computes a derivative through a recurrent network of packed sequences, which is not "
        "captured; give the network the padded sequences.",
    )


packed_network.register_autograd(_backward)


@local_function
def packed_block(
    input: Tensor,
    lengths: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    network: str,
    has_biases: bool,
    num_layers: int,
    dropout_p: float,
    bidirectional: bool,
    batch_first: bool,
    enforce_sorted: bool,
    key: int = 0,
    ordinal: int | None = None,
    start: int = 0,
    batch: int = 0,
) -> tuple[Tensor, ...]:
    """What `packed_network` returns for the rows from `start` on of a global `batch`, behind whose end is padding. With
    an `ordinal` between layers drops out what drops out of the batch; without, what torch draws."""
    if isinstance(input, FakeTensor) or input.is_meta:
        given = hx if network == "lstm" else hx[0]
        options = has_biases, num_layers, dropout_p, True, bidirectional, batch_first
        return tuple(resolve(f"aten.{network}.input")(input, given, params, *options))
    time = input.shape[1 if batch_first else 0]
    if not has_batch():
        lengths = torch.full_like(lengths, time)
    if batch and start + len(lengths) > batch:
        lengths = lengths.clone()
        lengths[max(batch - start, 0) :] = 1
    packed = rnn.pack_padded_sequence(input, lengths.cpu(), batch_first, enforce_sorted)
    order, back = packed.sorted_indices, packed.unsorted_indices
    states = [state if order is None else state.index_select(1, order) for state in hx]
    layers = network, packed, states, params, has_biases, num_layers, dropout_p, bidirectional
    data, *last = packed_layers(*layers, None if ordinal is None else (key, ordinal, start, batch))
    output, _ = rnn.pad_packed_sequence(packed._replace(data=data), batch_first, total_length=time)
    return output, *(state if back is None else state.index_select(1, back) for state in last)


def packed_layers(
    network: str,
    packed: rnn.PackedSequence,
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    bidirectional: bool,
    draws: tuple[int, int, int, int] | None = None,
) -> tuple[Tensor, ...]:
    """Outputs and last states of torch's network, in training, in the order of `packed`. With `draws`, which are the
    key, the ordinal, the first row and the global batch, layer by layer, as `recurrent_block`."""
    call, directions = resolve(f"aten.{network}.data"), 2 if bidirectional else 1

    def layers(packed: rnn.PackedSequence, states: Sequence[Tensor], params: Sequence[Tensor], count: int) -> Any:
        given = states if network == "lstm" else states[0]
        rest = has_biases, count, dropout if count > 1 else 0.0, True, bidirectional
        return call(packed.data, packed.batch_sizes, given, params, *rest)

    if draws is None:
        return tuple(layers(packed, states, params, num_layers))
    each, ends = len(params) // num_layers, []
    key, ordinal, start, batch = draws
    for layer in range(num_layers):
        if layer:
            padded, lengths = rnn.pad_packed_sequence(packed)
            shape = padded.shape[0], batch, padded.shape[2]
            padded = dropout_block(padded, dropout, mix(key, ordinal), layer, shape, (0, start, 0))
            packed = rnn.pack_padded_sequence(padded, lengths, enforce_sorted=packed.sorted_indices is None)
        own = [state[layer * directions : (layer + 1) * directions] for state in states]
        data, *last = layers(packed, own, params[layer * each : (layer + 1) * each], 1)
        packed = packed._replace(data=data)
        ends.append(last)
    return packed.data, *(torch.cat(parts) for parts in zip(*ends, strict=True))


def _packed(operator: Operator, local: Local) -> Ref:
    given, own, args = local.arguments, local.operand_shape(), tuple(local.arguments.values())
    rows, batch = own[0 if given["batch_first"] else 1], local.size("n")
    if given["dropout_p"] == 0:
        padded = local.equal("n") and local.slices("n") * rows != batch
        place = (local.position("n", rows), batch) if padded else ()
        return local.several("local.packed_block", *args, local.key, None, *place)
    if not local.exact:
        seeds = "local.packed_block", local.key, local.ordinal, local.position("n")
        return local.several("local.seeded_slice", *seeds, *args)
    place = local.position("n", rows), batch
    return local.several("local.packed_block", *args, local.key, local.ordinal, *place)


@rule(NAME)
def sequences(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x [t, n, i] (or [n, t, i]), lengths [n], states [layers, n, h], weights -> outputs like x, states."""
    given = arguments(operator)
    sequence: Dims = ("n", None, None) if given["batch_first"] else (None, "n", None)
    state: Dims = (None, "n", None)
    states, weights = len(given["hx"]), specs[2 + len(given["hx"]) :]
    products = sum(spec.elements for spec in weights if len(spec.shape) == 2)
    return sharding(
        operator,
        specs,
        [sequence, ("n",), *[state] * states, *unsliced(weights)],
        [sequence, *[state] * states],
        local=_packed,
        flops=2.0 * products * specs[0].shape[0] * specs[0].shape[1],
        padded=() if given["dropout_p"] else ("n",),
    )
