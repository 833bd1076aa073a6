"""Copies of a rank's pieces in the host's memory, made while training computes the next gradients.

Weights and optimizer states change in updates alone, so there is time until the next one: another thread copies (on a
GPU a stream of its own), and `settle`, before an update, waits for what is left of it. Only what changes earlier, such
as the statistics of a batch norm, is copied at once. Invariant: a copy has the numbers of the moment of `begin`.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from strategies.runtime.shards import Shard, Shards


class Copies:
    """Buffers that are used again, in memory from which a GPU reads by itself; one set of copies at a time."""

    def __init__(self) -> None:
        self._buffers: dict[str, list[Tensor]] = {}
        self._left: list[tuple[Tensor, Tensor]] = []
        self._begun: torch.cuda.Event | None = None
        self._ended: torch.cuda.Event | None = None
        self._under_way = threading.Event()
        self._under_way.set()

    @property
    def bytes(self) -> int:
        """Of all buffers."""
        return sum(buffer.nbytes for buffers in self._buffers.values() for buffer in buffers)

    def begin(self, pieces: Shards, at_once: Collection[str]) -> dict[str, list[Shard]]:
        """What will be the copies of `pieces`; those of the keys `at_once` are when this returns."""
        self._under_way.clear()
        self._left, self._ended = [], None
        found: dict[str, list[Shard]] = {}
        for key, ones in pieces.items():
            found[key] = [replace(one, view=buffer) for buffer, one in zip(self._fitting(key, ones), ones, strict=True)]
            pairs = [(copy.view, one.view) for copy, one in zip(found[key], ones, strict=True)]
            if key in at_once:
                _copy(pairs, False)
            else:
                self._left += pairs
        device = next((source.device for _, source in self._left if source.is_cuda), None)
        self._begun = None if device is None else torch.cuda.current_stream(device).record_event()
        return found

    def carry_out(self) -> None:
        """Copy what is left; for another thread. Returns when all is there."""
        try:
            if self._begun is None:
                _copy(self._left, False)
                return
            device = next(source.device for _, source in self._left if source.is_cuda)
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                stream.wait_event(self._begun)
                _copy(self._left, True)
                self._ended = stream.record_event()
        finally:
            self._left = []
            self._under_way.set()
        self._ended.synchronize()

    def settle(self) -> None:
        """Return when what was copied may change: on a GPU, by what is launched from now on."""
        self._under_way.wait()
        if self._ended is not None:
            torch.cuda.current_stream().wait_event(self._ended)

    def _fitting(self, key: str, pieces: Sequence[Shard]) -> list[Tensor]:
        held = self._buffers.get(key, [])
        shapes = [(one.view.shape, one.view.dtype) for one in pieces]
        if [(buffer.shape, buffer.dtype) for buffer in held] != shapes:
            held = [torch.empty(one.view.shape, dtype=one.view.dtype, pin_memory=one.view.is_cuda) for one in pieces]
            self._buffers[key] = held
        return held


def _copy(pairs: Sequence[tuple[Tensor, Tensor]], later: bool) -> None:
    with torch.no_grad():
        for copy, source in pairs:
            copy.copy_(source, non_blocking=later)
