"""A run that goes on without a host: the same config for the hosts that are left, with a plan searched anew.

A pure function. Mesh and counts that were configured for more ranks are left to the search; strategies are kept, and
those that do not fit fewer ranks end the run as they would have at its start.
"""

from __future__ import annotations

from collections.abc import Collection

from runner.schema import Config


def without(config: Config, lost: Collection[str]) -> Config | None:
    """`config` for the hosts of its launch that are not `lost`, continuing from the newest checkpoint; None where that
    is not wanted, or fewer than `launch.min_ranks` are left."""
    left = [host for host in config.launch.hosts if host.name not in lost]
    count = sum(len(host.ranks) for host in left)
    if config.launch.min_ranks is None or count < config.launch.min_ranks or len(left) == len(config.launch.hosts):
        return None
    content = config.model_dump(mode="json")
    content["world_size"] = count
    content["train"]["resume"] = "auto"
    content["parallel"]["mesh"] = None
    numbers = {rank: new for new, rank in enumerate(sorted(rank for host in left for rank in host.ranks))}
    content["launch"]["hosts"] = [
        {"name": host.name, "ranks": [numbers[rank] for rank in host.ranks], "devices": host.devices} for host in left
    ]
    content["launch"]["faults"] = [fault for fault in content["launch"]["faults"] if fault["rank"] < count]
    return Config.model_validate(content)
