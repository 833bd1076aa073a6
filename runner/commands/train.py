"""`run train`: prepare once, start the ranks, train."""

from __future__ import annotations

import json
import math
import shlex
import signal
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

from runner import launch
from runner.cli.arguments import DRY_RUN
from runner.cli.run_folders import START, remove_if_unused, without_trace
from runner.config.schema import Config
from runner.errors import ConfigError, RunFailed, Stopped
from runner.launch import logs
from runner.launch.interrupts import Interrupts
from runner.launch.launchers.commands import LAUNCHERS, Started
from runner.launch.launchers.host_assignment import meeting
from runner.launch.launchers.start import check, described
from runner.launch.startup import begin, marked
from runner.launch.temporary_folder import offload_folder, own_folder
from runner.recovery import restarting
from runner.report.units import shown_path
from runner.run_folder import RESCUED
from runner.run_folder.metrics import records
from runner.training.loggers import require_loggers


def run(config: Config, run_dir: Path) -> float | None:
    """Train. Returns the last loss. Raises ConfigError, StrategyError (wrong input), RunFailed (a rank failed)
    and Stopped (SIGTERM, SIGINT, SIGHUP)."""
    marks = marked(begin(), "config")
    require_loggers(config)
    if config.launch.dry_run:
        dry_run(config, run_dir)
        return None
    if submits(config):
        submit(config, run_dir)
        return None
    launch.warm()
    with (
        logs.console_may_close(),
        without_trace(config, run_dir),
        own_folder(run_dir, START) as folder,
        offload_folder(config, run_dir) as offload,
    ):
        payload = {"folder": str(folder), "marks": marks, "offload": offload}
        try:
            result = restarting.train(config, run_dir, payload)
        except RunFailed:
            if any((run_dir / "checkpoints").glob(RESCUED)):
                print("checkpoint: ranks have saved what was trained; train.resume=auto goes on from it", flush=True)
            raise
        if result is not None and result["stopped"] is not None:
            raise stopped(result["stopped"], Interrupts.requested or result["signal"])
        return _ended(result, run_dir)


def _ended(result: dict[str, Any] | None, run_dir: Path) -> float | None:
    """Print how a run has ended. Returns the loss of its last evaluation, or of its last step if it has none, which a
    sweeper such as Optuna minimises; None where another command has it."""
    if result is None:
        print("done: the ranks of this command; the output of rank 0 is where it was started", flush=True)
        return None
    if result["memory"] is not None:
        print(memory_of(result["memory"], run_dir), flush=True)
    result = with_recorded(result, run_dir)
    print(ending(result, run_dir), flush=True)
    loss: float = result["evaluation"].get("loss", result["loss"])
    return loss


def with_recorded(result: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """`result` with loss and evaluation of the last step from metrics.jsonl, if no step was left to run."""
    if not math.isnan(result["loss"]):
        return result
    last = [record for record in records(run_dir) if record["step"] == result["steps"]]
    return result | {key: one[key] for one in last for key in ("loss", "evaluation") if one.get(key) is not None}


def ending(result: dict[str, Any], run_dir: Path) -> str:
    """The last line of a training run."""
    scores = [f"loss {result['loss']:.6g}"] + [
        f"test {name} {value:.4g}" for name, value in result["evaluation"].items()
    ]
    return f"done: {result['steps']} steps, {', '.join(scores)}; results in {shown_path(run_dir)}"


def stopped(step: int, number: int) -> Stopped:
    """The exception for a run that the signal `number` has stopped after `step`."""
    name = signal.Signals(number).name
    if not step:
        return Stopped(f"stopped by {name} before the first step; nothing was trained, so run it again.", number)
    return Stopped(f"stopped by {name} after step {step}, which is saved.", number, saved=True)


def memory_of(measured: list[dict[str, Any]], run_dir: Path) -> str:
    """Write memory.json: each rank's measured memory, next to the plan's prediction. Returns a line about it."""
    plan = run_dir / "plan.json"
    predicted = json.loads(plan.read_text(encoding="utf-8"))["memory"] if plan.exists() else None
    content = {"predicted": predicted, "measured": measured}
    (run_dir / "memory.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    most = max(measured, key=lambda one: one["peak"])
    comparison = "" if predicted is None else f", predicted {predicted.get('peak', predicted['total']):,}"
    return f"memory of the fullest rank: at most {most['peak']:,} bytes, in {most['peak_in']}{comparison}"


FOLDER = "join"
"""Stands for the folder that a run makes for its ranks, whose name differs every time."""


def submits(config: Config) -> bool:
    """Whether the launcher hands over a job for other machines."""
    return config.launch.launcher != "local" and LAUNCHERS[config.launch.launcher].submits


def submit(config: Config, run_dir: Path) -> None:
    """Write the description of a job into the run folder and hand it over. Raises ConfigError where the program is
    missing, RunFailed where it refuses."""
    check(config.launch)
    started = _started(config, run_dir.absolute())
    for name, content in started.files.items():
        (run_dir / name).write_text(content, encoding="utf-8")
    for command in started.commands:
        print(shlex.join(command.words), flush=True)
        if code := subprocess.run(command.words).returncode:
            raise RunFailed(
                "MW863",
                f"launch = {config.launch.launcher!r}: {command.words[0]} ended with exit code {code}; it says why "
                f"above. The job is described in {', '.join(started.files)} of {shown_path(run_dir)}.",
            )
    print(f"submitted; the job is described in {', '.join(started.files)} of {shown_path(run_dir)}")


def _started(config: Config, folder: Path) -> Started:
    """What the launcher starts, for inputs in `folder`. No machine is looked at."""
    typed = tuple(word for word in sys.argv[1:] if word != DRY_RUN and not word.startswith("job="))
    site = meeting(config.launch, resolve=False)
    return described(config.launch, _world_size(config), folder, site, typed, config.device)


def dry_run(config: Config, run_dir: Path) -> None:
    """Print the commands, files and scripts of the launch. Raises ConfigError where the number of ranks is open."""
    if config.launch.launcher == "local" or config.launch.by_hand:
        print("the ranks are forks of this command; nothing else is started")
    else:
        folder = run_dir.absolute() if submits(config) else run_dir.absolute() / FOLDER
        print(_listed(_started(config, folder), folder))
    remove_if_unused(run_dir)


def _world_size(config: Config) -> int:
    """The number of ranks, without probing the machine."""
    if config.parallel.mode == "stand_alone":
        return 1
    if config.world_size is not None:
        return config.world_size
    for _, shape in config.parallel.meshes():
        return prod(shape) * (config.parallel.pipeline.known or 1)
    raise ConfigError(
        "MW704",
        "world_size is null, so the number of ranks is that of the devices at hand; a launcher needs it: set "
        "world_size=N or launch.hosts.",
    )


def _listed(started: Started, folder: Path) -> str:
    """The commands by host, ready for a shell; then the files written beforehand, and the script."""
    lines = []
    for command in started.commands:
        if command.host is None:
            lines += ["# on this machine", shlex.join(command.words)]
        else:
            lines += [f"# on {command.host}", command.shell(Path.cwd())]
    for name, content in started.files.items():
        lines += [f"# {folder / name}", content.rstrip()]
    if started.script is not None:
        lines += ["# or a script for sbatch", started.script.rstrip()]
    return "\n".join(lines)
