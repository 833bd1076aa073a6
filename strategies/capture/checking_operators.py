"""Operators of torch that look at values to check them, or to say how long their result is, as operators that do not.

An inverse short-time Fourier transform asks whether its windows cover the signal, and counts of integers whether one is
larger than the last that is counted; what has shapes alone, as a trace of memory, cannot answer.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
