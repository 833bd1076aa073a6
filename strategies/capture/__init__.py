"""Capture a torch module as an `OperatorGraph`: torch.export, then graph passes, one per file.

`model` is the entry point; `tracing` runs the export and keeps what it would lose; `transforms` and `derivatives`
record torch.func and torch.autograd.grad as operators, `strided` replaces as_strided; `exported` reads the result after
`regions` (no_grad, autocast), `numbers` (Python scalars from tensors), `functional` (writes become values) and `causal`
(masks) have rewritten it; `packed_weights` marks the dims of fused weights, `fixed_sizes` and `sizes_as_numbers` what
does not run on slices; `autograd_functions` makes operators of custom backwards; `unsupported` refuses what a graph
cannot hold; `nodes` has helpers for fx nodes that they share; `shapes` builds models without storage.
"""

from strategies.capture.constant_buffers import check_decided, check_kept
from strategies.capture.duplicate import duplicate
from strategies.capture.model import (
    ON_SLICES,
    Captured,
    LossFunction,
    Objective,
    capture,
    loss_in,
    plain_outputs,
    run_once,
)

__all__ = [
    "ON_SLICES",
    "Captured",
    "LossFunction",
    "Objective",
    "capture",
    "check_decided",
    "check_kept",
    "duplicate",
    "loss_in",
    "plain_outputs",
    "run_once",
]
