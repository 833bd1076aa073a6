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
ENTRY = "runner.training.trainer:train"
"""The entry of a rank."""


Differences = dict[tuple[str, str], float]
"""The largest relative differences between two runs, by `LOSS`, ("grad", NAME) and ("weight", NAME)."""
LOSS, TENSORS = ("loss", ""), ("grad", "weight")


def _to_json(differences: Differences) -> dict[str, Any]:
    tensors = {kind: {name: gap for (its, name), gap in differences.items() if its == kind} for kind in TENSORS}
    return {"loss_max_rel_diff": differences[LOSS]} | {f"{kind}_max_rel_diff": gaps for kind, gaps in tensors.items()}


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

    def own(self, key: tuple[str, str]) -> float:
        """The reference's own rounding; 0 where it was not measured."""
        return (self.rounding or {}).get(key, 0.0)

    def bound(self, key: tuple[str, str]) -> float:
        """The tolerance of a loss or tensor: more where the reference itself differs from fp64."""
        rounding = TIMES * self.own(key)
        return max(self.tolerance, rounding) if rounding <= MAGNIFIED else self.tolerance

    @property
    def passed(self) -> bool:
        return all(gap <= self.bound(key) for key, gap in self.differences.items())

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
        ours, theirs, exact = (folder / name for name in ("sharded", "reference", "fp64"))
        for records in (ours, theirs, exact):
            records.mkdir()
        prepared = prepare_decided(sharded, folder)
        capacity.check_plan(prepared, plan_files.write_plan(prepared, run_dir))
        print(headline(prepared, run_dir), flush=True)
        section, ranks, elastic = config.launch, prepared.world_size, config.parallel.elastic
        start = partial(launch.run_ranks, device=prepared.device, timeout=section.timeout, threads=section.threads)
        entry = "runner.server.roles:train" if elastic else ENTRY
        job = TrainingJob(prepared, folder, None, ours, offload=offload)
        start(entry, job, world_size=ranks, run_dir=run_dir, elastic=elastic)
        print(f"verify: {config.verify.steps} steps on {ranks} ranks done; now the same on one process", flush=True)
        reference = prepare(_reference(prepared.config), None)
        (run_dir / "reference").mkdir(exist_ok=True)
        start(ENTRY, TrainingJob(reference, folder, None, theirs, ours), world_size=1, run_dir=run_dir / "reference")
        precision = config.train.precision
        tolerance = config.verify.tolerance or TOLERANCE[precision]
        comparison = compare(ours, theirs, tolerance, ROUNDING[precision])
        magnified = not comparison.passed and comparison.worst <= MAGNIFIED
        if magnified and precision == "fp32" and config.verify.tolerance is None:
            print(f"verify: a difference is beyond {tolerance:g}; now the same on one process in fp64", flush=True)
            try:
                double = prepare(_changed(reference.config, train={"precision": "fp64"}), None, say=lambda _: None)
                job = TrainingJob(replace(double, single_draws=True), folder, None, exact, ours)
                start(ENTRY, job, world_size=1, run_dir=run_dir / "reference_fp64")
                rounding = compare(theirs, exact, tolerance, ROUNDING["fp32"]).differences
                comparison = replace(comparison, rounding=rounding)
            except (ConfigError, StrategyError, RunFailed) as error:
                comparison = replace(comparison, unmeasured=str(error).partition("\n")[0])
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
    if comparison.rounding is not None:
        return (
            f" It is more than {TIMES:g} times the distance of one process from its own fp64, so it is not rounding "
            "alone."
        )
    if precision == "fp64" or comparison.worst >= MAGNIFIED:
        return ""
    text = (
        " Networks that magnify rounding (batch norms over few samples, relus near zero) differ by that much from "
        "themselves in other orders of addition; "
    )
    if comparison.unmeasured is None:
        return text + "train.precision=fp64 shows which it is."
    return text + f"by how much this one does is not known, because it does not run in fp64: {comparison.unmeasured}"


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
    gradients: dict[tuple[str, str], float] = {}
    for file in sorted(theirs.glob("step-*.pt")):
        truth, sharded = (torch.load(folder / file.name, weights_only=True) for folder in (theirs, ours))
        gap = abs(sharded["loss"] - truth["loss"])
        absolute, relative = max(absolute, gap), max(relative, _finite(gap / max(abs(truth["loss"]), 1e-30)))
        noise = rounding * max(map(_largest, truth["gradients"].values()), default=0.0)
        for name, value in _differences(sharded["gradients"], truth["gradients"], noise, noise / tolerance).items():
            gradients["grad", name] = max(gradients.get(("grad", name), 0.0), value)
        steps += 1
    sharded, truth = (torch.load(folder / "weights.pt", weights_only=True) for folder in (ours, theirs))
    weights = {("weight", name): value for name, value in _differences(sharded, truth).items()}
    return Comparison(absolute, {LOSS: relative, **gradients, **weights}, tolerance, steps)


def _differences(
    sharded: dict[str, Any], truth: dict[str, Any], noise: float = 0.0, scale: float = 0.0
) -> dict[str, float]:
    """Per tensor: max |sharded - truth| / max |truth|, or / `scale` where max |truth| is at most `noise`; 0 where both
    are equal, infinities included."""
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
        gaps = (own.double() - expected.double()).masked_fill(own == expected, 0.0)
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
    return math.inf if math.isnan(value) else value


def table(comparison: Comparison) -> str:
    """The verdict and the worst offenders."""
    verdict, differences = "passed" if comparison.passed else "FAILED", comparison.differences

    def shown(key: tuple[str, str]) -> str:
        text = f"{differences[key]:.2e}"
        if not (own := comparison.own(key)) or differences[key] <= comparison.tolerance:
            return text
        return f"{text}  (one process: {own:.2e} from fp64; {comparison.bound(key):.2e} allowed)"

    gradients, weights = ([key for key in differences if key[0] == kind] for kind in TENSORS)
    worst = sorted(gradients, key=lambda key: differences[key] / comparison.bound(key), reverse=True)[:WORST]
    width = max((len(name) for _, name in worst), default=0)
    lines = [f"verify {verdict}: {comparison.steps} steps, tolerance {comparison.tolerance:g} relative"]
    if comparison.rounding is not None:
        lines[0] += f", or {TIMES:g} times how far one process in fp32 is from fp64"
    elif comparison.unmeasured is not None:
        lines[0] += f"; how much of it is rounding is unknown, fp64 does not run: {comparison.unmeasured}"
    lines.append(f"  loss: largest difference {comparison.loss_max_abs_diff:.2e} ({shown(LOSS)} relative)")
    lines.append(f"  gradients of {len(gradients)} parameters, the worst:")
    lines += [f"    {key[1]:<{width}}  {shown(key)}" for key in worst]
    weight = max(weights, key=differences.__getitem__)
    lines.append(f"  weights after the last step, the worst: {weight[1]}  {shown(weight)}")
    return "\n".join(lines)
