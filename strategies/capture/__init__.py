"""From a torch module to an `OperatorGraph`: torch.export, then passes of our own, one per file.

`model` is the entrance; `tracing` runs the export and keeps what it would lose; `exported` reads the result, after
`regions` (no_grad, autocast), `numbers` (python numbers made of tensors), `functional` (writes become values, with
`functional_overloads` and `inverse_views`) and `causal` (masks) have rewritten it; `own_backward` judges what the user
differentiates by hand; `nodes` are words about fx nodes that they share; `shapes` builds models without numbers.
"""

from strategies.capture.model import Captured, LossFunction, Objective, capture, loss_in, run_once

__all__ = ["Captured", "LossFunction", "Objective", "capture", "loss_in", "run_once"]
