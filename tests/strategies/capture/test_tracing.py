"""What is changed around an export is put back, also if it fails."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.grad_mode import inference_mode

from strategies.capture.tracing import traceable


def test_everything_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: Any = ModuleType("masks")
    masks.is_torchdynamo_exporting = lambda: True
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", masks)
    net = nn.Sequential(nn.BatchNorm1d(2, momentum=None), nn.BatchNorm1d(2))
    before = inference_mode.__enter__, masks.is_torchdynamo_exporting
    with pytest.raises(ZeroDivisionError), torch.autocast("cpu", torch.bfloat16), traceable(net):
        assert not masks.is_torchdynamo_exporting()
        assert net[0].momentum is not None and net[1].momentum == 0.1
        assert not torch.is_autocast_enabled("cpu")
        with torch.inference_mode():
            assert not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()
        raise ZeroDivisionError
    assert (inference_mode.__enter__, masks.is_torchdynamo_exporting) == before
    assert net[0].momentum is None
    with torch.inference_mode():
        assert torch.is_inference_mode_enabled()


def test_a_library_of_models_that_was_not_imported_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", {name: m for name, m in sys.modules.items() if "transformers" not in name})
    with traceable(SimpleNamespace(modules=list)):  # type: ignore[arg-type]
        assert "transformers" not in sys.modules
