"""What Hydra does several times for one command, done once: Hydra has no switch for it, so its methods are replaced
for as long as a command composes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.core.utils import configure_log
from hydra.types import RunMode
from omegaconf import open_dict


@contextmanager
def composed_once() -> Iterator[None]:
    """Inside of the block, the config that Hydra composes to ask for `hydra.mode` is that of the run.

    A command with swept values or a group without a choice does not compose as a run; Hydra's own way decides there.
    """
    get_mode_twice, compose = Hydra.get_mode, Hydra.compose_config
    composed: dict[tuple[str, ...], Any] = {}

    def get_mode(owner: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        try:
            config = compose(owner, config_name, overrides, RunMode.RUN)
        except Exception:  # composed again for the run, where it is reported
            return get_mode_twice(owner, config_name, overrides)
        mode, added = config.hydra.mode, [] if config.hydra.mode is not None else ["hydra.mode=RUN"]
        with open_dict(config):
            config.hydra.overrides.hydra.extend(added)
            config.hydra.mode = mode or RunMode.RUN
        composed[tuple(overrides) + tuple(added)] = config
        return mode

    def compose_config(
        owner: Hydra,
        config_name: str | None,
        overrides: Sequence[str],
        run_mode: RunMode,
        with_log_configuration: bool = False,
        **rest: Any,
    ) -> Any:
        config = composed.pop(tuple(overrides), None)
        if config is None or run_mode != RunMode.RUN:
            return compose(owner, config_name, list(overrides), run_mode, with_log_configuration, **rest)
        if with_log_configuration:
            configure_log(config.hydra.hydra_logging, config.hydra.verbose)
        return config

    Hydra.get_mode, Hydra.compose_config = get_mode, compose_config  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Hydra.get_mode, Hydra.compose_config = get_mode_twice, compose  # type: ignore[method-assign]


@contextmanager
def sources_copied_once() -> Iterator[None]:
    """Inside of the block, Hydra copies all sources once for the list of options, not for every group."""
    copied = ConfigLoaderImpl._parse_overrides_and_create_caching_repo
    known: dict[str, Any] = {}

    def once(owner: ConfigLoaderImpl, *args: Any, **kwargs: Any) -> Any:
        if (key := repr((args, kwargs))) not in known:
            known[key] = copied(owner, *args, **kwargs)
        return known[key]

    ConfigLoaderImpl._parse_overrides_and_create_caching_repo = once  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ConfigLoaderImpl._parse_overrides_and_create_caching_repo = copied  # type: ignore[method-assign]
