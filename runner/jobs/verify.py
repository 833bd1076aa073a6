"""`run verify`: the same steps sharded and on one process, from the same weights and data; loss and gradients compared.

The single process runs the user's untouched eager module. Compared are the loss and the gradients of the whole tensors
at every step, and the weights after the last: max |sharded - reference| / max |reference|, the largest over the steps.
A gradient that cancels out (a bias before a batch norm) is nothing but rounding: where the reference's is below the
rounding of the model's largest one, both must be; every other gradient is held to its own size. A running mean is held
to the deviation that it is used with: the mean of what was normalized before is nothing but rounding, too.
The reference's optimizer is given the sharded run's gradients, so both stay at the same weights and rounding does not
compound (Adam turns noise around zero into whole steps); a wrong update shows in the weights.
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from runner import launch
from runner.errors import ConfigError, RunFailed
from runner.refusal import without_trace
from runner.schema import Config
from runner.training.offload_folder import offload_folder

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2, "bf16_autocast": 2e-2}
ROUNDING = {"fp64": 2e-15, "fp32": 1e-6, "bf16": 8e-2, "fp16": 1e-2, "bf16_autocast": 8e-2}
"""Ten times the distance of neighbouring numbers at 1."""
MAGNIFIED = 0.1
"""The largest difference that may still be rounding."""
WORST = 5


@dataclass(frozen=True)
class Comparison:
    """What verify.json holds."""

    loss_max_abs_diff: float
    loss_max_rel_diff: float
    grad_max_rel_diff: dict[str, float]
    weight_max_rel_diff: dict[str, float]
    tolerance: float
    steps: int

    @property
    def passed(self) -> bool:
        return self.worst <= self.tolerance

    @property
    def worst(self) -> float:
        return max(self.loss_max_rel_diff, *self.grad_max_rel_diff.values(), *self.weight_max_rel_diff.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "loss_max_abs_diff": self.loss_max_abs_diff,
            "loss_max_rel_diff": self.loss_max_rel_diff,
            "grad_max_rel_diff": self.grad_max_rel_diff,
            "weight_max_rel_diff": self.weight_max_rel_diff,
            "tolerance": self.tolerance,
            "steps": self.steps,
            "passed": self.passed,
        }


def run(config: Config, run_dir: Path) -> float | None:
    """Compare, write verify.json, print the worst offenders. Returns the largest difference.

    Raises RunFailed beyond tolerance.
    """
    if config.parallel.mode == "hybrid" and config.verify.reference.target is None:
        raise ConfigError(
            "parallel.mode = hybrid: verify needs the one-device module to compare with; set verify.reference.target "
            "(and its args)."
        )
    launch.warm()
    from runner.planning.deciding import prepare_decided
    from runner.planning.prepare import prepare
    from runner.reporting import report
    from runner.training.trainer import Job

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
        report.write_plan(prepared, run_dir)
        print(report.headline(prepared, run_dir), flush=True)
        start = partial(
            launch.run_ranks,
            "runner.training.trainer:train",
            device=prepared.device,
            timeout=config.launch.timeout,
            threads=config.launch.threads,
        )
        start(Job(prepared, folder, None, ours, offload=offload), world_size=prepared.world_size, run_dir=run_dir)
        print(
            f"verify: {config.verify.steps} steps on {prepared.world_size} ranks done; now the same on one process",
            flush=True,
        )
        reference = prepare(_reference(prepared.config), None)
        (run_dir / "reference").mkdir(exist_ok=True)
        start(Job(reference, folder, None, theirs, ours), world_size=1, run_dir=run_dir / "reference")
        precision = config.train.precision
        tolerance = config.verify.tolerance or TOLERANCE[precision]
        comparison = compare(ours, theirs, tolerance, ROUNDING[precision])
    (run_dir / "verify.json").write_text(json.dumps(comparison.to_json(), indent=2) + "\n")
    print(table(comparison))
    if not comparison.passed:
        rounded = (
            " Networks that magnify rounding (batch norms over few samples, relus near zero) differ by that much from "
            "themselves in other orders of addition; train.precision=fp64 tells which it is."
        )
        raise RunFailed(
            f"verify: the sharded run differs from one process beyond {comparison.tolerance:g} (see the table above "
            f"and {run_dir / 'verify.json'}). `run explain` shows how each operator is sliced."
            + rounded
            * (precision != "fp64" and comparison.worst < MAGNIFIED)
        )
    return comparison.worst


def _changed(config: Config, **sections: dict[str, Any]) -> Config:
    """`config` with the steps of verification and `sections` changed; without evaluation and checkpoints."""
    content = config.model_dump(mode="json")
    content["train"] |= {"steps": config.verify.steps, "epochs": None, "resume": None, "log_every": 1}
    content["evaluate"] |= {"metric": None, "every": None, "args": {}, "batch_size": None}
    content["checkpoint"] |= {"every": None, "minutes": None, "best": None, "best_mode": None, "at_end": False}
    content["report"] |= {"tensorboard": False, "progress": False}
    for name, values in sections.items():
        content[name] |= values
    return Config.model_validate(content)


def _reference(config: Config) -> Config:
    """The single-process run: the user's module, or the one-device module that a hybrid recipe names."""
    content = config.model_dump(mode="json")
    content["world_size"] = None
    content["train"]["accumulate"] = config.parts
    content["train"]["compile"] = False
    content["parallel"] |= {
        "mode": "stand_alone", "mesh": None, "strategies": {}, "layouts": {}, "set_data_parallel": [],
        "dataset_strategy": "data_parallel", "zero": {"stage": 0, "options": {}}, "recompute": "none",
        "memory_limit": None, "dump_ir": False,
        "comm_fusion": {kind: {"mode": "none", "config": None} for kind in content["parallel"]["comm_fusion"]},
        "place": {}, "copies": 1, "plan": None,
        "offload": {
            "optimizer": "none", "parameters": "none", "folder": None,
            "activations": {"to": "none", "modules": [], "larger_than": 0.0},
        },
        "pipeline": content["parallel"]["pipeline"] | {
            "stages": None, "virtual_stages": None, "micro_batches": None, "cuts": "auto",
        },
    }  # fmt: skip
    if config.verify.reference.target is not None:
        content["model"] |= {
            "target": config.verify.reference.target, "args": config.verify.reference.args,
            "config": None, "weights": None, "rename": [],
        }  # fmt: skip
    return Config.model_validate(content)


def compare(ours: Path, theirs: Path, tolerance: float, rounding: float) -> Comparison:
    """Compare the records of two runs. A reference gradient below `rounding` times the model's largest is rounding
    itself (a bias before a batch norm: truly zero), and is held to stay below that.

    Raises ConfigError where the models have different parameters.
    """
    import torch

    losses, relative, steps = 0.0, 0.0, 0
    gradients: dict[str, float] = {}
    for file in sorted(theirs.glob("step-*.pt")):
        truth, found = (torch.load(folder / file.name, weights_only=True) for folder in (theirs, ours))
        difference = abs(found["loss"] - truth["loss"])
        losses, relative = max(losses, difference), max(relative, _finite(difference / max(abs(truth["loss"]), 1e-30)))
        noise = rounding * max((_largest(one) for one in truth["gradients"].values()), default=0.0)
        for name, value in _differences(found["gradients"], truth["gradients"], noise, noise / tolerance).items():
            gradients[name] = max(gradients.get(name, 0.0), value)
        steps += 1
    found, truth = (torch.load(folder / "weights.pt", weights_only=True) for folder in (ours, theirs))
    return Comparison(losses, relative, gradients, _differences(found, truth), tolerance, steps)


def _differences(
    found: dict[str, Any], truth: dict[str, Any], noise: float = 0.0, scale: float = 0.0
) -> dict[str, float]:
    """Per tensor: max |found - truth| / max |truth|, or / `scale` where max |truth| is at most `noise`; 0 where both
    are equal, infinities included."""
    missing = sorted(set(found) ^ set(truth))
    if missing:
        raise ConfigError(
            f"verify: the two models have different parameters: {', '.join(missing)} in only one of them."
        )
    values = {}
    for name, expected in truth.items():
        if expected.shape != found[name].shape:
            raise ConfigError(
                f"verify: {name} has shape {tuple(found[name].shape)} sharded, {tuple(expected.shape)} in the "
                "reference."
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
    """nan counts as the largest difference."""
    return math.inf if math.isnan(value) else value


def table(comparison: Comparison) -> str:
    """The verdict and the worst offenders."""
    verdict = "passed" if comparison.passed else "FAILED"
    worst = sorted(comparison.grad_max_rel_diff.items(), key=lambda item: -item[1])[:WORST]
    width = max(len(name) for name, _ in worst) if worst else 0
    lines = [f"verify {verdict}: {comparison.steps} steps, tolerance {comparison.tolerance:g} relative"]
    lines.append(
        f"  loss: largest difference {comparison.loss_max_abs_diff:.2e} ({comparison.loss_max_rel_diff:.2e} relative)"
    )
    lines.append(f"  gradients of {len(comparison.grad_max_rel_diff)} parameters, the worst:")
    lines += [f"    {name:<{width}}  {value:.2e}" for name, value in worst]
    name, value = max(comparison.weight_max_rel_diff.items(), key=lambda item: item[1])
    lines.append(f"  weights after the last step, the worst: {name}  {value:.2e}")
    return "\n".join(lines)
