"""Checkpoints: training state that any plan can load, written atomically.

A checkpoint is a folder `step-00000100`, on a file system that all ranks see:

    checkpoint.json          run, history, step, position, form, world_size, plan, config, fingerprint, and size and
                             sha256 of every file
    index.json               every tensor by key: shape, dtype, and where its parts are stored (file, byte, block)
    rank-00003.safetensors   form sharded: this rank's parts, named KEY[0:256,0:784]
    rank-00003.copy-of-00002.safetensors  with checkpoint.copies=2 under ZeRO: another rank's file
    rank-00003.pt            RNG states of the rank; for the first rank of each pipeline group also non-tensor state:
                             options and scalars of the optimizer by parameter, scheduler, loss scale
    model.safetensors        form merged: unsharded parameters and buffers by the model's own names
    optimizer.safetensors    form merged: unsharded optimizer states, named STATE/NAME
    config.json              form merged, for a model of transformers
    adapter_model.safetensors, adapter_config.json
                             form merged, for a model with an adapter of peft: what peft loads onto the base model

Keys do not depend on a plan: `model/NAME` (in fp32 where the program computes in less) and `optimizer/STATE/NAME`.
The invariant: a folder with that name is complete, and reading it runs no code from it (JSON,
safetensors, and torch files of plain data).

`read(path)` opens one without a process group; see `Checkpoint` for reading any block of any tensor.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.checkpoint.branch import is_one, locate, newest
    from runner.checkpoint.content import Content
    from runner.checkpoint.folder import HEADER, NAME, clean
    from runner.checkpoint.loading import Restored, check, check_model, load
    from runner.checkpoint.reading import Checkpoint, read
    from runner.checkpoint.saving import SaveFailed, SaveOptions, Saver
    from runner.checkpoint.verification import to_continue, verify, weights, weights_in
    from runner.checkpoint.writing import ADAPTER_DESCRIPTION, DESCRIPTION, Companions

_MODULES = {
    "ADAPTER_DESCRIPTION": "writing",
    "DESCRIPTION": "writing",
    "HEADER": "folder",
    "NAME": "folder",
    "Checkpoint": "reading",
    "Companions": "writing",
    "Content": "content",
    "Restored": "loading",
    "SaveFailed": "saving",
    "SaveOptions": "saving",
    "Saver": "saving",
    "check": "loading",
    "check_model": "loading",
    "clean": "folder",
    "is_one": "branch",
    "load": "loading",
    "locate": "branch",
    "newest": "branch",
    "read": "reading",
    "to_continue": "verification",
    "verify": "verification",
    "weights": "verification",
    "weights_in": "verification",
}

__all__ = [
    "ADAPTER_DESCRIPTION",
    "DESCRIPTION",
    "HEADER",
    "NAME",
    "Checkpoint",
    "Companions",
    "Content",
    "Restored",
    "SaveFailed",
    "SaveOptions",
    "Saver",
    "check",
    "check_model",
    "clean",
    "is_one",
    "load",
    "locate",
    "newest",
    "read",
    "to_continue",
    "verify",
    "weights",
    "weights_in",
]


def __getattr__(name: str) -> Any:
    """Names are imported at their first use: the command, which looks at folders of checkpoints, needs no torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'runner.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(f"runner.checkpoint.{_MODULES[name]}"), name)
