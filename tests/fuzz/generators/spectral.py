"""Complex numbers and Fourier transforms; results are converted to real numbers."""

from __future__ import annotations

import torch

from strategies.core.graph import Ref
from tests.fuzz.generators.table import draws
from tests.fuzz.pool import Pool, Rejected


def _complex(pool: Pool) -> Ref:
    """A complex value made from real ones."""
    real = pool.tensor(least=1, most=4)
    return pool.emit("aten.complex.default", real, pool.like(pool.shape_of(real)))


def _shown(pool: Pool, value: Ref) -> None:
    """As real numbers; values that are only marked as conjugated are resolved first."""
    pool.emit("aten.view_as_real.default", pool.emit("aten.resolve_conj.default", value))


@draws("complex")
def from_parts(pool: Pool, op: str) -> None:
    _shown(pool, _complex(pool))


@draws("polar")
def polar(pool: Pool, op: str) -> None:
    length = pool.within(pool.tensor(least=1, most=4), 0.2, 3.0)
    _shown(pool, pool.emit("aten.polar.default", length, pool.like(pool.shape_of(length))))


@draws("real", "imag")
def part(pool: Pool, op: str) -> None:
    pool.emit(f"aten.{op}.default", _complex(pool))


@draws("angle")
def angle(pool: Pool, op: str) -> None:
    """Of numbers on the right of the plane, away from the jump and from zero."""
    real = pool.within(pool.tensor(least=1, most=4), 0.3, 3.0)
    pool.emit("aten.angle.default", pool.emit("aten.complex.default", real, pool.like(pool.shape_of(real))))


@draws("_conj", "conj_physical", "resolve_conj", "view_as_real", "view_as_complex")
def same_number(pool: Pool, op: str) -> None:
    if op == "view_as_complex":
        x = pool.like((*pool.shape_of(pool.tensor(least=1, most=3)), 2))
        _shown(pool, pool.emit("aten.view_as_complex.default", x))
    elif op == "view_as_real":
        _shown(pool, _complex(pool))
    else:
        _shown(pool, pool.emit(f"aten.{op}.default", _complex(pool)))


ALONG_ONE = "fft_fft fft_ifft fft_rfft fft_ihfft fft_irfft fft_hfft".split()
ALONG_SEVERAL = "fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn".split()


@draws(*ALONG_ONE, *ALONG_SEVERAL)
def transform(pool: Pool, op: str) -> None:
    backward = op.startswith(("fft_irfft", "fft_hfft"))
    x = _complex(pool) if backward else pool.tensor(least=1, most=4)
    rank = len(pool.shape_of(x))
    if op in ALONG_ONE:
        dim = pool.rng.randrange(-rank, rank)
        if backward and pool.shape_of(x)[dim] < 2:
            raise Rejected
        arguments: tuple[object, ...] = (None, dim)
    else:
        if rank < 2:
            raise Rejected
        dims = tuple(pool.rng.sample(range(rank), 2))
        if backward and pool.shape_of(x)[dims[-1]] < 2:
            raise Rejected
        arguments = (None, dims)
    found = pool.emit(f"aten.{op}.default", x, *arguments)
    if pool.values[found].is_complex():
        _shown(pool, found)


@draws("fft_fftshift", "fft_ifftshift")
def shifted(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1, most=4)
    pool.emit(f"aten.{op}.default", x, (pool.dim(x),))


@draws("stft")
def stft(pool: Pool, op: str) -> None:
    x = pool.floats((pool.rng.choice((1, 2, 4)), 16))
    window = pool.source(torch.hann_window(8, dtype=torch.float64), trainable=False)
    found = pool.emit("aten.stft.default", x, 8, 4, 8, window, False, True, True)
    _shown(pool, found)
