"""Packed sequences in a captured graph: padded tensors with the length of each row, since how many elements are packed
depends on the lengths.

`pack_padded_sequence` notes both, torch's recurrent networks take and return them as one operator, and
`pad_packed_sequence` fills the places behind each row's end. The `data` of a packed sequence is a mask's selection of
the padded tensor (`masked`): those of two sequences with the same lengths are in the same order, and in no other
mask's. Invariant: a padded tensor has the shape that torch gives it, whatever the lengths are, so `total_length` must
say it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import rnn

from strategies.capture.constants import number, values_of
from strategies.capture.logged_arrays import LoggedArray
from strategies.capture.masked import SELECTIONS, equal_masks
from strategies.capture.nodes import forwards_wrapped, proxy_mode, replaced, users_line
from strategies.core.errors import StrategyError
from strategies.rules.packed_sequences import packed_network

NETWORKS = (nn.LSTM, nn.GRU, nn.RNN)
NAMES = {"LSTM": "lstm", "GRU": "gru", "RNN_TANH": "rnn_tanh", "RNN_RELU": "rnn_relu"}


def refusal(what: str, cure: str) -> StrategyError:
    where = users_line()
    return StrategyError("MW906", f"The model's forward {what}{where}, which depends on the values of lengths; {cure}.")


class PackedAsPadded(rnn.PackedSequence):
    """What a forward takes for a packed sequence while it is traced."""

    padded: Tensor
    lengths: Tensor
    batch_first: bool
    enforce_sorted: bool
    filled: bool
    """Whether zeros are behind the end of each row."""
    longest: int
    """The longest that rows of these lengths may be: so long is the shortest tensor that was packed by them."""

    @staticmethod
    def of(
        padded: Tensor, lengths: Tensor, batch_first: bool, enforce_sorted: bool, *, filled: bool = False
    ) -> PackedAsPadded:
        made = tuple.__new__(PackedAsPadded, (None,) * 4)
        made.padded, made.lengths, made.filled = padded, lengths, filled
        made.batch_first, made.enforce_sorted = batch_first, enforce_sorted
        made.longest = padded.shape[1 if batch_first else 0]
        same = [one for one in SELECTIONS[-1].packed if equal_masks(one.lengths, lengths)]
        if same and same[0].longest > made.longest:
            SELECTIONS[-1].shorten(same[0]._mask(), made._mask())
        shortest = min(one.longest for one in (made, *same))
        for one in (made, *same):
            one.longest = shortest
        SELECTIONS[-1].packed.append(made)
        return made

    @property
    def data(self) -> Tensor:
        if "selected" not in vars(self):
            padded = self.padded.transpose(0, 1) if self.batch_first else self.padded
            self.selected = padded[: self.longest][self._mask()]
        return self.selected

    @property
    def batch_sizes(self) -> Any:
        return SequenceOrder(self)

    sorted_indices = unsorted_indices = batch_sizes

    def with_data(self, data: Tensor) -> PackedAsPadded:
        """A packed sequence of the same lengths."""
        known = SELECTIONS[-1].of(data)
        if known is None or not equal_masks(known.mask, self._mask()):
            raise refusal(
                "makes a packed sequence of tensors that are not computed from the elements of another, one by one",
                "compute on the padded tensor, of pad_packed_sequence(..., total_length=x.size(1)), and pack again",
            )
        padded = known.dense.transpose(0, 1) if self.batch_first else known.dense
        return PackedAsPadded.of(padded, self.lengths, self.batch_first, self.enforce_sorted)

    def _mask(self) -> Tensor:
        """Where elements are, time first. A forward's own masks have another order, so it computes none like this."""
        places = torch.arange(self.longest, device=self.padded.device)
        behind = places[:, None] >= self.lengths.to(self.padded.device)
        return behind.logical_xor(torch.ones((), dtype=torch.bool, device=behind.device))

    def __iter__(self) -> Iterator[Any]:
        return iter((self.data, *(SequenceOrder(self),) * 3))

    def __getitem__(self, place: Any) -> Any:
        return tuple(self)[place]

    def _replace(self, **fields: Any) -> PackedAsPadded:
        data = fields.pop("data")
        if any(not isinstance(one, SequenceOrder) for one in fields.values()):
            raise refusal("changes the order of a packed sequence", "pack again")
        return self.with_data(data)


class SequenceOrder:
    """What a forward takes for the sizes and the order of a packed sequence, of which it makes others."""

    def __init__(self, packed: PackedAsPadded) -> None:
        self.packed = packed

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise refusal(
            "looks into a packed sequence (batch_sizes, sorted_indices ...)",
            "compute on the padded tensor, that of pad_packed_sequence(..., total_length=x.size(1)), and pack again",
        )

    __getattr__ = __iter__ = __getitem__ = __len__ = __bool__ = __eq__ = _refuse
    __hash__ = object.__hash__


def _pack(input: Tensor, lengths: Any, batch_first: bool, enforce_sorted: bool) -> PackedAsPadded:
    if isinstance(lengths, LoggedArray) and lengths.tensor is not None:
        lengths = lengths.tensor
    if any(isinstance(one, torch.SymInt) for one in lengths):  # of Tensor.tolist
        lengths = torch.stack([torch.full((), one, dtype=torch.int64) for one in lengths])
    lengths = lengths if isinstance(lengths, Tensor) else torch.as_tensor(lengths)
    return PackedAsPadded.of(input, lengths.to(torch.int64), batch_first, enforce_sorted)


def _pad(sequence: PackedAsPadded, batch_first: bool, value: float, total_length: Any) -> tuple[Tensor, Tensor]:
    padded, lengths = sequence.padded, sequence.lengths
    if batch_first != sequence.batch_first:
        padded = padded.transpose(0, 1)
    dim = 1 if batch_first else 0
    size, total_length, constant = padded.shape[dim], number(total_length), values_of(lengths)
    longest = None if constant is None else int(constant.max())
    total_length = longest if total_length is None else total_length
    if not isinstance(total_length, int) or total_length < (size if longest is None else longest):
        raise refusal(
            "pads packed sequences to the longest of them, or to less than the padded input",
            f"say a length that holds for all: pad_packed_sequence(..., total_length={size}), the padded input's, and "
            "mask the places behind the ends",
        )
    if total_length > size:
        padded = functional.pad(padded, (*(0, 0) * (padded.dim() - 1 - dim), 0, total_length - size))
    elif total_length < size:
        padded = padded.narrow(dim, 0, total_length)
    if not sequence.filled or value:
        places = torch.arange(total_length, device=padded.device)
        ends = lengths.to(padded.device)
        behind = places >= ends[:, None] if batch_first else places[:, None] >= ends
        padded = padded.masked_fill(behind.reshape(*behind.shape, *(1,) * (padded.dim() - 2)), value)
    return padded, lengths


def _on_packed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a recurrent network that takes `PackedAsPadded`, too."""

    def call(module: Any, input: Any, hx: Any = None) -> Any:
        if not isinstance(input, PackedAsPadded):
            return forward(module, input, hx)
        module._update_flat_weights()
        network, padded = NAMES[module.mode], input.padded
        if torch.is_autocast_enabled(padded.device.type):
            padded = padded.float()  # computes in fp32
        if hx is None:
            states = _zeros(module, padded, input.batch_first)
        else:
            states = [state.to(padded.dtype) for state in (hx if network == "lstm" else (hx,))]
        drops = module.dropout if module.training and module.num_layers > 1 else 0.0
        options = network, module.bias, module.num_layers, drops, module.bidirectional
        weights = list(module._flat_weights)
        order = input.batch_first, input.enforce_sorted
        output, *last = packed_network(padded, input.lengths, states, weights, *options, *order)
        return PackedAsPadded.of(output, input.lengths, *order, filled=True), tuple(
            last
        ) if network == "lstm" else last[0]

    return call


def _zeros(module: Any, padded: Tensor, batch_first: bool) -> Sequence[Tensor]:
    rows, layers = padded.shape[0 if batch_first else 1], module.num_layers * (2 if module.bidirectional else 1)
    widths = [module.proj_size or module.hidden_size, *[module.hidden_size] * (module.mode == "LSTM")]
    return [torch.zeros(layers, rows, width, dtype=padded.dtype, device=padded.device) for width in widths]


def _call_pack(input: Any, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> Any:
    return _instead_of_pack(input, lengths, batch_first, enforce_sorted)  # type: ignore[name-defined]  # noqa: F821


def _call_pad(
    sequence: Any, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> Any:
    return _instead_of_pad(sequence, batch_first, padding_value, total_length)  # type: ignore[name-defined]  # noqa: F821


@contextmanager
def packed_as_padded() -> Iterator[None]:
    """Around an export."""
    pack, pad = map(_copied, (rnn.pack_padded_sequence, rnn.pad_packed_sequence))

    def packed(*args: Any) -> Any:
        traced = proxy_mode()
        return pack(*args) if traced is None else _pack(*args)

    def padded(sequence: Any, *args: Any) -> Any:
        return _pad(sequence, *args) if isinstance(sequence, PackedAsPadded) else pad(sequence, *args)

    # other modules have imported the functions by their names: their code is replaced
    rnn.__dict__.update(_instead_of_pack=packed, _instead_of_pad=padded)
    with (
        replaced(rnn.PackedSequence, "__new__", _made(rnn.PackedSequence.__new__)),
        replaced(rnn.pack_padded_sequence, "__code__", _call_pack.__code__),
        replaced(rnn.pad_packed_sequence, "__code__", _call_pad.__code__),
        forwards_wrapped(NETWORKS, _on_packed),
    ):
        yield


def _made(new: Callable[..., Any]) -> Callable[..., Any]:
    """The constructor of packed sequences that takes the order of another, too."""

    def call(cls: type, data: Any, batch_sizes: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(batch_sizes, SequenceOrder):
            return batch_sizes.packed.with_data(data)
        return new(cls, data, batch_sizes, *args, **kwargs)

    return call


def _copied(function: Any) -> FunctionType:
    return FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
