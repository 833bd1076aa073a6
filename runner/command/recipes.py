"""Recipes: the YAML files that `+recipe=NAME` chooses.

Hydra names a config group after the folder that holds it, so the top-level folder `recipes/` would be a group `recipes`
whose files are bare configs. `RecipeSource` serves the files of a folder one level down instead, as `recipe/NAME`.
The shipped recipes come first, then `recipes/` of the working directory; the first file of a name wins.

Invariant: a file is read when it is asked for, so a broken recipe spoils nothing but itself.
"""

from __future__ import annotations

import builtins
from importlib.resources import files
from pathlib import Path, PurePosixPath

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

GROUP = "recipe"


def folders() -> list[Path]:
    """The folders that hold recipes, in search order: the shipped one, then `recipes/` here if there is one."""
    shipped, own = Path(str(files("recipes"))).resolve(), Path("recipes").resolve()
    return [shipped, own] if own.is_dir() and own != shipped else [shipped]


def catalogue() -> dict[str, Path]:
    """Every recipe by name."""
    found: dict[str, Path] = {}
    for folder in folders():
        for file in sorted(folder.rglob("*.yaml")):
            found.setdefault(file.relative_to(folder).with_suffix("").as_posix(), file)
    return found


def description(file: Path) -> str:
    """The one-line description of a recipe: its first comment that is no `@package` header, or nothing."""
    for line in file.read_text(encoding="utf-8").splitlines():
        comment = line.removeprefix("#").strip()
        if line and not line.startswith("#"):
            break
        if comment and not comment.startswith("@package"):
            return comment
    return ""


def table() -> str:
    """Name and description of every recipe, one line each."""
    found = catalogue()
    width = max(map(len, found), default=0)
    return "\n".join(f"  {name:<{width}}  {description(file)}".rstrip() for name, file in found.items())


class RecipeSource(ConfigSource):
    """The config source `recipes://FOLDER`: every YAML file in the folder is a config `recipe/NAME`."""

    @staticmethod
    def scheme() -> str:
        return "recipes"

    def available(self) -> bool:
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        if config_path.strip("/") == "":
            return True
        folder = self._locate(config_path)
        return folder is not None and folder.is_dir()

    def is_config(self, config_path: str) -> bool:
        file = self._locate(self._normalize_file_name(config_path))
        return file is not None and file.is_file()

    def load_config(self, config_path: str) -> ConfigResult:
        file = self._locate(self._normalize_file_name(config_path))
        if file is None or not file.is_file():
            raise ConfigLoadError(f"there is no recipe {config_path!r} in {self.path}")
        text = file.read_text(encoding="utf-8")
        return ConfigResult(
            provider=self.provider,
            path=self.full_path(),
            config=OmegaConf.create(text),
            header=self._get_header_dict(text),
        )

    def list(self, config_path: str, results_filter: ObjectType | None) -> builtins.list[str]:
        if config_path.strip("/") == "":
            return [] if results_filter == ObjectType.CONFIG else [GROUP]
        folder = self._locate(config_path)
        names: builtins.list[str] = []
        for file in folder.iterdir() if folder is not None else ():
            self._list_add_result(names, f"{config_path}/{file.name}", file.name, results_filter)
        return sorted(set(names))

    def _locate(self, config_path: str) -> Path | None:
        """The file or folder that `recipe/...` means, None for a path outside the group."""
        group, *rest = PurePosixPath(config_path).parts or ("",)
        return Path(self.path, *rest) if group == GROUP else None


class RecipeSearchPath(SearchPathPlugin):
    """Puts the recipe folders on Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder, provider in zip(folders(), ("recipes", "recipes-here"), strict=False):
            search_path.append(provider, f"{RecipeSource.scheme()}://{folder}")


def register() -> None:
    """Make Hydra know the group `recipe`. To be called once before Hydra starts; calling again does no harm."""
    known = Plugins.instance().discover(SearchPathPlugin)
    if RecipeSearchPath not in known:
        Plugins.instance().register(RecipeSource)
        Plugins.instance().register(RecipeSearchPath)
