"""`launch`: what starts the ranks, on which hosts, and how long they wait for one another.

A hostfile has a line `HOST slots=RANKS` per host, as DeepSpeed and OpenMPI read it. A rank table is JSON: a list of
{rank, host, device}, or the table of servers and devices that Ascend's tools write.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, StrictBool, WithJsonSchema, model_validator

from runner.config.section import REQUIRED, Count, Positive, Section, refusal, setting
from runner.errors import ConfigError

Phase = Literal["data", "forward", "backward", "collective", "optimizer", "save"]
Kind = Literal["kill", "hang", "raise", "corrupt", "truncate", "disk_full", "network"]
OF_FILES = ("corrupt", "truncate", "disk_full")
"""Kinds that concern saved files, and so happen in phase save alone."""


class Fault(Section):
    """One thing that goes wrong once: on `rank` (its process, its files, its host) in `phase` of optimizer `step`."""

    kind: Kind = setting(REQUIRED, "What happens")
    rank: int = setting(REQUIRED, "To which rank: its process, its files, its host", strict=True, ge=0)
    step: Count = setting(REQUIRED, "In which optimizer step")
    phase: Phase = setting(REQUIRED, "In which phase of it; save with corrupt, truncate and disk_full")
    interface: str | None = setting(None, "Network interface to take down, with kind network", min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise refusal(
                f"launch.faults holds {value!r}; each fault is a mapping such as "
                "{kind: kill, rank: 1, step: 3, phase: forward}, with one of the kinds "
                f"{', '.join(get_args(Kind))} and one of the phases {', '.join(get_args(Phase))}.",
                "launch.faults",
            )
        implied = {"phase": "save"} if value.get("kind") in OF_FILES else {}
        return {**implied, **value}

    @model_validator(mode="after")
    def _possible(self) -> Fault:
        if self.kind in OF_FILES and self.phase != "save":
            raise refusal(
                f"launch.faults: {self.kind} concerns the files of a checkpoint, so it cannot happen in phase "
                f"{self.phase!r}; leave the phase out, or write phase: save.",
                "launch.faults",
            )
        if (self.kind == "network") != (self.interface is not None):
            raise refusal(
                "launch.faults: a fault of kind network takes the network `interface` of its rank's host down, and no "
                "other kind does; name the interface (ip link shows them) with network alone.",
                "launch.faults",
            )
        return self


Launcher = Literal["local", "torchrun", "mpirun", "slurm", "deepspeed", "rank_table", "kubernetes", "skypilot"]
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]
Number = Annotated[int, Field(strict=True, ge=0)]
Word = Annotated[str, Field(min_length=1)]
YEAR = 31_536_000
"""Seconds; libraries count them in milliseconds, or fail."""
THREADS = 1024
"""More than any processor runs at once; where a system starts no more threads, OpenMP ends the process."""
EXPORTED = ("PYTHON*", "OMP_*", "NCCL_*", "GLOO_*", "TORCH_*", "TP_*", "LD_LIBRARY_PATH", "CUDA_*", "HF_*")


class Host(Section):
    """One host: its name or address, its ranks, and the device of each of them."""

    name: Word = setting(REQUIRED, "Host name or address")
    ranks: tuple[Number, ...] = setting(REQUIRED, "Ranks on this host", min_length=1)
    devices: tuple[Number, ...] = setting(REQUIRED, "Device index of each of the ranks")

    def __str__(self) -> str:
        return f"{self.name}:{len(self.ranks)}"


HOSTS = WithJsonSchema({"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "object"}]}})


def _in_order(value: Any) -> Any:
    """`["a:4", "b:4"]` as hosts whose ranks follow one another; other values are validated by the type."""
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        return value
    hosts: list[dict[str, Any]] = []
    first = 0
    for text in value:
        name, _, count = text.rpartition(":")
        if not name or not count.isdigit() or not int(count):
            raise ValueError(f"has {text!r}, which is not HOST:RANKS such as node1:8")
        devices = tuple(range(int(count)))
        hosts.append({"name": name.strip("[]"), "ranks": tuple(first + n for n in devices), "devices": devices})
        first += len(devices)
    return hosts


class Launch(Section):
    """The launcher, its hosts, and what happens when ranks fail."""

    launcher: Launcher = setting("local", "What starts the ranks; launch=NAME chooses it")
    timeout: Positive = setting(600.0, "Time limit of a collective", unit="seconds", ge=1e-3, le=YEAR)
    threads: Count = setting(1, "Threads of torch in each rank", le=THREADS)
    max_restarts: int = setting(0, "Number of restarts of a failed run, from its newest checkpoint", strict=True, ge=0)
    min_ranks: Count | None = setting(
        None, "Continue with this many ranks and a new plan when a rank or host is lost for good; null: never"
    )
    max_ranks: Count | None = setting(
        None, "Grow back to this many ranks at most once lost ones return, with a new plan; null: never"
    )
    standby: Annotated[tuple[Host, ...], BeforeValidator(_in_order), HOSTS] = setting(
        (), "HOST:RANKS of spare hosts such as [node9:8], each of which takes the place of one that is lost"
    )
    check_memory: StrictBool = setting(True, "Refuse ranks for which this machine lacks memory or processes")
    rescue: StrictBool = setting(False, "Survivors of a failure save their memory, so that a restart loses no step")
    faults: tuple[Fault, ...] = setting(
        (), "Injected faults for drills: [{kind: kill, rank: 1, step: 3, phase: forward}, ...], once per run folder"
    )
    hosts: Annotated[tuple[Host, ...], BeforeValidator(_in_order), HOSTS] = setting(
        (), "HOST:RANKS of each host such as [node1:8, node2:8], rank 0's first; []: this machine"
    )
    devices: tuple[Number, ...] = setting(
        (), "Device index of each rank on this machine such as [0, 2, 3]; []: the first ones"
    )
    hostfile: Word | None = setting(None, "A file with a line `HOST slots=RANKS` per host")
    rank_table: Word | None = setting(None, "A JSON file with {rank, host, device} of every rank")
    host: Word | None = setting(None, "Start only this host's ranks; the same command starts the others on theirs")
    rank: Number | None = setting(None, "Start only this rank; the same command starts the others")
    nodes: Count | None = setting(None, "Number of hosts, where Slurm, Kubernetes or SkyPilot knows their names")
    image: Word | None = setting(None, "Container image with Meshwright and your project, for kubernetes and skypilot")
    claim: Word | None = setting(None, "PersistentVolumeClaim of Kubernetes for the run folder")
    accelerator: Word | None = setting(None, "Kind of GPU that SkyPilot rents, such as H100")
    address: Word | None = setting(None, "Address of the first host, or of this command; null: detected")
    port: Port | None = setting(None, "Port of the rendezvous; null: a free one")
    rendezvous: Literal["static", "c10d"] = setting("static", "Rendezvous of torchrun's agents")
    remote: tuple[Word, ...] = setting(
        ("ssh", "-o", "BatchMode=yes"), "Command that runs another on a host; []: start the hosts yourself"
    )
    export: tuple[Word, ...] = setting(EXPORTED, "Globs of environment variables that other hosts receive")
    options: tuple[str, ...] = setting((), "Further arguments for the launcher, before the program")
    dry_run: StrictBool = setting(False, "Print the commands and start nothing; also `run launch --dry-run`")

    @model_validator(mode="after")
    def _table_is_complete(self) -> Launch:
        names, ranks = [host.name for host in self.hosts], [rank for host in self.hosts for rank in host.ranks]
        if twice := _repeated(self.devices):
            raise refusal(
                f"launch.devices names device {twice} more than once; every rank needs a device of its own.",
                "launch.devices",
            )
        if twice := _repeated(names):
            raise refusal(
                f"launch.hosts names {twice} more than once; give every host once, with all of its ranks.",
                "launch.hosts",
            )
        if twice := _repeated([*names, *(host.name for host in self.standby)]):
            raise refusal(
                f"launch.hosts and launch.standby name {twice} more than once; a spare host is one of its own.",
                "launch.hosts",
                "launch.standby",
            )
        if twice := _repeated(ranks):
            raise refusal(
                f"the hosts of the launch hold rank {twice} more than once; every rank has one place.",
                "launch.hosts",
                "launch.rank_table",
            )
        if missing := sorted(set(range(max(ranks, default=-1) + 1)) - set(ranks)):
            raise refusal(
                f"the hosts of the launch have {len(ranks)} ranks up to {max(ranks)}, but none has rank "
                f"{', '.join(map(str, missing))}; ranks are numbered from 0 without gaps.",
                "launch.hosts",
                "launch.rank_table",
            )
        for host in self.hosts:
            if len(host.devices) != len(host.ranks) or len(set(host.devices)) != len(host.devices):
                raise refusal(
                    f"host {host.name} has ranks {list(host.ranks)} on devices {list(host.devices)}; every rank needs "
                    "a device of its own.",
                    "launch.hosts",
                    "launch.rank_table",
                )
        if self.hosts and self.host is not None and self.host not in names:
            raise refusal(f"launch.host = {self.host!r} is not in the table: {', '.join(names)}.", "launch.host")
        if self.hosts and self.rank is not None and self.rank not in ranks:
            raise refusal(
                f"launch.rank = {self.rank} is not in the table, which has {len(ranks)} ranks from 0.", "launch.rank"
            )
        return self

    @model_validator(mode="after")
    def _launcher_can(self) -> Launch:
        if self.min_ranks is not None and self.ranks is not None and self.min_ranks > self.ranks:
            raise refusal(
                f"launch.min_ranks = {self.min_ranks}, but the hosts of the launch have {self.ranks} ranks; give hosts "
                "with as many ranks or more.",
                "launch.min_ranks",
                "launch.hosts",
            )
        if self.max_ranks is not None and self.min_ranks is not None and self.max_ranks < self.min_ranks:
            raise refusal(
                f"launch.max_ranks = {self.max_ranks} is less than launch.min_ranks = {self.min_ranks}; give at least "
                "as many.",
                "launch.max_ranks",
                "launch.min_ranks",
            )
        in_order = [rank for host in self.hosts for rank in host.ranks]
        if self.launcher not in ("local", "rank_table") and in_order != sorted(in_order):
            raise refusal(
                f"launch = {self.launcher!r} numbers the ranks host by host, but the ranks of the table do not follow "
                "one another so; use launch=rank_table.",
                "launch.launcher",
                "launch.rank_table",
            )
        if self.launcher == "slurm" and len({len(host.ranks) for host in self.hosts}) > 1:
            raise refusal(
                "launch = 'slurm' starts equally many ranks on every host, but launch.hosts has "
                f"{', '.join(map(str, self.hosts))}.",
                "launch.hosts",
            )
        return self

    @property
    def ranks(self) -> int | None:
        """How many ranks the hosts have, or the devices of this machine; None where none is named."""
        return sum(len(host.ranks) for host in self.hosts) or len(self.devices) or None

    def host_of(self, rank: int) -> str:
        """The name of the host of a rank; empty where no hosts are named."""
        return next((host.name for host in self.hosts if rank in host.ranks), "")

    @property
    def by_hand(self) -> bool:
        """Whether this command is one of several that the user starts manually."""
        return self.host is not None or self.rank is not None


_LINE = re.compile(r"(?P<host>\S+)(?:\s+slots\s*=\s*(?P<slots>[1-9]\d*))?(?:\s+max[-_]slots\s*=\s*\d+)?")
TABLE_SHAPE = 'a list such as [{"rank": 0, "host": "10.0.0.1", "device": 0}, ...]'


def _repeated(values: Sequence[Any]) -> str:
    """The values that occur more than once, sorted."""
    return ", ".join(str(value) for value, count in sorted(Counter(values).items()) if count > 1)


def from_files(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The composed section `launch`, with the hosts of `launch.hostfile` or `launch.rank_table` in `hosts`.

    Raises:
        ConfigError: A file is unreadable or has another format.
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
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        if not (content := line.partition("#")[0].strip()):
            continue
        if (match := _LINE.fullmatch(content)) is None:
            raise ConfigError(
                "MW701", f"launch.hostfile = {name!r}, line {number}: {content!r} is not `HOST slots=RANKS`."
            )
        hosts.append(f"{match['host']}:{match['slots'] or 1}")
    if not hosts:
        raise ConfigError(
            "MW701", f"launch.hostfile = {name!r} names no host; give a line `HOST slots=RANKS` for each."
        )
    return hosts


def _rank_table(name: str, text: str) -> list[dict[str, Any]]:
    try:
        content = json.loads(text)
        entries = content
        if isinstance(content, dict):
            entries = [
                {"rank": device["rank_id"], "host": server["server_id"], "device": device["device_id"]}
                for server in content["server_list"]
                for device in server["device"]
            ]
        rows = [(int(entry["rank"]), str(entry["host"]), int(entry["device"])) for entry in entries]
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise ConfigError("MW701", f"launch.rank_table = {name!r} is not {TABLE_SHAPE}: {reason}.") from None
    if not rows:
        raise ConfigError("MW701", f"launch.rank_table = {name!r} holds no rank; it is {TABLE_SHAPE}.")
    hosts: dict[str, dict[str, Any]] = {}
    for rank, host, device in sorted(rows):
        entry = hosts.setdefault(host, {"name": host, "ranks": [], "devices": []})
        entry["ranks"].append(rank)
        entry["devices"].append(device)
    return list(hosts.values())
