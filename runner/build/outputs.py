"""The tensors in what a model returns, by their place in it: `output` if that is all, `logits`, `0`, `heads.1`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from runner.errors import ConfigError

OUTPUT = "output"
"""What a model returns that returns one tensor."""


def row_names(output: Any, rows: int) -> frozenset[str]:
    """The tensors in what a model returned for `rows` rows whose dim 0 has as many."""
    named = ((name or OUTPUT, tensor) for name, tensor in _named(output, ()))
    return frozenset(name for name, tensor in named if tensor.dim() and tensor.shape[0] == rows)


def by_row(output: Any, rows: int, names: Collection[str]) -> dict[str, Tensor]:
    """The tensors `names`, which have a value for each row, of what a model returned for `rows` rows, on the CPU.

    Raises:
        ConfigError: there are none, or one has another number of values.
    """
    if not names:
        raise ConfigError(
            "MW317",
            "predict: the model returns nothing that has a value for each row of a batch, so there is nothing to "
            "write.",
        )
    tensors = ((name or OUTPUT, tensor) for name, tensor in _named(output, ()))
    found = {name: tensor.detach().cpu() for name, tensor in tensors if name in names}
    if wrong := [name for name in names if name not in found or found[name].shape[:1] != (rows,)]:
        shape = list(found[wrong[0]].shape) if wrong[0] in found else "nothing"
        raise ConfigError(
            "MW317",
            f"predict: for a batch of {rows} rows the model returns {shape} as {wrong[0]!r}, which had a value for "
            "each row of other batches; choose a predict.batch_size that divides the rows, or predict.rows.",
        )
    return found


def _named(output: Any, where: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        yield ".".join(where), output
        return
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(output, Mapping):
        children = output.items()
    elif is_dataclass(output) and not isinstance(output, type):
        children = ((field.name, getattr(output, field.name)) for field in fields(output))
    elif isinstance(output, (tuple, list)):
        children = enumerate(output)
    for name, child in children:
        yield from _named(child, (*where, str(name)))
