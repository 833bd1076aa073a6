"""`launch`: what starts the ranks, on which hosts, and how long they wait for one another."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, WithJsonSchema, model_validator

from runner.config.faults import Fault
from runner.config.section import REQUIRED, Count, Positive, Section, refusal, setting

Launcher = Literal["local", "torchrun", "mpirun", "slurm", "deepspeed", "rank_table"]
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]
Number = Annotated[int, Field(strict=True, ge=0)]
Word = Annotated[str, Field(min_length=1)]
YEAR = 31_536_000
"""Seconds; libraries count them in milliseconds, or fail."""
THREADS = 1024
"""More than any processor runs at once; where a system starts no more threads, OpenMP ends the process."""


EXPORTED = (
    *("PYTHON*", "OMP_*", "NCCL_*", "GLOO_*", "TORCH_*", "TP_*", "LD_LIBRARY_PATH", "CUDA_*", "HF_*"),
)  # fmt: skip


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
    found: list[dict[str, Any]] = []
    first = 0
    for one in value:
        name, _, count = one.rpartition(":")
        if not name or not count.isdigit() or not int(count):
            raise ValueError(f"has {one!r}, which is not HOST:RANKS such as node1:8")
        ranks = range(first, first + int(count))
        found.append({"name": name.strip("[]"), "ranks": tuple(ranks), "devices": tuple(range(int(count)))})
        first += int(count)
    return found


class Launch(Section):
    launcher: Launcher = setting("local", "What starts the ranks; launch=NAME chooses it")
    timeout: Positive = setting(600.0, "Time limit of a collective", unit="seconds", ge=1e-3, le=YEAR)
    threads: Count = setting(1, "Threads of torch in each rank", le=THREADS)
    max_restarts: int = setting(0, "Number of restarts of a failed run, from its newest checkpoint", strict=True, ge=0)
    min_ranks: Count | None = setting(
        None, "Continue with this many ranks and a new plan when a rank or host is lost for good; null: never"
    )
    check_memory: StrictBool = setting(True, "Refuse ranks for which this machine lacks memory or processes")
    rescue: StrictBool = setting(False, "Survivors of a failure save their memory, so that a restart loses no step")
    faults: tuple[Fault, ...] = setting(
        (), "Injected faults for drills: [{kind: kill, rank: 1, step: 3, phase: forward}, ...], once per run folder"
    )
    hosts: Annotated[tuple[Host, ...], BeforeValidator(_in_order), HOSTS] = setting(
        (), "HOST:RANKS of each host such as [node1:8, node2:8], rank 0's first; []: this machine"
    )
    hostfile: Word | None = setting(None, "A file with a line `HOST slots=RANKS` per host")
    rank_table: Word | None = setting(None, "A JSON file with {rank, host, device} of every rank")
    host: Word | None = setting(None, "Start only this host's ranks; the same command starts the others on theirs")
    rank: Number | None = setting(None, "Start only this rank; the same command starts the others")
    nodes: Count | None = setting(None, "Number of hosts, where Slurm knows their names")
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
    def _table_is_whole(self) -> Launch:
        names = [host.name for host in self.hosts]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise refusal(
                f"launch.hosts names {', '.join(twice)} more than once; give every host once, with all of its ranks.",
                "launch.hosts",
            )
        ranks = [rank for host in self.hosts for rank in host.ranks]
        if twice_ranks := sorted({rank for rank in ranks if ranks.count(rank) > 1}):
            raise refusal(
                f"the hosts of the launch hold rank {', '.join(map(str, twice_ranks))} more than once; every rank has "
                "one place.",
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
                f"{', '.join(f'{host.name}:{len(host.ranks)}' for host in self.hosts)}.",
                "launch.hosts",
            )
        return self

    @model_validator(mode="after")
    def _by_hand(self) -> Launch:
        names, ranks = [host.name for host in self.hosts], [rank for host in self.hosts for rank in host.ranks]
        if self.hosts and self.host is not None and self.host not in names:
            raise refusal(f"launch.host = {self.host!r} is not in the table: {', '.join(names)}.", "launch.host")
        if self.hosts and self.rank is not None and self.rank not in ranks:
            raise refusal(
                f"launch.rank = {self.rank} is not in the table, which has {len(ranks)} ranks from 0.", "launch.rank"
            )
        return self

    @property
    def ranks(self) -> int | None:
        """How many ranks the hosts have; None where no host is named."""
        return sum(len(host.ranks) for host in self.hosts) or None

    @property
    def by_hand(self) -> bool:
        """Whether this command is one of several that the user starts manually."""
        return self.host is not None or self.rank is not None
