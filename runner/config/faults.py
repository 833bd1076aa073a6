"""`launch.faults`: injected faults, for tests and drills."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import model_validator

from runner.config.section import REQUIRED, Count, Section, refusal, setting

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
