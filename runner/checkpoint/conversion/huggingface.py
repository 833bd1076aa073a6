"""What the library transformers wants to find beside merged weights: config.json, and no buffers that it makes itself.

Both follow from the config of the run that saved, for models of the library alone: to import what a file names would be
to run code because of it, so nothing else is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.build import huggingface
from runner.config.schema import Model
from runner.errors import ConfigError
from strategies.capture.shapes import shapes_only

Described = tuple[str | None, frozenset[str] | None]
"""The config.json, and the names in the model's state dict; None for what is not known."""


def described(config: Mapping[str, Any]) -> Described:
    """What is known of the model of a run with `config`. It is built from shapes alone."""
    model = config.get("model", {})
    if not str(model.get("target", "")).startswith(f"{huggingface.LIBRARY}."):
        return None, None
    try:
        with shapes_only():
            module = huggingface.build(Model(**model | {"weights": None, "rename": ()}))
    except ConfigError:  # the library is not installed, or is another; the weights are the same without it
        return None, None
    return huggingface.described(module), frozenset(module.state_dict())
