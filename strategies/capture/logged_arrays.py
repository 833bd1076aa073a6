"""Arrays that a forward makes of tensors (`h.detach().cpu().numpy()`) for a log alone, while it is traced.

What has no values while it is traced may be stored, printed, and computed with, to nothing but such again. Whoever asks
for a number, or makes a tensor of it, decides by values. Lengths by which a sequence is packed may be an array.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor


class LoggedArray:
    """Stands for an array, or a number that is computed from one. Raises RuntimeError where a number is asked for.

    Attributes:
        tensor: the one of which it is the array; None where it is computed.
    """

    def __init__(self, tensor: Tensor | None = None) -> None:
        self.tensor = tensor

    def _same(self, *others: Any, **_: Any) -> LoggedArray:
        if any(isinstance(one, Tensor) for one in others):
            self._refuse()
        return LoggedArray()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"a {type(self).__name__} has no values")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return LoggedArray()

    def __format__(self, form: str) -> str:
        return "?"

    def __repr__(self) -> str:
        return "?"

    __call__ = __getitem__ = __array_ufunc__ = __array_function__ = __neg__ = __abs__ = __round__ = __invert__ = _same
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = _same
    __pow__ = __rpow__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __and__ = __or__ = __xor__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _same  # type: ignore[assignment]
    __array__ = __iter__ = __len__ = __bool__ = __float__ = __int__ = __index__ = __contains__ = __setitem__ = _refuse
    __hash__ = object.__hash__


def leaves_torch(error: BaseException) -> bool:
    """Whether a forward hands a tensor, which has no values while it is traced, to numpy, and goes on with what that
    returns."""
    return any(words in str(error) for words in (".numpy() is not supported", LoggedArray.__name__))
