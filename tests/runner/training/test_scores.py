"""The metrics of an evaluation, and that checking them before the run changes no state."""

import pytest
import torch
from torch import Tensor, nn

from runner.build.scores import accuracy, scores, try_evaluation
from runner.errors import ConfigError
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
    try_evaluation(step, batch, scores("accuracy", step.loss))
    assert step.training and step.model.calls == 0


@pytest.mark.parametrize(
    ("output", "target"),
    [((2, 5, 7), (2, 5)), ((2, 7), (3,)), ((2,), (2,)), ((2, 7), (2, 1))],
    ids=["classes last", "other rows", "no classes", "a dim too many"],
)
def test_accuracy_reports_shapes_that_do_not_match(output, target) -> None:
    with pytest.raises(ConfigError, match=r"accuracy needs class scores \[n, classes, ...\].* choose evaluate.metric="):
        accuracy(torch.zeros(output), torch.zeros(target, dtype=torch.int64))


def test_accuracy_counts_positions() -> None:
    scored = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])  # 1 row, 2 classes, 2 positions
    assert accuracy(scored, torch.tensor([[0, 0]])) == 0.5
