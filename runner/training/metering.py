"""Measured tensor memory of a rank during training: the peak in each phase of a step, and the persistent bytes between
steps.

On a CPU every storage that an operator sees is counted (`strategies.runtime.live_tensors`) in the first `COUNTED`
steps, on a GPU torch's allocator is queried in all.
Invariant: measuring changes no number of the training, nor the time of the steps that are not counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from strategies.runtime.live_tensors import Live, bytes_of

COUNTED = 5
"""Steps that are counted on a CPU, where counting takes time; all that follow allocate the same."""


class Meter:
    """Bytes of one rank. `steps` holds one entry per step: `before` it, at the `ends` of its phases and their `peaks`,
    each the largest of the step's micro-batches; and the bytes that the first `forward` left allocated."""

    def __init__(self, device: str) -> None:
        self._live = Live("cpu") if device == "cpu" else None
        self._counting = True
        self.steps: list[dict[str, Any]] = []

    def __enter__(self) -> Meter:
        if self._live is not None:
            self._live.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live is not None and self._counting:
            self._live.__exit__(*error)  # type: ignore[no-untyped-call]
        self._counting = False

    def _now(self) -> int:
        return torch.cuda.memory_allocated() if self._live is None else self._live.now

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self._live is None else self._live.peak

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Attribute allocations inside the block to the data: they count once the model takes them."""
        if self._live is None or not self._counting:
            yield
            return
        self._live.counting = False
        try:
            yield
        finally:
            self._live.counting = True

    def begin(self, hosted: Sequence[Tensor]) -> None:
        """A new step; `hosted` stand for the host's memory."""
        if self._live is not None and len(self.steps) == COUNTED:
            self.__exit__(None, None, None)
        if not self._counting:
            return
        if self._live is not None:
            self._live.hosted(hosted)
        self.steps.append({"before": self._now(), "kept": 0, "host": 0, "ends": {}, "peaks": {}})

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the current step."""
        if not self._counting:
            yield
            return
        if self._live is None:
            torch.cuda.reset_peak_memory_stats()
        else:
            self._live.restart()
        step, before = self.steps[-1], self._now()
        yield
        step["host"] = max(step["host"], self._live.host_peak if self._live is not None else 0)
        step["ends"][name] = max(step["ends"].get(name, 0), self._now())
        step["peaks"][name] = max(step["peaks"].get(name, 0), self._peak())
        if name == "forward":
            step["kept"] = max(step["kept"], self._now() - before)

    @property
    def latest(self) -> int:
        """The peak of the latest step that was counted."""
        peaks: dict[str, int] = self.steps[-1]["peaks"]
        return max(peaks.values())

    def report(self, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """A summary of all steps except the first, which creates the optimizer's states (of that step, if it is the
        only one). Bytes after a phase are the minimum over the steps, and peaks the median: a communication thread may
        occasionally free a tensor late. `highest` is the overall peak; `reserved`, on a GPU, what its allocator has
        taken from the device."""
        steps = self.steps[1:] or self.steps
        own = {tensor.untyped_storage()._cdata for tensor in parameters}
        state_tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        state_tensors += [one for one in tree_leaves([*optimizer.state.values()]) if isinstance(one, Tensor)]
        state_tensors = [tensor for tensor in state_tensors if tensor.untyped_storage()._cdata not in own]
        before = max(step["before"] for step in steps)
        states = bytes_of(state_tensors)
        peaks = {name: statistics.median_low(step["peaks"][name] for step in steps) for name in steps[-1]["peaks"]}
        gradients = min(step["ends"].get("backward", step["before"]) - step["before"] for step in steps)
        where = max(peaks, key=lambda name: peaks[name])
        return {
            "parameters": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
            "gradients": gradients,
            "optimizer": states,
            "activations": min(step["kept"] for step in steps),
            "held": before,
            "peak": peaks[where],
            "peak_in": where,
            "highest": max(most for step in steps for most in step["peaks"].values()),
            "peaks": peaks,
            "host": max(step["host"] for step in steps),
            **({} if self._live is not None else {"reserved": torch.cuda.max_memory_reserved()}),
        }
