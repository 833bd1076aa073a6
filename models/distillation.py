"""Distillation: a student learns from the labels, and from the scores of a frozen teacher on the same input.

After Hinton, Vinyals and Dean, Distilling the Knowledge in a Neural Network, 2015. The invariant: nothing of the
teacher is trained or changes: it has no gradients, no optimizer state, and is always in evaluation mode, without
dropout and with the stored statistics of its norms.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class Distillation(nn.Module):
    """x -> (scores of the student, scores of the teacher), both [batch, classes].

    Metrics see the scores of the student, because they come first. Parameters are named `student.*` and `teacher.*`.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Distillation:
        """Switch the student; the teacher stays in evaluation mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(x), self.teacher(x)


class DistillationLoss(nn.Module):
    """(1 - soft) * cross-entropy of the student and the labels [batch] + soft * T^2 * KL(teacher || student), with the
    scores of both divided by the temperature T.

    T^2 keeps the gradients of the second term as large as those of the first, whatever T is.
    """

    def __init__(self, temperature: float = 2.0, soft: float = 0.5) -> None:
        super().__init__()
        if temperature <= 0 or not 0 <= soft <= 1:
            raise ValueError(f"temperature = {temperature} must be above 0, and soft = {soft} from 0 to 1")
        self.temperature, self.soft = temperature, soft

    def forward(self, output: tuple[Tensor, Tensor], label: Tensor) -> Tensor:
        student, teacher = output
        own = functional.log_softmax(student / self.temperature, 1)
        taught = functional.log_softmax(teacher / self.temperature, 1)
        soft = functional.kl_div(own, taught, reduction="batchmean", log_target=True)
        hard = functional.cross_entropy(student, label)
        return (1 - self.soft) * hard + self.soft * self.temperature**2 * soft
