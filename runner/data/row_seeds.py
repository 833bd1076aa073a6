"""Random augmentation: the random numbers of a sample depend only on (seed, epoch, row).

The invariant: whichever rank reads a row, under any sharding, accumulation, restart or resume, the dataset finds the
global generators of `random`, `numpy.random` and torch (on the CPU) in the same state, and a different one in every
epoch. Afterwards the RNG states of training are restored.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from strategies.rules.random import mix
from strategies.runtime.flight_recorder import recorder

EVALUATION = -1
"""The epoch of rows that are evaluated or predicted: they are augmented the same every time."""

_MERSENNE = numpy.random.MT19937()
_FIRST: float = numpy.random.RandomState(0).random_sample()
"""What a generator of numpy draws first."""


def seed_generators(seed: int) -> None:
    """Seed all generators for training itself."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Objects made inside draw the same numbers in every process; the generators are put back afterwards."""
    python, numbers, state = random.getstate(), numpy.random.get_state(), torch.default_generator.get_state()
    seed_generators(seed)
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numbers)
        torch.default_generator.set_state(state)


@contextmanager
def row_seeds(seed: int, epoch: int, generator: numpy.random.MT19937 = _MERSENNE) -> Iterator[Callable[..., None]]:
    """Yield a function that seeds all generators from (seed, epoch, *numbers): a row, or the rows of a collated batch.
    It takes 11 us. A block within another one, or within `watched`, needs a `generator` of its own.

    numpy's generator is exchanged, which is a hundred times cheaper than to save and set its state.
    """
    own, ours, theirs = random.getstate(), torch.default_generator.get_state(), get_bit_generator()
    set_bit_generator(generator)

    def begin(*numbers: int) -> None:
        unseeded()
        key = mix(seed, epoch, *numbers)
        random.seed(key)
        numpy.random.seed(key & 0xFFFFFFFF)
        torch.default_generator.manual_seed(key)

    try:
        yield begin
    finally:
        set_bit_generator(theirs)
        torch.default_generator.set_state(ours)
        random.setstate(own)


def unseeded(*_: int) -> None:
    """Stands in for the function of `row_seeds` where no random number is needed: another row counts as progress."""
    recorder.advance()


@dataclass
class Draws:
    """Whether a generator was used."""

    any: bool = False


@contextmanager
def watched() -> Iterator[Draws]:
    """Detect whether the block draws random numbers, and restore the generators. Most datasets draw none and need no
    seeds."""
    own, ours, theirs = random.getstate(), torch.default_generator.get_state(), get_bit_generator()
    set_bit_generator(_MERSENNE)
    numpy.random.seed(0)
    draws = Draws(any=True)
    try:
        yield draws
    finally:
        used = numpy.random.random_sample() != _FIRST or random.getstate() != own
        draws.any = used or not torch.equal(torch.default_generator.get_state(), ours)
        set_bit_generator(theirs)
        if draws.any:
            torch.default_generator.set_state(ours)
            random.setstate(own)
