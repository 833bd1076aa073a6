"""Parameters of which a rank keeps a part: complete only while something uses them, or staying so and gathered again
after an update. Buckets are gathered before and released after use.

Every module that has parameters of its own gathers their buckets when it runs, and the next one to run releases those
that it does not need. What autograd saves of a parameter becomes a handle; the first handle that backward asks for
gathers the bucket again, the last one that is dropped releases it. So a bucket is complete when it is used, whatever
the order of backward, and recomputed modules need nothing of their own. The order of one pass is remembered: in the
next one, a bucket's gather is in flight while the one before it is used. Invariant: all ranks gather in one order,
which follows from the program; a parameter that is not gathered reads as NaN, or as no index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from strategies.core.steps import ALL_GATHER
from strategies.runtime.communicator import Communicator
from strategies.runtime.flight_recorder import PLACE, Awaited, recorder
from strategies.runtime.recompute import Recomputing


class GatheredParameters:
    """`parameters` by their first element in one flat tensor, of which this rank keeps `part`.

    Args:
        parameters: their values are in `part` of the ranks, one after the other.
        part: this rank's; its value at the time is gathered.
        ranks: of `group`; with one rank the parameters are views of `part` for good.
        complete: the parts of all ranks, where the parameters stay complete; `part` is a view of it.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[nn.Parameter, int]],
        part: Tensor,
        ranks: int,
        communicator: Communicator,
        group: Any,
        place: int,
        complete: Tensor | None = None,
    ) -> None:
        self.gathers = ranks > 1 and complete is None
        self._complete = complete
        self.part, self._ranks, self._communicator, self._group, self._place = part, ranks, communicator, group, place
        shapes = [(parameter, first, parameter.shape) for parameter, first in parameters]
        self._parameters = [(one, first, shape, shape.numel()) for one, first, shape in shapes]
        nothing = torch.full((), _unset(part.dtype), dtype=part.dtype, device=part.device)
        self._hollow = [nothing.expand(shape) for _, _, shape in shapes]
        self.flat: Tensor | None = None
        self.saved = 0  # handles that backward has not dropped yet
        self.in_backward = False
        self._pending: tuple[Tensor, Awaited | None] | None = None
        if not self.gathers:
            self._point(part if complete is None else complete)
        else:
            self.release()

    @property
    def bytes(self) -> int:
        """Bytes of the complete parameters, while they are gathered."""
        return self._ranks * self.part.nbytes

    def launch(self) -> None:
        """Begin to gather."""
        if not self.gathers or self.flat is not None or self._pending is not None:
            return
        flat = self.part.new_empty(self._ranks * self.part.numel())
        self._pending = flat, self._gather_into(flat)

    def spread(self) -> Awaited | None:
        """Begin to give parameters that stay complete what all ranks' parts hold now; returns what to wait for."""
        return None if self._complete is None else self._gather_into(self._complete)

    def _gather_into(self, flat: Tensor) -> Awaited | None:
        recorder.cells[PLACE] = self._place
        work = self._communicator.gather_later(flat, self.part, self._group)
        self._communicator.count(ALL_GATHER, (self._ranks - 1) * self.part.numel(), self.part)
        return work

    def gather(self) -> None:
        """Make the parameters complete."""
        if not self.gathers or self.flat is not None:
            return
        self.launch()
        assert self._pending is not None
        flat, work = self._pending
        if work is not None:
            work.wait()
        self._pending = None
        self._point(flat)

    def _point(self, flat: Tensor) -> None:
        self.flat = flat
        for parameter, first, shape, elements in self._parameters:
            parameter.data = flat[first : first + elements].view(shape)

    def replaced(self, parameter: nn.Parameter) -> bool:
        """Whether something else has given the parameter other memory."""
        home = self._hollow[0] if self.flat is None else self.flat  # the hollow ones share one element
        return parameter.untyped_storage().data_ptr() != home.untyped_storage().data_ptr()

    def release(self) -> None:
        """Let go of the complete parameters, also of those on their way; views that somebody holds stay valid."""
        if not self.gathers:
            return
        if self._pending is not None:
            self.gather()
        self.flat, self.in_backward = None, False
        for (parameter, *_), hollow in zip(self._parameters, self._hollow, strict=True):
            parameter.data = hollow


class _Handle:
    """What autograd saves in place of a view of a gathered parameter."""

    def __init__(self, home: GatheredParameters, tensor: Tensor) -> None:
        self.home, self.form = home, (tensor.shape, tensor.stride(), tensor.storage_offset())
        home.saved += 1

    def __del__(self) -> None:
        home = self.home
        home.saved -= 1
        if not home.saved and home.in_backward:
            home.release()


class Gathering:
    """Gathers `buckets` for the programs to which it is attached."""

    def __init__(self, buckets: Iterable[GatheredParameters], *, ahead: bool = True) -> None:
        self._buckets, self._ahead = list(buckets), ahead
        self._of = {id(parameter): one for one in self._buckets for parameter, *_ in one._parameters}
        self._running: list[Sequence[GatheredParameters]] = []
        self._orders: dict[tuple[int, bool], list[GatheredParameters]] = {}
        self._pass: tuple[int, bool] | None = None
        self._needed: list[GatheredParameters] = []
        self._recent: list[GatheredParameters] = []  # those that may be complete

    def attach(self, root: nn.Module) -> None:
        """Let every module of a program gather what it uses; `root` is the called module."""
        for unit in root.modules():
            own = [parameter for parameter in unit._parameters.values() if parameter is not None]
            buckets = list(dict.fromkeys(self._of[id(parameter)] for parameter in own))
            if buckets:
                self._wrap(unit, buckets)
        forward = root.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            trains = torch.is_grad_enabled()
            self._begin((id(root), trains))
            if not trains:
                results = forward(*args, **kwargs)
                self.finish()
                return results
            with saved_tensors_hooks(self._pack, self._unpack):
                return forward(*args, **kwargs)

        object.__setattr__(root, "forward", run)  # a child may have that name

    def _wrap(self, unit: nn.Module, buckets: Sequence[GatheredParameters]) -> None:
        region = unit.forward if isinstance(unit.forward, Recomputing) else None
        inner: Callable[..., Any] = unit.forward if region is None else region.run

        def run(*args: Any, **kwargs: Any) -> Any:
            self._running.append(buckets)
            try:
                self._enter()
                return inner(*args, **kwargs)
            finally:
                self._running.pop()

        if region is None:
            object.__setattr__(unit, "forward", run)
        else:  # its second run needs them, too
            region.run = run

    def _enter(self) -> None:
        needed = [bucket for buckets in self._running for bucket in buckets]
        for bucket in self._complete():
            if bucket not in needed and not (bucket.in_backward and bucket.saved):
                bucket.release()
        for bucket in needed:
            self._need(bucket)

    def _complete(self) -> list[GatheredParameters]:
        self._recent = [bucket for bucket in self._recent if bucket.flat is not None]
        return self._recent

    def _begin(self, key: tuple[int, bool]) -> None:
        self.finish()
        self._pass = key

    def finish(self) -> None:
        """The end of a pass: of backward, or of a forward that has none."""
        if self._pass is not None:
            self._orders[self._pass] = self._needed
        self._pass, self._needed = None, []
        for bucket in self._buckets:
            if bucket.flat is not None or bucket._pending is not None:
                bucket.release()

    def _need(self, bucket: GatheredParameters) -> None:
        if bucket.flat is not None:
            return
        position = len(self._needed)
        self._needed.append(bucket)
        bucket.gather()
        self._recent.append(bucket)
        expected = self._orders.get(self._pass, ()) if self._ahead and self._pass is not None else ()
        if position + 1 < len(expected) and expected[position] is bucket:
            expected[position + 1].launch()

    def _pack(self, tensor: Tensor) -> _Handle | Tensor:
        storage = tensor.untyped_storage()._cdata
        for bucket in self._recent:
            flat = bucket.flat
            if flat is not None and flat.untyped_storage()._cdata == storage:
                return _Handle(bucket, tensor) if flat.dtype == tensor.dtype else tensor
        return tensor

    def _unpack(self, saved: _Handle | Tensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._need(saved.home)
        saved.home.in_backward = True
        assert saved.home.flat is not None
        return saved.home.flat.as_strided(*saved.form)


def _unset(dtype: torch.dtype) -> float:
    """What a parameter reads as that nothing has gathered: no number, or no index."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return 0 if dtype is torch.bool else torch.iinfo(dtype).min
