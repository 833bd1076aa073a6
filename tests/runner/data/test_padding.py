"""Samples of different lengths in one batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.data.loader import LocalBatches, global_batch
from runner.data.padding import pad
from runner.errors import ConfigError

VALUES = {"input_ids": 0, "labels": -100}


class Ragged:
    """Samples of 1 to 5 tokens, with a feature per token and one number per sample."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = torch.arange(1, 2 + index % 5)
        return {
            "input_ids": tokens,
            "labels": tokens + 10,
            "features": torch.ones(len(tokens), 2),
            "number": torch.tensor(index),
        }


def padded(rows: list[int]) -> dict[str, Tensor]:
    return pad([Ragged()[row] for row in rows], 6, {**VALUES, "features": 0.5}, mask="attention_mask")


def test_entries_are_filled_on_the_right() -> None:
    batch = padded([0, 2])
    assert batch["input_ids"].tolist() == [[1, 0, 0, 0, 0, 0], [1, 2, 3, 0, 0, 0]]
    assert batch["labels"].tolist() == [[11, *[-100] * 5], [11, 12, 13, -100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]]
    assert batch["features"].shape == (2, 6, 2) and batch["features"][1, :, 1].tolist() == [1, 1, 1, 0.5, 0.5, 0.5]
    assert batch["number"].tolist() == [0, 2]
    assert {tensor.dtype for name, tensor in batch.items() if name != "features"} == {torch.int64}
    assert list(batch) == ["input_ids", "labels", "features", "number", "attention_mask"]


def test_a_row_does_not_depend_on_the_others() -> None:
    for row in range(8):
        alone, together = padded([row]), padded(list(range(8)))
        assert all(torch.equal(alone[name][0], together[name][row]) for name in alone)


def test_a_rank_collates_its_own_rows() -> None:
    collate = partial(pad, length=6, values={**VALUES, "features": 0.0})
    full_batch = global_batch(Ragged(), collate, [5, 1, 7, 3])
    blocks = (((2, 4), (0, 3)), ((2, 4), (0, 6)), ((2, 4), (0, 6), (1, 2)), ((2, 4),))
    parts = LocalBatches(Ragged(), collate, blocks).load([5, 1, 7, 3])
    expected = (
        full_batch["input_ids"][2:, :3],
        full_batch["labels"][2:],
        full_batch["features"][2:, :, 1:2],
        full_batch["number"][2:],
    )
    for part, cut in zip(parts, expected, strict=True):
        assert torch.equal(part, cut)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"length": 4}, "'input_ids' has length 5, data.collate_args.length is 4"),
        ({"values": {"tokens": 0}}, "names 'tokens', but a sample has the entries input_ids, labels"),
        ({"values": {"number": 0}}, "'number', which is a single number"),
    ],
)
def test_what_cannot_be_padded_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        pad([Ragged()[4]], **{"length": 6, "values": VALUES, **arguments})
