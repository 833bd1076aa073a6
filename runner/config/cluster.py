"""The section `cluster`: the machine for which plan costs are estimated; rates are bytes or flops per second, times
seconds.

`machine` null means: decided when the device is known (see `runner.planning.clusters`). The description may be in a
separate file, `cluster.file`, which then replaces the section except for `cluster.nodes`,
`cluster.groups` and `cluster.price_per_hour`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, model_validator
from yaml import YAMLError

from runner.config.section import REQUIRED, Count, Positive, Section, refusal, setting
from runner.errors import ConfigError

Share = Annotated[float, Field(ge=0, le=1)]
Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Dtype = Literal["float64", "float32", "float16", "bfloat16"]
Kind = Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "exchange", "send", "broadcast"]
NODE = "node"


class Rate(Section):
    """What a collective finds on a level: bytes per second that a rank sends, seconds per round of messages, and
    seconds per call."""

    bandwidth: Positive = setting(REQUIRED, "Rate at which a rank sends, one way", unit="bytes/second")
    latency: Time = setting(REQUIRED, "Time per round of messages", unit="seconds")
    call: Time = setting(REQUIRED, "Time per call", unit="seconds")


class LevelForm(Rate):
    """A level of a cluster, such as the devices of a node."""

    size: Count = setting(REQUIRED, "Members of this level in one of the level above")
    kinds: dict[Kind, Rate] = setting(REQUIRED, "Rates of collectives that differ from those of the level")


class Achieved(Section):
    """What programs get of the peak rates."""

    flops: float = setting(REQUIRED, "Fraction of peak flops", gt=0, le=1)
    memory: float = setting(REQUIRED, "Fraction of peak memory bandwidth", gt=0, le=1)
    links: float = setting(REQUIRED, "Fraction of peak link bandwidth", gt=0, le=1)


class PaceForm(Section):
    """Seconds of operators of one kind, as calibration has measured them."""

    call: Time = setting(REQUIRED, "Time of a call, whatever it works on; at least launch", unit="seconds")
    factor: Positive = setting(REQUIRED, "Times the seconds that its flops or bytes take at the rates of the machine")


class OperatorPace(Section):
    """An operator that is slower, or faster, than flops and memory bandwidth say."""

    forward: PaceForm = setting(REQUIRED, "In forward")
    backward: PaceForm = setting(REQUIRED, "In backward, for all gradients together")


class Machine(Section):
    """Levels are outermost first; the product of their sizes is the number of devices."""

    levels: dict[str, LevelForm] = setting(REQUIRED, "Levels of the network by name, outermost first", min_length=1)
    flops: dict[Dtype, Positive] = setting(REQUIRED, "Peak rate of matrix products by dtype", unit="flops/second")
    memory: Positive = setting(REQUIRED, "Memory of a device", unit="bytes")
    memory_bandwidth: Positive = setting(REQUIRED, "Peak rate of the memory", unit="bytes/second")
    achieved: Achieved = setting(REQUIRED, "What programs reach of the peaks")
    launch: Time = setting(REQUIRED, "Shortest time of a kernel", unit="seconds")
    view: Time = setting(REQUIRED, "Time of an operator that returns a view", unit="seconds")
    overlap: Share = setting(REQUIRED, "Fraction of communication that computation can hide")
    algorithms: tuple[Literal["ring", "tree", "hierarchical"], ...] = setting(
        REQUIRED, "Algorithms of collectives", min_length=1
    )
    operators: dict[str, OperatorPace] = setting(
        {}, "Operators by their names in a graph, such as rms_norm, that take other times than flops and bytes say"
    )
    cores: Count | None = setting(
        None, "Cores that all its ranks share: with fewer ranks each is faster, with more slower; null: one device each"
    )

    @property
    def devices(self) -> int:
        return math.prod(level.size for level in self.levels.values())


class Group(Section):
    """Devices of one kind; ranks are assigned to the groups in their order."""

    devices: Count = setting(REQUIRED, "Number of devices")
    like: str | None = setting(
        None,
        "Rates and memory of a device: a cluster that comes with the package; null: those of cluster",
        min_length=1,
    )
    speed: Positive = setting(1.0, "Factor of its rates, such as 0.5 for devices that compute at half speed")

    def __str__(self) -> str:
        parts = {"devices": self.devices, "like": self.like, "speed": None if self.speed == 1.0 else self.speed}
        return f"{{{', '.join(f'{key}: {value}' for key, value in parts.items() if value is not None)}}}"


class ClusterForm(Section):
    """The cluster that a plan is for."""

    name: str = setting(
        "auto", "Of a description, which cluster=NAME chooses; auto: laptop_gloo on CPU, a dgx_h100 node on GPUs"
    )
    nodes: Count | None = setting(None, "Number of nodes, for clusters that have them")
    file: str | None = setting(None, "A description of your own, such as `run calibrate` writes", min_length=1)
    groups: tuple[Group, ...] = setting(
        (), "Kinds of devices, [{devices: 8, like: dgx_h100}, {devices: 8, like: a100}]; []: all devices are equal"
    )
    price_per_hour: Positive | None = setting(
        None, "Price of one device for an hour, in any currency; `run plan` then shows what the training costs"
    )
    machine: Machine | None = setting(None, "Levels, rates and memory; null: by name or file")

    @model_validator(mode="after")
    def _computes(self) -> ClusterForm:
        if self.machine is not None and "float32" not in self.machine.flops:
            raise refusal(
                f"cluster.machine.flops of {self.name!r} lacks float32, from which other dtypes follow; add it.",
                "cluster.machine.flops",
            )
        return self

    @model_validator(mode="after")
    def _describes(self) -> ClusterForm:
        if self.machine is None and self.name != "auto":
            raise refusal(
                f"cluster.name = {self.name!r} is what a description is called, and chooses none; choose one with "
                f"cluster={self.name} on the command line, or with `override /cluster: {self.name}` in the defaults "
                "of a recipe.",
                "cluster.name",
            )
        return self

    @model_validator(mode="after")
    def _nodes_count(self) -> ClusterForm:
        if self.nodes is None:
            return self
        level = None if self.machine is None else self.machine.levels.get(NODE)
        if level is None:
            raise refusal(
                f"cluster.nodes = {self.nodes} has no effect: cluster = {self.name!r} has no level of nodes. Choose a "
                "cluster that has one (cluster=dgx_h100, a100, h200, b200), or drop cluster.nodes.",
                "cluster.nodes",
            )
        if level.size != self.nodes:
            raise refusal(
                f"cluster.nodes = {self.nodes}, but cluster.machine.levels.node.size = {level.size}; they must be "
                "equal.",
                "cluster.nodes",
                "cluster.machine.levels.node.size",
            )
        return self


def from_file(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The composed section `cluster`, replaced by the content of `cluster.file`. Raises ConfigError."""
    name = values.get("file")
    if not isinstance(name, str) or not name:
        return values
    try:
        described = OmegaConf.create({"cluster": OmegaConf.load(Path(name))})
        if values.get("nodes") is not None:
            OmegaConf.update(described, "cluster.nodes", values["nodes"])
        content = OmegaConf.to_container(described, resolve=True)
    except OSError as error:
        raise ConfigError("MW209", f"cluster.file = {name!r} cannot be read: {error.strerror}.") from None
    except (OmegaConfBaseException, YAMLError, TypeError) as error:
        text = " ".join(str(error).split())
        raise ConfigError("MW209", f"cluster.file = {name!r} is not a description of a cluster: {text}.") from None
    assert isinstance(content, dict)
    found: Any = content["cluster"]
    if not isinstance(found, dict) or found.get("machine") is None:
        raise ConfigError(
            "MW209",
            f"cluster.file = {name!r} is not a description of a cluster: it has no `machine`; `run calibrate` writes "
            "one, and conf/cluster/ holds others.",
        )
    own = {key: values[key] for key in ("price_per_hour",) if values.get(key) is not None}
    return found | {"file": name, "groups": values.get("groups", [])} | own
