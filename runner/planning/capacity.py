"""Checks that this machine has the resources for a run: processes, then the model, then the plan.

Only lower bounds are counted, so that no run is rejected that would fit: before the plan is known, every tensor once. A
run that is too large ends with one paragraph, before anything starts; otherwise the kernel would kill a process
silently. In a container the limits of its control groups apply (versions 1 and 2, at every visible level). Without
/proc, nothing is rejected.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from runner.build import optimizers
from runner.build.modules import DTYPES, build
from runner.config.schema import Config
from runner.errors import ConfigError
from runner.planning import lowering
from runner.planning.clusters import DESCRIBING
from runner.planning.prepare import Prepared
from strategies.capture.shapes import shapes_only
from strategies.core.errors import StrategyError

RANK, DEEPSPEED = 40 * 10**6, 40 * 10**6
"""Bytes that a rank takes for itself before it holds a tensor, and more with DeepSpeed. Measured: 35 MB and 80 MB of
private memory."""
THREADS = 6
"""Of a rank: its own, those of autograd, and those of a group of gloo."""
FILES = 32
"""That a rank holds open beside its connections, of which it has one to every other rank."""
ROOT = Path("/")
TRY_ANYWAY = "launch.check_memory=false tries it all the same."


def ranks_here(config: Config, world_size: int) -> int:
    """How many of the ranks are processes that this command forks."""
    return world_size if config.launch.launcher == "local" else 0


def check_processes(config: Config, world_size: int) -> None:
    """Raises ConfigError for more ranks than this machine can have processes, or empty ones in memory."""
    count = ranks_here(config, world_size)
    if not _checked(config) or count < 2:
        return
    each, threads = _empty(config), count * THREADS
    for limit, needed, code, why in (
        (memory_at_hand(), count * each, "MW503",
         f"a rank takes {_size(each)} of memory before it holds anything, all of them {_size(count * each)}, and {{}} "
         "are at hand."),
        (threads_at_hand(), threads, "MW504", f"a rank has {THREADS} threads or more, all of them {threads}, and the "
         "kernel or a control group has room for {}."),
        (own_processes(), threads, "MW504", f"a rank has {THREADS} threads or more, all of them {threads}, and this "
         "user may have (ulimit -u) {}."),
        (open_files(), count + FILES, "MW504", "a rank is connected to each of the others, and a process may hold {} "
         "files open; raise that (ulimit -n)."),
    ):  # fmt: skip
        if limit is not None and needed > limit:
            raise ConfigError(
                code,
                f"world_size = {count} is too large for this machine: "
                f"{why.format(_size(limit) if code == 'MW503' else limit)} Set a smaller world_size, or start the "
                f"ranks on more hosts (launch=torchrun, slurm, mpirun, ...). {TRY_ANYWAY}",
            )


def check_model(config: Config, device: str, world_size: int) -> None:
    """Raises ConfigError where the model cannot be built, trained or verified within the memory at hand, whatever the
    plan. The model is built from shapes alone; one that reads numbers while it is built is not checked."""
    room = memory_at_hand()
    if not _checked(config) or room is None:
        return
    try:
        with shapes_only():
            model, _ = build(config)
    except ConfigError:
        return  # reported when it is built for real
    tensors = [*model.parameters(), *model.buffers()]
    weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    learning = sum(one.numel() for one in model.parameters() if one.requires_grad)
    size = DTYPES[config.train.precision].itemsize
    try:
        states = optimizers.need_of(config.optimizer).kept * max(1.0, size / 4) + 4 * (size < 4)  # with fp32 weights
    except StrategyError:
        states = 0.0  # an unknown optimizer
    gradients, updated = (learning * size, int(learning * states)) if config.job.name != "predict" else (0, 0)
    needs = {"building it": weights}
    count = ranks_here(config, world_size) if device == "cpu" and not config.parallel.offload.on_disk else 0
    if count:
        replicated = config.parallel.mode == "data_parallel" and not config.parallel.zero_or_pipeline_open
        stage = config.parallel.zero.known if replicated else 3
        replicas = max(1, count // lowering.pipeline_groups(config))
        resident = weights * (replicas if stage < 3 else 1) + gradients * (replicas if stage < 2 else 1)
        resident += updated * (replicas if stage < 1 else 1)
        needs[f"its {count} rank{'s' * (count > 1)}"] = count * _empty(config) + resident
    if config.job.name == "verify" and device == "cpu":
        needs["the one process that verify compares with"] = weights + gradients + updated
    if max(needs.values()) > room:
        listed = ", ".join(f"{what} at least {_size(need)}" for what, need in needs.items())
        elements = sum(one.numel() for one in model.parameters())
        raise ConfigError(
            "MW503",
            f"model.target = {config.model.target!r} is too large for this machine: its {elements:,} parameters in "
            f"{config.train.precision} need memory for {listed}, and {_size(room)} are at hand. Use a smaller model, "
            "more hosts (launch=torchrun, slurm, mpirun, ...), or `run plan` for a described cluster needs none. "
            f"{TRY_ANYWAY}",
        )


def room_of_a_rank(config: Config, device: str, world_size: int) -> float:
    """Bytes that this machine has for the step of each rank; infinity where nothing says so, or a step is elsewhere."""
    count, room = ranks_here(config, world_size), memory_at_hand()
    if device != "cpu" or room is None or not count or not _checked(config):
        return math.inf
    return room / count - _empty(config)


def check_plan(prepared: Prepared, content: Mapping[str, Any] | None) -> None:
    """Raises ConfigError where ranks that follow the plan with this `content` (of plan.json) do not fit."""
    config, room = prepared.config, memory_at_hand()
    count = ranks_here(config, prepared.world_size)
    if content is None or not _checked(config) or room is None or not count or prepared.device != "cpu":
        return
    groups = content["pipeline"]["memory"] if "pipeline" in content else [content["memory"]]
    peak = sum(group["peak"] for group in groups) * (count // len(groups))
    if kinds := content.get("kinds"):
        peak = sum(len(kind["ranks"]) * kind["memory"]["peak"] for kind in kinds)
    need = peak + count * _empty(config)
    if need > room:
        raise ConfigError(
            "MW503",
            f"this plan is too large for this machine: {count} rank{'s' * (count > 1)} on it take {_size(need)} at the "
            f"peak of a step (the fullest {_size(content['memory']['peak'])}), and {_size(room)} are at hand. Use "
            "fewer ranks, smaller micro-batches (train.accumulate), parallel.recompute=full, another "
            f"parallel.zero.stage, or more hosts. {TRY_ANYWAY}",
        )


def _checked(config: Config) -> bool:
    return config.launch.check_memory and config.job.name not in DESCRIBING


def _empty(config: Config) -> int:
    return RANK + (DEEPSPEED if config.parallel.zero.known and config.zero_engine == "deepspeed" else 0)


def _size(count: float) -> str:
    if count >= 1e11:
        return f"{count / 1e9:,.0f} GB"
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


# The machine


def memory_at_hand(root: Path = ROOT) -> int | None:
    """Bytes that new processes can allocate before the OOM killer acts; None if unknown."""
    found = _fields(root / "proc/meminfo")
    if "MemAvailable" not in found:
        return None
    free = [1024 * (found["MemAvailable"] + found.get("SwapFree", 0))]
    for folder in _groups(root, "memory"):
        for limit, used, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, now = _number(folder / limit), _number(folder / used)
            if most is not None and now is not None:
                free.append(most - now + _fields(folder / "memory.stat").get(cache, 0))
    return max(0, min(free))


def threads_at_hand(root: Path = ROOT) -> int | None:
    """How many more threads, of any processes, the kernel allows; None if unknown."""
    try:
        now = int((root / "proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[2])
    except (OSError, ValueError, IndexError):
        return None
    most = [_number(root / "proc/sys/kernel" / name) for name in ("threads-max", "pid_max")]
    free = [one - now for one in most if one is not None]
    for folder in _groups(root, "pids"):
        limit, used = _number(folder / "pids.max"), _number(folder / "pids.current")
        if limit is not None and used is not None:
            free.append(limit - used)
    return max(0, min(free)) if free else None


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control groups that may limit what `controller` counts, up to the outermost."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        inner = top / path.lstrip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder == top or top in folder.parents)


def _number(file: Path) -> int | None:
    """The number in a file; None where there is none, or `max`."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdigit() else None


def _fields(file: Path) -> dict[str, int]:
    """The first number of every line, by its first word."""
    try:
        lines = [line.split() for line in file.read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return {}
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def open_files() -> int | None:
    """How many files and connections a process may hold open; None for any number."""
    return _soft_limit(resource.RLIMIT_NOFILE)


def own_processes() -> int | None:
    """How many threads this user may have in all; None for any number, which is root's."""
    return None if os.geteuid() == 0 else _soft_limit(resource.RLIMIT_NPROC)


def _soft_limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft
