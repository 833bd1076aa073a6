"""Complex numbers and Fourier transforms; results are compared as real numbers."""

import pytest
import torch

from strategies.core.mesh import Mesh

torch.manual_seed(1)


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


def real(function):
    """The function's complex result as two real ones."""

    def parts(*operands):
        result = function(*operands)
        return result.real, result.imag

    return parts


def rotated(a, angles):
    """Rotary embedding by complex numbers."""
    turned = torch.view_as_complex(a.reshape(*a.shape[:-1], -1, 2)) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


FFT = torch.fft
CASES = [
    ("polar", real(torch.polar), x(6, 7), x(6, 7)),
    ("complex", lambda a, b: torch.complex(a, b).abs(), x(6, 7), x(6, 7)),
    ("rotary", rotated, x(2, 6, 2, 8), x(6, 1, 4)),
    ("parts", lambda a, b: (torch.complex(a, b).real, torch.complex(a, b).imag), x(6, 4), x(6, 4)),
    ("angle", lambda a, b: torch.complex(a, b).angle(), x(6, 4), x(6, 4)),
    ("conj", lambda a, b: torch.complex(a, b).conj().imag, x(6, 4), x(6, 4)),
    ("_conj", lambda a, b: torch.ops.aten._conj(torch.complex(a, b)).imag, x(6, 4), x(6, 4)),
    ("conj_physical", lambda a, b: real(torch.conj_physical)(torch.complex(a, b)), x(6, 4), x(6, 4)),
    ("resolve_conj", lambda a, b: real(torch.resolve_conj)(torch.complex(a, b).conj()), x(6, 4), x(6, 4)),
    ("fft", real(FFT.fft), x(6, 12)),
    ("fft of rows", real(lambda a: FFT.fft(a, n=5, dim=0)), x(6, 7)),
    ("ifft", real(FFT.ifft), x(6, 12)),
    ("rfft", real(lambda a: FFT.rfft(a, norm="ortho")), x(6, 12)),
    ("irfft", lambda a: FFT.irfft(FFT.rfft(a, dim=1), n=12, dim=1), x(6, 12, 2)),
    ("hfft", FFT.hfft, x(6, 4)),
    ("ihfft", real(FFT.ihfft), x(6, 4)),
    ("fft2", real(FFT.fft2), x(6, 4, 4)),
    ("ifft2", real(lambda a: FFT.ifft2(a, dim=(0, 2))), x(6, 7, 4)),
    ("rfft2", real(FFT.rfft2), x(6, 4, 4)),
    ("irfft2", lambda a: FFT.irfft2(FFT.rfft2(a)), x(6, 4, 4)),
    ("fftn", real(FFT.fftn), x(6, 4)),
    ("fftn of the last", real(lambda a: FFT.fftn(a, s=(3,))), x(6, 4)),
    ("ifftn", real(lambda a: FFT.ifftn(a, dim=(0,))), x(6, 4)),
    ("rfftn", real(lambda a: FFT.rfftn(a, dim=(-1,))), x(6, 4)),
    ("irfftn", lambda a: FFT.irfftn(a, dim=(-1,)), x(6, 4)),
    ("fftshift", lambda a: FFT.fftshift(a, dim=1), x(6, 4)),
    ("ifftshift", FFT.ifftshift, x(6, 4)),
    ("stft", lambda a, w: real(torch.stft)(a, 4, 2, 4, w, True, "reflect", False, None, True), x(6, 12), x(4)),
    ("stft of one", lambda a, w: real(torch.stft)(a, 4, 2, 4, w, True, "reflect", False, None, True), x(12), x(4)),
]


def test_spectral(cases, check):
    check(cases, Mesh((("a", 2),)), samples=2)


@pytest.mark.slow
def test_spectral_on_every_mesh(cases, check, mesh):
    check(cases, mesh, samples=4)
