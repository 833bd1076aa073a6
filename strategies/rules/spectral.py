"""Complex numbers, element by element, and Fourier transforms: the dims that are transformed stay whole, the others
pass. Transforms are linear, so dims that pass may have padded slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strategies.core.graph import Operator, TensorSpec
from strategies.rules.arguments import named
from strategies.rules.pointwise import pointwise
from strategies.rules.registry import rule
from strategies.rules.selections import named_dims, same_dims
from strategies.rules.sharding import Sharding, sharding


@rule("angle", "complex", "conj_physical", "imag", "polar", "real", "resolve_conj", "_conj")
def complex_elements(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Parts of complex numbers, and complex numbers from their parts."""
    return pointwise(operator, specs)


@rule("view_as_complex", "view_as_real")
def pairs(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """Complex numbers [...] as pairs of real ones [..., 2], or the other way round."""
    rank = min(len(specs[0].shape), len(operator.results[0].shape))
    dims = tuple(f"d{i}" for i in range(rank))
    single, double = dims, (*dims, None)
    if operator.op == "view_as_real":
        return sharding([single], [double], specs, operator.results, uneven=dims)
    return sharding([double], [single], specs, operator.results, uneven=dims)


def _transformed(options: dict[str, Any], rank: int) -> tuple[int, ...]:
    """The dims in `dim`; without it, as many of the last ones as there are sizes, or all."""
    dims = options["dim"]
    if isinstance(dims, int):
        dims = (dims,)
    if dims is None:
        sizes = options.get("s")
        dims = range(rank) if sizes is None else range(rank - len(sizes), rank)
    return tuple(dim % rank for dim in dims)


@rule(
    *"""
fft_fft fft_fft2 fft_fftn fft_fftshift fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft fft_irfft
fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn
""".split()
)
def transform(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """Fourier transforms of one dim, two, or several."""
    options = named(operator.target, operator.args, operator.keywords)
    return same_dims(operator, specs, _transformed(options, len(specs[0].shape)))


@rule("stft")
def windows(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Signals [n, t] and a window -> [n, frequencies, places]."""
    if len(specs[0].shape) != 2:
        return None
    rest = [(None,) * len(spec.shape) for spec in specs[1:]]
    result = ("d0", *(None for _ in operator.results[0].shape[1:]))
    return sharding([("d0", None), *rest], [result], specs, operator.results, uneven=named_dims(("d0",)))
