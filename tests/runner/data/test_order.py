"""The order of rows: reproducible, stateless, and every row once per epoch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.data.order import Order, epoch_order, eval_rows, padded
from runner.errors import ConfigError


@settings(deadline=None)
@given(length=st.integers(1, 200), seed=st.integers(-3, 2**63), epoch=st.integers(0, 5))
def test_an_epoch_is_a_permutation_that_its_arguments_fix(length: int, seed: int, epoch: int) -> None:
    order = epoch_order(length, seed, epoch, shuffle=True)
    assert torch.equal(order, epoch_order(length, seed, epoch, shuffle=True))
    assert order.sort().values.tolist() == list(range(length))


def test_the_order_stays_the_same_between_versions() -> None:
    assert epoch_order(8, seed=0, epoch=0, shuffle=True).tolist() == [4, 0, 1, 6, 7, 2, 3, 5]
    assert epoch_order(8, seed=0, epoch=1, shuffle=True).tolist() == [6, 5, 0, 2, 3, 1, 4, 7]


def test_seeds_and_epochs_do_not_share_permutations() -> None:
    orders = {tuple(epoch_order(20, seed, epoch, True).tolist()) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


@settings(deadline=None)
@given(length=st.integers(1, 60), batch=st.integers(1, 60), seed=st.integers(0, 9), shuffle=st.booleans())
def test_an_epoch_of_steps_is_its_order_without_the_short_end(
    length: int, batch: int, seed: int, shuffle: bool
) -> None:
    if length < batch:
        with pytest.raises(ConfigError, match=rf"batch_size = {batch} is more than the {length} rows"):
            Order(length, batch, seed, shuffle)
        return
    order = Order(length, batch, seed, shuffle)
    steps = order.steps_per_epoch
    assert steps * batch + order.dropped == length
    for epoch in range(2):
        rows = [row for step in range(epoch * steps, (epoch + 1) * steps) for row in order.rows(step)]
        assert rows == epoch_order(length, seed, epoch, shuffle)[: steps * batch].tolist()
        assert order.epoch((epoch + 1) * steps - 1) == epoch


def test_a_resumed_run_reads_the_rows_of_one_that_never_stopped() -> None:
    uninterrupted = [Order(50, 8, seed=3).rows(step) for step in range(40)]
    for start in (0, 5, 6, 7, 23):
        resumed = Order(50, 8, seed=3)
        assert [resumed.rows(step) for step in range(start, 40)] == uninterrupted[start:]


def test_without_shuffle_rows_come_in_order() -> None:
    order = Order(7, 3, seed=0, shuffle=False)
    assert [order.rows(step) for step in range(3)] == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]


@settings(deadline=None)
@given(length=st.integers(1, 50), batch=st.integers(1, 20))
def test_evaluation_sees_every_row_once_and_padding_says_how_many_count(length: int, batch: int) -> None:
    batches = eval_rows(length, batch)
    seen = []
    for rows in batches:
        filled, valid = padded(rows, batch)
        assert len(filled) == batch and set(filled[valid:]) <= {rows[-1]}
        seen += filled[:valid]
    assert seen == list(range(length))
    assert all(len(rows) == batch for rows in batches[:-1])


def test_an_order_that_takes_more_than_memory_is_refused() -> None:
    rows = 2**62
    with pytest.raises(ConfigError, match="takes 36893488147419103232 bytes"):
        Order(rows, 4, seed=0).rows(0)
    assert Order(rows, 4, seed=0, shuffle=False).rows(1) == [4, 5, 6, 7]
