"""Image preprocessing: pixel levels, 0 to 255, are rescaled, then normalized.

The invariant: an element of the result follows from its own level and channel alone, so a slice of an image becomes a
slice of the result, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from runner.errors import ConfigError

Floats = NDArray[np.float32]
Rescale = float | Sequence[float] | None
"""A factor, or (factor, shift), as in `level * factor + shift`; None is `level / 255`."""
Normalize = Mapping[str, float | Sequence[float]] | None
"""{mean, std}, numbers or one per channel, as in `(x - mean) / std`; None leaves x unchanged."""


class Scaling:
    """Raises ConfigError for arguments of another form, a number of entries that is not 1 or `channels`, and a standard
    deviation of 0 or less."""

    def __init__(self, rescale: Rescale, normalize: Normalize, channels: int) -> None:
        self._factor: Floats | None = None
        if rescale is not None:
            pair = _numbers("rescale", [rescale, 0.0] if isinstance(rescale, (int, float)) else rescale, (2,))
            self._factor, self._shift = pair[:1], pair[1:]
        self._mean: Floats | None = None
        if normalize is not None:
            if not isinstance(normalize, Mapping) or {*normalize} != {"mean", "std"}:
                raise ConfigError(
                    "MW315", f"data.args.normalize = {normalize!r} must be {{mean: ..., std: ...}}, or null."
                )
            self._mean = _numbers("normalize.mean", normalize["mean"], (1, channels))
            self._std = _numbers("normalize.std", normalize["std"], (1, channels))
            if not (self._std > 0).all():
                raise ConfigError("MW315", f"data.args.normalize.std = {normalize['std']} must be greater than 0.")

    def __call__(self, levels: Floats, channels: slice | None = None) -> Floats:
        """Scale a block of levels whose dim 0 is `channels` of the image; None: the image has one channel."""
        scaled = levels / np.float32(255) if self._factor is None else levels * self._factor + self._shift
        if self._mean is None:
            return scaled
        return (scaled - _along(self._mean, channels, levels.ndim)) / _along(self._std, channels, levels.ndim)


def _along(values: Floats, channels: slice | None, dims: int) -> Floats:
    chosen = values if channels is None or len(values) == 1 else values[channels]
    return chosen.reshape(-1, *(1,) * (dims - 1)) if dims else chosen[0]


def _numbers(name: str, given: object, lengths: Sequence[int]) -> Floats:
    values = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if len(values) not in lengths or not all(
        isinstance(value, (int, float)) and not isinstance(value, bool) and np.isfinite(value) for value in values
    ):
        wanted = " or ".join(map(str, dict.fromkeys(lengths)))
        raise ConfigError("MW315", f"data.args.{name} = {given!r} must be {wanted} finite number(s).")
    return np.asarray(values, np.float32)
