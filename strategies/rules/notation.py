"""Sharding rules in factor notation: "m k, k n -> m n" says which dims of operands and results carry which factor.

| text      | means                                                                                              |
|-----------|----------------------------------------------------------------------------------------------------|
| `m`       | a dim with the factor m; one of another size than m's (1, which is broadcast) stays replicated      |
| `!m`      | a dim that stays replicated                                                                        |
| `...`     | any number of dims, aligned from the right with those of other operands, with the factors d0, d1, ... |
| `b...`    | the same with the factors b0, b1, ...                                                              |
| `!...`    | any number of replicated dims                                                                      |
| `x*`      | any number of operands or results like x                                                           |
| `+n`      | an optional operand that is broadcast and added to the result, by one slice of the summed factors  |
| `; !dim`  | the dims of `...` that the argument `dim` names (all, if it is None) stay replicated                |
| `; +dim`  | they are summed over; `; /dim` takes means. Results lack these dims, or have size 1 in their place  |
| `; ^dim`  | the same, but the local program reduces them, so that every slice has the complete result          |

A number may stand for the name of the argument: `; !0`. Any other factor that no result carries is summed over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
from torch import Tensor

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.registry import arguments, local_function
from strategies.rules.sharding import Dims, Local, LocalProgram, Sharding, sharding


@local_function
def first_slice_only(bias: Tensor, position: int) -> Tensor:
    """`bias` on the ranks with slice 0 of the summed factors, zeros elsewhere (still connected: zero gradient)."""
    if position == 0:
        return bias
    return bias.masked_fill(torch.ones((), dtype=torch.bool, device=bias.device), 0)  # inf * 0 would be no zero


@dataclass(frozen=True)
class Term:
    """An operand or result of a line."""

    words: tuple[str, ...]
    added: bool = False
    repeated: bool = False

    @property
    def ellipses(self) -> tuple[str, ...]:
        return tuple(word for word in self.words if word.endswith("..."))


@dataclass(frozen=True)
class Line:
    """A line of notation. `chosen` are arguments (or numbers) that name dims; `how` says what becomes of these: they
    stay replicated (!), are summed over (+), averaged (/) or reduced by the local program (^)."""

    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    chosen: tuple[str, ...] = ()
    how: str = "!"


@cache
def parse(text: str) -> Line:
    """A line from its text."""
    line, _, clause = text.partition(";")
    operands, results = (tuple(map(_term, side.split(",")) if side.strip() else ()) for side in line.split("->"))
    chosen = clause.split()
    return Line(
        operands,
        (*results,) if results else (Term(()),),
        tuple(word[1:] for word in chosen),
        chosen[0][0] if chosen else "!",
    )


def _term(text: str) -> Term:
    text = text.strip()
    assert not re.search(r"!\w+\.\.\.", text), text
    return Term(tuple(text.strip("+*").split()), text.startswith("+"), text.endswith("*"))


def _spread(terms: Sequence[Term], count: int) -> list[Term] | None:
    """The term of each of `count` tensors; None if they do not fit."""
    needed = [term for term in terms if not term.added and not term.repeated]
    repeated = [term for term in terms if term.repeated]
    if repeated:
        extra = count - len(needed)
        return [*needed, *repeated * extra] if extra >= 0 else None
    if not len(needed) <= count <= len(terms):
        return None
    added = [term for term in terms if term.added][: count - len(needed)]
    return [term for term in terms if term in needed or term in added]


class _Reading:
    """One line read for the shapes of one call."""

    def __init__(self, line: Line, operator: Operator, specs: Sequence[TensorSpec]) -> None:
        self.line, self.operator, self.specs = line, operator, specs
        self.terms, self.outputs = _spread(line.operands, len(specs)), _spread(line.results, len(operator.results))
        self.lengths: dict[str, int] = {}

    def dims(self, strict: bool) -> tuple[list[Dims], list[Dims], dict[str, int]] | None:
        """Factors of operands and results, and their sizes; None where the call does not fit the line."""
        if self.terms is None or self.outputs is None or not self._measure():
            return None
        chosen, specs, results = self._chosen(), self.specs, self.operator.results
        names = [self._named(term, len(spec.shape)) for term, spec in zip(self.terms, specs, strict=True)]
        names += [self._result(term, len(spec.shape), chosen) for term, spec in zip(self.outputs, results, strict=True)]
        tensors = [(own, spec.shape) for own, spec in zip(names, (*specs, *results), strict=True) if own is not None]
        if len(tensors) < len(names):
            return None
        sizes: dict[str, int] = {}
        for own, shape in tensors:
            for name, size in zip(own, shape, strict=True):
                if name is not None:
                    sizes[name] = max(size, sizes.get(name, size))
        for at, (own, shape) in enumerate(tensors):
            broadcast = (1,) if at < len(specs) else ()
            pairs = zip(own, shape, strict=True)
            if strict and any(name is not None and size not in (sizes[name], *broadcast) for name, size in pairs):
                return None
        passing = sizes.keys() - (chosen if self.line.how == "!" else set())
        factors: list[Dims] = [
            tuple(
                name if name in passing and size == sizes[name] else None for name, size in zip(own, shape, strict=True)
            )
            for own, shape in tensors
        ]
        return factors[: len(specs)], factors[len(specs) :], sizes

    def _measure(self) -> bool:
        """Find how many dims every ellipsis stands for."""
        assert self.terms is not None
        for term, spec in zip(self.terms, self.specs, strict=True):
            rest = len(spec.shape) - len(term.words) + len(term.ellipses)
            if not term.added and rest < 0:
                return False
            if len(term.ellipses) == 1:
                (word,) = term.ellipses
                self.lengths[word] = max(rest, self.lengths.get(word, 0))
        return True

    def _named(self, term: Term, rank: int) -> list[str | None] | None:
        """The names of a tensor's dims; None where it does not fit its term."""
        if term.added:
            names = [name for word in term.words for name in self._names(word, self.lengths.get(word, 0), 0)]
            return names[len(names) - rank :] if rank <= len(names) else None
        known = [word for word in term.ellipses if word != "!..." and len(term.ellipses) > 1]
        rest = rank - (len(term.words) - len(term.ellipses)) - sum(self.lengths.get(word, 0) for word in known)
        if rest < 0 or (rest and len(known) == len(term.ellipses)):
            return None
        names = []
        for position, word in enumerate(term.words):
            length = self.lengths.get(word, 0) if word in known else rest if word.endswith("...") else 1
            names += self._names(word, length, position)
        return names

    def _names(self, word: str, length: int, position: int) -> list[str | None]:
        if not word.endswith("..."):
            return [None if word.startswith("!") else word]
        if word == "!...":
            return [None] * length
        prefix, skip = word[:-3] or "d", self.lengths.get(word, length) - length
        start = skip + (position if word == "..." else 0)
        return [f"{prefix}{start + i}" for i in range(length)]

    def _chosen(self) -> set[str | None]:
        """The names of the dims of `...` that the clause chooses."""
        rank, names = self.lengths.get("...", 0), set[str | None]()
        options = arguments(self.operator) if self.line.chosen and rank else {}
        for word in self.line.chosen if rank else ():
            dims = int(word) if word.lstrip("-").isdigit() else options.get(word)
            each = range(rank) if dims is None or dims in ((), []) else (dims,) if isinstance(dims, int) else dims
            names |= {f"d{dim % rank}" for dim in each}
        return names

    def _result(self, term: Term, rank: int, chosen: set[str | None]) -> list[str | None] | None:
        """The names of a result's dims, with or without those that the clause chooses."""
        if not self.line.chosen:
            if not term.ellipses:
                return self._named(term, rank) if rank == len(term.words) else None
            if len(term.ellipses) == 1 and term.ellipses[0] != "!...":
                others = len(term.words) - 1
                if rank != others + self.lengths.get(term.ellipses[0], -1):
                    return None
            return self._named(term, rank)
        full = [name for at, word in enumerate(term.words) for name in self._names(word, self.lengths.get(word, 0), at)]
        if rank == len(full):
            return [None if name in chosen else name for name in full]
        lacking = [name for name in full if name not in chosen]
        return lacking if rank == len(lacking) else None


def _added_once(positions: Sequence[int], summed: Sequence[str]) -> LocalProgram:
    """The operator itself, with the operands at `positions` added by the first slice of the summed factors alone."""

    def program(operator: Operator, local: Local) -> Ref:
        if local.slices(*summed) == 1:
            return local.itself()
        args, at = list(local.args), -1
        for index, argument in enumerate(args):
            if isinstance(argument, Ref):
                at += 1
                if at in positions:
                    args[index] = local.call("local.first_slice_only", argument, local.position(tuple(summed)))
        return local.call(operator.target, *args, **local.kwargs)

    return program


def mean_of(summed: Sequence[str]) -> LocalProgram:
    """The operator itself, divided by the number of such slices, so that the partial results add up to the mean."""

    def program(operator: Operator, local: Local) -> Ref:
        value, parts = local.itself(), local.parts(*summed)
        return value if parts == 1 else local.call("aten.div.Tensor", value, parts)

    return program


def notation(
    text: str,
    operator: Operator,
    specs: Sequence[TensorSpec],
    *,
    padded: bool = False,
    product: bool = False,
    sizes: Mapping[str, int] | None = None,
    local: LocalProgram | None = None,
    flops: float | None = None,
    strict: bool = False,
) -> Sharding | None:
    """The sharding that a line of notation gives one call, or None where its shapes do not fit the line.

    Args:
        text: the line, see the module's docstring.
        operator: the call.
        specs: shapes of its tensor operands.
        padded: whether factors that are not summed over may have padded slices.
        product: whether every combination of factors is multiplied and added once: two flops each.
        sizes: factor -> the number that its slice count must divide, for dims that are cut coarser.
        local: the local program, if a slice is computed by something else than the operator.
        flops: of one forward, if not one per element.
        strict: whether dims with one letter must have one size, but for operands of size 1.
    """
    line = parse(text)
    reading = _Reading(line, operator, specs)
    read = reading.dims(strict)
    if read is None or reading.terms is None:
        return None
    operands, results, known = read
    kept = {factor for dims in results for factor in dims}
    summed = list(dict.fromkeys(name for dims in operands for name in dims if name is not None and name not in kept))
    added = [position for position, term in enumerate(reading.terms) if term.added]
    if added and summed and local is None:
        local = _added_once(added, summed)
    if line.how == "/" and local is None:
        local = mean_of(summed)
    return sharding(
        operator,
        specs,
        operands,
        results,
        sums=() if line.how == "^" else summed,
        local=local,
        flops=2.0 * prod(known.values()) if product else flops,
        sizes=sizes,
        padded=known.keys() - set(summed) if padded else (),
    )
