"""Hydra's errors, reworded: one paragraph with the fault and its remedy.

Hydra offers little more than the text of its exceptions, so this reads the text; `tests/runner/test_cli.py` holds one
example of each kind against the Hydra that is installed. An unknown text is passed on in one line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from runner.cli.recipes import READ, catalogue, in_yaml, shipped
from runner.config.keys import children, unknown, walk
from runner.config.origins import Origins
from runner.errors import ConfigError, allowed

COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, YAMLError, RecursionError)
QUOTING = "a value that holds a comma or begins with a bracket needs quotes inside quotes: 'key=\"a,b\"'"

OWN = {
    **{
        group: f" With --config-dir DIR, one of your own is the file DIR/{group}/NAME.yaml."
        for group in ("parallel", "launch")
    },
    "cluster": " One of your own is named by its file: cluster.file=PATH.",
    "recipe": " One of your own is found in the folder recipes: recipes/NAME.yaml is +recipe=NAME.",
}
"""Where what the package does not have is looked for, by group of configs."""
OPTIONAL = ' It is an optional part: pip install "meshwright[sweep]".'
OPTIONAL_PARTS = {"hydra/launcher": ("joblib", "submitit_local", "submitit_slurm"), "hydra/sweeper": ("optuna",)}
"""What comes with the extra `sweep`, by group of configs."""


def reword(error: Exception, overrides: list[str]) -> ConfigError:
    """The ConfigError for an exception that Hydra, OmegaConf or the YAML reader raised while composing the `overrides`
    of the command line."""
    origins = Origins(tuple(overrides))
    text = _one_line(f"{error} {error.__cause__ or ''}")
    if isinstance(error, OverrideParseException):
        return ConfigError("MW103", _grammar(error.override.removeprefix("++"), text))
    if isinstance(error, YAMLError):
        return ConfigError("MW107", f"a config file is not valid YAML: {in_yaml(error)}.")
    if isinstance(error, RecursionError):
        return ConfigError(
            "MW107",
            f"the defaults of a recipe lead back to itself, by {', '.join(READ) or 'a file of --config-dir'}; a recipe "
            "that builds on a shipped one needs another name.",
        )
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, name = _chosen(str(error.missing_cfg_file), overrides)
        right = allowed(name, error.options)
        own = OPTIONAL if name in OPTIONAL_PARTS.get(group, ()) else OWN.get(group, "")
        own = "" if "Did you mean" in right and own != OPTIONAL else own
        if group == "recipe" and (other := Path("recipes", f"{name}.yml")).is_file():
            own = f" {other} is there: recipes end in .yaml."
        return ConfigError("MW106", f"{group} = {name!r} does not exist.{right}{own}{origins.sentence([group])}")
    listed = re.search(r"In '.*?([^/']+)': Could not load '(.+)/([^/']+)'", text)
    if isinstance(error, MissingConfigException) and listed is not None:
        ours = (file.stem for file in (shipped().parent / "conf" / listed[2]).glob("*.yaml"))
        options = sorted(catalogue() if listed[2] == "recipe" else ours)
        return ConfigError(
            "MW106", f"{listed[1]}: its defaults name {listed[3]!r}, which does not exist.{allowed(listed[3], options)}"
        )
    if isinstance(error, MissingConfigException):
        return ConfigError("MW803", f"{_fallback(_one_line(str(error)))} `run doctor` checks the installation.")
    if found := re.search(r"Could not override '([^'@]+)", text):
        return ConfigError("MW201", _override(found[1], origins))
    if found := re.search(r"Ambiguous value for argument '(.*?)' 1\.", text):
        return ConfigError(
            "MW104",
            f"{found[1].removeprefix('++')!r} gives several values: add -m to run one job for each, or write "
            "KEY=[VALUE,VALUE] for a list.",
        )
    if found := re.search(r"Sweep parameters '(.*?)' requires", text):
        return ConfigError(
            "MW104", f"{found[1].removeprefix('++')!r} is a sweep: add -m to run one job for each value."
        )
    if found := re.search(r"Error merging override \+*([^=]+)=(.*?) Cannot merge DictConfig with", text):
        return ConfigError("MW204", f"{found[1]} = {found[2]}: must be a mapping such as {{name: value}}.")
    if found := re.search(r"In '([^']+)': \w+ raised while composing config: Cannot merge DictConfig with", text):
        return ConfigError(
            "MW204",
            f"{found[1]}.yaml: a section, such as model, data or train, is a list there; it must be a mapping of keys.",
        )
    if found := re.search(r"An item is already at '([^']+)'", text):
        return ConfigError("MW105", f"{found[1]} is set already; change it with {found[1]}=VALUE, without the plus.")
    if found := re.search(r"Could not delete from config\. '([^']+)' does not exist", text):
        known = any(key.path == found[1] for key in walk())
        why = "The recipe does not set it, so it has its default; leave the word out." if known else unknown(found[1])
        return ConfigError("MW105", f"{found[1]} cannot be removed with ~: it is not there. {why}")
    if found := re.search(r"Multiple values for (\S+?)\.", text):
        return ConfigError(
            "MW105", f"{found[1]} is chosen twice; give it once, or several at once as '+{found[1]}=[a,b]'."
        )
    return ConfigError("MW107", _fallback(text))


def _chosen(missing: str, overrides: Sequence[str]) -> tuple[str, str]:
    """The group of configs and the name in it that the command line names; a name may be a path."""
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        if f"{key}/{value}" == missing:
            return key, value
    group, _, name = missing.rpartition("/")
    return group, name


def _override(key: str, origins: Origins) -> str:
    if key == "recipe":
        return "a recipe is added with a plus: +recipe=NAME. `run recipes` lists the names."
    inner = _key_of_mapping(key, origins.overrides)
    key = key if inner is None else f"{key}.{inner}"
    parent, _, _ = key.rpartition(".")
    text = unknown(key)
    if "Allowed" not in text and "no place" not in text:
        text = f"{key} is not a config key; {parent} has no keys of its own."
    return text + origins.sentence([key])


def _key_of_mapping(section: str, overrides: Sequence[str]) -> str | None:
    """The first key that a section does not have, of a mapping that is given as its value (`train={stps: 3}`)."""
    known = children(section)
    for word in overrides:
        name, _, value = word.lstrip("+").partition("=")
        if name == section and value.startswith("{"):
            with suppress(YAMLError):
                given = yaml.safe_load(re.sub(r":(?=[^ ])", ": ", value))
                return next((str(inner) for inner in given if inner not in known), None)
    return None


def _grammar(override: str, text: str) -> str:
    found = re.search(
        r"(?:mismatched input|extraneous input|viable alternative at input|error at:) '(.*?)'(?: |$)", text
    )
    near = "" if found is None else found[1]
    if not re.sub(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", "", override).isascii():  # values are quoted
        problem = "keys on the command line are ASCII; give this one in a recipe"
        if override.partition("=")[0].isascii():
            problem += ". Or quote the value, within quotes for the shell: 'key=\"é\"'"
    elif "=" not in override:
        problem = "write KEY=VALUE"
    elif (
        near.endswith("<EOF>") or override.count("[") > override.count("]") or override.count("{") > override.count("}")
    ):
        problem = "it ends too early: a bracket, brace or quote is not closed"
    elif override.lstrip("+").startswith("parallel.strategies.") and re.search(r"[*@?]", override.partition("=")[0]):
        problem = "paths with * ? or @ are written as keys of a mapping: '+parallel.strategies={PATH: [[2,4],[4,1]]}'"
    elif re.search(r"""[{,]\s*["']?[^:{},\s]*\[[^:{},]*\][^:{},\s]*["']?\s*:""", override):
        problem = r"brackets in the key of a mapping are escaped: '{\[qkv\]_proj: [[2,4],[4,1]]}'"
    elif re.search(r"""[{,]\s*("[^"]*"|'[^']*')\s*:""", override):
        problem = "keys of a mapping stand without quotes, and none is empty: '{KEY: VALUE}'"
    else:
        problem = (f"it cannot be read at {near!r}; " if near else "") + QUOTING
    return f"{override!r} is not a valid override: {problem}."


def _fallback(text: str) -> str:
    return re.sub(r"\s*(See https?://|Config search path:).*", "", text) or "the config cannot be composed."


def _one_line(text: str) -> str:
    return " ".join(text.split())
