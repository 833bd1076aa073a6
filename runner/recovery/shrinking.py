"""Going on with fewer ranks: the config of a smaller run, and its plan, which is searched anew.

What was configured is kept as far as it fits the smaller number; else the plan is whatever the search finds for it. The
batch of a step is that of the whole run before and after. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from runner.errors import ConfigError
from runner.schema import Config
from runner.start import Ready, make_ready
from strategies.errors import StrategyError


def smaller(
    config: Config, ranks: int, lost: Collection[str], run_dir: Path, folder: Path
) -> tuple[Config, Ready] | None:
    """The largest run of at most `ranks` ranks, and no fewer than launch.min_ranks, that can be prepared without the
    hosts `lost`: its config and its preparation, which goes to `folder`. None if there is none."""
    least = config.launch.min_ranks
    assert least is not None
    for count in range(ranks, least - 1, -1):
        for found in _configs(config, count, lost):
            try:
                return found, make_ready(found, run_dir, folder)
            except (ConfigError, StrategyError):
                continue  # it does not fit this number
    return None


def _configs(config: Config, count: int, lost: Collection[str]) -> Iterator[Config]:
    """`config` for `count` ranks: with its own strategies, then with those that a search finds."""
    own = config.model_dump(mode="json")
    own["world_size"] = count
    own["train"]["resume"] = "auto"
    own["parallel"] |= {"mesh": None, "plan": None}
    own["launch"] |= {
        "hosts": hosts_left(own["launch"]["hosts"], count, lost),
        "hostfile": None,
        "rank_table": None,
        "faults": [fault for fault in own["launch"]["faults"] if fault["rank"] < count],
    }
    searched = {"mode": "auto", "search": "recursive_programming", "strategies": {}, "set_data_parallel": []}
    one_stage = own["parallel"]["pipeline"] | {"stages": None, "cuts": None}
    for parallel in (own["parallel"], own["parallel"] | searched, own["parallel"] | searched | {"pipeline": one_stage}):
        try:
            yield Config.model_validate(own | {"parallel": parallel})
        except ValidationError:
            continue  # what belongs together does not fit this number


def hosts_left(hosts: Iterable[Mapping[str, Any]], count: int, lost: Collection[str]) -> list[dict[str, Any]]:
    """The hosts that are not `lost`, with the first `count` of their ranks, numbered anew in the same order."""
    left = [host for host in hosts if host["name"] not in lost]
    numbers = {rank: new for new, rank in enumerate(sorted(rank for host in left for rank in host["ranks"])[:count])}
    found = []
    for host in left:
        places = [
            (numbers[rank], device)
            for rank, device in zip(host["ranks"], host["devices"], strict=True)
            if rank in numbers
        ]
        if places:
            ranks, devices = zip(*places, strict=True)
            found.append({"name": host["name"], "ranks": ranks, "devices": devices})
    return found
