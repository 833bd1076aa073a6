"""Whether an optimizer updates every element by itself, so that slices of parameters train as complete ones do.

Tried out on a small parameter and on its halves, each with an optimizer of its own: norms of parameters (LARS, LAMB) or
of all gradients are others there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from strategies.core.errors import StrategyError
from strategies.core.program import Program
from strategies.optimizer.updates import BY_SHAPE, Groups, OptimizerFactory, check_kind, kind_of

VALUES = torch.linspace(1.0, 2.0, 16).view(2, 8) * torch.tensor([[0.01], [10.0]])
GRADIENTS = (torch.linspace(2.0, 1.0, 16).view(2, 8), torch.linspace(-1.0, 3.0, 16).view(2, 8))
"""Of two steps."""
TOLERANCE, ROUNDING = 1e-3, 4 * torch.finfo(torch.float32).eps
"""Of the update, which may be small, and of the values."""


def check_slices(factory: OptimizerFactory, groups: Groups, program: Program, stage: int, device: torch.device) -> None:
    """Raises StrategyError if the optimizer updates slices of parameters otherwise than complete ones, and the plan or
    the ZeRO stage slices some."""
    sliced = [source.name for source in program.parameters if program.layouts[source.id].axes]
    if program.mesh.size == 1 or not (stage or sliced):
        return
    what = f"ZeRO stage {stage} flattens and cuts up parameters" if stage else f"this plan slices {sliced[0]}"
    check_elementwise(factory, groups, device, what, flat=stage > 0)


def check_elementwise(
    factory: OptimizerFactory, groups: Groups, device: torch.device, what: str, *, flat: bool = True
) -> None:
    """Raises StrategyError if the optimizer updates slices of parameters, `flat` ones or those along a dim, otherwise
    than complete ones; `what` slices them."""
    for group in groups:
        options = {key: value for key, value in group.items() if key != "names"}
        kind = _kind(factory, options, device)
        if kind not in BY_SHAPE and is_elementwise(factory, options, device, flat=flat):
            continue
        reason = (
            "treats every parameter as one matrix"
            if kind in BY_SHAPE
            else "does not update every element by itself (tried out: halves of a parameter come out otherwise than "
            "the complete one, as with LARS and LAMB, which take its norm)"
        )
        raise StrategyError(
            "MW323",
            f"Optimizer {kind} {reason}, but {what}: the updates would differ from training on one device. Use an "
            "elementwise optimizer such as torch.optim.AdamW, or parallel=data_parallel with parallel.zero.stage=0.",
        )


def is_elementwise(factory: OptimizerFactory, options: Mapping[str, Any], device: torch.device, *, flat: bool) -> bool:
    """Whether halves of a parameter, `flat` ones or those along each dim, are updated as the complete one."""
    values, gradients = VALUES.to(device), [gradient.to(device) for gradient in GRADIENTS]

    def half(tensor: Tensor, number: int, dim: int) -> Tensor:
        part = tensor.chunk(2, dim)[number]
        return part.reshape(-1) if flat else part.contiguous()

    def same(dim: int) -> bool:
        parts = [
            _updated(factory, options, half(values, number, dim), [half(one, number, dim) for one in gradients])
            for number in range(2)
        ]
        joined = torch.cat([part.view_as(values.chunk(2, dim)[0]) for part in parts], dim)
        return bool(((joined - complete).abs() <= allowed).logical_or(joined.isnan() & complete.isnan()).all())

    complete = _updated(factory, options, values, gradients)
    allowed = TOLERANCE * (complete - values).abs() + ROUNDING * values.abs()
    return all(map(same, (0,) if flat else (0, 1)))


def _updated(
    factory: OptimizerFactory, options: Mapping[str, Any], values: Tensor, gradients: Sequence[Tensor]
) -> Tensor:
    """What `values` are after a step with each of the gradients."""
    parameter = nn.Parameter(values.clone())
    optimizer = factory([{"params": [parameter], **options}])
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def _kind(factory: OptimizerFactory, options: Mapping[str, Any], device: torch.device) -> str:
    """The class of the optimizer. Raises StrategyError for one that no plan can use."""
    optimizer = factory([{"params": [nn.Parameter(VALUES.to(device))], **options}])
    check_kind(optimizer)
    return kind_of(optimizer, BY_SHAPE) or type(optimizer).__name__
