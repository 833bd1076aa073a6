"""The proof of a plan: its program on simulated ranks in this process, compared with the eager module."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.plans import Batch, Plan, Planned, check_signature, entries_of, require_plan
from runner.build.targets import describe
from runner.config.schema import Config
from runner.errors import ConfigError, RunFailed
from runner.planning import lowering
from runner.report.comparison import (
    FINER,
    MAGNIFIED_FP64,
    NUDGED,
    ROUNDING,
    SMALL,
    TOLERANCE,
    Comparison,
    below,
    computes_in_less,
    differences,
    of_step,
)
from runner.training.callbacks.nan_watch import first_not_finite
from runner.training.eager import Eager, nudge
from strategies.capture import duplicate
from strategies.core.layout import Layout
from strategies.rules.random import mix
from strategies.runtime.simulate import Simulation, assemble

Record = dict[str, Any]
"""{"loss": number, "gradients": {name: unsharded tensor}}."""


def verify(module: nn.Module, batch: Batch, plan: Plan, *, tolerance: float | None = None) -> Comparison:
    """Prove that a plan computes what one device does: loss, every gradient, and every buffer that the step writes.

    All ranks are simulated in this process, with the resharding steps of real ones: neither processes nor a GPU are
    needed, but memory for the slices of all ranks. Under ZeRO the program of stage 0 is run.

    Args:
        module: on the CPU, with the names and shapes of the planned one; it is not changed.
        batch: the global batch, with the shapes that the plan was made for.
        plan: of `meshwright.plan`, or of `meshwright.load` with a module.
        tolerance: relative; None: by precision as in `run verify`, in fp32 1e-5 or 3 times the distance of one device
            from its own fp64.

    Returns:
        The differences by tensor; printed, the worst of them.

    Raises:
        ConfigError: module or batch are not those of the plan.
        RunFailed: a difference beyond the tolerance, numbers of one device that are not finite, or a module that fails
            there.
    """
    require_plan(plan, "meshwright.verify")
    if not (tolerance is None or (isinstance(tolerance, int | float) and 0 < tolerance < math.inf)):
        raise ConfigError(
            "MW204", f"meshwright.verify: tolerance = {tolerance!r}; give a number above 0, such as 1e-5, or None."
        )
    planned = plan.planned("verify")
    check_signature(planned.signature, module, "meshwright.verify")
    names, tensors = entries_of(batch, "meshwright.verify", planned.prepared.names)
    check_shapes(planned, tensors, "meshwright.verify")
    precision, key = planned.prepared.config.train.precision, mix(planned.prepared.config.train.seed, 1, 0)
    eager = Eager(duplicate(planned.step_of(module)).train())
    graph, own = planned.captured.graph, {name: one.detach() for name, one in eager.tensors().items()}
    written = (*dict(eager.named_buffers()), *(graph.by_id[id].name for id, _ in graph.updates))  # by forward
    own |= {name: own[name].clone() for name in written}
    values = {**planned.captured.tensors, **own}
    entries = zip(names, tensors, strict=True)  # a forward on one device may mark its own as requiring gradients
    values |= {f"input.{name}" if name in values else name: one.detach() for name, one in entries}
    tensors = [tensor.detach() for tensor in tensors]
    alone = _on_one_device(eager, tensors, key)  # first, as it refuses numbers that no program takes
    ours, buffers = _on_simulated_ranks(planned, values, key)
    theirs = _trained(alone, ours)
    limit, rounding = tolerance or TOLERANCE[precision], ROUNDING[precision]
    gap, found = of_step(ours, theirs, limit, rounding)
    after = {name: eager.tensors()[name] for name in buffers}
    weights = {("weight", name): value for name, value in differences(buffers, after).items()}
    comparison = Comparison(gap, found | weights, limit, 1, small=below(theirs["gradients"], SMALL))
    magnified = comparison.may_be_rounding and tolerance is None
    kind: str = precision
    if magnified and precision == "fp64" and (less := computes_in_less(planned.prepared.graph)) is not None:
        kind = less[0]
        limit, rounding = TOLERANCE[kind], ROUNDING[kind]
        gap, found = of_step(ours, theirs, limit, rounding)
        comparison = Comparison(gap, found | weights, limit, 1)
        magnified = comparison.may_be_rounding
    zero: Set[str] = frozenset()
    if magnified and precision in FINER:
        widen = methodcaller("double" if FINER[precision] == "fp64" else "float")
        exact = Eager(widen(duplicate(planned.step_of(module)).train()), single_draws=True)
        wide = [widen(tensor) if tensor.is_floating_point() else tensor for tensor in tensors]
        try:
            truth = _trained(_on_one_device(exact, wide, key), ours)
        except RunFailed as error:  # in that precision alone
            comparison = replace(comparison, unmeasured=str(error), precision=precision, finer=FINER[precision])
        else:
            zero = below(truth["gradients"], ROUNDING[FINER[precision]])
            gap, found = of_step(ours, theirs, limit, rounding, zero)
            distance = of_step(theirs, truth, limit, rounding, zero)[1]
            comparison = Comparison(gap, found | weights, limit, 1).measured(distance, precision, FINER[precision])
    close = kind == "fp32" or (kind == "fp64" and comparison.worst <= MAGNIFIED_FP64)
    for number in NUDGED if magnified and close else ():
        if comparison.passed:
            break
        near = Eager(duplicate(planned.step_of(module)).train())
        nudge(near, kind, number)
        distance = of_step(_trained(_on_one_device(near, tensors, key), ours), theirs, limit, rounding, zero)[1]
        comparison = comparison.measured(distance, kind)
    if not comparison.passed and (wrong := _not_finite(theirs)) is not None:
        first = first_not_finite(lambda: eager(*(tensor.clone() for tensor in tensors), key=key).backward())
        where = "" if first is None else f": the first {first[2]} is made in {first[1]} at {first[0]}"
        raise RunFailed(
            "MW719", f"meshwright.verify: on one device {wrong} is not finite{where}; nothing is to compare."
        )
    if not comparison.passed:
        raise RunFailed("MW731", f"meshwright.verify: the plan differs from one device beyond {limit:g}.\n{comparison}")
    return comparison


def _not_finite(record: Record) -> str | None:
    """The loss or the first gradient of a record that is not finite."""
    wrong = [f"the gradient of {name}" for name, one in record["gradients"].items() if not bool(one.isfinite().all())]
    return next(iter([*([] if math.isfinite(record["loss"]) else ["the loss"]), *wrong]), None)


def check_shapes(planned: Planned, tensors: Sequence[Tensor], what: str) -> None:
    """Raises ConfigError for a global batch of other shapes or dtypes than the plan's, or that is not on the CPU."""
    prepared, given = planned.prepared, [tuple(tensor.shape) for tensor in tensors]
    for name, tensor, example in zip(prepared.names, tensors, planned.batch, strict=True):
        if (tensor.dtype, tensor.device.type) != (example.dtype, "cpu"):
            raise ConfigError(
                "MW463",
                f"{what}: entry {name} of the batch is {tensor.dtype} on the device {tensor.device}, but the plan was "
                f"made for {example.dtype}; give such a batch on the CPU, or plan anew.",
            )
    for name, shape, wanted in zip(prepared.names, given, prepared.shapes, strict=True):
        if shape != wanted:
            raise ConfigError(
                "MW463",
                f"{what}: entry {name} of the batch has the shape {shape}, but the plan was made for {wanted}; give a "
                "batch of that shape, or plan anew.",
            )


def _trained(record: Record, ours: Record) -> Record:
    """A record with the gradients of those parameters alone that the record `ours` has."""
    return record | {"gradients": {name: record["gradients"][name] for name in ours["gradients"]}}


def _on_simulated_ranks(planned: Planned, values: Mapping[str, Tensor], key: int) -> tuple[Record, dict[str, Tensor]]:
    """One step of the plan's program with the random numbers of one device: its record, and the buffers after it.
    Raises RunFailed where it fails, as where backward needs a buffer that forward writes through `.data`."""
    assert planned.prepared.step is not None
    content = planned.prepared.config.model_dump()
    content["train"]["random"] = "exact"
    content["parallel"]["zero"] |= {"stage": 0, "options": {}}
    content["parallel"]["offload"] |= {"optimizer": "none", "parameters": "none"}
    program = lowering.training_program(Config.model_validate(content), *planned.prepared.step)
    ranks = Simulation(program, values)
    try:
        (losses,) = ranks.run(key)
        ranks.backward(losses)
    except RuntimeError as error:
        text = f"meshwright.verify: the plan's program fails on simulated ranks: {describe(error)}."
        raise RunFailed("MW710", text) from error
    loss = assemble([one.detach() for one in losses], Layout((), frozenset(program.loss_axes)), (), program.mesh)
    return {"loss": loss.item(), "gradients": ranks.gradients()}, ranks.buffers()


def _on_one_device(eager: Eager, tensors: Sequence[Tensor], key: int) -> Record:
    """The same step of the eager module. Raises RunFailed where the module itself raises."""
    try:
        loss = eager(*(tensor.clone() for tensor in tensors), key=key)  # a forward may write to its inputs
        loss.backward()
    except Exception as error:
        text = f"meshwright.verify: the module itself fails on one device, so nothing is to compare: {describe(error)}."
        raise RunFailed("MW710", text) from error
    named = eager.named_parameters()
    gradients = {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in named}
    return {"loss": loss.item(), "gradients": gradients}
