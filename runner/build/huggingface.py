"""Models of the library transformers, from a config alone: `model.target=transformers.XForCausalLM` and `model.config`.

The config class that belongs to the model class is made from `model.config`; nothing is fetched from anywhere. The
invariant: a key of `model.config` that the config class does not know is an error, although the class itself would take
it for an attribute and go on with its default. Any class that has a `config_class` is built this way.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from runner.build import targets
from runner.checkpoint import DESCRIPTION, Companions
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
    function: Any = targets.resolve(model.target, "model.target")
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
    given, name = dict(model.config), model.target
    model_type = given.pop("model_type", None)
    if automatic:
        kind, function, name = _automatic(function, name, model_type), function.from_config, f"{name}.from_config"
    elif kind is None:
        raise ConfigError(
            "MW306",
            f"model.config is given, but model.target = {name!r} has no config class as the models of "
            f"{LIBRARY} have; give its arguments as model.args.",
        )
    elif model_type not in (None, kind.model_type):
        raise ConfigError(
            "MW306", f"model.config.model_type = {model_type!r}, but {name} is of type {kind.model_type!r}."
        )
    return targets.call(function, model.args | {"config": _configured(kind, given)}, name, "model")


def load(module: nn.Module, folder: Path, new: Collection[str] = ()) -> tuple[list[str], list[str]] | None:
    """Load a transformers model's weights from a folder with the library's own loader, which handles older names and
    layouts; the tensors `new` stay as they are.

    Returns:
        The names that the files lack, and those that the model does not know: none if it is loaded, else `module` is as
        it was. None if it is no model of the library, or these are not its weights. The full model is read.
    """
    library = sys.modules.get(LIBRARY)
    if library is None or not isinstance(module, library.PreTrainedModel) or not folder.is_dir():
        return None
    try:
        found, mismatches = type(module).from_pretrained(
            folder, config=module.config, local_files_only=True, output_loading_info=True
        )
    except (OSError, RuntimeError, ValueError):  # not weights of this model, which the caller reports by name
        return None
    missing, unexpected = sorted({*mismatches.pop("missing_keys")} - {*new}), sorted(mismatches.pop("unexpected_keys"))
    if any(mismatches.values()):
        return None
    if not missing and not unexpected:
        kept = module.state_dict()
        module.load_state_dict({name: kept[name] if name in new else one for name, one in found.state_dict().items()})
    return missing, unexpected


def companions(module: nn.Module) -> Companions:
    """The config.json from which the library makes a model such as `module`; nothing for other modules."""
    library = sys.modules.get(LIBRARY)
    if library is None or not isinstance(module, library.PreTrainedModel):
        return Companions()
    content = json.loads(module.config.to_json_string()) | {"architectures": [type(module).__name__]}
    return Companions({DESCRIPTION: json.dumps(content, indent=2) + "\n"})


def _automatic(function: Any, target: str, model_type: str | None) -> Any:
    """The config class of a model type, by which a class such as AutoModelForCausalLM chooses the model."""
    from transformers import CONFIG_MAPPING

    if model_type is None or model_type not in CONFIG_MAPPING:
        what = "is not set" if model_type is None else f"= {model_type!r} is not a type of model"
        near = closest(model_type or "", sorted(CONFIG_MAPPING))
        raise ConfigError("MW306", f"model.config.model_type {what}; {target} chooses the model by it.{near}")
    if (kind := CONFIG_MAPPING[model_type]) not in function._model_mapping:
        raise ConfigError(
            "MW306", f"model.target = {target!r} has no model of model.config.model_type = {model_type!r}."
        )
    return kind


def _configured(kind: type, given: Mapping[str, Any]) -> Any:
    """The config of class `kind` made from `given`, without a cache of keys and values unless that asks for one."""
    try:
        config = kind(**given)
    except Exception as error:
        text = f"model.config: {kind.__name__} cannot be made: {targets.describe(error)}."
        raise ConfigError("MW306", text) from error
    _check_known(kind, config, given, "model.config")
    _switch_cache_off(config, given)
    return config


def _check_known(kind: type, config: Any, given: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for a key, here or in a config within, that the config class does not declare and stored as an
    extra attribute."""
    declared = _declared(kind)
    for key, value in given.items():
        if key in vars(config) and key not in declared and not _read_by_models(kind, key):
            raise ConfigError("MW306", f"{where}: {kind.__name__} has no {key!r}.{closest(key, sorted(declared))}")
        inner = getattr(config, key, None)
        if isinstance(value, Mapping) and key in getattr(kind, "sub_configs", {}) and inner is not None:
            within = {name: one for name, one in value.items() if name != "model_type"}  # which has chosen the class
            _check_known(type(inner), inner, within, f"{where}.{key}")


def _read_by_models(kind: type, key: str) -> bool:
    """Whether models read a key that their config class does not declare, as T5 reads `decoder_start_token_id`."""
    file = Path(inspect.getfile(kind))
    models = file.with_name(file.name.replace("configuration_", "modeling_"))
    name = re.escape(key)
    read = rf"""\bconfig\.{name}\b|\bgetattr\([\w.]*config, *["']{name}["']"""
    return models.is_file() and bool(re.search(read, models.read_text(encoding="utf-8")))


def _declared(kind: type) -> set[str]:
    """The public names that a config class gives its configs by itself."""
    own = [one for one in inspect.signature(kind).parameters.values() if one.kind is not one.VAR_KEYWORD]
    names = {one.name for one in own}
    if all(one.default is not one.empty for one in own):
        with suppress(ValueError):  # a config made of others has no default
            names |= set(vars(kind()))
    return {name for name in names if not name.startswith("_")}


def _switch_cache_off(config: Any, given: Mapping[str, Any]) -> None:
    if "use_cache" in vars(config) and "use_cache" not in given:
        config.use_cache = False
    for key in getattr(config, "sub_configs", {}):
        inner = getattr(config, key, None)
        if inner is not None:
            _switch_cache_off(inner, given.get(key) or {})
