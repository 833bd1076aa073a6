"""Connectionist temporal classification as one operator whose shapes do not depend on values.

torch's own operator returns a table as wide as the longest target, which it reads from the lengths, so no graph holds
it. Ours calls it, and returns the loss of every sequence with its gradient; each sequence is computed by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from strategies.rules.declared import sharding_rule


@sharding_rule("!t b !c, b !s, b, b -> b, !t b !c")
@torch.library.custom_op("meshwright::ctc", mutates_args=())
def ctc(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    """The losses [batch] of `log_probs` [time, batch, class] and their gradients in its shape."""
    given = log_probs, targets, input_lengths, target_lengths
    losses, table = torch.ops.aten._ctc_loss.Tensor(*given, blank, zero_infinity)
    ones = torch.ones_like(losses)
    gradient = torch.ops.aten._ctc_loss_backward.Tensor(ones, *given, losses, table, blank, zero_infinity)
    return losses.where(losses != torch.inf, 0) if zero_infinity else losses, gradient


@ctc.register_fake
def _shapes(log_probs: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return log_probs.new_empty(log_probs.shape[1]), torch.empty_like(log_probs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, of_losses: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    (gradient,) = ctx.saved_tensors
    return gradient * of_losses[:, None], None, None, None, None, None


ctc.register_autograd(_backward, setup_context=_save)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """`torch.nn.functional.ctc_loss` by our operator where it takes a batch; targets that are one behind the other are
    padded."""
    given = (torch.as_tensor(one, device=targets.device) for one in (input_lengths, target_lengths))
    input_lengths, target_lengths = lengths = tuple(one.to(torch.int64) for one in given)
    batched = log_probs.dim() == 3 and all(length.dim() == 1 for length in lengths)
    if not batched or targets.dim() > 2 or not targets.numel() or reduction not in ("none", "mean", "sum"):
        return functional.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
    if targets.dim() == 1:
        starts, last = target_lengths.cumsum(0) - target_lengths, len(targets) - 1
        places = starts[:, None] + torch.arange(len(targets), device=targets.device)
        targets = targets[places.clamp(max=last)]
    if torch.is_autocast_enabled(log_probs.device.type) and log_probs.dtype in (torch.bfloat16, torch.float16):
        log_probs = log_probs.float()  # as torch's does, which autocast knows
    losses: Tensor = ctc(log_probs, targets, *lengths, blank, zero_infinity)[0]
    if reduction == "mean":
        losses = losses / target_lengths.clamp(min=1)
        return losses.mean()
    return losses.sum() if reduction == "sum" else losses
