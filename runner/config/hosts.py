"""The assignment of ranks to hosts, read from a hostfile or a rank table into the form of `launch.hosts`.

A hostfile has a line `HOST slots=RANKS` per host, as DeepSpeed and OpenMPI read it. A rank table is JSON: a list of
{rank, host, device}, or the table of servers and devices that Ascend's tools write. Torch is not needed here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.errors import ConfigError

_LINE = re.compile(r"(?P<host>\S+)(?:\s+slots\s*=\s*(?P<slots>[1-9]\d*))?(?:\s+max[-_]slots\s*=\s*\d+)?")
TABLE_SHAPE = 'a list such as [{"rank": 0, "host": "10.0.0.1", "device": 0}, ...]'


def from_files(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The composed section `launch`, with the hosts of `launch.hostfile` or `launch.rank_table` in `hosts`.

    Raises ConfigError for a file that is unreadable or has another format.
    """
    key = next((key for key in ("hostfile", "rank_table") if values.get(key)), "")
    if not isinstance(values.get(key), str):
        return values
    name = values[key]
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError("MW701", f"launch.{key} = {name!r} cannot be read: {reason}.") from None
    read = _hostfile if key == "hostfile" else _rank_table
    return {**values, "hosts": read(name, text)}


def _hostfile(name: str, text: str) -> list[str]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            raise ConfigError(
                "MW701", f"launch.hostfile = {name!r}, line {number}: {content!r} is not `HOST slots=RANKS`."
            )
        found.append(f"{match['host']}:{match['slots'] or 1}")
    if not found:
        raise ConfigError(
            "MW701", f"launch.hostfile = {name!r} names no host; give a line `HOST slots=RANKS` for each."
        )
    return found


def _rank_table(name: str, text: str) -> list[dict[str, Any]]:
    try:
        content = json.loads(text)
        entries = _of_servers(content) if isinstance(content, dict) else content
        rows = [(int(entry["rank"]), str(entry["host"]), int(entry["device"])) for entry in entries]
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise ConfigError("MW701", f"launch.rank_table = {name!r} is not {TABLE_SHAPE}: {reason}.") from None
    if not rows:
        raise ConfigError("MW701", f"launch.rank_table = {name!r} holds no rank; it is {TABLE_SHAPE}.")
    hosts: dict[str, dict[str, Any]] = {}
    for rank, host, device in sorted(rows):
        one = hosts.setdefault(host, {"name": host, "ranks": [], "devices": []})
        one["ranks"].append(rank)
        one["devices"].append(device)
    return list(hosts.values())


def _of_servers(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"rank": device["rank_id"], "host": server["server_id"], "device": device["device_id"]}
        for server in content["server_list"]
        for device in server["device"]
    ]
