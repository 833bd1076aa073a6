"""Resharding paths end in the target layout, forward and backward; predicted bytes are sent; none is cheaper."""

from __future__ import annotations

import heapq
import math
from itertools import combinations, count, permutations

import pytest
import torch

from strategies.core.errors import StrategyError
from strategies.core.graph import Ref, TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.program import Redistribute
from strategies.core.steps import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    EXCHANGE,
    LOCAL,
    PAD,
    REDUCE_SCATTER,
    SLICE,
    Step,
    receives,
    sends,
    size_of,
)
from strategies.resharding.path import path_elements, resharding_path
from strategies.runtime.simulate import assemble, carry, redistribute, shard

SIZES = [(2, 2), (4, 2), (3, 2), (2, 2, 2), (2, 3, 2), (2, 1, 4)]


def mesh_of(sizes):
    return Mesh(tuple(zip("abcd", sizes, strict=False)))


def case(draw, seed):
    """A mesh, a shape, a layout with partial sums, and a target: not partial, partial where possible, or padded."""
    layouts = draw(seed)
    rng = layouts.rng
    mesh = mesh_of(rng.choice(SIZES))
    padded = seed % 2 == 1
    shape = tuple(rng.choice([1, 2, 6, 12, 24, *((3, 7, 13) * padded)]) for _ in range(rng.randint(1, 3)))
    before = layouts.layout(shape, mesh, partial=True, padded=padded)
    after = layouts.layout(shape, mesh, padded=padded)
    allowed = {axis for axis in before.partial if axis not in after.axes}
    for dim in before.dims:  # slices at the end of a dim may be padded
        for axis in reversed(dim):
            if axis in after.axes:
                break
            allowed.add(axis)
    kept = frozenset(axis for axis in mesh.names if axis in allowed and rng.random() < 0.4)
    for size, dim in zip(shape, before.dims, strict=True):  # the end of a dim is filled up, or all of a padded one
        tail = [axis in kept for axis in dim]
        if tail != sorted(tail) or (size % mesh.product(dim) and not all(tail)):
            kept -= set(dim)
    return mesh, shape, before, Layout(after.dims, kept)


def pieces_of(tensor, layout, mesh, generator):
    """The ranks' tensors of a value under `layout`: random terms where it is a partial sum."""
    pieces = shard(tensor, layout, mesh)
    if not layout.partial:
        return pieces
    axes = mesh.sorted(layout.partial)
    for group in mesh.groups(axes):
        terms = [torch.randn(pieces[rank].shape, generator=generator, dtype=tensor.dtype) for rank in group[1:]]
        for rank, term in zip(group[1:], terms, strict=True):
            pieces[group[0]] = pieces[group[0]] - term
            pieces[rank] = term
    # replicas of a term are equal: every rank takes it from the lowest rank of its replica group
    silent = [axis for axis in layout.replica_axes(mesh) if axis not in layout.partial]
    return [pieces[min(mesh.group(rank, silent))] for rank in range(mesh.size)]


def assert_layout(pieces, tensor, layout, mesh):
    """`pieces` are the shards of `tensor` under `layout`: equal on replicas, terms of a sum over partial axes."""
    slices = shard(tensor, layout, mesh)
    for rank, piece in enumerate(pieces):
        total = sum(pieces[peer] for peer in mesh.group(rank, mesh.sorted(layout.partial)))
        torch.testing.assert_close(total, slices[rank], rtol=1e-12, atol=1e-12)
        assert piece.shape == slices[rank].shape


def check(draw, seed):
    mesh, shape, before, after = case(draw, seed)
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
    forward = resharding_path(before, after, shape, mesh)
    if not after.partial:
        backward = resharding_path(after.reduced, before.reduced, shape, mesh)
    pieces = pieces_of(tensor, before, mesh, generator)
    assert_layout(*carry([forward], [pieces], mesh), tensor, after, mesh)
    if after.partial:
        return
    # the gradient of sum(tensor * weight), which every rank computes on its slice
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    inputs = [piece.detach().requires_grad_() for piece in pieces]
    spec = TensorSpec(shape, "float64")
    instruction = Redistribute("r", Ref("x"), forward, backward, 1.0, True, spec, "x", 0, ())
    (results,) = redistribute(instruction, mesh, [inputs])
    torch.autograd.backward(results, shard(weight, after, mesh))
    assert_layout([leaf.grad for leaf in inputs], weight, before.reduced, mesh)


def test_random_redistributions(draw):
    for seed in range(200):
        check(draw, seed)


@pytest.mark.slow
def test_two_thousand_random_redistributions(draw):
    for seed in range(1000, 3000):
        check(draw, seed)


def sent(step, mesh):
    """Elements that each rank puts on the wire, counted message by message."""
    counted = dict.fromkeys(range(mesh.size), 0)
    local = math.prod(step.before.local_shape(step.shape, mesh))
    if step.kind in LOCAL:
        return counted
    for group in mesh.groups(step.axes):
        n = len(group)
        chunks = [local // n + (i < local % n) for i in range(n)]
        for place, rank in enumerate(group):
            if step.kind == ALL_GATHER:  # my slice to everyone
                messages = [local for peer in group if peer != rank]
            elif step.kind == ALL_REDUCE:  # a ring: reduce one chunk per step, then gather the sums
                adding = [chunks[(place - turn) % n] for turn in range(n - 1)]
                handing = [chunks[(place + 1 - turn) % n] for turn in range(n - 1)]
                messages = adding + handing
            elif step.kind == EXCHANGE:
                wanted = {peer: receives(step, mesh, peer) for peer in group if peer != rank}
                messages = [size_of(block) for found in wanted.values() for source, block in found if source == rank]
            else:  # reduce-scatter, all-to-all: everyone else's part of my slice
                cut = list(step.before.local_shape(step.shape, mesh))
                cut[step.dim] = math.ceil(cut[step.dim] / n)  # the parts of a dim that does not divide are padded
                messages = [math.prod(cut) for peer in group if peer != rank]
            counted[rank] += sum(messages)
    return counted


def test_predicted_elements_are_the_counted_ones(draw):
    kinds = set()
    for seed in range(200):
        mesh, shape, before, after = case(draw, seed)
        for step in resharding_path(before, after, shape, mesh):
            kinds.add(step.kind)
            counted = sent(step, mesh)
            if step.kind == ALL_REDUCE:  # chunks that differ by one: the prediction is the mean, rounded up
                predicted = {
                    rank: math.ceil(sum(counted[r] for r in group) / len(group))
                    for group in mesh.groups(step.axes)
                    for rank in group
                }
                assert all(abs(counted[rank] - mean) <= 2 for rank, mean in predicted.items())
            else:
                predicted = counted
            assert {rank: step.elements(mesh, rank) for rank in range(mesh.size)} == predicted
            assert step.busiest(mesh) == max(predicted.values())
    assert kinds == {SLICE, PAD, ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, ALL_TO_ALL, EXCHANGE}


def test_sends_are_the_receives_of_others(draw):
    for seed in range(200):
        mesh, shape, before, after = case(draw, seed)
        for step in resharding_path(before, after, shape, mesh):
            if step.kind != EXCHANGE:
                continue
            received = {(peer, rank, block) for rank in range(mesh.size) for peer, block in receives(step, mesh, rank)}
            given = {(rank, peer, block) for rank in range(mesh.size) for peer, block in sends(step, mesh, rank)}
            assert received == given
            assert all(peer in step.group(mesh, rank) for peer, rank, _ in received)
            for rank in range(mesh.size):  # a rank keeps what it has
                parts = [size_of(block) for _, block in receives(step, mesh, rank)]
                assert sum(parts) == size_of(step.after.block(shape, mesh, rank))


def every_step(now, mesh, shape, everything):
    """Every step that leaves `now`, wherever it leads."""

    def step(kind, axes, dims, partial, dim=0, source=0):
        return Step(kind, axes, dim, source, now, Layout(tuple(dims), frozenset(partial)), shape)

    dims, free = list(now.dims), mesh.others(now.axes | now.partial)
    for size in range(1, len(mesh.names) + 1):
        for axes in permutations(mesh.names, size):
            if axes == mesh.sorted(axes) and set(axes) <= now.partial:
                yield step(ALL_REDUCE, axes, dims, now.partial - set(axes))
            for dim, have in enumerate(dims):
                grown = [*dims[:dim], have + axes, *dims[dim + 1 :]]
                if set(axes) <= now.partial:
                    yield step(REDUCE_SCATTER, axes, grown, now.partial - set(axes), dim)
                if set(axes) <= set(free):
                    yield step(SLICE, axes, grown, now.partial, dim)
                if have[-size:] == axes:
                    cut = [*dims[:dim], have[:-size], *dims[dim + 1 :]]
                    yield step(ALL_GATHER, axes, cut, now.partial, dim)
                    for other in range(len(dims)):
                        if other != dim:
                            moved = [d + axes if i == other else d for i, d in enumerate(cut)]
                            yield step(ALL_TO_ALL, axes, moved, now.partial, other, dim)
    for after in everything:
        if after.partial == now.partial and not after.axes & now.partial and after != now:
            prefix = {a for x, y in zip(now.dims, after.dims, strict=True) for a in common_prefix(x, y)}
            yield step(EXCHANGE, mesh.sorted((now.axes | after.axes) - prefix), after.dims, now.partial)


def common_prefix(x, y):
    for a, b in zip(x, y, strict=False):
        if a != b:
            return
        yield a


def every_layout(mesh, shape):
    """All layouts of a shape, with every set of partial axes."""
    found = set()
    for size in range(len(mesh.names) + 1):
        for axes in permutations(mesh.names, size):
            for cuts in combinations(range(size + len(shape)), len(shape)):
                bounds = [cut - i for i, cut in enumerate(cuts)]
                dims = tuple(axes[a:b] for a, b in zip([0, *bounds], bounds, strict=False))
                if sum(map(len, dims)) < size or any(n % mesh.product(d) for n, d in zip(shape, dims, strict=True)):
                    continue
                rest = [name for name in mesh.names if name not in axes]
                found |= {Layout(dims, frozenset(p)) for k in range(len(rest) + 1) for p in combinations(rest, k)}
    return sorted(found, key=str)


def cheapest(before, after, mesh, shape, everything, collectives):
    """Elements of the cheapest path with at most this many collectives that shards only over axes of the target."""
    costs, order = {(before, 0): 0}, count()
    queue = [(0, next(order), 0, before)]
    while queue:
        cost, _, used, now = heapq.heappop(queue)
        if now == after:
            return cost
        for step in every_step(now, mesh, shape, everything):
            if not (step.after.axes - step.before.axes) <= after.axes | step.before.partial:
                continue
            if any(n % c for n, c in zip(shape, step.after.counts(mesh), strict=True)):
                continue
            reached, spent = cost + step.busiest(mesh), used + (step.kind not in LOCAL)
            known = min(costs.get((step.after, i), math.inf) for i in range(spent + 1))
            if spent <= collectives and reached < known:
                costs[step.after, spent] = reached
                heapq.heappush(queue, (reached, next(order), spent, step.after))
    return math.inf


def assert_none_is_cheaper(sizes, shape, every=1):
    mesh = mesh_of(sizes)
    everything = every_layout(mesh, shape)
    for before in everything[::every]:
        for after in everything[::every]:
            if after.partial:
                continue
            found = resharding_path(before, after, shape, mesh)
            collectives = sum(step.kind not in LOCAL for step in found)
            least = cheapest(before, after, mesh, shape, everything, collectives)
            assert path_elements(found, mesh) <= least, f"{before} -> {after}: {[*map(str, found)]}"


@pytest.mark.parametrize(("sizes", "shape"), [((2, 2), (8, 8)), ((2, 3), (12, 6)), ((4, 2), (16, 8))])
def test_no_chain_is_cheaper(sizes, shape):
    assert_none_is_cheaper(sizes, shape)


@pytest.mark.slow
def test_no_chain_is_cheaper_on_a_cube():
    assert_none_is_cheaper((2, 2, 2), (8, 16), every=3)


def test_a_moved_axis_is_one_exchange_of_the_missing_elements():
    """((1, 8) -> (8, 1)) moves 7/8 of a slice, not the full tensor."""
    mesh = Mesh((("a", 8),))
    before, after = Layout(((), ("a",))), Layout((("a",), ()))
    (step,) = resharding_path(before, after, (16, 16), mesh)
    assert step.kind == ALL_TO_ALL
    assert step.busiest(mesh) == 28


def test_a_changed_order_of_axes_is_one_exchange():
    mesh = Mesh((("dp", 2), ("sp", 2), ("mp", 2)))
    before, after = Layout((("dp", "sp", "mp"), ())), Layout((("mp",), ("sp", "dp")))
    (step,) = resharding_path(before, after, (8, 8), mesh)
    assert step.kind == EXCHANGE
    assert (
        step.busiest(mesh) == 8
    )  # all of the one row that a rank holds, none to itself: every rank but one sends less


def test_replicas_share_the_work_of_an_exchange():
    """Sliced over a and replicated over b, wanted the other way round: each replica serves half."""
    mesh = mesh_of((4, 2))
    cut, step = resharding_path(Layout((("a",),)), Layout((("b",),)), (16,), mesh)
    assert (cut.kind, step.kind) == (SLICE, EXCHANGE)
    direct = Step(EXCHANGE, ("a", "b"), 0, 0, Layout((("a",),)), Layout((("b",),)), (16,))
    assert step.busiest(mesh) == 8 < direct.busiest(mesh) == 12


def test_half_an_all_reduce_before_an_exchange():
    """A partial sum whose target wants the axis elsewhere is not reduced in full."""
    mesh = mesh_of((4, 2))
    kinds = [
        step.kind
        for step in resharding_path(Layout((("a",), ()), frozenset("b")), Layout((("b", "a"), ())), (16, 8), mesh)
    ]
    assert kinds == [REDUCE_SCATTER, EXCHANGE]


def test_a_partial_sum_that_is_sliced_is_one_reduce_scatter():
    mesh = Mesh((("m", 2), ("k", 4)))
    (step,) = resharding_path(Layout((("m",), ()), frozenset("k")), Layout((("m",), ("k",))), (16, 16), mesh)
    assert step.kind == REDUCE_SCATTER
    assert step.group(mesh, 0) == (0, 1, 2, 3)


def test_fused_over_several_axes():
    mesh = mesh_of((2, 2, 2))
    (step,) = resharding_path(Layout((("a", "b", "c"),)), Layout(((),)), (8,), mesh)
    assert (step.kind, step.axes) == (ALL_GATHER, ("a", "b", "c"))
    (step,) = resharding_path(Layout(((),), frozenset("abc")), Layout(((),)), (8,), mesh)
    assert (step.kind, step.axes) == (ALL_REDUCE, ("a", "b", "c"))


def test_targets_that_cannot_be_reached():
    mesh = mesh_of((2, 2))
    with pytest.raises(StrategyError, match="No redistribution leads from layout"):
        resharding_path(Layout(((),)), Layout(((),), frozenset("a")), (4,), mesh)
    with pytest.raises(StrategyError, match="do not fit"):
        resharding_path(Layout(((),)), Layout(((), ())), (6,), mesh)


def test_assemble_undoes_shard(draw):
    for seed in range(50):
        mesh, shape, before, _ = case(draw, seed)
        tensor = torch.randn(shape, dtype=torch.float64)
        pieces = pieces_of(tensor, before, mesh, torch.Generator().manual_seed(seed))
        torch.testing.assert_close(assemble(pieces, before, shape, mesh), tensor, rtol=1e-12, atol=1e-12)
