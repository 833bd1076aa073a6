"""Models of the library transformers, from a config alone: `model.target=transformers.XForCausalLM` and `model.config`.

The config class that belongs to the model class is made from `model.config`; nothing is fetched from anywhere. The
invariant: a key of `model.config` that the config class does not know is an error, although the class itself would take
it for an attribute and go on with its default. Any class that has a `config_class` is built this way.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from runner.build import targets
from runner.config.schema import Model
from runner.errors import ConfigError
from strategies.core.errors import closest

LIBRARY = "transformers"
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""Environment variables that the library reads when it is imported; what the user has set counts."""


def build(model: Model) -> Any:
    """What `model.target` makes of `model.args`, and of `model.config` where its class has a config class.

    Raises ConfigError: as `targets.build`, for a config that the class does not take, and for one that is missing.
    """
    if model.target.partition(".")[0] == LIBRARY:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
    function = targets.resolve(model.target, "model.target")
    automatic = hasattr(function, "_model_mapping") and hasattr(function, "from_config")
    kind = None if automatic else getattr(function, "config_class", None)
    if model.config is None:
        if (automatic or kind is not None) and "config" not in model.args:
            raise ConfigError(
                "MW306",
                f"model.target = {model.target!r} is made from a config; set model.config, e.g. "
                f"model.config={{{'model_type: llama, ' * automatic}hidden_size: 64, num_hidden_layers: 2}}. What it "
                "leaves out has the default of the class, at full size.",
            )
        return targets.call(function, model.args, model.target, "model")
    if automatic:
        return _automatic(function, model)
    if kind is None:
        raise ConfigError(
            "MW306",
            f"model.config is given, but model.target = {model.target!r} has no config class as the models of "
            f"{LIBRARY} have; give its arguments as model.args.",
        )
    given = dict(model.config)
    if (named := given.pop("model_type", kind.model_type)) != kind.model_type:
        raise ConfigError(
            "MW306", f"model.config.model_type = {named!r}, but {model.target} is of type {kind.model_type!r}."
        )
    return targets.call(function, model.args | {"config": _configured(kind, given)}, model.target, "model")


def load(module: nn.Module, folder: Path) -> bool:
    """Load a transformers model's weights from a folder with the library's own loader, which handles older names and
    layouts. Returns whether the files matched exactly: nothing missing, nothing unexpected.

    The full model is read; if the answer is false, `module` is as it was.
    """
    library = sys.modules.get(LIBRARY)
    if library is None or not isinstance(module, library.PreTrainedModel) or not folder.is_dir():
        return False
    try:
        found, mismatches = type(module).from_pretrained(
            folder, config=module.config, local_files_only=True, output_loading_info=True
        )
    except (OSError, RuntimeError, ValueError):  # not weights of this model, which the caller reports by name
        return False
    if any(mismatches.values()):
        return False
    module.load_state_dict(found.state_dict())
    return True


def described(module: nn.Module) -> str | None:
    """The config.json from which the library makes a model such as `module`; None for other modules."""
    library = sys.modules.get(LIBRARY)
    if library is None or not isinstance(module, library.PreTrainedModel):
        return None
    content = json.loads(module.config.to_json_string()) | {"architectures": [type(module).__name__]}
    return json.dumps(content, indent=2) + "\n"


def _automatic(function: Any, model: Model) -> Any:
    """A model of a class such as AutoModelForCausalLM, which chooses by `model_type`."""
    from transformers import CONFIG_MAPPING

    given = dict(model.config or {})
    name = given.pop("model_type", None)
    known = sorted(CONFIG_MAPPING)
    if name not in known:
        what = "is not set" if name is None else f"= {name!r} is not a type of model"
        raise ConfigError(
            "MW306",
            f"model.config.model_type {what}; {model.target} chooses the model by it.{closest(name or '', known)}",
        )
    kind = CONFIG_MAPPING[name]
    if kind not in function._model_mapping:
        raise ConfigError(
            "MW306", f"model.target = {model.target!r} has no model of model.config.model_type = {name!r}."
        )
    config = _configured(kind, given)
    make: Callable[..., Any] = function.from_config
    return targets.call(make, model.args | {"config": config}, f"{model.target}.from_config", "model")


def _configured(kind: type, given: Mapping[str, Any]) -> Any:
    """The config of class `kind` made from `given`, without a cache of keys and values unless that asks for one."""
    try:
        config = kind(**given)
    except Exception as error:
        raise ConfigError(
            "MW306", f"model.config: {kind.__name__} cannot be made: {targets.describe(error)}."
        ) from error
    _check_known(kind, config, given, "model.config")
    _switch_cache_off(config, given)
    return config


def _check_known(kind: type, config: Any, given: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for a key, here or in a config within, that the config class does not declare and stored as an
    extra attribute."""
    declared = _declared(kind)
    for key, value in given.items():
        if key in vars(config) and key not in declared:
            raise ConfigError("MW306", f"{where}: {kind.__name__} has no {key!r}.{closest(key, sorted(declared))}")
        inner = getattr(config, key, None)
        if isinstance(value, Mapping) and key in getattr(kind, "sub_configs", {}) and inner is not None:
            _check_known(type(inner), inner, value, f"{where}.{key}")


def _declared(kind: type) -> set[str]:
    """The public names that a config class gives its configs by itself."""
    names = {name for name, one in inspect.signature(kind).parameters.items() if one.kind is not one.VAR_KEYWORD}
    if not any(one.default is one.empty for one in inspect.signature(kind).parameters.values() if one.name in names):
        try:
            names |= set(vars(kind()))
        except ValueError:  # a config made of others has no default
            return names
    return {name for name in names if not name.startswith("_")}


def _switch_cache_off(config: Any, given: Mapping[str, Any]) -> None:
    if "use_cache" in vars(config) and "use_cache" not in given:
        config.use_cache = False
    for key in getattr(config, "sub_configs", {}):
        inner = getattr(config, key, None)
        if inner is not None:
            _switch_cache_off(inner, given.get(key) or {})
