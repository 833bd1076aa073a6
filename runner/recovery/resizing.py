"""Going on with fewer ranks, with more again, or on a spare host: the config of such a run, and its plan, which is
searched anew where the number of ranks is another one.

The configured strategies are kept if they fit the number of ranks; otherwise the plan is searched. The global batch
size does not change. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from runner.config.launch import Host
from runner.config.schema import Config
from runner.errors import ConfigError
from runner.launch.launchers.start import Ready, make_ready
from strategies.core.errors import StrategyError

Resized = tuple[Config, Ready]


def resized(
    config: Config,
    counts: Sequence[int],
    lost: Collection[str],
    run_dir: Path,
    folder: Path,
    pipeline: tuple[int, int],
    failed: int | None = None,
) -> Resized:
    """The run of the first number of ranks in `counts` that can be prepared without the hosts `lost`, and without the
    device of the rank `failed`.

    Args:
        config: of the complete run.
        pipeline: the stages and micro-batches of the run until now, as `Ready` has them.
        run_dir: the folder to which plan.json goes.
        folder: the temporary folder to which the preparation goes.

    Returns:
        Its config and its preparation.

    Raises:
        ConfigError: there is none; with the reason for each number of ranks.
        RunFailed: as `make_ready`.
    """
    refused = []
    for count in counts:
        why = ""
        for values in candidates(config, count, lost, pipeline, failed):
            try:
                smaller_config = Config.model_validate(values)
                return smaller_config, make_ready(smaller_config, run_dir, folder)
            except ValidationError as error:
                problems = error.errors()
                why = "; ".join(str(p.get("ctx", {}).get("text") or f"{p['loc']}: {p['msg']}") for p in problems)
            except (ConfigError, StrategyError) as error:
                why = str(error)
        refused.append(f"With {count} ranks: {why}")
    least = f"launch.min_ranks = {config.launch.min_ranks}, but fewer are left."
    raise ConfigError("MW708", " ".join(refused) or least)


def candidates(
    config: Config,
    count: int,
    lost: Collection[str] = (),
    pipeline: tuple[int, int] = (1, 1),
    failed: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Values of a `Config` for `count` ranks, none on a host of `lost` or the device of the rank `failed`, the closest
    to `config` first: with its own strategies or with those that a search finds, each with its `pipeline` (stages,
    micro-batches) and then without. A step has as many micro-batches as before: sums, batch norms and random numbers
    are those of each."""
    own = config.model_dump()
    own["train"]["resume"] = "auto"
    if count == config.world_size and not lost:
        yield own
    own["world_size"] = count
    own["parallel"] |= {"mesh": None, "plan": None}
    own["launch"] |= {
        "hosts": hosts_left(own["launch"]["hosts"], count, lost, failed),
        "devices": devices_left(config, count, failed),
        "hostfile": None,
        "rank_table": None,
        "faults": [fault for fault in own["launch"]["faults"] if fault["rank"] < count],
    }
    searched = {
        "mode": "auto",
        "search": "recursive_programming",
        "strategies": {},
        "layouts": {},
        "set_data_parallel": [],
        "dataset_strategy": "data_parallel",
    }
    plans = [own["parallel"]]
    if config.parallel.mode != "hybrid":  # a hybrid module has its own collectives: there is no plan to search
        plans.append(own["parallel"] | searched)
    stages, parts = pipeline
    if stages > 1:
        kept = own["parallel"]["pipeline"] | {"stages": stages, "micro_batches": parts}
        for plan in plans:
            yield own | {"parallel": plan | {"pipeline": kept}}
    without: dict[str, Any] = {"pipeline": {}}
    if config.parallel.recompute.operators == "auto" and config.parallel.memory_limit is None and stages > 1:
        without["recompute"] = {}  # auto was a decision about the stages
    train = own["train"] | {"accumulate": config.train.accumulate * parts}
    for plan in plans:
        yield own | {"parallel": plan | without, "train": train}


def with_standby(config: Config, lost: Collection[str]) -> Config | None:
    """The config with a spare host in the place of each host that is lost; None where `launch.standby` has not enough
    of them, or none with as many ranks."""
    hosts, spare = list(config.launch.hosts), list(config.launch.standby)
    for place, host in enumerate(hosts):
        if host.name not in lost:
            continue
        found = next((one for one in spare if len(one.ranks) >= len(host.ranks)), None)
        if found is None:
            return None
        spare.remove(found)
        hosts[place] = Host(name=found.name, ranks=host.ranks, devices=found.devices[: len(host.ranks)])
    launch = config.launch.model_copy(update={"hosts": tuple(hosts), "standby": tuple(spare)})
    return config.model_copy(update={"launch": launch}) if lost else None


def devices_left(config: Config, count: int, failed: int | None) -> tuple[int, ...]:
    """The first `count` devices of this machine but that of the rank `failed`; () where they are not ours to choose."""
    devices = config.launch.devices
    if config.launch.launcher != "local" or (failed is None and not devices):
        return ()
    devices = devices or (*range(config.world_size or 1 + max(count, failed or 0)),)
    return tuple(device for rank, device in enumerate(devices) if rank != failed)[:count]


def hosts_left(
    hosts: Iterable[Mapping[str, Any]], count: int, lost: Collection[str], failed: int | None = None
) -> list[dict[str, Any]]:
    """The hosts that are not `lost`, with the first `count` of their ranks but `failed`, numbered anew in the same
    order."""
    left = [host for host in hosts if host["name"] not in lost]
    stay = sorted(rank for host in left for rank in host["ranks"] if rank != failed)
    numbers = {rank: new for new, rank in enumerate(stay[:count])}
    numbered = []
    for host in left:
        chosen = [
            (numbers[rank], device)
            for rank, device in zip(host["ranks"], host["devices"], strict=True)
            if rank in numbers
        ]
        if chosen:
            ranks, devices = zip(*chosen, strict=True)
            numbered.append({"name": host["name"], "ranks": ranks, "devices": devices})
    return numbered
