"""Attention over a sequence that ranks share: keys and values travel around a ring of ranks, block by block.

A block returns its own softmax's output and the logarithm of its sum of exponentials; two blocks merge exactly: the
sums add up, and each output counts by its share of them. Backward computes probabilities again from the logarithms of
all blocks together. Keys and values travel once more in backward, and the gradients of a block follow it from rank to
rank until it is home, so autograd stores a rank's own slices alone. While a block is computed, the next is under way.

Causal attention is balanced: every rank but the middle one swaps the second half of its slice with its mirror (the
first rank with the last), so that it has as many visible keys before it as any other, at every step of the ring
(zigzag order). Results are swapped back, so nothing outside sees this order.

Sources: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers" (2023); Dao, "FlashAttention-2" (2023) for
the gradients of a block; Brandon et al., "Striped Attention" (2023) for the balance of causal work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strategies.rules.random import Rows, kept_block, mix, uniform
from strategies.rules.registry import Link, Once, local_function

SCORES = 2**26
"""Scores that are computed at once, as far as rows of queries allow."""
NOTHING = -1e30
"""The logarithm of the sum of no exponentials: finite, so that blocks without a visible key merge without NaN."""
KEYS, GRADIENTS, THERE, BACK, AGAIN = range(5)
"""Channels: keys and values, and their gradients, around the ring; halves of queries, keys and values to the mirror; of
results; and of results with their gradients."""


class Settings(NamedTuple):
    """What decides a rank's attention beside its tensors.

    Attributes:
        position: The rank's place among the `slices` ranks of the ring.
        seeds: The program's key, the operator's ordinal and the position of the rank's slice; None without dropout.
        shape: Of the random tensor over all ranks.
        starts: Where the rank's leading dims begin in it, for `exact` dropout; None: numbers of each block alone.
        rows: Those of a batch split.
    """

    position: int
    slices: int
    causal: bool
    dropout: float
    scale: float | None
    grouped: bool
    seeds: tuple[int, int, int] | None
    shape: Sequence[int]
    starts: Sequence[int] | None
    rows: Rows | None


@dataclass(frozen=True)
class _Chunk:
    """Consecutive positions of the sequence: `start` of all, `first` of those of the rank that has them."""

    start: int
    first: int
    length: int

    def of(self, tensor: Tensor) -> Tensor:
        """Its rows of a rank's tensor [..., s, d]."""
        return tensor.narrow(-2, self.first, self.length)


class _Attention:
    """One rank's queries [..., s, d] over blocks of keys [..., s, d] and values [..., s, e], with a bias or a boolean
    mask [..., s or 1, t or 1]; leading dims broadcast. With grouped queries, heads [h] are [heads of keys, group]."""

    def __init__(self, settings: Settings, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
        self.settings, self.length, self.mask = settings, query.shape[-2], mask
        self.heads = key.shape[-3] if settings.grouped and key.shape[-3] < query.shape[-3] else 0
        self.scale = 1 / math.sqrt(query.shape[-1]) if settings.scale is None else settings.scale
        self.left = 1 / (1 - settings.dropout) if settings.dropout < 1 else 0.0
        ahead = 3 if self.heads else 2
        lead = torch.broadcast_shapes(query.shape[:-ahead], key.shape[:-ahead], value.shape[:-ahead])  # type: ignore[no-untyped-call]
        self.lead = (*lead, *(query.shape[-3:-2] if self.heads else ()))
        self.query = self.in_groups(query)
        self.own = self.chunks(settings.position)
        self.bias = None if mask is None else self.in_groups(mask)
        self.wide = torch.promote_types(query.dtype, torch.float32)
        self.numbers: Tensor | None = None
        self.fused = (
            query.device.type == "cpu"
            and mask is None
            and settings.dropout == 0
            and not self.heads
            and query.dim() == 4
            and query.shape[:2] == key.shape[:2] == value.shape[:2]
            and query.shape[-1] == value.shape[-1]
        )

    def in_groups(self, tensor: Tensor) -> Tensor:
        """Heads [..., h, s, t] as groups of those that share keys."""
        if not self.heads or tensor.dim() < 3:
            return tensor
        return tensor.unsqueeze(-3) if tensor.shape[-3] == 1 else tensor.unflatten(-3, (self.heads, -1))  # type: ignore[no-untyped-call]

    def out_of_groups(self, tensor: Tensor) -> Tensor:
        return tensor.flatten(-4, -3) if self.heads else tensor

    def chunks(self, position: int) -> list[_Chunk]:
        """The positions that the rank at `position` of the ring has; a mirror's second half if they are swapped."""
        length, mirror = self.length, self.settings.slices - 1 - position
        if not self.settings.causal:
            return [_Chunk(position * length, 0, length)]
        half = first_half(length)
        chunks = [_Chunk(position * length, 0, half), _Chunk(mirror * length + half, half, length - half)]
        return [chunk for chunk in chunks if chunk.length]

    def _visible(self, step: int) -> Iterator[tuple[_Chunk, _Chunk]]:
        """The chunks of queries and of keys that meet after `step` rotations."""
        block = (self.settings.position - step) % self.settings.slices
        for queries in self.own:
            for keys in self.chunks(block):
                if not self.settings.causal or keys.start <= queries.start:
                    yield queries, keys

    def _tiles(self, queries: _Chunk, keys: _Chunk) -> Iterator[_Chunk]:
        """Rows of queries whose scores are computed at once."""
        most = max(1, SCORES // (math.prod(self.lead) * keys.length))
        for row in range(0, queries.length, most):
            yield _Chunk(queries.start + row, queries.first + row, min(most, queries.length - row))

    def _scores(self, rows: _Chunk, keys: _Chunk, key: Tensor) -> Tensor:
        """Scores of some rows of queries, -inf where a query does not see a key; float32 or wider."""
        scores = (rows.of(self.query) @ key.mT).to(self.wide) * self.scale
        if self.settings.causal and rows.start < keys.start + keys.length - 1:
            seen = torch.ones(rows.length, keys.length, dtype=torch.bool, device=key.device)
            scores = scores.masked_fill(~seen.tril(rows.start - keys.start), -math.inf)
        if self.bias is not None:
            part = self._part(self.bias, rows, keys)
            scores = scores.masked_fill(~part, -math.inf) if part.dtype == torch.bool else scores + part
        return scores

    def _part(self, bias: Tensor, rows: _Chunk, keys: _Chunk) -> Tensor:
        if bias.shape[-1] > 1:
            bias = bias.narrow(-1, keys.start, keys.length)
        return bias if bias.dim() < 2 or bias.shape[-2] == 1 else rows.of(bias)

    def _kept(self, rows: _Chunk, keys: _Chunk, like: Tensor) -> Tensor | None:
        """1 / (1 - p) for the probabilities that dropout keeps, and 0 for others; None without dropout."""
        settings = self.settings
        if settings.seeds is None:
            return None
        program_key, ordinal, where = settings.seeds
        shape = (*self.lead, rows.length, keys.length)
        if settings.starts is None:
            numbers = uniform(shape, mix(program_key, ordinal, where, rows.start, keys.start), like.device)
            kept = numbers >= settings.dropout
        else:
            if self.numbers is None:
                begin, every = (*settings.starts, 0, 0), like.new_empty(()).expand(*self.lead, *settings.shape[-2:])
                block = settings.dropout, program_key, ordinal, settings.shape, begin, settings.rows
                self.numbers = kept_block(every, *block)
            kept = self.numbers.narrow(-2, rows.start, rows.length).narrow(-1, keys.start, keys.length)
        return self.in_groups(kept.to(like.device)).to(self.wide) * self.left

    def results(self, features: int, device: torch.device) -> None:
        """Begin with the results of no block: the output [..., s, e], and the logarithms [..., s, 1]."""
        shape = (*self.lead, self.length)
        if self.heads:
            shape = (*self.lead[:-1], self.heads, self.lead[-1] // self.heads, self.length)
        self.output = torch.zeros((*shape, features), dtype=self.wide, device=device)
        self.logarithms = torch.full((*shape, 1), NOTHING, dtype=self.wide, device=device)

    def add(self, step: int, key: Tensor, value: Tensor) -> None:
        """Merge the block of keys and values that is here after `step` rotations into the results."""
        for queries, keys in self._visible(step):
            if self.fused:
                output, logarithms = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    queries.of(self.query), keys.of(key), keys.of(value), 0.0, self._diagonal(queries, keys),
                    scale=self.scale,
                )  # fmt: skip
                self._merge(queries, output.to(self.wide), logarithms.to(self.wide).unsqueeze(-1))
                continue
            of_keys, of_values = (keys.of(self._shared(tensor)) for tensor in (key, value))
            for rows in self._tiles(queries, keys):
                scores = self._scores(rows, keys, of_keys)
                logarithms = scores.logsumexp(-1, keepdim=True).clamp_min(NOTHING)
                shares, kept = (scores - logarithms).exp(), self._kept(rows, keys, value)
                shares = shares if kept is None else shares * kept
                self._merge(rows, (shares.to(value.dtype) @ of_values).to(self.wide), logarithms)

    def _diagonal(self, queries: _Chunk, keys: _Chunk) -> bool:
        return self.settings.causal and queries.start == keys.start

    def _shared(self, tensor: Tensor) -> Tensor:
        """Keys or values beside groups of heads of queries."""
        return tensor.unsqueeze(-3) if self.heads else tensor

    def _merge(self, rows: _Chunk, output: Tensor, logarithms: Tensor) -> None:
        own, before = rows.of(self.output), rows.of(self.logarithms)
        after = torch.logaddexp(before, logarithms)
        own.mul_((before - after).exp()).add_(output * (logarithms - after).exp())
        before.copy_(after)

    def gradients(self, output: Tensor, logarithms: Tensor, of_output: Tensor) -> None:
        """Begin with the gradients of no block, from the results of all blocks and the gradient of the output."""
        self.output, self.of_output, self.logarithms = map(self.in_groups, (output, of_output, logarithms))
        if not self.fused:
            self.inner = (self.of_output.to(self.wide) * self.output.to(self.wide)).sum(-1, keepdim=True)
        self.of_query = torch.zeros_like(self.query, dtype=self.wide)
        learned = self.bias is not None and self.bias.is_floating_point()
        self.of_bias = torch.zeros_like(self.bias, dtype=self.wide) if learned else None  # type: ignore[arg-type]

    @property
    def of_mask(self) -> Tensor | None:
        """The gradient of a bias that is learned."""
        mask, gradient = self.mask, self.of_bias
        return None if mask is None or gradient is None else gradient.reshape(mask.shape).to(mask.dtype)

    def add_gradients(self, step: int, key: Tensor, value: Tensor) -> list[Tensor]:
        """What the block of keys and values that is here after `step` rotations causes: part of the gradients of
        queries and bias, which are kept, and of keys and values, which are returned, float32 or wider."""
        of_key, of_value = (torch.zeros_like(tensor, dtype=self.wide) for tensor in (key, value))
        for queries, keys in self._visible(step):
            if self.fused:
                parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    *(queries.of(self.of_output), queries.of(self.query), keys.of(key), keys.of(value)),
                    *(queries.of(self.output), queries.of(self.logarithms).squeeze(-1)),
                    *(0.0, self._diagonal(queries, keys)),
                    scale=self.scale,
                )
                for chunk, total, part in zip(
                    (queries, keys, keys), (self.of_query, of_key, of_value), parts, strict=True
                ):
                    chunk.of(total).add_(part)
                continue
            for rows in self._tiles(queries, keys):
                self._add_tile(rows, keys, *map(self._shared, (key, value, of_key, of_value)))
        return [of_key, of_value]

    def _add_tile(
        self, rows: _Chunk, keys: _Chunk, key: Tensor, value: Tensor, of_key: Tensor, of_value: Tensor
    ) -> None:
        key, value, of_key, of_value = map(keys.of, (key, value, of_key, of_value))
        scores, above = self._scores(rows, keys, key), rows.of(self.of_output)
        probabilities = (scores - rows.of(self.logarithms)).exp()
        of_dropped, dropped, kept = (above @ value.mT).to(self.wide), probabilities, self._kept(rows, keys, value)
        if kept is not None:
            dropped, of_dropped = probabilities * kept, of_dropped * kept
        of_value += (dropped.to(value.dtype).mT @ above).sum_to_size(value.shape)
        of_scores = probabilities * (of_dropped - rows.of(self.inner))
        if self.of_bias is not None:
            part = self._part(self.of_bias, rows, keys)
            part += of_scores.sum_to_size(part.shape)
        of_scores = (of_scores * self.scale).to(key.dtype)
        query, of_query = rows.of(self.query), rows.of(self.of_query)
        of_query += (of_scores @ key).sum_to_size(query.shape)
        of_key += (of_scores.mT @ query).sum_to_size(key.shape)


def first_half(length: int) -> int:
    """The positions of a slice of `length` that stay where they are in zigzag order."""
    return length - length // 2


def _swapped(links: Sequence[Link], channel: int, ranks: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """The tensors [..., s, d] of all `ranks` with the second halves of their mirrors."""
    length = ranks[0][0].shape[-2]
    cut = first_half(length)
    if cut == length:
        return [list(tensors) for tensors in ranks]
    arrived = links[channel]([[tensor[..., cut:, :] for tensor in tensors] for tensors in ranks])()
    return [
        [torch.cat([tensor[..., :cut, :], half], -2) for tensor, half in zip(tensors, halves, strict=True)]
        for tensors, halves in zip(ranks, arrived, strict=True)
    ]


def _heads_last(tensor: Tensor) -> Tensor:
    """[..., h, s, e] with the memory of [..., s, h, e], as torch's kernels return it: models join heads without a copy,
    so what the next product saves is the result itself."""
    return tensor if tensor.dim() < 3 else tensor.transpose(-2, -3).contiguous().transpose(-2, -3)


class _Ring(torch.autograd.Function):
    """The attention of several ranks, of which each gives query, key, value and mask: of one, in a process of its own,
    or of all, where they are simulated."""

    @staticmethod
    def forward(
        ctx: Any, links: Sequence[Link], once: Once, settings: Sequence[Settings], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        slices, causal = settings[0].slices, settings[0].causal
        given = [tensors[4 * rank : 4 * rank + 4] for rank in range(len(settings))]

        def computed(operands: Sequence[Tensor]) -> list[Tensor]:
            """The result, the logarithms and, in the order of the ring, the operands of each rank."""
            ranks = [list(operands[3 * rank : 3 * rank + 3]) for rank in range(len(settings))]
            ranks = _swapped(links, THERE, ranks) if causal else ranks
            parts = [
                _Attention(own, query, key, value, one[3])
                for own, (query, key, value), one in zip(settings, ranks, given, strict=True)
            ]
            for part, (_, _, value) in zip(parts, ranks, strict=True):
                part.results(value.shape[-1], value.device)
            here = [rank[1:] for rank in ranks]
            for step in range(slices):
                landing = links[KEYS](here) if step + 1 < slices else None
                for part, pair in zip(parts, here, strict=True):
                    part.add(step, *pair)
                here = here if landing is None else landing()
            results = [
                [part.out_of_groups(part.output).to(rank[0].dtype)] for part, rank in zip(parts, ranks, strict=True)
            ]
            results = _swapped(links, BACK, results) if causal else results
            results = [[_heads_last(tensor) for tensor in tensors] for tensors in results]
            rest = [
                [part.out_of_groups(part.logarithms), *(rank * causal)] for part, rank in zip(parts, ranks, strict=True)
            ]
            return [tensor for pair in zip(results, rest, strict=True) for some in pair for tensor in some]

        flat = once(computed)([tensor for rank in given for tensor in rank[:3] if tensor is not None])
        size = len(flat) // len(settings)
        saved: list[Tensor | None] = []
        for rank in range(len(settings)):
            output, logarithms, *moved = flat[size * rank : size * rank + size]
            saved += [output, logarithms, *(moved or given[rank][:3]), given[rank][3]]
        ctx.links, ctx.settings = links, settings
        ctx.save_for_backward(*saved)
        return tuple(flat[::size])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        links, settings, saved = ctx.links, ctx.settings, ctx.saved_tensors
        slices, causal, count = settings[0].slices, settings[0].causal, len(settings)
        given = [saved[6 * rank : 6 * rank + 6] for rank in range(count)]
        above = [[one[0], gradient] for one, gradient in zip(given, gradients, strict=True)]
        above = _swapped(links, AGAIN, above) if causal else above
        parts = [_Attention(own, *one[2:]) for own, one in zip(settings, given, strict=True)]
        for part, (output, gradient), one in zip(parts, above, given, strict=True):
            part.gradients(output, one[1], gradient)

        def added(step: int, here: list[list[Tensor]]) -> list[list[Tensor]]:
            return [part.add_gradients(step, *pair) for part, pair in zip(parts, here, strict=True)]

        here = [list(one[3:5]) for one in given]
        landing = links[KEYS](here) if slices > 1 else None
        own, following = added(0, here), None
        for step in range(1, slices):
            assert landing is not None
            here = landing()
            landing = links[KEYS](here) if step + 1 < slices else None
            found = added(step, here)
            if following is not None:
                _add(found, following())
            following = links[GRADIENTS](found)
        if following is not None:
            _add(own, following())
        results = [
            [
                gradient.to(like.dtype)
                for gradient, like in zip((part.out_of_groups(part.of_query), *pair), one[2:5], strict=True)
            ]
            for part, pair, one in zip(parts, own, given, strict=True)
        ]
        results = _swapped(links, THERE, results) if causal else results
        flat = [one for three, part in zip(results, parts, strict=True) for one in (*three, part.of_mask)]
        return None, None, None, *flat


def _add(totals: Sequence[Sequence[Tensor]], others: Sequence[Sequence[Tensor]]) -> None:
    for total, other in zip(totals, others, strict=True):
        for tensor, part in zip(total, other, strict=True):
            tensor += part


@local_function
def ring_attention(links: Sequence[Link], once: Once, calls: Sequence[Sequence[Any]]) -> list[Tensor]:
    """The attention of each of the ranks whose calls (query, key, value, mask, *settings) these are."""
    settings = [Settings(*call[4:]) for call in calls]
    tensors = [tensor for call in calls for tensor in call[:4]]
    return list(_Ring.apply(links, once, settings, *tensors))  # type: ignore[no-untyped-call]
