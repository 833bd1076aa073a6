"""Reading by index, with indexed dims replicated and sharded, and indices of every shape."""

import pytest
import torch

from strategies.core.mesh import Mesh
from strategies.rules.indexing import masked_scatter_slice, own_index, take_along_all

torch.manual_seed(1)


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


def indices(high, *shape, low=0):
    return torch.randint(low, high, shape)


def image_tokens(embeddings, tokens, features):
    """As vision language models put the features of images in the places of their tokens."""
    return embeddings.masked_scatter((tokens > 4)[..., None].expand_as(embeddings), features)


COVERS = "gather index index_select masked_scatter take_along_dim"
CASES = [
    ("index", lambda a, i: a[i], x(12, 7), indices(12, 6)),
    ("index negative", lambda a, i: a[i], x(7, 4), indices(7, 6, 2, low=-7)),
    ("index behind", lambda a, i: a[:, i], x(6, 12), indices(12, 4)),
    ("index between", lambda a, i: a[:, i], x(2, 6, 4), indices(6, 4, 3)),
    ("index pairs", lambda a, i, j: a[i, j], x(4, 6, 2), indices(4, 6), indices(6, 6)),
    ("index broadcast", lambda a, i, j: a[i[:, None], j], x(4, 7), indices(4, 6), indices(7, 4)),
    ("index apart", lambda a, i, j: a[i, :, j], x(4, 6, 7, 2), indices(4, 6), indices(7, 6)),
    ("index by one number", lambda a, i: torch.ops.aten.index(a, [i]), x(12, 4), torch.tensor(5)),
    ("index by numbers", lambda a, *i: torch.ops.aten.index(a, i), x(12, 4), torch.tensor(5), torch.tensor(3)),
    ("index of integers", lambda a, i: a[i], indices(99, 12), indices(12, 6)),
    ("index of booleans", lambda a, i: (a > 0)[i], x(12, 4), indices(12, 6)),
    ("index_select", lambda a, i: a.index_select(-1, i), x(6, 12), indices(12, 4)),
    ("index_select rows", lambda a, i: torch.index_select(a, 0, i), x(7, 5), indices(7, 6)),
    ("index_select booleans", lambda a, i: (a > 0).index_select(0, i), x(6, 4), indices(6, 4)),
    ("gather", lambda a, i: a.gather(1, i), x(6, 12), indices(12, 6, 4)),
    ("gather rows", lambda a, i: torch.gather(a, 0, i), x(7, 4), indices(7, 6, 4)),
    ("gather smaller", lambda a, i: a.gather(-1, i), x(6, 4, 12), indices(12, 2, 4, 1)),
    ("gather booleans", lambda a, i: (a > 0).gather(1, i), x(6, 4), indices(4, 6, 4)),
    ("log likelihood", lambda a, i: -a.log_softmax(-1).gather(-1, i[:, None]).mean(), x(6, 12), indices(12, 6)),
    ("take_along_dim", lambda a, i: a.take_along_dim(i, 1), x(6, 4), indices(4, 1, 6)),
    ("take_along_dim broadcast", lambda a, i: torch.take_along_dim(a, i, dim=0), x(6, 1), indices(6, 4, 2)),
    ("take_along_dim flat", lambda a, i: a.take_along_dim(i), x(6, 4), indices(24, 6)),
    ("masked_scatter", lambda a, m, s: a.masked_scatter(m > 4, s), x(6, 5), indices(9, 6, 5), x(7, 5)),
    ("masked_scatter uneven", lambda a, m, s: a.masked_scatter(m > 4, s), x(7), indices(9, 7), x(2, 4)),
    ("image tokens", image_tokens, x(6, 4, 5), indices(9, 6, 4), x(24, 5)),
    ("take", torch.take, x(6, 4), indices(24, 6, 2)),
    ("bucketize", lambda a, b: torch.bucketize(a, b.detach(), right=True), x(6, 7), x(4).sort().values),
    ("searchsorted", lambda a, b: torch.searchsorted(b.detach(), a), x(6, 7), x(4).sort().values),
    ("searchsorted rows", lambda a, b: torch.searchsorted(b.detach(), a), x(6, 2), x(6, 4).sort().values),
    ("isin", torch.isin, indices(9, 6, 7), indices(9, 4)),
]


def test_indexing(cases, check):
    check(cases, Mesh((("a", 2), ("b", 3))), samples=1)


@pytest.mark.slow
def test_indexing_on_every_mesh(cases, check, mesh):
    check(cases, mesh, samples=4)


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases)


def test_a_search_per_row_runs_replicated(cases, known):
    assert known(cases, "searchsorted") == [True, False]


def test_a_flattened_tensor_needs_no_order_in_memory():
    table, places = torch.arange(6.0).reshape(2, 3).mT, torch.tensor([[5, 0], [3, 3]]).mT
    assert torch.equal(take_along_all(table, places), table.contiguous().take_along_dim(places.contiguous()))


def test_a_mask_with_more_places_than_the_source_has_elements_is_an_error():
    with pytest.raises(IndexError, match="more places"):
        masked_scatter_slice(torch.zeros(2, 3), torch.ones(4, 3, dtype=torch.bool), torch.zeros(11), 2)


@pytest.mark.parametrize("index", [12, -13])
def test_an_index_outside_the_dim_is_an_error(index):
    """No slice owns it: it must not alias an entry of another slice."""
    with pytest.raises(IndexError, match="outside a dim of size 12"):
        own_index(torch.tensor([0, index]), 3, 3, 12)
