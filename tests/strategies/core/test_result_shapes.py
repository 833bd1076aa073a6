"""Cached results of operators on fake tensors equal those of a new dispatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode

from strategies.core import result_shapes as shapes
from strategies.runtime.live_tensors import Live

CASES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "product": lambda a, b: a @ b.t(),
    "view": lambda a, b: a.view(2, 2, 8),
    "slice": lambda a, b: a[1:3, 2:],
    "slice of a slice": lambda a, b: a[1:][1:],
    "slices of equal ones elsewhere": lambda a, b: (a[:2][:, 1:], a[2:][:, 1:]),
    "split": lambda a, b: a.split(3, 1),
    "unbind": lambda a, b: a.unbind(),
    "transposed": lambda a, b: a.t().contiguous(),
    "expanded": lambda a, b: a[:, :1].expand(4, 8),
    "two results": lambda a, b: torch.max(a, 1),
    "number": lambda a, b: (a + 1, a + 1.5, a > 1, a.sum()),
    "other dtype": lambda a, b: a.to(torch.bfloat16),
    "dtype of a sum": lambda a, b: (a.long().sum(0), a.sum(0, dtype=torch.float64)),
    "norm": lambda a, b: F.layer_norm(a, (8,), b[0], b[1]),
    "attention": lambda a, b: F.scaled_dot_product_attention(*(a.view(1, 2, 2, 8) for _ in range(3)), is_causal=True),
    "written": lambda a, b: a.clone().mul_(2).add_(b),
    "written in part": lambda a, b: (a := a.clone(), a[1].zero_(), a),
    "shaped anew": lambda a, b: a.clone().t_(),
    "like": lambda a, b: (torch.zeros_like(a), a.new_empty(3), a.detach()),
    "new ones": lambda a, b: (torch.zeros(3, dtype=torch.int8), torch.empty(3, 2), torch.full((2,), 1.5)),
    "views of numbers": lambda a, b: (torch.full((), torch.nan).expand(4, 8), torch.zeros(()).view(1, 1)),
    "complex": lambda a, b: torch.view_as_real(torch.view_as_complex(a.view(4, 4, 2)).conj() * 2),
}


def described(results: Any, given: list[Tensor]) -> Any:
    """All properties that a trace reads; memory by its owner."""
    if isinstance(results, Tensor):
        storages = [one.untyped_storage()._cdata for one in given]
        storage = results.untyped_storage()
        whose = storages.index(storage._cdata) if storage._cdata in storages else storage.nbytes()
        form = tuple(results.shape), results.stride(), results.storage_offset(), results.dtype, results.device
        return *form, whose, type(results), results.is_conj()
    return type(results), [described(one, given) for one in results]


def made(case: Callable[[Tensor, Tensor], Any], wrapped: bool) -> tuple[Any, int]:
    """The results of a case, and the peak of live bytes."""
    with FakeTensorMode() as mode:
        given = [torch.zeros(4, 8), torch.ones(4, 8)]
        if not wrapped:
            return described(case(*given), given), 0
        with Live("cpu", mode) as live:
            live.see(given)
            results = case(*given)
        return described(results, given), live.peak


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_cached_results_equal_a_new_dispatch(case: Callable[[Tensor, Tensor], Any]) -> None:
    shapes.forget()
    plain, _ = made(case, wrapped=False)
    first, peak = made(case, wrapped=True)
    known = dict(shapes._known)
    again, same = made(case, wrapped=True)
    assert first == plain and again == plain and peak == same > 0
    assert shapes._known == known  # the second time it was known


def test_known_results_need_no_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode() as mode:
        a = torch.zeros(4, 8)
        for _ in range(2):
            with Live("cpu", mode):
                b = torch.relu(a)[1:]
                monkeypatch.setattr(FakeTensorMode, "dispatch", None)  # as if torch could not infer the results
    assert type(b) is FakeTensor and b.shape == (3, 8) and b.fake_mode is mode and b.storage_offset() == 8


def test_other_numbers_are_other_calls() -> None:
    with FakeTensorMode() as mode, Live("cpu", mode):
        a = torch.zeros(4, 8, dtype=torch.int64)
        assert [(a * one).dtype for one in (1, 1.0, True, 1)] == [torch.int64, torch.float32, torch.int64, torch.int64]
        assert (a * torch.tensor(1.0)).dtype == torch.float32 and (a * torch.ones(1)).dtype == torch.float32


def test_no_more_calls_are_remembered_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes.forget()
    monkeypatch.setattr(shapes, "MOST", 3)
    with FakeTensorMode() as mode, Live("cpu", mode):
        for size in range(1, 9):
            assert torch.relu(torch.zeros(size)).shape == (size,)
            assert len(shapes._known) <= 3


def test_offloaded_memory_stays_offloaded_without_torchs_cache() -> None:
    """Like activations on the host, of which views are still made."""
    for remembered in (True, False):
        with FakeTensorMode() as mode:
            mode.cache_enabled = remembered
            with Live("cpu", mode):
                a = torch.zeros(4, 8)
                for size in (128,) if remembered else (128, 0, 128):
                    a.untyped_storage().resize_(size)
                    b = a.detach().view(32)
                    assert b.untyped_storage()._cdata == a.untyped_storage()._cdata
                    assert a.untyped_storage().nbytes() == size
