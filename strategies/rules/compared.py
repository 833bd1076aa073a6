"""An operator that compares what integers of a batch say with what they said when the graph was made; and whether
there is a batch: memory is traced on zeros in place of one, where shapes do not do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from strategies.rules.registry import local_function


class _Batch(threading.local):
    known = True


_batch = _Batch()


@contextmanager
def without_a_batch() -> Iterator[None]:
    """Nothing is compared in this context, whose numbers are no batch's."""
    _batch.known = False
    try:
        yield
    finally:
        _batch.known = True


def has_batch() -> bool:
    """Whether numbers are those of a batch."""
    return _batch.known


@local_function
def compared(known: str, entry: Tensor, said: Tensor) -> Tensor:
    """An entry of a batch, if `said`, which is computed from it, has the values that are `known`: a JSON text of these,
    the entry's name, and where a forward has read them.

    Raises RuntimeError for other values.
    """
    values, name, where = json.loads(known)
    if _batch.known and not said.is_meta and not isinstance(said, FakeTensor) and (found := said.tolist()) != values:
        raise RuntimeError(
            f"the forward{where} reads {_short(found)} from the entry {name} of this batch; the plan is made for "
            f"{_short(values)}, as in the first batch. Let all batches have the same, or take a size that does not "
            "depend on values"
        )
    return entry.clone()


def _short(values: object) -> str:
    text = str(values)
    return text if len(text) <= 80 else f"{text[:77]}..."
