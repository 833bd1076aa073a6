"""A shard's arithmetic: every slice counts once, in one order, and a copy goes on with the same bits."""

import torch

from runner.server.partition import Piece, partition, size
from runner.server.shard import ServedShard

PIECES = (Piece("w", 2, 6), Piece("b", 0, 1))
GROUPS = [{"names": ["w", "b"]}]


def adam(groups):
    return torch.optim.AdamW(groups, lr=0.1)


def made(factory=adam):
    return ServedShard(PIECES, GROUPS, factory, torch.float64)


def slices(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(3)]


def test_partition_is_equal_and_contiguous():
    shards = partition({"a": 7, "b": 1, "c": 9}, 3)
    assert [size(shard) for shard in shards] == [5, 6, 6]
    assert shards == (
        (Piece("a", 0, 5),),
        (Piece("a", 5, 7), Piece("b", 0, 1), Piece("c", 0, 3)),
        (Piece("c", 3, 9),),
    )


def test_a_step_is_the_sum_of_its_slices_whatever_arrives_and_in_which_order():
    values = []
    for order in ((0, 1, 2), (2, 0, 1, 1, 2)):
        shard = made()
        for step in (1, 2):
            assert shard.prepare(step, 3) == [0, 1, 2]
            for number in order:
                shard.push(step, number, slices(step)[number])
            shard.push(step + 1, 0, torch.ones(5, dtype=torch.float64))  # of a step that is not there yet
            assert shard.prepare(step, 3) == []
            shard.push(step, 0, torch.ones(5, dtype=torch.float64))  # too late
            shard.apply(step, 0.5, [{"lr": 0.05}])
            shard.apply(step, 0.5, [{"lr": 0.05}])
        values.append(shard.values)
    assert torch.equal(*values)
    parameter = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    alone = torch.optim.AdamW([parameter], lr=0.05)
    for step in (1, 2):
        parameter.grad = 0.5 * sum(slices(step))
        alone.step()
    assert torch.equal(values[0], parameter.detach())


def test_an_update_on_arrival_counts_once():
    shard = made(lambda groups: torch.optim.SGD(groups, lr=1.0))
    assert [shard.arrive(unit, 0, torch.ones(5, dtype=torch.float64)) for unit in (4, 3, 4)] == [True, True, False]
    assert not shard.arrive(2, 3, torch.ones(5, dtype=torch.float64))
    assert shard.version == 2 and shard.values.tolist() == [-2.0] * 5


def test_a_copy_goes_on_with_the_same_bits_between_the_phases_of_a_step():
    shard, copy = made(), made()
    for number, gradient in enumerate(slices(1)):
        shard.push(1, number, gradient)
    shard.prepare(1, 3)
    shard.apply(1, 1.0, [{}])
    for number, gradient in enumerate(slices(2)):
        shard.push(2, number, gradient)
    shard.prepare(2, 3)
    fields, tensors = shard.state()
    copy.load(fields, [tensor.clone() for tensor in tensors])
    for one in (shard, copy):
        one.apply(2, 1.0, [{}])
    assert copy.version == 2 and torch.equal(copy.values, shard.values)
