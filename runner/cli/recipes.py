"""Recipes: the YAML files that `+recipe=NAME` chooses.

Hydra names a config group after the folder that holds it, so the top-level folder `recipes/` would be a group `recipes`
whose files are bare configs. `RecipeSource` serves the files of a folder one level down instead, as `recipe/NAME`.
The user's recipes come first: `recipe/` of `--config-dir`, then `recipes/` of the working directory, then the shipped
ones. The first file of a name is taken, and `NOTICES` reports when it hides a shipped recipe.

Invariant: a file is read on demand, so a broken recipe affects only itself.
"""

from __future__ import annotations

import builtins
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from runner.errors import ConfigError
from runner.packages import ours_alone
from runner.report.units import shown_path

GROUP = "recipe"
NO_MESH = ".no_mesh"
"""Configs `recipe/.no_mesh/NAME` set the mesh to null; they come before a recipe that has one, whose axes Hydra would
else add to those of the recipes below it."""
NOTICES: dict[str, None] = {}
"""What to say of the recipes that were read, each once and in order."""
CHOSEN = ("parallel", "cluster", "launch", "job")
"""Groups that have a choice in `conf/config.yaml`."""
READ: dict[str, None] = {}
"""The files of recipes that were read."""
_given: list[Path] = []
"""The folder of `--config-dir`."""


def shipped() -> Path:
    """The folder of the recipes that come with the package."""
    return Path(str(files("recipes"))).resolve()


def folders() -> list[Path]:
    """The folders that hold recipes, in search order: those of the user that there are, then the shipped one."""
    own = [*(folder / GROUP for folder in _given), Path("recipes").resolve()]
    return [*(folder for folder in own if folder.is_dir() and folder != shipped()), shipped()]


def catalogue() -> dict[str, Path]:
    """Every recipe by name, the shipped ones first."""
    return {
        file.relative_to(folder).with_suffix("").as_posix(): file
        for folder in reversed(folders())
        for file in sorted(folder.rglob("*.yaml"))
    }


def description(file: Path) -> str:
    """The one-line description of a recipe: its first comment that is neither an `@package` header nor for editors, or
    nothing."""
    try:
        text = text_of(file)
    except ConfigError:
        return "(cannot be read)"
    for line in text.splitlines():
        comment = line.removeprefix("#").strip()
        if line and not line.startswith("#"):
            break
        if comment and not comment.startswith(("@package", "yaml-language-server:")):
            return comment
    return ""


def text_of(file: Path) -> str:
    """The text of a recipe, without the mark that some editors put before it. Raises ConfigError if it cannot be
    read."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("MW111", f"the recipe {shown_path(file)} cannot be read: {error}.") from None


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
        return file is not None and (file.is_file() or NO_MESH in PurePosixPath(config_path).parts)

    def load_config(self, config_path: str) -> ConfigResult:
        file = self._locate(self._normalize_file_name(config_path))
        if file is not None and NO_MESH in PurePosixPath(config_path).parts:
            nothing = OmegaConf.create({"parallel": {"mesh": None}})
            return ConfigResult(self.provider, self.full_path(), nothing, {"package": "_global_"})
        if file is None or not file.is_file():
            raise ConfigLoadError(f"there is no recipe {config_path!r} in {self.path}")
        name = file.relative_to(self.path).with_suffix("").as_posix()
        config, header = _read(file)
        if Path(self.path) == shipped():
            _mean_ours(config)
        elif (shipped() / f"{name}.yaml").is_file():
            NOTICES[
                f"recipe: {name} is {shown_path(file)}, not the one of the same name that comes with Meshwright"
            ] = None
        _put_no_mesh_before(config, name)
        return ConfigResult(self.provider, self.full_path(), config, header)

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


def _read(file: Path) -> tuple[DictConfig, dict[str, str | None]]:
    """The content of a recipe and its header. Raises ConfigError for a file that is no recipe."""
    where = shown_path(file)
    READ[where] = None
    text = text_of(file)
    try:
        config = OmegaConf.create(text)
    except OmegaConfBaseException as error:
        what = str(error).splitlines()[0].replace("Incompatible key type 'NoneType'", "null cannot be a key")
        raise ConfigError("MW111", f"the recipe {where}: {error.full_key}: {what}.") from None
    except YAMLError as error:
        raise ConfigError("MW111", f"the recipe {where} is not valid YAML: {in_yaml(error)}.") from None
    if not isinstance(config, DictConfig):
        raise ConfigError(
            "MW111",
            f"the recipe {where} holds a list, but a recipe is a mapping of config keys, e.g. `train: {{steps: 10}}`.",
        )
    if not config:
        raise ConfigError(
            "MW111",
            f"the recipe {where} is empty; begin it with `# @package _global_` and give at least model.target and "
            "data.target, or `defaults: [NAME, _self_]` of another recipe.",
        )
    defaults = config.get("defaults")
    if defaults is not None and not isinstance(defaults, ListConfig):
        raise ConfigError("MW111", f"the recipe {where}: defaults must be a list such as [NAME, _self_].")
    pairs = (pair for default in defaults or () if isinstance(default, DictConfig) for pair in default.items())
    for key, value in ((str(key), value) for key, value in pairs):
        group = key.removeprefix("override ").strip().removeprefix("/")
        if group in CHOSEN and key != f"override /{group}":
            raise ConfigError(
                "MW111",
                f"the recipe {where}: `- {key}: {value}` in its defaults must be `- override /{group}: {value}`, "
                f"because a choice of {group} is there already.",
            )
    header = RecipeSource._get_header_dict(text)
    if header.get("package") != "_global_":
        raise ConfigError(
            "MW111",
            f"the recipe {where} must begin with the line `# @package _global_`, without which its keys are not those "
            "of the config.",
        )
    return config, header


def in_yaml(error: Exception) -> str:
    """The error in a YAML file and its position, without the file name that the parser makes up."""
    return " ".join(str(error).replace('in "<unicode string>", ', "in ").split())


def _mean_ours(node: Any) -> None:
    """Make every model name in a shipped recipe refer to ours, even if the user has a package `models` too."""
    for key in list(node.keys()) if isinstance(node, DictConfig) else range(len(node)):
        value = node._get_node(key)
        if isinstance(value, (DictConfig, ListConfig)):
            _mean_ours(value)
        elif isinstance(text := value._value(), str):
            node[key] = ours_alone(text)


def _put_no_mesh_before(config: DictConfig, name: str) -> None:
    """Let `recipe/.no_mesh/NAME` come before the file's own values, if these have a mesh."""
    parallel = config.get("parallel")
    if not isinstance(parallel, DictConfig) or not isinstance(parallel.get("mesh"), DictConfig):
        return
    defaults = list(config.get("defaults") or [])
    overriding = [
        isinstance(one, DictConfig) and any(str(key).startswith("override ") for key in one) for one in defaults
    ]
    if "_self_" not in defaults:  # where Hydra would put it
        at = 0 if defaults and all(overriding) else len(defaults)
        defaults.insert(at, "_self_")
        overriding.insert(at, False)
    first = min([defaults.index("_self_"), *(n for n, overrides in enumerate(overriding) if overrides)])
    config["defaults"] = [*defaults[:first], f"/{GROUP}/{NO_MESH}/{name}", *defaults[first:]]


class RecipeSearchPath(SearchPathPlugin):
    """Puts the recipe folders on Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in folders():
            provider = "recipes" if folder == shipped() else f"recipes in {folder}"
            search_path.append(provider, f"{RecipeSource.scheme()}://{folder}")


def search(config_dir: str | None) -> None:
    """Begin a command whose `--config-dir` is `config_dir`."""
    _given[:] = [] if config_dir is None else [Path(config_dir).resolve()]
    NOTICES.clear()
    READ.clear()


def register() -> None:
    """Make Hydra know the group `recipe`. To be called once before Hydra starts; calling again does no harm."""
    known = Plugins.instance().discover(SearchPathPlugin)
    if RecipeSearchPath not in known:
        Plugins.instance().register(RecipeSource)
        Plugins.instance().register(RecipeSearchPath)
