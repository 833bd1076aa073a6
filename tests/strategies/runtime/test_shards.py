"""Ranges of slices as blocks, and ZeRO's ranges by arithmetic against those of DeepSpeed on real ranks."""

import math
import random

import pytest
import torch

from strategies.core.graph import FusedSections, TensorSpec
from strategies.core.layout import Layout, stored
from strategies.core.mesh import Mesh
from strategies.optimizer.zero.partition import part_of_flat, ranges_of_each, ranges_of_flat
from strategies.runtime.shards import KnownShards, boxes, of_range, replicated
from strategies.runtime.simulate import assemble
from strategies.runtime.transfer import cut, in_order


def test_blocks_of_a_range_are_its_elements_in_order():
    draw = random.Random(0)
    for _ in range(500):
        shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 4)))
        size = math.prod(shape)
        first = draw.randint(0, size)
        last = draw.randint(first, size)
        numbers = torch.arange(size).view(shape)
        found = list(boxes(shape, first, last))
        assert len(found) <= 2 * len(shape) - 1
        flat = torch.full((last - first,), -1)
        for block, at in found:
            part = numbers[tuple(slice(*bounds) for bounds in block)].reshape(-1)
            flat[at : at + part.numel()] = part
        assert flat.tolist() == list(range(first, last))


def test_no_piece_reaches_into_padding():
    """A slice of rows 6 to 9 of 9, stored as 4 rows, of columns 3 to 5 of 5, stored as 3."""
    tensor = torch.arange(45.0).view(9, 5)
    local = torch.full((4, 3), -1.0)
    local[:3, :2] = tensor[6:9, 3:5]
    flat = local.reshape(-1)
    seen = torch.zeros(9, 5)
    for first, last in ((0, 5), (5, 10), (10, 12)):
        for piece in of_range((9, 5), [(((6, 9), (3, 5)), ((0, 3), (0, 2)))], (4, 3), first, flat[first:last]):
            inside = tuple(slice(*bounds) for bounds in piece.block)
            assert torch.equal(piece.view, tensor[inside])
            seen[inside] += 1
            piece.view.fill_(0.0)  # a view: this reaches the slice
    assert seen[6:9, 3:5].eq(1).all() and seen.sum() == 6
    assert local.eq(-1).sum() == 6 and local.eq(0).sum() == 6


def test_stripes_of_packed_sections_are_blocks_of_the_tensor():
    """Sections of 4, 2 and 2 rows on two ranks: every range of a rank's slice is blocks, which reach all rows."""
    tensor, mesh = torch.arange(24.0).view(8, 3), Mesh((("a", 2),))
    layout = stored(Layout((("a",), ())), TensorSpec((8, 3), "float32", FusedSections(0, (4, 2, 2))), mesh)
    seen = torch.zeros(8, 3)
    for rank, rows in enumerate(([0, 1, 4, 6], [2, 3, 5, 7])):
        local = cut(tensor, layout, mesh, rank)
        assert torch.equal(local, tensor[rows])
        for first, last in ((0, 4), (4, 5), (5, 12)):
            flat = local.reshape(-1)[first:last]
            for piece in of_range((8, 3), layout.blocks((8, 3), mesh, rank), (4, 3), first, flat):
                inside = tuple(slice(*bounds) for bounds in piece.block)
                assert torch.equal(piece.view, tensor[inside])
                seen[inside] += 1
    assert seen.eq(1).all()
    gathered = torch.cat([cut(tensor, layout, mesh, rank) for rank in range(2)])
    assert torch.equal(in_order(gathered, layout, mesh), tensor)
    with pytest.raises(TypeError):
        layout.block((8, 3), mesh, 0)


@pytest.mark.parametrize("ranges_of", [ranges_of_flat, ranges_of_each])
def test_every_element_is_in_one_range(ranges_of):
    draw = random.Random(1)
    for _ in range(200):
        sizes = [draw.randint(1, 40) for _ in range(draw.randint(1, 6))]
        replicas = draw.randint(1, 5)
        seen = [[0] * size for size in sizes]
        for index in range(replicas):
            used = set()
            for one in ranges_of(sizes, replicas, index):
                places = set(range(one.position, one.position + one.count))
                assert not used & places
                used |= places
                for element in range(one.first, one.first + one.count):
                    seen[one.member][element] += 1
            if ranges_of is ranges_of_flat:
                assert max(used, default=-1) < part_of_flat(sizes, replicas)
        assert all(count == 1 for counts in seen for count in counts)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_deepspeed_ranges_equal_the_arithmetic(training, ranks, world_size):
    _, task = training.task(steps=1)
    case = training.Case
    cases = [case(seed, stage, "adamw") for stage in (1, 2, 3) for seed in (0, 1, training.DATA_PARALLEL)]
    found = ranks("compared", [(task, one) for one in cases], world_size, module="parts_of_zero")
    for one, (ours, theirs, same) in zip(cases, found, strict=True):
        assert ours == theirs != [], one
        assert same, one


def test_shards_are_made_once_for_a_tensor_where_it_is():
    known, made, tensor = KnownShards(), [], torch.arange(6.0)

    def make(of):
        made.append(of)
        return [replicated(of)]

    shards = known.of("w", tensor, lambda: make(tensor))
    tensor.add_(1)
    assert known.of("w", tensor, lambda: make(tensor)) is shards and torch.equal(shards[0].view, tensor)
    tensor.data = torch.zeros(6)
    assert torch.equal(known.of("w", tensor, lambda: make(tensor))[0].view, tensor)
    other = torch.ones(6)
    assert known.of("w", other, lambda: make(other))[0].view is not tensor and len(made) == 3


def test_stripes_are_padded_in_other_dims() -> None:
    mesh, tensor = Mesh((("a", 2), ("b", 3))), torch.randn(24, 8)
    spec = TensorSpec((24, 8), "float32", FusedSections(0, (8, 8, 8)))
    layout = stored(Layout((("a",), ("b",))), spec, mesh)
    slices = [cut(tensor, layout, mesh, rank) for rank in range(mesh.size)]
    assert {tuple(one.shape) for one in slices} == {layout.local_shape(spec.shape, mesh)} == {(12, 3)}
    assert torch.equal(assemble(slices, layout, spec.shape, mesh), tensor)
