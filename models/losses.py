"""Loss and metric of models that predict a token at every position.

The invariant: a position whose label is `ignore_index` never counts, so padding does not change the loss or the metric.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional


class NextTokenLoss(nn.Module):
    """Mean cross-entropy of logits [batch, sequence, vocabulary] and labels [batch, sequence] int64.

    The mean is over the positions whose label is not `ignore_index`. A model may return (logits, load) instead, load a
    scalar that is added with weight `balance` (the balance of the experts of `models.moe`).
    Classes are moved to dim 1 instead of flattening batch and sequence, so that either of them can be sliced.
    """

    def __init__(self, ignore_index: int = -100, balance: float = 0.01, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.ignore_index, self.balance, self.label_smoothing = ignore_index, balance, label_smoothing

    def forward(self, output: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        logits, load = output if isinstance(output, tuple) else (output, None)
        loss = functional.cross_entropy(
            logits.transpose(1, 2), labels, ignore_index=self.ignore_index, label_smoothing=self.label_smoothing
        )
        return loss if load is None else loss + self.balance * load


def next_token_accuracy(output: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Share of the positions with a label other than -100 whose largest logit is the label; a scalar float64."""
    logits = output[0] if isinstance(output, tuple) else output
    counted = labels != -100
    return ((logits.argmax(-1) == labels) & counted).double().sum() / counted.sum()


class ClassLoss(nn.Module):
    """Mean cross-entropy of one label [batch] int64 for each sample, and the logits [batch, classes] of the model.

    The model returns the logits, or as models of transformers do an output with the attribute `logits`.
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing

    def forward(self, output: Any, label: Tensor) -> Tensor:
        logits, label = class_scores(output, label)
        return functional.cross_entropy(logits, label, label_smoothing=self.label_smoothing)


def class_scores(output: Any, label: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [batch, classes] and labels [batch], as metrics of torchmetrics receive them (`inputs` of a metric)."""
    return getattr(output, "logits", output), label
