"""`run verify`: the same steps sharded and on one process, from the same weights and data; loss and gradients compared.

The single process runs the user's untouched eager module. Compared are the loss and the gradients of the full tensors
at every step, and the weights after the last: max |sharded - reference| / max |reference|, the largest over the steps.
A gradient that cancels out (a bias before a batch norm) is pure rounding error: if the reference's is below the
rounding of the model's largest one, both must be; every other gradient is compared relative to its magnitude. A running
mean is compared relative to the standard deviation: the mean of normalized values is pure rounding error, too. The
reference's optimizer is given the sharded run's gradients, so both stay at the same weights and rounding does not
compound (Adam turns noise around zero into full steps); a wrong update shows in the weights.

Some networks magnify the rounding of fp32. Where a difference is beyond the tolerance of fp32, the single process runs
again in fp64, from the same weights and with the same random numbers. That gives the distance of the reference's
fp32 from fp64, per tensor; up to three times as much counts as rounding.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from runner import launch
from runner.cli.run_folders import without_trace
from runner.config.schema import Config
from runner.errors import ConfigError, RunFailed
from runner.launch.temporary_folder import offload_folder
from strategies.core.errors import StrategyError

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2, "bf16_autocast": 2e-2}
ROUNDING = {"fp64": 2e-15, "fp32": 1e-6, "bf16": 8e-2, "fp16": 1e-2, "bf16_autocast": 8e-2}
"""Ten times the distance of neighbouring numbers at 1."""
MAGNIFIED = 0.1
"""The largest difference that may still be rounding."""
TIMES = 3.0
"""How many times one process's own rounding a sharded run may differ from it."""
WORST = 5


@dataclass(frozen=True)
class Differences:
    """The largest relative differences between two runs, of the loss and by the name of a tensor."""

    loss: float
    gradients: dict[str, float]
    weights: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return {
            "loss_max_rel_diff": self.loss,
            "grad_max_rel_diff": self.gradients,
            "weight_max_rel_diff": self.weights,
        }


@dataclass(frozen=True)
class Comparison:
    """The content of verify.json. `rounding` is the distance of the reference from its fp64 run where it was measured,
    and `unmeasured` says why it could not be."""

    loss_max_abs_diff: float
    differences: Differences
    tolerance: float
    steps: int
    rounding: Differences | None = None
    unmeasured: str | None = None

    def bound(self, rounding: float) -> float:
        """The tolerance of a tensor whose reference differs by `rounding` from fp64."""
        return max(self.tolerance, TIMES * rounding) if TIMES * rounding <= MAGNIFIED else self.tolerance

    def pairs(self) -> Iterator[tuple[float, float]]:
        """Every difference, with the reference's own (0 where it was not measured)."""
        found, own = self.differences, self.rounding or Differences(0.0, {}, {})
        yield found.loss, own.loss
        yield from ((value, own.gradients.get(name, 0.0)) for name, value in found.gradients.items())
        yield from ((value, own.weights.get(name, 0.0)) for name, value in found.weights.items())

    @property
    def passed(self) -> bool:
        return all(value <= self.bound(rounding) for value, rounding in self.pairs())

    @property
    def worst(self) -> float:
        return max(value for value, _ in self.pairs())

    def to_json(self) -> dict[str, Any]:
        measured = self.rounding is not None or self.unmeasured is not None
        rounding = {"unmeasured": self.unmeasured} if self.rounding is None else self.rounding.to_json()
        return {
            "loss_max_abs_diff": self.loss_max_abs_diff,
            **self.differences.to_json(),
            "tolerance": self.tolerance,
            "steps": self.steps,
            "passed": self.passed,
            "rounding": {"times": TIMES, **rounding} if measured else None,
        }


def run(config: Config, run_dir: Path) -> float | None:
    """Compare, write verify.json, print the worst offenders. Returns the largest difference.

    Raises RunFailed beyond tolerance.
    """
    if config.parallel.mode == "hybrid" and config.verify.reference.target is None:
        raise ConfigError(
            "MW326",
            "parallel.mode = hybrid: verify needs the one-device module to compare with; set verify.reference.target "
            "(and its args).",
        )
    launch.warm()
    from runner.planning import capacity
    from runner.planning.joint import prepare_decided
    from runner.planning.prepare import prepare
    from runner.report import plan_files
    from runner.report.text import headline
    from runner.training.trainer import TrainingJob

    sharded = _changed(config, train={"random": "exact"})
    with (
        without_trace(run_dir),
        tempfile.TemporaryDirectory(prefix=".verify-", dir=run_dir) as scratch,
        offload_folder(config, run_dir) as offload,
    ):
        folder = Path(scratch).absolute()
        ours, theirs = folder / "sharded", folder / "reference"
        ours.mkdir()
        theirs.mkdir()
        prepared = prepare_decided(sharded, folder)
        capacity.check_plan(prepared, plan_files.write_plan(prepared, run_dir))
        print(headline(prepared, run_dir), flush=True)
        start = partial(
            launch.run_ranks,
            "runner.training.trainer:train",
            device=prepared.device,
            timeout=config.launch.timeout,
            threads=config.launch.threads,
        )
        start(
            TrainingJob(prepared, folder, None, ours, offload=offload), world_size=prepared.world_size, run_dir=run_dir
        )
        print(
            f"verify: {config.verify.steps} steps on {prepared.world_size} ranks done; now the same on one process",
            flush=True,
        )
        reference = prepare(_reference(prepared.config), None)
        (run_dir / "reference").mkdir(exist_ok=True)
        start(TrainingJob(reference, folder, None, theirs, ours), world_size=1, run_dir=run_dir / "reference")
        precision = config.train.precision
        tolerance = config.verify.tolerance or TOLERANCE[precision]
        comparison = compare(ours, theirs, tolerance, ROUNDING[precision])
        magnified = not comparison.passed and comparison.worst <= MAGNIFIED
        if magnified and precision == "fp32" and config.verify.tolerance is None:
            print(f"verify: a difference is beyond {tolerance:g}; now the same on one process in fp64", flush=True)

            def exactly(record: Path) -> None:
                double = prepare(_changed(reference.config, train={"precision": "fp64"}), None, say=lambda _: None)
                job = TrainingJob(replace(double, single_draws=True), folder, None, record, ours)
                start(job, world_size=1, run_dir=run_dir / "reference_fp64")

            comparison = rounded(comparison, theirs, folder / "fp64", exactly)
    (run_dir / "verify.json").write_text(json.dumps(comparison.to_json(), indent=2) + "\n", encoding="utf-8")
    print(table(comparison))
    if not comparison.passed:
        raise RunFailed(
            "MW731",
            f"verify: the sharded run differs from one process beyond {comparison.tolerance:g} (see the table above "
            f"and {run_dir / 'verify.json'}). `run explain` shows how each operator is sliced."
            + _about_rounding(comparison, precision),
        )
    return comparison.worst


def _about_rounding(comparison: Comparison, precision: str) -> str:
    """A sentence on how much of a difference is rounding error."""
    if comparison.rounding is not None:
        return (
            f" It is more than {TIMES:g} times the distance of one process from its own fp64, so it is not rounding "
            "alone."
        )
    if precision == "fp64" or comparison.worst >= MAGNIFIED:
        return ""
    said = (
        " Networks that magnify rounding (batch norms over few samples, relus near zero) differ by that much from "
        "themselves in other orders of addition; "
    )
    if comparison.unmeasured is None:
        return said + "train.precision=fp64 tells which it is."
    return said + f"by how much this one does is not known, because it does not run in fp64: {comparison.unmeasured}"


def _changed(config: Config, **sections: dict[str, Any]) -> Config:
    """`config` with the steps of verification and `sections` changed; without evaluation and checkpoints."""
    content = config.model_dump()
    content["train"] |= {"steps": config.verify.steps, "epochs": None, "resume": None, "log_every": 1}
    content |= {"evaluate": {}, "checkpoint": {"at_end": False}, "report": {"progress": False}}
    for name, values in sections.items():
        content[name] |= values
    return Config.model_validate(content)


def _reference(config: Config) -> Config:
    """The single-process run: the user's module, or the one-device module that a hybrid recipe names."""
    content = config.model_dump()
    content["world_size"] = None
    content["train"]["accumulate"] = config.parts
    content["train"]["compile"] = False
    content["parallel"] = {"comm_fusion": {kind: {"mode": "none"} for kind in content["parallel"]["comm_fusion"]}}
    if config.verify.reference.target is not None:
        content["model"] = content["verify"]["reference"]
    return Config.model_validate(content)


def compare(ours: Path, theirs: Path, tolerance: float, rounding: float) -> Comparison:
    """Compare the records of two runs. A reference gradient below `rounding` times the model's largest is rounding
    itself (a bias before a batch norm: truly zero), and has to stay below that.

    Raises ConfigError where the models have different parameters.
    """
    import torch

    absolute, relative, steps = 0.0, 0.0, 0
    gradients: dict[str, float] = {}
    for file in sorted(theirs.glob("step-*.pt")):
        truth, found = (torch.load(folder / file.name, weights_only=True) for folder in (theirs, ours))
        gap = abs(found["loss"] - truth["loss"])
        absolute, relative = max(absolute, gap), max(relative, _finite(gap / max(abs(truth["loss"]), 1e-30)))
        noise = rounding * max((_largest(one) for one in truth["gradients"].values()), default=0.0)
        for name, value in _differences(found["gradients"], truth["gradients"], noise, noise / tolerance).items():
            gradients[name] = max(gradients.get(name, 0.0), value)
        steps += 1
    found, truth = (torch.load(folder / "weights.pt", weights_only=True) for folder in (ours, theirs))
    return Comparison(absolute, Differences(relative, gradients, _differences(found, truth)), tolerance, steps)


def rounded(comparison: Comparison, theirs: Path, record: Path, exactly: Callable[[Path], None]) -> Comparison:
    """The comparison with the difference between the reference, recorded in `theirs`, and its fp64 run, which `exactly`
    records; or with the reason why there is none."""
    record.mkdir()
    try:
        exactly(record)
    except (ConfigError, StrategyError, RunFailed) as error:
        return replace(comparison, unmeasured=str(error).partition("\n")[0])
    own = compare(theirs, record, comparison.tolerance, ROUNDING["fp32"])
    return replace(comparison, rounding=own.differences)


def _differences(
    found: dict[str, Any], truth: dict[str, Any], noise: float = 0.0, scale: float = 0.0
) -> dict[str, float]:
    """Per tensor: max |found - truth| / max |truth|, or / `scale` where max |truth| is at most `noise`; 0 where both
    are equal, infinities included."""
    missing = sorted(set(found) ^ set(truth))
    if missing:
        raise ConfigError(
            "MW326", f"verify: the two models have different parameters: {', '.join(missing)} in only one of them."
        )
    values = {}
    for name, expected in truth.items():
        if expected.shape != found[name].shape:
            raise ConfigError(
                "MW326",
                f"verify: {name} has shape {tuple(found[name].shape)} sharded, {tuple(expected.shape)} in the "
                "reference.",
            )
        gaps = (found[name].double() - expected.double()).masked_fill(found[name] == expected, 0.0)
        gap, largest = _largest(gaps), _largest(expected)
        variance = truth.get(f"{name.removesuffix('running_mean')}running_var")
        if name.endswith("running_mean") and variance is not None:
            largest = max(largest, _largest(variance) ** 0.5)
        largest = largest if largest > noise else scale
        values[name] = 0.0 if gap == 0 else _finite(gap / largest if largest else math.inf)
    return values


def _largest(tensor: Any) -> float:
    """max |tensor|; 0 for an empty one."""
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def _finite(value: float) -> float:
    """Replace nan by the largest difference."""
    return math.inf if math.isnan(value) else value


def table(comparison: Comparison) -> str:
    """The verdict and the worst offenders."""
    verdict = "passed" if comparison.passed else "FAILED"
    found, own = comparison.differences, comparison.rounding or Differences(0.0, {}, {})

    def shown(difference: float, rounding: float) -> str:
        note = (
            f"  (one process: {rounding:.2e} from fp64; {comparison.bound(rounding):.2e} allowed)" if rounding else ""
        )
        return f"{difference:.2e}" + note * (difference > comparison.tolerance)

    def beyond(name: str) -> float:
        return found.gradients[name] / comparison.bound(own.gradients.get(name, 0.0))

    worst = sorted(found.gradients, key=beyond, reverse=True)[:WORST]
    width = max(map(len, worst), default=0)
    lines = [f"verify {verdict}: {comparison.steps} steps, tolerance {comparison.tolerance:g} relative"]
    if comparison.rounding is not None:
        lines[0] += f", or {TIMES:g} times how far one process in fp32 is from fp64"
    elif comparison.unmeasured is not None:
        lines[0] += f"; how much of it is rounding is unknown, fp64 does not run: {comparison.unmeasured}"
    loss = shown(found.loss, own.loss)
    lines.append(f"  loss: largest difference {comparison.loss_max_abs_diff:.2e} ({loss} relative)")
    lines.append(f"  gradients of {len(found.gradients)} parameters, the worst:")
    lines += [f"    {name:<{width}}  {shown(found.gradients[name], own.gradients.get(name, 0.0))}" for name in worst]
    name, value = max(found.weights.items(), key=lambda item: item[1])
    lines.append(f"  weights after the last step, the worst: {name}  {shown(value, own.weights.get(name, 0.0))}")
    return "\n".join(lines)
