"""What an evaluation measures, and that trying it out before the run changes nothing."""

import torch
from torch import Tensor, nn

from runner.scores import scores, tried
from strategies.capture import Objective


class Counting(nn.Module):
    """Counts its calls in a buffer, also in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.dense(x)


def test_trying_an_evaluation_leaves_the_model_as_it_was() -> None:
    step = Objective(Counting(), nn.CrossEntropyLoss(), ("0", "1"), ("1",))
    batch = {"0": torch.randn(2, 4), "1": torch.tensor([0, 2])}
    tried(step, batch, scores("accuracy", step.loss))
    assert step.training and step.model.calls == 0
