"""The section `cluster`: the machine for which plans are priced; rates are bytes or flops per second, times seconds.

`machine` null means: decided when the device is known (see `runner.planning.clusters`). A description may stand in a
file of its own, `cluster.file`; it then takes the place of the section, but for `cluster.nodes`.
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

from runner.config.section import Count, Positive, Section, refusal
from runner.errors import ConfigError

Share = Annotated[float, Field(ge=0, le=1)]
Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Dtype = Literal["float64", "float32", "float16", "bfloat16"]
Kind = Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "exchange", "send", "broadcast"]
NODE = "node"


class Rate(Section):
    """What a collective finds on a level: bytes per second that a rank sends, seconds per round of messages, and
    seconds per call."""

    bandwidth: Positive
    latency: Time
    call: Time


class LevelForm(Rate):
    size: Count
    kinds: dict[Kind, Rate]


class Achieved(Section):
    """What programs get of the peak rates."""

    flops: Annotated[float, Field(gt=0, le=1)]
    memory: Annotated[float, Field(gt=0, le=1)]
    links: Annotated[float, Field(gt=0, le=1)]


class Machine(Section):
    """Levels are outermost first; the product of their sizes is the number of devices."""

    levels: Annotated[dict[str, LevelForm], Field(min_length=1)]
    flops: dict[Dtype, Positive]
    memory: Positive
    memory_bandwidth: Positive
    achieved: Achieved
    launch: Time
    view: Time
    overlap: Share
    algorithms: Annotated[tuple[Literal["ring", "tree", "hierarchical"], ...], Field(min_length=1)]

    @property
    def devices(self) -> int:
        return math.prod(level.size for level in self.levels.values())


class ClusterForm(Section):
    name: str
    nodes: Count | None
    file: Annotated[str | None, Field(min_length=1)]
    machine: Machine | None

    @model_validator(mode="after")
    def _computes(self) -> ClusterForm:
        if self.machine is not None and "float32" not in self.machine.flops:
            raise refusal(
                f"cluster.machine.flops of {self.name!r} lacks float32, from which other dtypes follow; add it.",
                "cluster.machine.flops",
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
    """The composed section `cluster`, with what `cluster.file` says in its place. Raises ConfigError."""
    name = values.get("file")
    if not isinstance(name, str) or not name:
        return values
    if values.get("machine") is not None:
        raise ConfigError(
            "MW205",
            f"cluster = {values.get('name')!r} and cluster.file = {name!r} both describe the machine; drop one of "
            "them.",
        )
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
    return found | {"file": name}
