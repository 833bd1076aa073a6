"""Augmentation depends on (seed, epoch, row), not on the reader; the RNG states of the process do not change."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from runner.data.description import check_read, described
from runner.data.loader import LocalBatches, global_batch
from runner.errors import ConfigError


class Noisy:
    """Each row uses all three global generators."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float, float]:
        return torch.randn(4), random.random(), np.random.randn()


def test_ranks_with_different_slices_read_the_same_numbers() -> None:
    rows = [5, 2, 7, 0]
    full_batch = global_batch(Noisy(), None, rows, 3, 1)
    assert len({float(value) for value in full_batch[1]}) == 4
    for span in ((0, 2), (1, 4), (3, 4)):
        found = LocalBatches(Noisy(), None, ((span, (1, 3)), (span,), ((0, 4),)), seed=3).load(rows, 1)
        assert torch.equal(found[0], full_batch[0][slice(*span), 1:3]) and torch.equal(
            found[1], full_batch[1][slice(*span)]
        )
        assert torch.equal(found[2], full_batch[2])
    assert not torch.equal(global_batch(Noisy(), None, rows, 3, 2)[0], full_batch[0])
    assert not torch.equal(global_batch(Noisy(), None, rows, 4, 1)[0], full_batch[0])


def test_the_own_random_states_are_untouched() -> None:
    def random_numbers() -> list[float]:
        return [float(torch.rand(())), random.random(), np.random.rand()]

    def begin() -> None:
        torch.manual_seed(1), random.seed(1), np.random.seed(1)

    begin()
    expected = random_numbers()
    begin()
    global_batch(Noisy(), None, [1, 2])
    LocalBatches(Noisy(), None, (((0, 2), (0, 4)), ((0, 2),), ((0, 2),))).load([1, 2])
    with pytest.raises(ConfigError):
        global_batch([1], None, [3])
    assert random_numbers() == expected


class Seldom(Noisy):
    """Only row 7 uses random numbers."""

    def __getitem__(self, index: int) -> Any:
        return (torch.randn(4) if index == 7 else torch.ones(4),)


def test_a_row_with_late_random_numbers_is_seeded_too() -> None:
    full_batch = global_batch(Seldom(), None, [1, 7], 3, 1)[0]
    batches = LocalBatches(Seldom(), None, (((1, 2), (0, 4)),), seed=3)
    for rows in ([7, 1], [1, 7], [1, 7]):
        assert torch.equal(batches.load(rows, 1)[0][0], full_batch[1] if rows[1] == 7 else torch.ones(4))


def test_deterministic_rows_are_read_once() -> None:
    read: list[int] = []

    class Plain(Noisy):
        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return (torch.ones(4),)

    LocalBatches(Plain(), None, (((0, 2), (0, 4)),)).load([5, 6], 1)
    assert read == [5, 6]
    with pytest.raises(IndexError):
        LocalBatches([], None, (((0, 2),),)).load([0, 1])


def mixed(samples: list[Any]) -> torch.Tensor:
    return torch.stack([sample[0] for sample in samples]) + torch.randn(len(samples), 1)


def test_a_random_collate_sees_all_rows_on_every_rank() -> None:
    rows = [5, 2, 7, 0]
    full_batch = global_batch(Noisy(), mixed, rows, 3, 1)
    for span in ((0, 2), (2, 4)):
        batches = LocalBatches(Noisy(), mixed, ((span, (0, 4)),), seed=3)
        for _ in range(2):
            assert torch.equal(batches.load(rows, 1)[0], full_batch[slice(*span)])


class Entropy(Noisy):
    def __getitem__(self, index: int) -> Any:
        return (torch.from_numpy(np.random.default_rng().random(4)),)


def test_a_description_distinguishes_other_data_and_unseeded_numbers() -> None:
    def of(dataset: Any, row: int = 3, evaluating: Any = None) -> Any:
        return described(dataset, evaluating, None, row=row, shapes=[(2, 4)], seed=0)

    assert of(Noisy()) == of(Noisy()) != of(Noisy(), 2)
    assert of(Entropy()).sample != of(Entropy()).sample
    assert of(Noisy(), 3, [1, 2]).facts["the number of evaluation rows"] == "2"
    assert of([1, 2, 3], 3).sample == "there is none"


class Renamed(Noisy):
    def __getitem__(self, index: int) -> Any:
        return (torch.arange(4.0) + index,)

    def read(self, i: int, parts: Any) -> Any:
        return (self[i][0][parts[0]],)


class Shifted(Renamed):
    def read(self, i: int, parts: Any) -> Any:
        return (self[i][0][parts[0]] + 1,)


class Seeking(Renamed):
    def read(self, offset: int, size: int) -> bytes:
        return b"x" * (offset + size)


def test_read_is_known_by_its_two_arguments_and_checked() -> None:
    class Sliced(Renamed):
        def __getitem__(self, index: int) -> Any:
            raise AssertionError("a row is read although read() is offered")

        def read(self, i: int, parts: Any) -> Any:
            return (torch.arange(4.0)[parts[0]] + i,)

    assert LocalBatches(Sliced(), None, (((0, 1), (1, 3)),)).load([5])[0].tolist() == [[6.0, 7.0]]
    check_read(Renamed(), 2, [(2, 4)], 0)
    with pytest.raises(ConfigError, match=r"Shifted.read takes two arguments"):
        check_read(Shifted(), 2, [(2, 4)], 0)
    with pytest.raises(ConfigError, match=r"Seeking.read takes two arguments.*TypeError"):
        check_read(Seeking(), 2, [(2, 4)], 0)
