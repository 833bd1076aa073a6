"""`parallel.offload` as users write it: what is offloaded between uses, and where to."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from runner.config.section import Glob, Section, refusal, setting

Offloaded = Literal["none", "host", "disk"]


class ActivationOffload(Section):
    to: Offloaded = setting("none", "Where activations wait for backward")
    modules: tuple[Glob, ...] = setting((), "Globs of modules; []: all")
    larger_than: float = setting(0.0, "Smaller tensors stay on the device", unit="MB", ge=0, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _written_out(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise refusal(
                f"parallel.offload.activations = {value!r}: it has several keys; write "
                f"parallel.offload.activations.to={value}.",
                "parallel.offload.activations",
            )
        return value


class OffloadForm(Section):
    optimizer: Offloaded = setting("none", "Where optimizer states are stored; host with ZeRO 1-3, disk with ZeRO 3")
    parameters: Offloaded = setting("none", "Where parameters are stored between uses, with ZeRO 3")
    activations: ActivationOffload = setting(ActivationOffload(), "Tensors that autograd saves for backward")
    folder: str | None = setting(None, "Folder on the disk to use; null: the run folder", min_length=1)

    @property
    def on_disk(self) -> bool:
        return "disk" in (self.optimizer, self.parameters, self.activations.to)
