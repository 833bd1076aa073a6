"""The architectures of the matrix, small and with random weights: 32 that must be exact, and additional ones."""

from __future__ import annotations

from tests.matrix.zoo.architecture import Architecture
from tests.matrix.zoo.further import FURTHER
from tests.matrix.zoo.language import LANGUAGE
from tests.matrix.zoo.plain import PLAIN
from tests.matrix.zoo.vision import SOUND, VISION

ARCHITECTURES = (*LANGUAGE, *VISION, *SOUND, *PLAIN)

__all__ = ["ARCHITECTURES", "FURTHER", "Architecture"]
