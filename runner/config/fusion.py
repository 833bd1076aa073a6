"""The section `parallel.comm_fusion`: which collectives become one call."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from runner.config.section import Count, Section, refusal, setting


class Joined(Section):
    """Which collectives of one kind become one call: `auto`; of at most `size` megabytes (`config`); cut at positions
    (`index`, `config`: a list); or `none` of them."""

    mode: Literal["auto", "size", "index", "none"] = setting(
        "auto", "auto; size: calls of at most config MB; index: cut at the positions in config; none: a call per tensor"
    )
    config: Annotated[float, Field(gt=0, allow_inf_nan=False)] | tuple[Count, ...] | None = setting(
        None, "MB with mode size, a list of positions with mode index"
    )

    @property
    def bytes(self) -> int | None:
        """The maximum bytes of one call; None if not configured."""
        assert not isinstance(self.config, tuple)
        return None if self.config is None else max(int(self.config * 2**20), 1)


class CommFusion(Section):
    all_reduce: Joined = setting(Joined(), "All-reduces of gradients and of a plan")
    all_gather: Joined = setting(Joined(), "All-gathers of a plan")
    reduce_scatter: Joined = setting(Joined(), "Reduce-scatters of a plan")

    @model_validator(mode="after")
    def _configs_fit_modes(self) -> CommFusion:
        for name in type(self).model_fields:
            joined: Joined = getattr(self, name)
            key, config = f"parallel.comm_fusion.{name}", joined.config
            if joined.mode == "index" and name != "all_reduce":
                raise refusal(
                    f"{key}.mode = 'index' is not allowed: only all_reduce, the sum of gradients, has positions to cut "
                    "at. Allowed here: auto, size, none.",
                    f"{key}.mode",
                )
            fits = {
                "size": isinstance(config, float),
                "index": isinstance(config, tuple) and all(a < b for a, b in pairwise(config)),
            }.get(joined.mode, config is None)
            if not fits:
                wanted = {
                    "size": "a number of megabytes above 0, e.g. 25",
                    "index": "a list of increasing positions in the order in which backward completes the gradients, "
                    "e.g. [4, 8]",
                }.get(joined.mode, "nothing (null)")
                shown = list(config) if isinstance(config, tuple) else "null" if config is None else config
                raise refusal(
                    f"{key}.config = {shown} does not fit {key}.mode = {joined.mode!r}, which takes {wanted}; change "
                    "one of the two.",
                    f"{key}.config",
                    f"{key}.mode",
                )
        return self
