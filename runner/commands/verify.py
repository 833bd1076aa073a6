"""`run verify`: the same steps sharded and on one process, from the same weights and data; loss and gradients compared.

The single process runs the user's untouched eager module. Compared are the loss and the gradients of the full tensors
at every step, and the weights after the last: max |sharded - reference| / max |reference|, the largest over the steps.
A gradient that cancels out (a bias before a batch norm) is pure rounding error: if the reference's is below the
rounding of the model's largest one, both must be; every other gradient is compared relative to its magnitude. A running
mean is compared relative to the standard deviation: the mean of normalized values is pure rounding error, too. The
reference's optimizer is given the sharded run's gradients, so both stay at the same weights and rounding does not
compound (Adam turns noise around zero into full steps); a wrong update shows in the weights.

Some networks magnify rounding. Where a difference is beyond the tolerance of fp32, the single process runs again in
fp64, and in fp32 beyond that of half precision, from the same weights and with the same random numbers. That gives the
distance of the reference from the finer precision, per tensor; up to three times as much counts as rounding. It also
shows which small gradients cancel out: those are compared relative to the largest one. In fp64, where nothing is finer,
and in fp32 where fp64 does not explain it, the single process runs up to eight times more with weights a few
neighbouring numbers away, by which sums differ in another order: deep networks of batch norms over few rows magnify
that beyond 1e-10, and a relu at zero decides otherwise (1.3e-2 of a gradient of a small residual network).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from runner import launch
from runner.cli.run_folders import without_trace
from runner.commands.few_steps import few_steps
from runner.config.schema import Config
from runner.errors import ConfigError, RunFailed
from runner.launch.failure import NOT_FINITE
from runner.launch.temporary_folder import offload_folder
from runner.report.comparison import (
    FINER,
    LOSS,
    MAGNIFIED,
    MAGNIFIED_FP64,
    NEIGHBOUR,
    NUDGED,
    ROUNDING,
    SMALL,
    TIMES,
    TOLERANCE,
    Comparison,
    Differences,
    below,
    computes_in_less,
    differences,
    of_step,
    table,
)
from strategies.core.errors import StrategyError

ENTRY = "runner.training.trainer:train"
"""The entry of a rank."""


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
        without_trace(config, run_dir),
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
        wrong = _not_finite(lambda: start(entry, job, world_size=ranks, run_dir=run_dir, elastic=elastic))
        done = f"{config.verify.steps} steps on {ranks} ranks done" if wrong is None else "a number is not finite"
        print(f"verify: {done}; now the same on one process", flush=True)
        reference = prepare(_reference(prepared.config), None)
        (run_dir / "reference").mkdir(exist_ok=True)
        alone = partial(start, ENTRY, TrainingJob(reference, folder, None, theirs, ours), world_size=1)
        also = _not_finite(lambda: alone(run_dir=run_dir / "reference"))
        _check_finite(wrong, also)
        precision = config.train.precision
        tolerance = config.verify.tolerance or TOLERANCE[precision]
        published = prepared.published or frozenset()
        if precision == "fp16" and (overflowed := leave_out_overflows(ours, theirs)):
            print(f"verify: gradients of step {overflowed} overflow in fp16, so they are not compared", flush=True)
        comparison = compare(ours, theirs, tolerance, ROUNDING[precision], published)
        magnified = comparison.may_be_rounding and config.verify.tolerance is None
        kind: str = precision
        if magnified and precision == "fp64" and (less := computes_in_less(prepared.graph)) is not None:
            kind, where = less
            tolerance = TOLERANCE[kind]
            print(
                f"verify: a difference is beyond {TOLERANCE[precision]:g}, but the model itself computes in {kind} in "
                f"{where}; compared as that",
                flush=True,
            )
            comparison = compare(ours, theirs, tolerance, ROUNDING[kind], published)
            magnified = comparison.may_be_rounding
        others: list[str | int] = [FINER[precision]] if precision in FINER else []
        if kind == "fp32" or (kind == "fp64" and comparison.worst <= MAGNIFIED_FP64):
            others += NUDGED  # also where the finer precision does not run
        zero = frozenset[str]()
        for other in others if magnified else ():
            finer = other if isinstance(other, str) else None
            how = f"in {other}" if finer else f"with neighbouring weights (at most {len(NUDGED)} times)"
            print(f"verify: a difference is beyond {tolerance:g}; now the same on one process {how}", flush=True)
            try:
                if isinstance(other, str):
                    fine = prepare(_changed(reference.config, train={"precision": other}), None, say=lambda _: None)
                    fine = replace(fine, single_draws=True)
                else:
                    fine = replace(reference, nudged=(kind, other))
                job = TrainingJob(fine, folder, None, exact, ours)
                start(ENTRY, job, world_size=1, run_dir=run_dir / f"reference_{finer or 'neighbouring'}")
                if finer is not None:
                    zero = frozenset.intersection(*(below(one["gradients"], ROUNDING[finer]) for one in _steps(exact)))
                    comparison = compare(ours, theirs, tolerance, ROUNDING[kind], published, zero)
                rounding = compare(theirs, exact, tolerance, ROUNDING[kind], published, zero).differences
                comparison = comparison.measured(rounding, kind, finer)
                if comparison.passed:
                    break
            except (ConfigError, StrategyError, RunFailed) as error:
                unmeasured = str(error).partition("\n")[0]
                print(f"verify: one process {how} does not run: {unmeasured}", flush=True)
                if finer is None:
                    break
                comparison = replace(comparison, unmeasured=unmeasured, precision=kind, finer=finer)
    (run_dir / "verify.json").write_text(json.dumps(comparison.to_json(), indent=2) + "\n", encoding="utf-8")
    print(table(comparison))
    if not comparison.passed:
        raise RunFailed(
            "MW731",
            f"verify: the sharded run differs from one process beyond {comparison.tolerance:g} (see the table above "
            f"and {run_dir / 'verify.json'}). `run explain` shows how each operator is sliced."
            + _about_rounding(comparison),
        )
    return comparison.worst


def _not_finite(run: Callable[[], Any]) -> RunFailed | None:
    """The failure of a run in which a loss or gradient is not finite; None where all are."""
    try:
        run()
    except RunFailed as error:
        if error.code != NOT_FINITE:
            raise
        return error
    return None


def leave_out_overflows(ours: Path, theirs: Path) -> str:
    """Take the gradients of steps that overflow out of the records; returns the numbers of these steps. Ranks overflow
    in other steps than one process, as ZeRO averages over them: neither is wrong, and such steps are skipped.

    Raises:
        RunFailed: all do.
    """
    import torch

    from strategies.runtime.tensor_files import save

    files = {int(file.stem.removeprefix("step-")): file for file in theirs.glob("step-*.pt")}
    left_out = []
    for number, file in sorted(files.items()):
        records = {folder / file.name: torch.load(folder / file.name, weights_only=True) for folder in (ours, theirs)}
        gradients = [one for record in records.values() for one in record["gradients"].values()]
        if not all(bool(one.isfinite().all()) for one in gradients):
            left_out.append(number)
            for path, record in records.items():
                save(record | {"gradients": {}}, path)
    if len(left_out) == len(files):
        raise RunFailed(
            "MW731",
            "verify: gradients overflow in fp16 in every step, so there is nothing to compare; set train.loss_scale to "
            "a smaller number (where it is null, than 32768), or, where it is null, verify.steps to more.",
        )
    return ", ".join(map(str, left_out))


def _check_finite(sharded: RunFailed | None, alone: RunFailed | None) -> None:
    """Raises RunFailed where numbers of the sharded run or of one process are not finite, and says which."""
    if alone is not None:
        beside = "" if sharded is not None else " The sharded run has finite numbers."
        raise RunFailed(
            alone.code, f"verify: not finite on one process, so there is nothing to compare. {alone}{beside}"
        )
    if sharded is not None:
        raise RunFailed("MW731", f"verify: not finite in the sharded run alone; on one process all is. {sharded}")


def _about_rounding(comparison: Comparison) -> str:
    if comparison.rounding is not None:
        return (
            f" It is more than {TIMES:g} times the distance of one process from its own "
            f"{comparison.finer or NEIGHBOUR}, so it is not rounding alone."
        )
    if comparison.precision == "fp64" or comparison.worst >= MAGNIFIED:
        return ""
    text = (
        " Networks that magnify rounding (batch norms over few samples, relus near zero) differ by that much from "
        "themselves in other orders of addition; "
    )
    if comparison.unmeasured is None:
        return text + "train.precision=fp64 shows which it is."
    return (
        f"{text}by how much this one does is not known, because it does not run in {comparison.finer}: "
        f"{comparison.unmeasured}"
    )


def _changed(config: Config, **sections: dict[str, Any]) -> Config:
    """`config` with the steps of verification and `sections` changed; without evaluation and checkpoints."""
    content = few_steps(config, config.verify.steps, 1)
    for name, values in sections.items():
        content[name] |= values
    return Config.model_validate(content)


def _reference(config: Config) -> Config:
    """The single-process run: the user's module, or the one-device module that a hybrid recipe names."""
    content = config.model_dump()
    content["world_size"] = None
    content["train"]["accumulate"] = config.parts
    content["train"]["compile"] = False
    content["cluster"]["groups"] = []
    content["parallel"] = {"comm_fusion": {kind: {"mode": "none"} for kind in content["parallel"]["comm_fusion"]}}
    if config.verify.reference.target is not None:
        content["model"] = content["verify"]["reference"]
    return Config.model_validate(content)


def compare(
    ours: Path, theirs: Path, tolerance: float, rounding: float, published: Set[str], zero: Set[str] = frozenset()
) -> Comparison:
    """Compare the records of two runs; see `of_step`. `published` are the names of the model's state dict: of other
    buffers, a graph lacks those that it computes anew in every step. Raises ConfigError where the models have different
    parameters."""
    import torch

    absolute, steps, small = 0.0, 0, frozenset[str]()
    found: Differences = {LOSS: 0.0}
    for sharded, truth in zip(_steps(ours, theirs), _steps(theirs), strict=True):
        if not sharded["gradients"]:
            truth |= {"gradients": {}}
        gap, of_this = of_step(sharded, truth, tolerance, rounding, zero)
        absolute, small = max(absolute, gap), small | below(truth["gradients"], SMALL)
        found |= {key: max(found.get(key, 0.0), value) for key, value in of_this.items()}
        steps += 1
    sharded, truth = (torch.load(folder / "weights.pt", weights_only=True) for folder in (ours, theirs))
    truth = {name: tensor for name, tensor in truth.items() if name in sharded or name in published}
    weights = {("weight", name): value for name, value in differences(sharded, truth).items()}
    return Comparison(absolute, {**found, **weights}, tolerance, steps, small=small)


def _steps(records: Path, like: Path | None = None) -> Iterator[dict[str, Any]]:
    """The record of every step, or of every one that `like` has."""
    import torch

    for file in sorted((like or records).glob("step-*.pt")):
        yield torch.load(records / file.name, weights_only=True)
