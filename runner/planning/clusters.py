"""The devices of this machine on which a run executes, and the cluster for which its plan cost is estimated.

With `cluster=auto`, the default, plan costs are estimated for laptop_gloo on CPU and for nodes of dgx_h100 on GPUs,
with one device per rank.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from omegaconf import OmegaConf

from runner.config.cluster import NODE, ClusterForm, LevelForm, Machine, PaceForm, Rate, from_file
from runner.config.schema import Config
from runner.errors import ConfigError, allowed
from strategies.cost.cluster import Cluster, Level, Link, Pace, slowest

DEFAULTS = {"cpu": "laptop_gloo", "cuda": "dgx_h100"}
DESCRIBING = ("plan", "explain", "export")
"""Verbs that start no ranks."""


def device_of(config: Config) -> tuple[str, int]:
    """The device type, "cpu" or "cuda", and the number of ranks.

    Raises:
        ConfigError: this machine has too few GPUs.
    """
    if config.parallel.elastic:
        return "cpu", config.world_size or 1 + config.parallel.server.servers + (config.parallel.server.workers or 1)
    machine, alone = config.cluster.machine, config.parallel.mode == "stand_alone"
    if machine is not None and config.world_size is None and config.job.name in DESCRIBING:
        return "cpu", 1 if alone else machine.devices
    gpus = 0 if config.device == "cpu" else _gpus()
    here = 1 if alone else config.world_size
    if config.launch.hosts:
        here = max(len(host.ranks) for host in config.launch.hosts)
    if config.device == "cuda" or (config.device == "auto" and gpus >= (here or 1)):
        if gpus < (here or 1):
            raise ConfigError(
                "MW801",
                f"device = cuda needs {here or 1} GPUs (world_size), but this machine has {gpus}; set "
                f"world_size={max(gpus, 1)} or device=cpu.",
            )
        if max(config.launch.devices, default=0) >= gpus:
            raise ConfigError(
                "MW801",
                f"launch.devices = {list(config.launch.devices)}, but this machine has GPUs 0 to {gpus - 1} alone.",
            )
        return "cuda", config.launch.ranks or here or gpus
    return "cpu", config.launch.ranks or here or 8


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def shipped(name: str, nodes: int | None = None) -> Machine:
    """A description that comes with the package, of `nodes` nodes if it has nodes."""
    values = OmegaConf.create({"cluster": OmegaConf.load(str(files("conf") / "cluster" / f"{name}.yaml"))})
    if nodes is not None:
        OmegaConf.update(values, "cluster.nodes", nodes)
    content = OmegaConf.to_container(values, resolve=True)
    assert isinstance(content, dict)
    machine = ClusterForm.model_validate(content["cluster"]).machine
    assert machine is not None
    return machine


def cluster_of(config: Config, device: str, world_size: int) -> Cluster:
    """The machine for which the cost of `world_size` ranks on `device` is estimated."""
    every = clusters_of(config, device, world_size)
    return slowest(every) if len({*every}) == 1 else replace(slowest(every), each=every)


def _links_of(config: Config, device: str, world_size: int) -> Cluster:
    """The machine whose links join the ranks; its devices are those of groups without `like`."""
    chosen = config.cluster
    if chosen.machine is not None:
        return busy(chosen.name, chosen.machine, world_size)
    name = DEFAULTS[device]
    if kinds := {group.like for group in chosen.groups if group.like is not None}:
        name = min(kinds, key=lambda kind: next(iter(_of_kind(kind).levels.values())).bandwidth)
    machine = shipped(name)
    if NODE in machine.levels:
        return described(name, shipped(name, -(-world_size // machine.devices)))
    found = busy(name, machine, world_size)
    level, *_ = found.levels
    return replace(found, levels=(replace(level, size=max(level.size, world_size)),))


def busy(name: str, machine: Machine, ranks: int) -> Cluster:
    """A machine while `ranks` of its processes are busy. The description is of as many as it has devices, which share
    its cores: what they compute, copy and send, and how soon they are woken, all take time on these."""
    cluster = described(name, machine)
    if machine.cores is None:
        return cluster
    speed = machine.devices / max(ranks, machine.cores)

    def link(one: Link) -> Link:
        return Link(one.bandwidth * speed, one.latency / speed, one.call / speed)

    levels = (
        replace(one, link=link(one.link), kinds={kind: link(other) for kind, other in one.kinds.items()})
        for one in cluster.levels
    )
    return replace(_at_speed(cluster, speed), levels=tuple(levels))


def _at_speed(cluster: Cluster, speed: float) -> Cluster:
    """A machine whose devices, not its links, have other rates."""
    return replace(
        cluster,
        flops={dtype: speed * rate for dtype, rate in cluster.flops.items()},
        memory_bandwidth=speed * cluster.memory_bandwidth,
        launch=cluster.launch / speed,
        view=cluster.view / speed,
        operators={
            op: (Pace(ahead.call / speed, ahead.factor), Pace(back.call / speed, back.factor))
            for op, (ahead, back) in cluster.operators.items()
        },
    )


def clusters_of(config: Config, device: str, world_size: int) -> tuple[Cluster, ...]:
    """The machine of every rank: what its own device computes and stores, with the links of `cluster`."""
    base, every = _links_of(config, device, world_size), []
    for group in config.cluster.groups:
        own = base if group.like is None else described(group.like, _of_kind(group.like))
        name = own.name if group.speed == 1 else f"{own.name} x {group.speed:g}"
        own = replace(_at_speed(own, group.speed), name=name, levels=base.levels, algorithms=base.algorithms)
        every += [own] * group.devices
    return tuple(every) or (base,) * world_size


def _of_kind(name: str) -> Machine:
    """The description that comes with the package. Raises ConfigError."""
    names = sorted(file.name.removesuffix(".yaml") for file in (files("conf") / "cluster").iterdir())
    known = [one for one in names if not one.startswith(("_", "auto"))]
    if name not in known:
        raise ConfigError("MW106", f"cluster.groups: like = {name!r} is not a cluster.{allowed(name, known)}")
    return shipped(name)


def from_description(file: Path) -> Cluster:
    """The cluster described in a file, such as one of `run calibrate`. Raises ConfigError."""
    form = ClusterForm.model_validate(from_file({"file": str(file)}))
    assert form.machine is not None
    return described(form.name, form.machine)


def described(name: str, machine: Machine) -> Cluster:
    """A machine for the cost models, with achieved rates."""
    achieved = machine.achieved

    def link(rate: Rate) -> Link:
        return Link(rate.bandwidth * achieved.links, rate.latency, rate.call)

    def level(title: str, form: LevelForm) -> Level:
        return Level(title, form.size, link(form), {kind: link(rate) for kind, rate in form.kinds.items()})

    def pace(form: PaceForm) -> Pace:
        return Pace(max(form.call, machine.launch), form.factor)

    return Cluster(
        name,
        tuple(level(title, form) for title, form in machine.levels.items()),
        {dtype: rate * achieved.flops for dtype, rate in machine.flops.items()},
        int(machine.memory),
        machine.memory_bandwidth * achieved.memory,
        machine.launch,
        machine.view,
        machine.overlap,
        machine.algorithms,
        achieved.flops,
        operators={op: (pace(form.forward), pace(form.backward)) for op, form in machine.operators.items()},
    )
