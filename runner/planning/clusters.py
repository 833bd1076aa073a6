"""From the section `cluster` to the machine that plans are priced on.

`cluster=auto` is what runs are priced on by default: laptop_gloo on CPU and nodes of dgx_h100 on GPUs, as many devices
as there are ranks.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from omegaconf import OmegaConf

from runner.config.cluster import NODE, ClusterForm, LevelForm, Machine, Rate, from_file
from runner.config.schema import Config
from strategies.cost.cluster import Cluster, Level, Link

DEFAULTS = {"cpu": "laptop_gloo", "cuda": "dgx_h100"}


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
    """The machine on which `world_size` ranks on `device` are priced."""
    chosen = config.cluster
    if chosen.machine is not None:
        return described(chosen.name, chosen.machine)
    name = DEFAULTS[device]
    machine = shipped(name)
    if NODE in machine.levels:
        return described(name, shipped(name, -(-world_size // machine.devices)))
    (title, level), *_ = machine.levels.items()
    larger = level.model_copy(update={"size": max(level.size, world_size)})
    return described(name, machine.model_copy(update={"levels": {title: larger}}))


def from_description(file: Path) -> Cluster:
    """What a file, such as one of `run calibrate`, describes. Raises ConfigError."""
    form = ClusterForm.model_validate(from_file({"name": "", "nodes": None, "file": str(file), "machine": None}))
    assert form.machine is not None
    return described(form.name, form.machine)


def described(name: str, machine: Machine) -> Cluster:
    """A machine as cost models see it: with the rates that programs achieve."""
    achieved = machine.achieved

    def link(rate: Rate) -> Link:
        return Link(rate.bandwidth * achieved.links, rate.latency, rate.call)

    def level(title: str, form: LevelForm) -> Level:
        return Level(title, form.size, link(form), {kind: link(rate) for kind, rate in form.kinds.items()})

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
    )
