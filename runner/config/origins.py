"""The origin of each value of a composed config: an override on the command line, or one of the composed files.

Hydra keeps no origin per key, so the files of the defaults list are read again, last one first, and the first that
holds the key is the one that gave it. This is slow and done only for a rejected config.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

NAMED = {
    "launch.hosts": ("launch.hostfile", "launch.rank_table"),
    "world_size": ("launch.hosts", "launch.hostfile", "launch.rank_table"),
    "cluster": ("cluster.file",),
}
"""Keys whose values may come from a file, and the keys that name the file."""
EVERY_MODE = "conf/parallel/stand_alone"
"""Has the defaults of all modes."""


@dataclass(frozen=True)
class Origins:
    """The origins of one composed config.

    Attributes:
        overrides: The words of the command line, without options.
        config_name: The primary config; None leaves only the command line to look at.
        groups: The config groups that have a choice; `parallel=auto` chooses a file, it gives no value itself.
    """

    overrides: tuple[str, ...] = ()
    config_name: str | None = None
    groups: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of(cls, composed: DictConfig) -> Origins:
        """The origins of a config that still has its `hydra` node."""
        hydra = composed.hydra
        return cls(given(composed), hydra.job.config_name, frozenset(map(str, hydra.runtime.choices)))

    def sentence(self, keys: Sequence[str]) -> str:
        """The end of an error paragraph that says where `keys` came from, e.g. ` (from recipe/ffn_auto)`."""
        found = {key: source for key in keys if (source := self.source(key))}
        if len(set(found.values())) == 1:
            return f" (from {next(iter(found.values()))})"
        listed = ", ".join(f"{key} from {source}" for key, source in found.items())
        return f" ({listed})" if listed else ""

    def choice(self, group: str) -> str | None:
        """What the command line chose for a config group, None if it chose nothing."""
        return next((o.partition("=")[2] for o in reversed(self.overrides) if _key(o) == group), None)

    def overrides_key(self, dotted: str) -> bool:
        """Whether the command line gives this very key."""
        return any(_key(override) == dotted for override in self.overrides)

    def source(self, dotted: str) -> str | None:
        """What gave the value of a dotted key, None if nothing did."""
        parts = _before_position(dotted)
        for override in reversed(self.overrides):
            key = _key(override).split(".")
            shared = min(len(key), len(parts))
            if key[:shared] == parts[:shared] and (".".join(key) not in self.groups or len(parts) == 1):
                return f"the command line: {as_typed(override)}"
        for label, package, tree in reversed(self._files):
            if parts[: len(package)] == package and _holds(tree, parts[len(package) :]):
                return self._given_instead(dotted, str(label))
        return None

    def _given_instead(self, dotted: str, label: str) -> str:
        """The override behind a default: it selected the file, or a more specific one."""
        if not label.startswith("conf/"):
            return label
        if label == EVERY_MODE and dotted != "parallel.mode":
            return "its default"
        group = label.removeprefix("conf/").rpartition("/")[0]
        names = next((names for key, names in NAMED.items() if f"{dotted}.".startswith(f"{key}.")), ())
        given = {_key(override): override for override in self.overrides}
        key = next((key for key in (*names, group) if key in given), None)
        return label if key is None else f"the command line: {as_typed(given[key])}"

    @cached_property
    def _files(self) -> list[tuple[str, list[str], Any]]:
        """Label, package and content of every composed file of the project or the user, in order."""
        if self.config_name is None or not GlobalHydra.instance().is_initialized():
            return []
        loader = GlobalHydra.instance().config_loader()
        defaults = loader.compute_defaults_list(self.config_name, list(self.overrides), RunMode.RUN).defaults
        paths = {d.config_path: d.package for d in defaults if d.config_path}
        return [
            (label, [part for part in (package or "").split(".") if part and part != "_global_"], tree)
            for path, package in paths.items()
            if not path.startswith("hydra/")
            for label, tree in _load(loader, path)
        ]


def given(composed: DictConfig) -> tuple[str, ...]:
    """The overrides of a config that still has its `hydra` node, as they were written: `a=${b}` is not resolved."""
    written = OmegaConf.to_container(composed.hydra.overrides.task, resolve=False)
    return tuple(map(str, written)) if isinstance(written, list) else ()


def as_typed(override: str) -> str:
    """An override as the user typed it; undoes what `words.for_hydra` adds: pluses before keys in open mappings, and
    its encoding of `~`."""
    removal = re.fullmatch(r"\+\+([^=]+)=\{-(.*): null\}", override)
    return override.removeprefix("++") if removal is None else f"~{removal[1]}.{removal[2]}"


def _load(loader: ConfigLoader, path: str) -> list[tuple[str, Any]]:
    """Label and content of the first file that has this path on the search path."""
    for source in loader.get_sources():
        if source.is_config(path):
            label = f"conf/{path}" if source.provider == "main" else path
            return [(label, OmegaConf.to_container(source.load_config(path).config, resolve=False))]
    return []


def _holds(tree: Any, parts: Sequence[str]) -> bool:
    """Whether a nested mapping, whose keys may themselves be dotted, has the key `parts`."""
    if not parts:
        return True
    if not isinstance(tree, Mapping):
        return False
    heads = ((".".join(parts[:n]), parts[n:]) for n in range(1, len(parts) + 1))
    return any(head in tree and _holds(tree[head], rest) for head, rest in heads)


def _key(override: str) -> str:
    """The key of an override: `a.b` of `++a.b=1`."""
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def _before_position(dotted: str) -> list[str]:
    """The parts of a key up to a position in a list, e.g. `optimizer.groups` of `optimizer.groups.0.match`."""
    parts = dotted.split(".")
    stop = next((n for n, part in enumerate(parts) if part.isdigit()), len(parts))
    return parts[:stop]
