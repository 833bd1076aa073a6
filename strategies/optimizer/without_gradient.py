"""The parameters that a step leaves without a gradient, such as experts that no token chooses: an optimizer does not
touch them, nor count the step for them.

Ranks agree: a parameter has a gradient if any rank has one. Invariant: only parameters of `Program.optional_names` can
be without; where there are none, nothing is sent.
"""

from __future__ import annotations

import torch

from strategies.core.program import Program
from strategies.core.steps import ALL_REDUCE
from strategies.optimizer.buckets import all_reduce_elements
from strategies.runtime.communicator import Communicator
from strategies.runtime.flight_recorder import PLACE, recorder


class WithoutGradient:
    """Parameters without a gradient in the steps of one program."""

    def __init__(self, program: Program, communicator: Communicator, device: torch.device) -> None:
        self.names = [name for name in program.trainable_names if name in program.optional_names]
        self._mesh, self._communicator, self._device = program.mesh, communicator, device
        self._came: set[str] = set()

    def came(self, name: str, *_: object) -> None:
        """This rank has a gradient of a parameter."""
        self._came.add(name)

    def forget(self) -> None:
        """The gradients of this step are dropped."""
        self._came.clear()

    def agreed(self) -> frozenset[str]:
        """The parameters of which no rank has one. Collective; then the next step begins."""
        if not self.names:
            return frozenset()
        came = torch.tensor([float(name in self._came) for name in self.names], device=self._device)
        self.forget()
        if self._mesh.size > 1:
            recorder.cells[PLACE] = recorder.place("which parameters have a gradient")
            self._communicator.sum(came, self._communicator.group(self._mesh.names))
            self._communicator.count(ALL_REDUCE, all_reduce_elements([came.numel()], self._mesh.size), came)
        return frozenset(name for name, ranks in zip(self.names, came.tolist(), strict=True) if not ranks)
