"""Whether a model keeps the documents of a packed row apart, tried with a row of two.

A model that takes none of the entries that separate documents (transformers' swallow unknown ones) trains all the
same, and lets each document see what stands before it. The invariant: nothing that a model returns for a document
changes with its neighbour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from runner.data.loader import MapDataset
from runner.errors import ConfigError
from runner.planning.vocabulary import TOKENS
from strategies.capture import Objective

HALF = 4
"""Tokens of each of the two documents."""
TOLERANCE = 1e-4
"""Relative; kernels may round otherwise where other tokens are beside."""


def check_neighbours(step: Objective, names: Sequence[str], tensors: Sequence[Tensor], dataset: MapDataset) -> None:
    """Try the model on two documents of which the first has other tokens, where `dataset` packs documents (it has
    `boundaries`, the entries that separate them). `tensors` are a batch. Raises ConfigError for a model whose result
    for the second changes."""
    boundaries: dict[str, str] = getattr(dataset, "boundaries", {})
    batch = dict(zip(names, tensors, strict=True))
    if not boundaries or TOKENS not in batch or batch[TOKENS].shape[1] < 2 * HALF:
        return
    if any(parameter.is_meta for parameter in step.model.parameters()):
        return
    tokens = batch[TOKENS][:1, : 2 * HALF].clone()
    secret = tokens.clone()
    known = torch.unique(batch[TOKENS])
    secret[0, :HALF] = known[(torch.searchsorted(known, tokens[0, :HALF]) + 1) % len(known)]
    half = torch.arange(HALF)
    made = {"documents": torch.cat((0 * half, 0 * half + 1)), "positions": torch.cat((half, half))}
    entries = {name: batch[name][:1, : 2 * HALF] for name in names if name not in step.targets}
    entries |= {name: made[kind][None].to(tokens) for name, kind in boundaries.items()}
    for name in entries.keys() - boundaries.keys() - {TOKENS}:  # labels of a model that returns its loss
        entries[name] = entries[name].clone()
        entries[name][0, : HALF + 1] = -100
    first, second = (_second_half(step, entries | {TOKENS: row}) for row in (tokens, secret))
    for one, other in zip(first, second, strict=True):
        if not torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * float(one.abs().max())):
            raise ConfigError(
                "MW833",
                f"data: {type(dataset).__name__} packs documents, but {type(step.model).__name__} lets a document see "
                f"the one before it in its row, whatever {' and '.join(boundaries)} say. Models of transformers take "
                "data.args.shift=false, if they make their mask from position_ids; a model of your own takes documents "
                "and makes the mask with models.transformer.block_causal.",
            )


@torch.no_grad()
def _second_half(step: Objective, entries: dict[str, Tensor]) -> list[Tensor]:
    """What the model returns for the second document: results with a dim of tokens, or else all."""
    step.eval()
    with torch.random.fork_rng(()):
        output: Any = Objective(step.model, None, [*entries], (), step.autocast)(*entries.values())
    step.train()
    found = [one.double() for one in _pytree.tree_leaves(_values(output)) if isinstance(one, Tensor)]
    by_token = [one[:, HALF:] for one in found if one.dim() > 1 and one.shape[:2] == (1, 2 * HALF)]
    return by_token or found


def _values(output: Any) -> Any:
    """Outputs of transformers are mappings that pytrees take for leaves where the library has not named them."""
    return dict(output) if isinstance(output, dict) else output
