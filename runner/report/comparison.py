"""The comparison of a sharded run with one device: loss, gradients and weights, by tensor, and the verdict.

Compared is max |sharded - reference| / max |reference| of every tensor. A gradient that cancels out (a bias before a
batch norm) is rounding alone; see `differences`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from runner.errors import ConfigError
from strategies.core.graph import OperatorGraph, Ref

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2, "bf16_autocast": 2e-2}
ROUNDING = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 8e-2, "fp16": 1e-2, "bf16_autocast": 8e-2}
"""Gradients below this times the model's largest one are rounding: at least ten times the distance of neighbouring
numbers at 1, in fp64 what is left where the terms of a long sum cancel."""
NEIGHBOURS = 1e-15
"""Differences of a gradient below this times the model's largest one are a few neighbouring numbers of fp64 in the
terms of a sum that cancels. One process whose rows come in another order has them, too: 2e-16 to 4e-16 in the scale of
a batch norm before another one."""
SMALL = 1e-3
"""Gradients below this times the model's largest one may cancel out, which fp64 decides."""
FINER = {"fp32": "fp64", "bf16": "fp32", "fp16": "fp32", "bf16_autocast": "fp32"}
"""The precision in which one process measures the rounding of another one."""
NEIGHBOUR = "one with neighbouring weights"
"""What one process in fp64 is compared with."""
NUDGED = range(8)
"""Such weights that are tried: a relu at zero, or two equal maxima, decide otherwise with every second or so."""
LESS = {"float32": "fp32", "complex64": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Precisions below fp64, by dtype."""
MAGNIFIED, MAGNIFIED_FP64 = 0.1, 1e-6
"""The largest difference that may still be rounding, and that in fp64."""
TIMES = 3.0
"""How many times one process's own rounding a sharded run may differ from it."""
WORST = 5

Differences = dict[tuple[str, str], float]
"""The largest relative differences between two runs, by `LOSS`, ("grad", NAME) and ("weight", NAME)."""
LOSS, TENSORS = ("loss", ""), ("grad", "weight")


def computes_in_less(graph: OperatorGraph | None) -> tuple[str, str] | None:
    """The least precision of a result or parameter with a gradient in a graph of a model in fp64, and the first
    operator or parameter that has it: losses of transformers compute in fp32, and `Module.double` leaves complex64.
    None where all is fp64."""
    if graph is None:
        return None
    found = [
        (LESS[spec.dtype], operator.where)
        for operator in graph.operators
        for index, spec in enumerate(operator.results)
        if spec.dtype in LESS and Ref(operator.id, index) in graph.trained
    ]
    found += [
        (LESS[source.spec.dtype], f"the parameter {source.name}")
        for source in graph.of_kind("parameter")
        if source.spec.dtype in LESS and source.trainable
    ]
    return max(found, key=lambda one: TOLERANCE[one[0]], default=None)


def _to_json(differences: Differences) -> dict[str, Any]:
    tensors = {kind: {name: gap for (its, name), gap in differences.items() if its == kind} for kind in TENSORS}
    return {"loss_max_rel_diff": differences[LOSS]} | {f"{kind}_max_rel_diff": gaps for kind, gaps in tensors.items()}


@dataclass(frozen=True)
class Comparison:
    """The content of verify.json. `rounding` is the distance of the reference, which computes in `precision`, from its
    run in the `finer` one, without one from a run with neighbouring weights, where it was measured, and `unmeasured`
    says why it could not be; gradients of the reference that are `small` may cancel out."""

    loss_max_abs_diff: float
    differences: Differences
    tolerance: float
    steps: int
    rounding: Differences | None = None
    unmeasured: str | None = None
    small: Set[str] = frozenset()
    precision: str = "fp32"
    finer: str | None = None

    def measured(self, rounding: Differences, precision: str, finer: str | None = None) -> Comparison:
        """This one with another run of the reference: of a tensor the largest distance of all runs counts."""
        most = {key: max(gap, self.own(key)) for key, gap in rounding.items()}
        return replace(self, rounding=most, unmeasured=None, precision=precision, finer=finer)

    def own(self, key: tuple[str, str]) -> float:
        """The reference's own rounding; 0 where it was not measured."""
        return (self.rounding or {}).get(key, 0.0)

    def bound(self, key: tuple[str, str]) -> float:
        """The tolerance of a loss or tensor: more where the reference itself differs from its finer run."""
        own, most = self.own(key), MAGNIFIED_FP64 if self.precision == "fp64" else MAGNIFIED
        return max(self.tolerance, min(TIMES * own, most)) if own <= most else self.tolerance

    def __str__(self) -> str:
        return table(self)

    @property
    def passed(self) -> bool:
        return all(gap <= self.bound(key) for key, gap in self.differences.items())

    @property
    def may_be_rounding(self) -> bool:
        """Whether a failure may be rounding that the network magnifies, or that is all of a gradient."""
        return not self.passed and all(
            gap <= MAGNIFIED or (kind == "grad" and name in self.small)
            for (kind, name), gap in self.differences.items()
        )

    @property
    def worst(self) -> float:
        return max(self.differences.values())

    def to_json(self) -> dict[str, Any]:
        measured = self.rounding is not None or self.unmeasured is not None
        rounding = {"unmeasured": self.unmeasured} if self.rounding is None else _to_json(self.rounding)
        return {
            "loss_max_abs_diff": self.loss_max_abs_diff,
            **_to_json(self.differences),
            "tolerance": self.tolerance,
            "steps": self.steps,
            "passed": self.passed,
            "rounding": {"times": TIMES, **rounding} if measured else None,
        }


def differences(
    sharded: Mapping[str, Any],
    truth: Mapping[str, Any],
    noise: float = 0.0,
    scale: float = 0.0,
    least: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Per tensor: max |sharded - truth| / max |truth|, or / `scale` where max |truth| is at most `noise`, or / its
    `least` where that is more; 0 where both are equal, infinities included."""
    missing = sorted(set(sharded) ^ set(truth))
    if missing:
        raise ConfigError(
            "MW326", f"verify: the two models have different parameters: {', '.join(missing)} in only one of them."
        )
    values = {}
    for name, expected in truth.items():
        own = sharded[name]
        if expected.shape != own.shape:
            raise ConfigError(
                "MW326",
                f"verify: {name} has shape {tuple(own.shape)} sharded, {tuple(expected.shape)} in the reference.",
            )
        gaps = (_wide(own) - _wide(expected)).masked_fill(own == expected, 0.0)
        gap, size = _largest(gaps), _largest(expected)
        variance = truth.get(f"{name.removesuffix('running_mean')}running_var")
        if name.endswith("running_mean") and variance is not None:
            size = max(size, _largest(variance) ** 0.5)
        size = max(size if size > noise else scale, (least or {}).get(name, 0.0))
        values[name] = 0.0 if gap == 0 else _finite(gap / size if size else math.inf)
    return values


def of_step(
    sharded: Mapping[str, Any],
    truth: Mapping[str, Any],
    tolerance: float,
    rounding: float,
    zero: Set[str] = frozenset(),
) -> tuple[float, Differences]:
    """The absolute difference of the losses of one step, and all relative differences of its record.

    Args:
        sharded, truth: {"loss": number, "gradients": {name: unsharded tensor}}.
        tolerance: relative.
        rounding: a reference gradient below this times the model's largest is rounding itself (a bias before a batch
            norm: truly zero), and has to stay below that. One of at most NEIGHBOURS / tolerance is compared as if it
            were as large as that.
        zero: gradients that are rounding in fp64, too; they are compared relative to the model's largest.

    Raises:
        ConfigError: the models have different parameters.
    """
    gap = abs(sharded["loss"] - truth["loss"])
    largest = max(map(_largest, truth["gradients"].values()), default=0.0)
    noise, least = rounding * largest, dict.fromkeys(truth["gradients"], NEIGHBOURS * largest / tolerance)
    least |= dict.fromkeys(zero, largest)
    gradients = differences(sharded["gradients"], truth["gradients"], noise, noise / tolerance, least)
    relative = _finite(gap / max(abs(truth["loss"]), 1e-30))
    return gap, {LOSS: relative, **{("grad", name): value for name, value in gradients.items()}}


def below(gradients: Mapping[str, Any], share: float) -> frozenset[str]:
    """The gradients that are at most `share` times the largest of all."""
    sizes = {name: _largest(gradient) for name, gradient in gradients.items()}
    limit = share * max(sizes.values(), default=0.0)
    return frozenset(name for name, size in sizes.items() if size <= limit)


def _largest(tensor: Any) -> float:
    """max |tensor|; 0 for an empty one."""
    return float(_wide(tensor).abs().max()) if tensor.numel() else 0.0


def _wide(tensor: Any) -> Any:
    """A tensor in fp64; a complex one keeps its imaginary part."""
    import torch

    return tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()


def _finite(value: float) -> float:
    return math.inf if math.isnan(value) else value


def table(comparison: Comparison) -> str:
    """The verdict and the worst offenders."""
    verdict, differences = "passed" if comparison.passed else "FAILED", comparison.differences
    finer = comparison.finer or NEIGHBOUR

    def shown(key: tuple[str, str]) -> str:
        text = f"{differences[key]:.2e}"
        if not (own := comparison.own(key)) or differences[key] <= comparison.tolerance:
            return text
        return f"{text}  (one process: {own:.2e} from {finer}; {comparison.bound(key):.2e} allowed)"

    gradients, weights = ([key for key in differences if key[0] == kind] for kind in TENSORS)
    worst = sorted(gradients, key=lambda key: differences[key] / comparison.bound(key), reverse=True)[:WORST]
    width = max((len(name) for _, name in worst), default=0)
    lines = [f"verify {verdict}: {comparison.steps} steps, tolerance {comparison.tolerance:g} relative"]
    if comparison.rounding is not None:
        lines[0] += f", or {TIMES:g} times how far one process in {comparison.precision} is from {finer}"
    elif comparison.unmeasured is not None:
        lines[0] += f"; how much of it is rounding is unknown, {finer} does not run: {comparison.unmeasured}"
    lines.append(f"  loss: largest difference {comparison.loss_max_abs_diff:.2e} ({shown(LOSS)} relative)")
    lines.append(f"  gradients of {len(gradients)} parameters, the worst:")
    lines += [f"    {key[1]:<{width}}  {shown(key)}" for key in worst]
    if weights:
        weight = max(weights, key=differences.__getitem__)
        lines.append(f"  weights after the last step, the worst: {weight[1]}  {shown(weight)}")
    return "\n".join(lines)
