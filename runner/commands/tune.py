"""`run tune`: the best plans of the search, measured.

The search decides by predicted seconds. Its best plan and those that differ from it in one decision (the mesh, the
stage of ZeRO, the stages of a pipeline, recompute), each the search's best with that decision given, are
sorted by prediction; the first few that fit are trained for a few real steps, one after the other. The fastest is kept.
"""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from runner import launch
from runner.cli.run_folders import without_trace
from runner.commands import train
from runner.commands.few_steps import few_steps
from runner.config.schema import Config
from runner.errors import ConfigError, RunFailed
from runner.launch.startup import begin
from runner.report.units import shown_path, shown_seconds, text_table
from runner.run_folder.metrics import records
from strategies.core.errors import StrategyError

RECOMPUTES = ("none", "selective", "full")
WARMUP = 2
"""Steps before those that are timed: the first one creates the optimizer's states."""


@dataclass
class Candidate:
    """A plan to try.

    Attributes:
        keys: what differs from the config of the command, as overrides.
        config: in which nothing is open.
        content: that of plan.json.
        seconds: measured per step; None before that, and where the run failed.
        failure: why it did.
    """

    keys: dict[str, Any]
    config: Config
    content: dict[str, Any]
    seconds: float | None = None
    failure: str | None = None

    @property
    def predicted(self) -> float:
        seconds: float = self.content["cost"]["total"]
        return seconds

    @property
    def fits(self) -> bool:
        prediction = self.content["prediction"]
        return bool(prediction["memory"] <= prediction["memory_limit"])

    def to_json(self) -> dict[str, Any]:
        measured = {"measured": self.seconds, "failure": self.failure, "mesh": self.content["mesh"]}
        return {"keys": self.keys, "predicted": self.predicted, **measured}


def run(config: Config, run_dir: Path) -> float | None:
    """Try plans; write the fastest as plan.json and all as tune.json. Returns its measured seconds per step.

    Raises:
        ConfigError: The mode has no plan, so there is nothing to choose.
        RunFailed: No plan could be trained.
    """
    begin()  # the runs that it starts are jobs of their own, whose time does not begin with this process
    if config.parallel.mode in ("stand_alone", "hybrid", "parameter_server"):
        raise ConfigError(
            "MW861",
            f"tune compares plans, and parallel.mode = {config.parallel.mode} has none to choose between; use "
            "parallel.mode=auto.",
        )
    launch.warm()
    with without_trace(config, run_dir):
        found = sorted(candidates(config), key=lambda one: one.predicted)
        chosen = list(islice((one for one in found if one.fits), config.tune.plans))
        if not chosen:
            needed = min(one.content["prediction"]["memory"] for one in found)
            raise ConfigError(
                "MW861",
                f"tune: none of {len(found)} plans fits into the memory of a device; the smallest needs {needed:,} "
                "bytes. `run plan` says what would help.",
            )
        print(f"tune: {len(found)} plans, of which {len(chosen)} are tried for {config.tune.steps} steps", flush=True)
        for number, one in enumerate(chosen, 1):
            print(f"tune: plan {number}, {shown(one.keys)}: predicted {shown_seconds(one.predicted)}", flush=True)
            folder = run_dir / "tried" / str(number)
            folder.mkdir(parents=True)
            try:
                one.seconds = measured(one.config, folder)
            except (RunFailed, StrategyError) as error:
                one.failure = str(error).partition("\n")[0]
                print(f"tune: plan {number} failed: {error}", flush=True)
        return report(chosen, run_dir)


def candidates(config: Config) -> Iterator[Candidate]:
    """The search's best plan, and those with one other decision, each layout once. Raises as `prepare_decided`."""
    from runner.planning.joint import prepare_decided
    from runner.report.plan_files import plan_content

    content = _short(config)
    best = prepare_decided(Config.model_validate(content), None)
    decided = best.config.model_dump()
    seen = set()
    for number, keys in enumerate(({}, *_others(config, best))):
        try:
            prepared = best if not number else prepare_decided(_with(decided, keys), None, say=lambda _: None)
        except (ConfigError, StrategyError):  # such a choice has no plan
            continue
        plan, _ = plan_content(prepared)
        slices = [(one["in_strategy"], one["out_strategy"]) for one in plan["operators"]]
        again = sorted((plan.get("recompute") or {}).get("modules", ()))
        decisions = prepared.config.parallel.zero.stage, prepared.config.parallel.pipeline.stages, again
        mark = json.dumps([slices, decisions, round(plan["cost"]["total"], 9)])
        if mark not in seen:
            seen.add(mark)
            yield Candidate(_decisions(config, prepared.config) | keys, prepared.config, plan)


def _short(config: Config) -> dict[str, Any]:
    """The content of the config of a few steps, which leave nothing but their times."""
    steps = WARMUP + config.tune.steps
    content = few_steps(config, steps, steps)
    content["launch"] |= {"faults": (), "max_restarts": 0, "min_ranks": None, "max_ranks": None, "rescue": False}
    content["job"] = {"name": "train"}
    return content


def _others(config: Config, best: Any) -> Iterator[dict[str, Any]]:
    """Every other value of each decision that the config leaves to the search, the others as in the best plan."""
    from runner.planning.clusters import cluster_of
    from strategies.core.mesh import Mesh, primes
    from strategies.search.mesh_choice import factorisations

    parallel, decided = config.parallel, best.config.parallel
    stages = decided.pipeline.known or 1
    if parallel.mesh is None and parallel.mode != "data_parallel" and parallel.plan is None:
        ranks = best.world_size // stages
        mesh = Mesh(tuple((f"p{place}", size) for place, size in enumerate(primes(ranks))))
        for runs in factorisations(mesh, cluster_of(best.config, best.device, best.world_size)):
            yield {"parallel.mesh": {f"d{place}": mesh.product(run) for place, run in enumerate(runs)}}
    if parallel.zero.stage == "auto":
        yield from ({"parallel.zero.stage": stage} for stage in range(4))
    if parallel.recompute.operators == "auto":
        yield from ({"parallel.recompute": mode} for mode in RECOMPUTES)
    if parallel.pipeline.stages == "auto":
        counts = [count for count in range(2, best.world_size + 1) if best.world_size % count == 0]
        yield from ({"parallel.pipeline.stages": count, "parallel.pipeline.micro_batches": "auto"} for count in counts)
        yield {"parallel.pipeline.stages": None, "parallel.pipeline.micro_batches": None}


def _with(decided: Mapping[str, Any], keys: Mapping[str, Any]) -> Config:
    """The decided config with other values for some keys. Raises ConfigError where they exclude each other."""
    content = json.loads(json.dumps(decided))
    for key, value in keys.items():
        *path, last = key.split(".")
        section = content
        for name in path:
            section = section[name]
        section[last] = value
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        raise ConfigError("MW205", *(one["msg"] for one in error.errors())) from None


def _decisions(config: Config, decided: Config) -> dict[str, Any]:
    """What was decided for keys that the config leaves open."""
    found: dict[str, Any] = {}
    if config.parallel.zero.stage == "auto":
        found["parallel.zero.stage"] = decided.parallel.zero.stage
    if config.parallel.pipeline.open:
        found["parallel.pipeline.stages"] = decided.parallel.pipeline.stages
        found["parallel.pipeline.micro_batches"] = decided.parallel.pipeline.micro_batches
    if config.parallel.recompute.operators == "auto":
        found["parallel.recompute"] = decided.parallel.recompute.operators
    return found


def measured(config: Config, folder: Path) -> float:
    """Train a few steps in `folder`; returns the median seconds of a step, the first ones left out, without the wait
    for its rows, which no plan changes."""
    train.run(config, folder)
    seconds: list[float] = [one["seconds"] - one["data_seconds"] for one in records(folder) if "seconds" in one]
    return statistics.median(seconds[WARMUP:])


def report(tried: list[Candidate], run_dir: Path) -> float:
    """Write plan.json and tune.json, and print what was found. Returns the seconds of the fastest plan.

    Raises:
        RunFailed: All have failed.
    """
    ended = [(one.seconds, number) for number, one in enumerate(tried) if one.seconds is not None]
    content: dict[str, Any] = {"plans": [one.to_json() for one in tried], "kept": min(ended)[1] if ended else None}
    (run_dir / "tune.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if not ended:
        raise RunFailed("MW862", f"tune: none of {len(tried)} plans could be trained; the first: {tried[0].failure}")
    seconds, kept = min(ended)
    shutil.copyfile(run_dir / "tried" / str(kept + 1) / "plan.json", run_dir / "plan.json")
    rows = [("plan", "mesh", "decisions", "predicted", "measured", "measured / predicted", "")]
    for number, one in enumerate(tried):
        mesh = " x ".join(map(str, one.content["mesh"].values()))
        times = (
            ("failed", "")
            if one.seconds is None
            else (shown_seconds(one.seconds), f"{one.seconds / one.predicted:.2f}")
        )
        own = " ".join(_overrides({key: value for key, value in one.keys.items() if key != "parallel.mesh"}))
        rows.append((str(number + 1), mesh, own, shown_seconds(one.predicted), *times, "kept" * (number == kept)))
    print(text_table(rows))
    ratios = [one.seconds / one.predicted for one in tried if one.seconds is not None]
    first = tried[0].seconds
    lost = "" if first is None or not kept else f"; the search's own first choice takes {first / seconds - 1:.1%} more"
    print(
        f"prediction: a step takes {statistics.median(ratios):.2f} times what was predicted in the median, from "
        f"{min(ratios):.2f} to {max(ratios):.2f} times{lost}"
    )
    others = {key: value for key, value in tried[kept].keys.items() if key != "parallel.mesh"}
    plan = shown_path(run_dir / "plan.json")
    print(f"kept: {plan}; train with it: {' '.join(['parallel.plan=' + plan, *_overrides(others)])}")
    return seconds


def shown(keys: Mapping[str, Any]) -> str:
    """Decisions as overrides; none are those of the config."""
    return " ".join(_overrides(keys)) or "as configured"


def _overrides(keys: Mapping[str, Any]) -> list[str]:
    def written(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{name}:{size}" for name, size in value.items()) + "}"
        return "null" if value is None else str(value)

    return [f"{key}={written(value)}" for key, value in keys.items()]
