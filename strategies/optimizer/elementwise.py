"""Whether an optimizer updates every element by itself, so that slices of parameters train as complete ones do, or at
least every parameter, as the stages of a pipeline need.

Tried out on parameters and on two parts of each, with an optimizer for every part: norms of parameters (LARS, LAMB) or
of all gradients are others there. One parameter is small, the others have the shapes of the model's, as optimizers may
treat those from a size on otherwise (Adafactor factors matrices of at least 128 rows and columns).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.core.errors import StrategyError
from strategies.core.program import Program
from strategies.optimizer.state import check_states
from strategies.optimizer.updates import BY_SHAPE, Groups, OptimizerFactory, check_kind, kind_of

SMALL, LARGEST, LONGEST = (2, 8), 2**14, 256
"""The shape of a parameter that is always tried, and the most elements and the longest dim of others."""
BESIDE = ([8], [8]), ([4, 2], [2, 4])
"""The shapes of two parameters that are tried together, of the elements of a small one."""
ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
"""Those of torch need no trial."""
STEPS = 100
"""Optimizers change after some: LARS behind a warm-up, preconditioners that are computed every tenth step."""
SCALES = {1.0: STEPS, 1e-6: 20, 1e-3: 20, 1e3: 20, 1e6: 20}
"""What gradients are multiplied by in turn, and for how many steps: optimizers that clip do nothing to small ones, and
others are driven by a weight decay or an epsilon there."""
TOLERANCE, ROUNDINGS = 1e-3, 2 * STEPS
"""Of the update, which may be small, and how many roundings of the values."""


def check_slices(
    factory: OptimizerFactory, groups: Groups, program: Program, stage: int, device: torch.device, *, staged: bool
) -> None:
    """Raises StrategyError if the optimizer updates slices of parameters otherwise than complete ones, and the plan or
    the ZeRO stage slices some; or some of the parameters otherwise than all, and ranks have those of their stages
    (`staged`)."""
    sliced = [source.name for source in program.parameters if program.layouts[source.id].axes]
    if stage or sliced:
        what = flattened(stage) if stage else f"this plan slices {sliced[0]}"
        shapes = {source.name: source.spec.shape for source in program.parameters}
        check_elementwise(factory, groups, shapes, device, what, flat=stage > 0)
    elif staged:
        what = "a pipeline has an optimizer for each stage"
        for group in groups:
            _check_separate(factory, {key: value for key, value in group.items() if key != "names"}, device, what)


def flattened(stage: int) -> str:
    """What ZeRO does with parameters, for `check_elementwise`."""
    return f"ZeRO stage {stage} flattens and cuts up parameters"


def check_elementwise(
    factory: OptimizerFactory,
    groups: Groups,
    shapes: Mapping[str, Sequence[int]],
    device: torch.device,
    what: str,
    *,
    flat: bool = True,
) -> None:
    """Raises StrategyError if the optimizer updates slices of parameters, `flat` ones or those along a dim, otherwise
    than complete ones; `what` slices them. `shapes` are those of the parameters, by name."""
    for group in groups:
        options = {key: value for key, value in group.items() if key != "names"}
        optimizer = _made(factory, options, device)
        kind = kind_of(optimizer, BY_SHAPE)
        tried = _tried(shapes[name] for name in group["names"] if name in shapes)
        if type(optimizer) in ELEMENTWISE:
            continue
        if not kind and all(is_elementwise(factory, options, device, shape, flat=flat) for shape in tried):
            _check_separate(factory, options, device, what)
            ones = [torch.ones(SMALL, device=device)]
            check_states(_stepped(factory, options, ones, [ones])[0])
            continue
        reason = (
            "treats every parameter as one matrix"
            if kind
            else "does not update every element by itself (tried out: parts of a parameter come out otherwise than "
            "the complete one, as with LARS and LAMB, which take its norm)"
        )
        raise StrategyError(
            "MW323",
            f"Optimizer {kind or type(optimizer).__name__} {reason}, but {what}: the updates would differ from one "
            "device's. Use an elementwise optimizer such as torch.optim.AdamW, or parallel=data_parallel with "
            "parallel.zero.stage=0.",
        )


def _check_separate(factory: OptimizerFactory, options: Mapping[str, Any], device: torch.device, what: str) -> None:
    """Raises StrategyError if the optimizer updates a parameter otherwise beside others of its group than alone."""
    kind = type(_made(factory, options, device))
    if kind in ELEMENTWISE or is_separate(factory, options, device):
        return
    raise StrategyError(
        "MW323",
        f"Optimizer {kind.__name__} updates parameters by all of a group (tried out: two come out otherwise than each "
        f"alone, as with Prodigy, which estimates one learning rate), but {what}: the updates would differ from "
        "training on one device. Use an optimizer such as torch.optim.AdamW, or parallel=data_parallel with "
        "parallel.zero.stage=0 and without a pipeline.",
    )


def is_separate(factory: OptimizerFactory, options: Mapping[str, Any], device: torch.device) -> bool:
    """Whether a parameter is updated beside another one of its group as it is alone: a vector, and a matrix beside one
    by which it could be multiplied (pairs of low rank)."""

    def same(shapes: Sequence[Sequence[int]], complete: Tensor, by_step: Sequence[Tensor]) -> bool:
        def cut(tensor: Tensor) -> list[Tensor]:
            return [part.contiguous().view(*shape) for part, shape in zip(tensor, shapes, strict=True)]

        values, gradients = cut(complete), [cut(gradient) for gradient in by_step]
        together = _updated(factory, options, values, gradients)
        alone = [
            _updated(factory, options, [value], [[step[number]] for step in gradients])[0]
            for number, value in enumerate(values)
        ]
        return all(map(_agree, alone, together, values))

    return all(_always(partial(same, shapes), SMALL, device) for shapes in BESIDE)


def _always(same: Callable[[Tensor, Sequence[Tensor]], bool], shape: Sequence[int], device: torch.device) -> bool:
    """Whether a trial with a parameter and its gradients of all steps succeeds at all scales."""

    def tried(dtype: torch.dtype) -> bool:
        return all(same(*_numbers(shape, device, dtype, *scaled)) for scaled in SCALES.items())

    try:
        return tried(torch.float64)  # single precision hides steps that begin small (Prodigy)
    except Exception:  # whatever an optimizer raises that takes single precision alone; any other raises it again
        return tried(torch.float32)


def _tried(shapes: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
    """A small shape, and the largest of `shapes` of every number of dims, cut down to what can be tried."""
    largest: dict[int, Sequence[int]] = {}
    for shape in shapes:
        largest[len(shape)] = max(largest.get(len(shape), shape), shape, key=math.prod)
    tried: list[tuple[int, ...]] = [SMALL]
    for shape in largest.values():
        lengths = [min(length, LONGEST) for length in shape]
        while math.prod(lengths) > LARGEST:
            lengths[lengths.index(max(lengths))] //= 2
        tried.append(tuple(lengths))
    return [shape for shape in dict.fromkeys(tried) if math.prod(shape) > 1]


def _numbers(
    shape: Sequence[int], device: torch.device, dtype: torch.dtype, scale: float, steps: int
) -> tuple[Tensor, list[Tensor]]:
    """A parameter whose first rows are much smaller than its last ones, and its gradients of all steps. Every second
    one is nearly orthogonal to the parameter, as those that some project (AdamP)."""
    generator, size, rows = torch.Generator().manual_seed(0), math.prod(shape), torch.arange(shape[0])
    sizes = torch.where(rows < shape[0] / 2, 0.01, 10.0).view(-1, *(1 for _ in shape[1:]))
    value = torch.linspace(1.0, 2.0, size, dtype=dtype).view(*shape) * sizes
    pattern = torch.linspace(-1.0, 3.0, size, dtype=dtype).view(*shape)
    gradients = [
        ((step % 2) * pattern + torch.randn(*shape, generator=generator, dtype=dtype)).mul_(scale).to(device)
        for step in range(steps)
    ]
    return value.to(device), gradients


def is_elementwise(
    factory: OptimizerFactory, options: Mapping[str, Any], device: torch.device, shape: Sequence[int], *, flat: bool
) -> bool:
    """Whether parts of a parameter, `flat` ones or those along each dim, are updated as the complete one."""

    def same(values: Tensor, gradients: Sequence[Tensor]) -> bool:
        (complete,) = _updated(factory, options, [values], [[one] for one in gradients])

        def cut(dim: int) -> bool:
            def parts(tensor: Tensor) -> list[Tensor]:
                tensor = tensor.reshape(-1) if flat else tensor
                first = max(tensor.shape[dim] // 3, 1)
                return [part.contiguous() for part in torch.split(tensor, [first, tensor.shape[dim] - first], dim)]

            by_step = [parts(one) for one in gradients]
            updated = [
                _updated(factory, options, [part], [[step[number]] for step in by_step])[0]
                for number, part in enumerate(parts(values))
            ]
            return _agree(torch.cat(updated, dim).view(*shape), complete, values)

        return cut(0) if flat else all(cut(dim) for dim, length in enumerate(shape) if length > 1)

    return _always(same, shape, device)


def _agree(found: Tensor, expected: Tensor, before: Tensor) -> bool:
    """Whether an update of `before` is the expected one, but for rounding."""
    allowed = TOLERANCE * (expected - before).abs() + ROUNDINGS * torch.finfo(before.dtype).eps * before.abs()
    same = (found == expected) | (found.isnan() & expected.isnan())  # infinities, too
    return bool(((found - expected).abs() <= allowed).logical_or(same).all())


def _updated(
    factory: OptimizerFactory,
    options: Mapping[str, Any],
    values: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> list[Tensor]:
    """What the parameters `values` of one group are after a step with each of the gradients."""
    return [parameter.detach() for parameter in _stepped(factory, options, values, gradients)[1]]


def _stepped(
    factory: OptimizerFactory,
    options: Mapping[str, Any],
    values: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> tuple[Optimizer, list[nn.Parameter]]:
    """The optimizer and its parameters, of one group, which begin with `values`, after a step with each of the
    gradients."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = factory([{"params": parameters, **options}])
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return optimizer, parameters


def _made(factory: OptimizerFactory, options: Mapping[str, Any], device: torch.device) -> torch.optim.Optimizer:
    """The optimizer of one parameter. Raises StrategyError for one that no plan can use."""
    optimizer = factory([{"params": [nn.Parameter(torch.ones(SMALL, device=device))], **options}])
    check_kind(optimizer)
    return optimizer
