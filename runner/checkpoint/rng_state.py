"""The RNG states of one process: torch, Python and numpy.

Invariant: random numbers after `restore(states())` are those without it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from strategies.rules.random import mix


def states() -> dict[str, Any]:
    """All RNG states, as plain data and tensors."""
    state: Any = numpy.random.get_state(legacy=True)
    kind, words, position, has_spare, spare = state
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    numpy_state = (str(kind), words.tolist(), int(position), int(has_spare), float(spare))
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate(), "numpy": numpy_state}


def restore(state: Mapping[str, Any]) -> None:
    """Restore all RNG states from `state`."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for cuda in state["cuda"]:
            torch.cuda.set_rng_state(cuda)
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])


def begin(seed: int, step: int) -> None:
    """Set RNG states derived from seed and step, distinct from those that a run with this seed starts with."""
    key = mix(seed, step, 0)
    random.seed(key)
    numpy.random.seed(key % 2**32)
    torch.manual_seed(key % 2**63)
