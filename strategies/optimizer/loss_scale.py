"""Dynamic loss scaling: the largest factor on the loss with which fp16 gradients neither underflow nor overflow.

The scale doubles after `WINDOW` consecutive steps with finite gradients and halves after a step without, which leaves
the weights unchanged (the rule of Micikevicius et al. 2018, as in torch.amp.GradScaler). Invariant: all ranks have the
same scale, because they decide by the norm of the global gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

POWER = 15
"""The scale begins at 2**15: 2**16 is no number of fp16, and the loss itself is one in programs of fp16."""
WINDOW = 1000
SMALLEST = 1.0


@dataclass
class LossScale:
    """`value` multiplies the loss; `skipped` steps have left the weights as they were, the last `good` steps have not.
    A scale that is not `adapts` stays constant."""

    value: float = 2.0**POWER
    adapts: bool = True
    good: int = 0
    skipped: int = 0

    def note(self, finite: bool) -> None:
        """The step is done, or was skipped because its gradients were not `finite`. Raises FloatingPointError where no
        smaller scale is left."""
        self.good = self.good + 1 if finite else 0
        self.skipped += not finite
        if not self.adapts:
            return
        if finite and self.good == WINDOW:
            self.value, self.good = self.value * 2, 0
        elif not finite:
            if self.value <= SMALLEST:
                raise FloatingPointError(
                    f"Gradients are not finite in fp16 even with a loss scale of {self.value:g}; train with "
                    "train.precision=bf16, a smaller learning rate or train.clip."
                )
            self.value = max(self.value / 2, SMALLEST)


def scale_of(wanted: float | None) -> LossScale:
    """The scale that a run begins with: a constant one, or None for one that adapts."""
    return LossScale() if wanted is None else LossScale(wanted, adapts=False)
