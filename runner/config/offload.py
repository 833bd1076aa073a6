"""`parallel.offload` as users write it: what leaves the device between its uses, and where it goes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from runner.config.section import Glob, Section, refusal

Offloaded = Literal["none", "host", "disk"]


class ActivationOffload(Section):
    to: Offloaded
    modules: tuple[Glob, ...]
    larger_than: Annotated[float, Field(ge=0, allow_inf_nan=False, description="MB.")]

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

    @model_validator(mode="after")
    def _something_is_moved(self) -> ActivationOffload:
        for name, value in (("modules", self.modules), ("larger_than", self.larger_than)):
            if value and self.to == "none":
                key = f"parallel.offload.activations.{name}"
                raise refusal(
                    f"{key} = {list(value) if isinstance(value, tuple) else value} is given but "
                    "parallel.offload.activations.to = 'none' moves nothing; choose host or disk, or drop it.",
                    key,
                    "parallel.offload.activations.to",
                )
        return self


class OffloadForm(Section):
    optimizer: Offloaded
    parameters: Offloaded
    activations: ActivationOffload
    folder: Annotated[str | None, Field(min_length=1)]

    @property
    def on_disk(self) -> bool:
        return "disk" in (self.optimizer, self.parameters, self.activations.to)

    @model_validator(mode="after")
    def _folder_is_used(self) -> OffloadForm:
        if self.folder is not None and not self.on_disk:
            raise refusal(
                f"parallel.offload.folder = {self.folder!r} is given but nothing of parallel.offload goes to a disk; "
                "set optimizer, parameters or activations.to to disk, or drop the folder.",
                "parallel.offload.folder",
                "parallel.offload",
            )
        return self
