"""Adapters of the library peft: weights of the base model by its own names, and files that peft loads.

peft wraps the base model, so its `layers.0.q_proj.weight` is `base_model.model.layers.0.q_proj.base_layer.weight` here.
The invariant: saved adapters have the names and the config that `save_pretrained` of the library writes for the active
adapter, so `PeftModel.from_pretrained` loads it.
"""

from __future__ import annotations

import copy
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from runner.checkpoint import ADAPTER_DESCRIPTION, Companions
from runner.errors import ConfigError

LIBRARY = "peft"
PREFIX = "base_model.model."


def _is_one(module: nn.Module) -> bool:
    library = sys.modules.get(LIBRARY)
    return library is not None and isinstance(module, library.PeftModel)


def base_names(module: nn.Module) -> dict[str, str]:
    """The names that tensors of a model with adapters have in the model that it was made of; none for other modules.

    A module that is trained in full (`modules_to_save`) is two: both begin with the values of the one in the base.
    """
    if not _is_one(module):
        return {}
    inner = re.compile(rf"[.](base_layer|original_module|modules_to_save[.]{re.escape(_active(module))})(?=[.])")
    return {
        name: inner.sub("", name.removeprefix(PREFIX))
        for name, _ in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    }


def adapter_names(module: nn.Module) -> frozenset[str]:
    """The tensors of the active adapter, which weights of a base model lack; none for other modules."""
    saved = _saved(module) if _is_one(module) else {}
    return frozenset(name for name, short in saved.items() if name != short)


def made_of_base(module: nn.Module) -> str | None:
    """The setting by which the active adapter begins with values that peft computes from the base's weights; None where
    it begins at random or with constants. Source: peft.tuners.lora.layer.LoraLayer.update_layer."""
    made: Any = module
    config = made.peft_config[_active(module)] if _is_one(module) else None
    if getattr(config, "use_dora", False):
        return "use_dora"
    first = getattr(config, "init_lora_weights", True)
    return f"init_lora_weights={first}" if isinstance(first, str) and first not in ("gaussian", "orthogonal") else None


def companions(module: nn.Module) -> Companions:
    """adapter_config.json, and what the tensors of the adapter are called in its file; nothing for other modules.

    Raises ConfigError: an adapter of which peft saves something that is no tensor of the model.
    """
    if not _is_one(module):
        return Companions()
    made: Any = module
    config = copy.deepcopy(made.peft_config[_active(module)])
    config.inference_mode = True  # as peft saves it
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        text = Path(folder, ADAPTER_DESCRIPTION).read_text(encoding="utf-8")
    stored: dict[int, str] = {}  # tensors that several layers share are stored under the first of their names
    named = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    for name, tensor in named.items():
        stored.setdefault(id(tensor), name)
    return Companions(
        {ADAPTER_DESCRIPTION: text}, {stored[id(named[name])]: one for name, one in _saved(module).items()}
    )


def _active(module: nn.Module) -> str:
    return str(module.active_adapter)


def _saved(module: nn.Module) -> Mapping[str, str]:
    """The names in the file of the active adapter by those in the model's state dict."""
    made: Any = module
    adapter, state = _active(module), made.state_dict()
    library: Any = sys.modules[LIBRARY]
    saved = library.get_peft_model_state_dict(made, state, adapter, save_embedding_layers=False)
    names = {}
    for name in state:
        short = name.replace(f".modules_to_save.{adapter}.", ".").replace(f".{adapter}", "")
        if name.endswith(f".lora_magnitude_vector.{adapter}.weight"):
            short = short.removesuffix(".weight")  # as peft had it first
        if short in saved:
            names[name] = short
    if len(names) != len(saved):
        left = sorted(set(saved) - set(names.values()))
        raise ConfigError(
            "MW871",
            f"model: peft saves {left[0]} of this adapter ({len(left)} such), which is no tensor of the model; choose "
            "an adapter whose parameters are modules of their own, such as peft.LoraConfig.",
        )
    return names
