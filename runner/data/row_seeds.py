"""Random augmentation: the numbers that a sample draws follow from (seed, epoch, row) alone.

The invariant: whatever rank reads a row, in whatever slicing, accumulation, restart or resume, the dataset finds the
global generators of `random`, `numpy.random` and torch (on the CPU) in the same state, and a different one in every
epoch. Training finds its own states afterwards as they were.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from strategies.engine.whereabouts import here
from strategies.rules.random import mix

EVALUATION = -1
"""The epoch of rows that are evaluated or predicted: they are augmented the same every time."""

_MERSENNE = numpy.random.MT19937()


@contextmanager
def row_seeds(seed: int, epoch: int) -> Iterator[Callable[..., None]]:
    """Yield a function that seeds all generators from (seed, epoch, *numbers): a row, or what else is drawn for.

    numpy's generator is exchanged, which is a hundred times cheaper than to save and set its state.
    """
    own, ours, theirs = random.getstate(), torch.default_generator.get_state(), get_bit_generator()
    set_bit_generator(_MERSENNE)

    def begin(*numbers: int) -> None:
        here.advance()
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


def states() -> tuple[Any, ...]:
    """The states of all generators, to compare."""
    ours, numpys = torch.default_generator.get_state(), numpy.random.get_state(legacy=True)
    return random.getstate(), ours.tolist(), repr(numpys[1].tolist()), numpys[2:]  # type: ignore[index]
