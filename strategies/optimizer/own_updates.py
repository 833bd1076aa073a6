"""What our own stages share around a torch optimizer: loss scale, norm of the gradient, clipping, step."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from strategies.core.steps import ALL_REDUCE
from strategies.optimizer.buckets import all_reduce_elements
from strategies.optimizer.loss_scale import LossScale
from strategies.optimizer.updates import Updates
from strategies.runtime.flight_recorder import PLACE, recorder


class OwnUpdates(Updates):
    """Updates by a torch optimizer on this rank; see `Updates` for the `shared` arguments.

    Args:
        scale: the loss scale in fp16.
    """

    _optimizer: Optimizer

    def __init__(self, *given: Any, scale: LossScale | None, **shared: Any) -> None:
        super().__init__(*given, **shared)
        self._scale = scale

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer

    @property
    def loss_scale(self) -> LossScale | None:
        return self._scale

    @abstractmethod
    def _present(self) -> list[Tensor]:
        """The gradients that the optimizer will use, where something came back."""

    @abstractmethod
    def _squares(self) -> Tensor:
        """The sum of the squares of the gradients that this rank counts, float64."""

    @abstractmethod
    def forget(self) -> None:
        """Drop the gradients."""

    def updated(self) -> None:
        """Recompute what follows from the values that the optimizer has just updated. Collective."""
        self.loaded()

    def _divided(self, loss: Tensor, share: float | None) -> Tensor:
        """The part of the step's loss that `loss` of one micro-batch is, times the loss scale."""
        if self._scale is not None:
            loss = loss.float() * self._scale.value  # autograd casts what flows back to the loss's own dtype
        if share is not None:
            return loss * share
        return loss / self._accumulate if self._accumulate > 1 else loss

    def update(self, measure: bool = True) -> float | None:
        norm = self._norm() if measure or self._clip is not None or self._scale is not None else None
        if self._scale is not None and norm is not None:
            self._scale.note(finite=math.isfinite(norm))  # the same on all ranks, as the norm is
            if not math.isfinite(norm):
                self.forget()
                return norm
        if self._clip is not None and norm is not None:
            scale = self._clip / (norm + 1e-6)
            if not scale >= 1.0 and (gradients := self._present()):  # also where it is not a number, as torch does
                torch._foreach_mul_(gradients, scale)
        self._optimizer.step()
        self.forget()
        self.updated()
        return norm

    def _norm(self) -> float:
        """The 2-norm of the global gradient, the same number on every rank."""
        total, mesh = self._squares(), self._program.mesh
        if self._peers is not None:
            self._peers.add_over_all(total)
        elif mesh.size > 1:
            recorder.cells[PLACE] = recorder.place("the norm of the gradients")
            self._communicator.sum(total, self._communicator.group(mesh.names))
            self._communicator.count(ALL_REDUCE, all_reduce_elements([1], mesh.size), total)
        return math.sqrt(total.item()) if total >= 0 else math.nan
