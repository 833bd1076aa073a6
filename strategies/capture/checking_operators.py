"""Operators of torch that look at values to check them, or to say how long their result is, as operators that do not.

An inverse short-time Fourier transform asks whether its windows cover the signal, counts of integers whether one is
larger than the last that is counted, a covariance whether there are more samples than it corrects for, and combinations
which elements a mask of theirs has; what has shapes alone, as a trace of memory, cannot answer.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations as chosen
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from strategies.rules.ctc import ctc_loss


def istft(
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor:
    """torch.istft: frames that are transformed back, times the window, added where they overlap, over the squares of
    the window added likewise."""
    hop, size = hop_length or n_fft // 4, win_length or n_fft
    norm, real = "ortho" if normalized else None, input.real.dtype
    window = torch.ones(size, dtype=real, device=input.device) if window is None else window
    left = (n_fft - size) // 2
    window = torch.nn.functional.pad(window, (left, n_fft - size - left))
    spectra = input.transpose(-1, -2)
    if return_complex:
        frames = torch.fft.ifft(spectra, n_fft, norm=norm)
    else:
        frames = torch.fft.irfft(spectra[..., : n_fft // 2 + 1], n_fft, norm=norm)
    count = frames.shape[-2]
    reach = n_fft + hop * (count - 1)
    places = (torch.arange(count)[:, None] * hop + torch.arange(n_fft)).flatten().to(input.device)

    def overlapping(values: Tensor) -> Tensor:
        sums = torch.zeros(*values.shape[:-2], reach, dtype=values.dtype, device=values.device)
        return sums.index_add(-1, places, values.flatten(-2))

    signal = overlapping(frames * window)
    envelope = overlapping((window * window).expand(count, n_fft).contiguous())
    begin = n_fft // 2 if center else 0
    end = reach - begin if length is None else min(begin + length, reach)
    signal = signal[..., begin:end] / envelope[begin:end]
    return signal if length is None else torch.nn.functional.pad(signal, (0, length - signal.shape[-1]))


def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """torch.bincount of integers below `minlength`, at least 1; a larger one raises IndexError or RuntimeError."""
    if weights is None:
        weights = torch.ones_like(input, dtype=torch.int64)
    elif weights.dtype != torch.float32:
        weights = weights.double()
    return torch.zeros(minlength, dtype=weights.dtype, device=input.device).scatter_add(0, input.long(), weights)


def cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """torch.cov: covariances of the rows of `input`, whose columns are samples."""
    samples = input.reshape(1, -1) if input.dim() < 2 else input
    given = [one for one in (fweights, aweights) if one is not None]
    if not given:
        centred, weighted = (both := samples - samples.mean(1, keepdim=True)), both
        freedom: Any = max(samples.shape[1] - correction, 0)
    else:
        weights = given[0] if len(given) == 1 else given[0] * given[1]
        total = weights.sum()
        centred = samples - ((samples * weights).sum(1) / total)[:, None]
        weighted = centred * weights
        taken = total if aweights is None or not correction else (weights * aweights).sum()
        freedom = (total - correction * taken / total).clamp(min=0)
    found: Tensor = (centred @ weighted.transpose(0, 1).conj()) / freedom
    return found.squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """torch.corrcoef: covariances of the rows of `input`, over the deviations of both."""
    found = cov(input)
    if not found.dim():
        return found / found
    variances = found.diagonal()
    deviations = (variances.real if found.is_complex() else variances).sqrt()
    found = found / deviations[:, None] / deviations
    return torch.complex(found.real.clip(-1, 1), found.imag.clip(-1, 1)) if found.is_complex() else found.clip(-1, 1)


def combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """torch.combinations: all choices of `r` elements of a vector, a row each."""
    choices = (combinations_with_replacement if with_replacement else chosen)(range(len(input)), r)
    return input[torch.tensor(list(choices), dtype=torch.int64, device=input.device).reshape(-1, r)]


def narrow(input: Tensor, dim: int, start: Any, length: int) -> Tensor:
    """torch.narrow, by places where `start` is a tensor."""
    if not isinstance(start, Tensor):
        return torch.narrow(input, dim, start, length)
    first = start.where(start >= 0, start + input.shape[dim])
    return input.index_select(dim, first + torch.arange(length, device=input.device))


WITHOUT_QUESTIONS: dict[Any, Callable[..., Tensor]] = {
    functional.ctc_loss: ctc_loss,
    **{getattr(owner, one.__name__): one for owner in (torch, Tensor) for one in (istft, cov, corrcoef)},
    torch.combinations: combinations,
}
"""The functions that ask, with ours."""
