"""Operators that stand for those of torch that look at values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.capture.checking_operators import bincount, combinations, corrcoef, cov, istft, narrow
from tests.strategies.simulated_model import TOLERANCE, Model


@pytest.mark.parametrize(
    "options",
    [
        {"hop_length": 16, "window": torch.hann_window(32).double()},
        {"hop_length": 8, "win_length": 20, "window": torch.hann_window(20).double(), "length": 70},
        {"hop_length": 10, "center": False, "window": torch.hamming_window(32).double(), "normalized": True},
    ],
)
def test_a_spectrum_is_transformed_back_as_torch_does(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    without_length = {key: value for key, value in options.items() if key != "length"}
    spectrum = torch.stft(torch.randn(3, 64).double(), 32, **without_length, return_complex=True)
    spectrum = spectrum * torch.rand(3, 17, 1)
    for one in (spectrum, spectrum[0]):
        assert torch.allclose(istft(one, 32, **options), torch.istft(one, 32, **options), rtol=0, atol=1e-12)


def test_what_is_counted() -> None:
    labels, weights = torch.tensor([0, 3, 3, 1]), torch.tensor([1.5, 2.0, 1.0, 4.0])
    for some in (None, weights, weights.double(), weights.long()):
        found, expected = bincount(labels, some, 6), torch.bincount(labels, some, 6)
        assert torch.equal(found, expected) and found.dtype == expected.dtype


@pytest.mark.filterwarnings("ignore:cov")
@pytest.mark.parametrize("shape", [(3, 7), (7,), (1, 1), (3, 1)])
@pytest.mark.parametrize("weights", [(), ("fweights",), ("aweights",), ("aweights", "fweights")])
@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_covariances(shape: tuple[int, ...], weights: tuple[str, ...], correction: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, count = torch.randn(shape, dtype=dtype), shape[-1]
    every = {"fweights": torch.arange(count) + 1, "aweights": torch.rand(count, dtype=torch.float64)}
    given: dict[str, Any] = {"correction": correction} | {name: every[name] for name in weights}
    torch.testing.assert_close(cov(rows, **given), torch.cov(rows, **given), equal_nan=True)
    torch.testing.assert_close(corrcoef(rows), torch.corrcoef(rows), equal_nan=True)


@pytest.mark.parametrize("repeated", [False, True])
def test_choices(repeated: bool) -> None:
    vector = torch.randn(5)
    for number in (1, 2, 3, 6):
        found = combinations(vector, number, repeated)
        assert torch.equal(found, torch.combinations(vector, number, repeated)), number


def test_a_part_that_begins_at_a_tensor() -> None:
    matrix = torch.randn(4, 6)
    for start in map(torch.tensor, (0, 2, -3)):
        assert torch.equal(narrow(matrix, -1, start, 3), matrix.narrow(-1, start, 3))


class Decorrelated(nn.Module):
    """The losses of representations whose features are to differ, of all pairs, and of a window that the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 5)

    def forward(self, x: Tensor, begin: Tensor) -> Tensor:
        features = self.inner(x)
        apart = torch.cov(features.mT) + features.mT.corrcoef()
        pairs = torch.combinations(features[0]).prod(1)
        return (apart - torch.eye(5)).square().sum() + pairs.sum() + features.narrow(1, begin[0], 2).exp().sum()


def test_a_model_of_covariances(draw: Any) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 6), "begin": torch.full((8,), 2)}
    assert Model(Decorrelated(), None, batch).worst(draw, seeds=2) < TOLERANCE


class Masking(nn.Module):
    """Masks a spectrum and balances its rows by counts of their labels."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(9, 9)
        self.register_buffer("window", torch.hann_window(16))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        spectrum = torch.stft(x, 16, 8, window=self.window, return_complex=True)
        mask = self.inner(spectrum.abs().mT).sigmoid().mT
        again = torch.istft(spectrum * mask, 16, 8, window=self.window, length=x.shape[-1])
        counts = torch.bincount(y, minlength=4).to(x.dtype)
        return ((again - x).square().mean(1) / counts[y]).sum()


def test_a_model_that_calls_them(draw: Any) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 32), "y": torch.arange(8) % 3}
    assert Model(Masking(), None, batch).worst(draw, seeds=1) < TOLERANCE
