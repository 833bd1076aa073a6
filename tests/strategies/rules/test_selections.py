"""Operators that select, order or join along a dim, with positive, negative and keyword dims."""

import torch
import torch.nn.functional as F

torch.manual_seed(1)


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


def indices(high, *shape):
    return torch.randint(0, high, shape)


CASES = [
    ("slice", lambda a: a[:, 2:8], x(6, 12)),
    ("slice step", lambda a: a[::2], x(6, 12)),
    ("slice negative", lambda a: a[..., -4:], x(6, 12)),
    ("slice everything", lambda a: torch.ops.aten.slice(a, 0, 0, 9223372036854775807), x(6, 12)),
    ("select", lambda a: a[:, 3], x(6, 12)),
    ("select negative", lambda a: a.select(-1, -2), x(6, 2, 12)),
    ("narrow", lambda a: a.narrow(1, 2, 4), x(6, 12)),
    ("unbind", lambda a: a.unbind(-2), x(6, 2, 12)),
    ("split", lambda a: a.split(4, dim=1), x(6, 12)),
    ("split sizes", lambda a: a.split((2, 4)), x(6, 12)),
    ("split_with_sizes", lambda a: torch.split_with_sizes(a, (2, 10), 1), x(6, 12)),
    ("chunk", lambda a: a.chunk(3, -1), x(6, 12)),
    ("tensor_split", lambda a: a.tensor_split(5, 1), x(6, 12)),
    ("cumsum", lambda a: a.cumsum(dim=0), x(6, 12)),
    ("cumprod", lambda a: a.cumprod(-1), x(6, 12)),
    ("sort", torch.sort, x(6, 12)),
    ("sort stable", lambda a: torch.sort(a, dim=0, descending=True, stable=True), x(6, 12)),
    ("argsort", torch.argsort, x(6, 12)),
    ("argsort dim", lambda a: torch.argsort(a, 0, descending=True), x(6, 12)),
    ("topk", lambda a: a.topk(3), x(6, 12)),
    ("topk dim", lambda a: a.topk(2, dim=0, largest=False), x(6, 12)),
    ("diff", torch.diff, x(6, 12)),
    ("diff dim", lambda a: torch.diff(a, n=2, dim=0), x(6, 12)),
    ("diff prepend", lambda a, b: torch.diff(a, dim=1, prepend=b), x(6, 12), x(6, 1)),
    ("tril", torch.tril, x(2, 6, 12)),
    ("triu", lambda a: a.triu(1), x(6, 12)),
    ("flip", lambda a: a.flip(0), x(6, 12)),
    ("flip dims", lambda a: a.flip((0, -1)), x(6, 2, 12)),
    ("roll", lambda a: a.roll(2, 1), x(6, 12)),
    ("roll dims", lambda a: a.roll((1, 2), (0, -1)), x(6, 2, 12)),
    ("roll flat", lambda a: a.roll(5), x(6, 12)),
    ("pad", lambda a: F.pad(a, (1, 2)), x(6, 12)),
    ("pad rows", lambda a: F.pad(a, (0, 0, 1, 0), value=2.0), x(2, 6, 12)),
    ("pad reflect", lambda a: F.pad(a, (2, 1), mode="reflect"), x(2, 6, 12)),
    ("constant_pad_nd", lambda a: torch.constant_pad_nd(a, (1, 1), 3.0), x(6, 12)),
    ("cat", lambda a, b: torch.cat((a, b)), x(6, 12), x(2, 12)),
    ("cat negative", lambda a, b: torch.cat((a, b, a), dim=-1), x(6, 12), x(6, 1)),
    ("cat with nothing", lambda a, b: torch.cat((a, b)), x(6, 12), x(0)),
    ("concat", lambda a, b: torch.concat((a, b), 1), x(6, 12), x(6, 6)),
    ("stack", lambda a, b: torch.stack((a, b)), x(6, 12), x(6, 12)),
    ("stack last", lambda a, b: torch.stack((a, b), dim=-1), x(6, 12), x(6, 12)),
]


def test_selections(cases, check, mesh):
    check(cases, mesh, samples=4)


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases, "selections")


def test_calls_that_need_everything_run_whole(cases, known):
    """diff with a tensor in front, roll over the flattened tensor, cat with an empty vector."""
    assert known(cases, "diff") == [True, True, False]
    assert known(cases, "roll") == [True, True, False]
    assert known(cases, "cat")[:3] == [True, True, False]
