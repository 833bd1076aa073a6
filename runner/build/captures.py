"""Graphs that commands before this one have captured, for plans of described clusters: a model under another plan need
not be exported again.

The question is the complete config but for the plan and the cluster, the batch, the objective's tensors and the
surroundings; the files behind an entry must be as they were. Invariants: nothing trains with such a graph, as what a
module computes may depend on more than files; to read an entry runs no code but that of graphs.
"""

from __future__ import annotations

import base64
import hashlib
import io
import pickle
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.build.watched_files import Files, WatchedFiles, surroundings
from runner.config.schema import Config
from strategies.capture import Captured, Objective
from strategies.core import graph as graphs
from strategies.planner import plan_cache

PLANNING = {"parallel", "cluster", "world_size"}
"""Sections of the config that decide nothing that is captured, but for what an objective says of them."""
OF_ARGUMENTS = {
    ("torch", "device"): torch.device,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("builtins", "slice"): slice,
    ("builtins", "complex"): complex,
}
"""How a pickle names what arguments of operators are made of, besides dtypes, layouts and memory formats."""


class Captures:
    """The captures of a model, in a folder.

    Args:
        config: of the command.
        folder: of the entries; it need not exist.
        watched: has seen all files that the command has read.
        warn: reports an entry that cannot be used or kept.
    """

    def __init__(self, config: Config, folder: Path, watched: WatchedFiles, warn: Callable[[str], None]) -> None:
        self.question = config.model_dump_json(exclude=PLANNING)
        self.folder, self.watched, self.warn = folder, watched, warn

    def find(self, objective: Objective, batch: Sequence[Tensor]) -> Captured | None:
        """The training graph of an objective that has shapes alone, where it was captured before. Of its tensors those
        of the objective are there, but no constants."""
        read = plan_cache.load(self.folder, self._key(objective, batch), self.warn, _read)
        if read is None:
            return None
        self.watched.add(read[0])
        return Captured(read[1], _own(objective))

    def keep(self, objective: Objective, batch: Sequence[Tensor], captured: Captured) -> None:
        """Store a captured graph; one that holds for some values alone, or arguments of unknown classes, is not."""
        graph = pickle.dumps(captured.graph)
        try:
            _Graphs(io.BytesIO(graph)).load()
        except pickle.UnpicklingError:
            return
        if not captured.decided and (behind := self.watched.behind()) is not None:
            content = {**vars(behind), "graph": base64.b64encode(zlib.compress(graph, 1)).decode()}
            plan_cache.store(self.folder, self._key(objective, batch), content, self.warn)

    def _key(self, objective: Objective, batch: Sequence[Tensor]) -> str:
        target = objective.sections, objective.target, objective.names, sorted(objective.targets)
        described = [
            (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            for name, tensor in (*_own(objective).items(), *zip(objective.names, batch, strict=True))
        ]
        complete = self.question, target, described, surroundings()
        return hashlib.sha256(repr(complete).encode()).hexdigest()[:32]


def _own(objective: Objective) -> dict[str, Tensor]:
    """The parameters and buffers by the names of a graph's sources."""
    named = (*objective.named_buffers(), *objective.named_parameters())
    return {name.removeprefix("model."): tensor.detach() for name, tensor in named}


def _read(content: dict[str, Any]) -> tuple[Files, graphs.OperatorGraph] | None:
    """The files behind an entry and its graph; None where one of them, such as the code of graphs, has changed."""
    files = Files(content["files"], content["names"], content["folders"])
    if not files.unchanged:
        return None
    try:
        return files, _Graphs(io.BytesIO(zlib.decompress(base64.b64decode(content["graph"])))).load()
    except (pickle.UnpicklingError, EOFError, zlib.error) as error:
        raise ValueError(str(error)) from error


class _Graphs(pickle.Unpickler):
    """Reads graphs, and no other objects than theirs."""

    def find_class(self, module: str, name: str) -> Any:
        if module == graphs.__name__ and isinstance(found := getattr(graphs, name, None), type):
            return found
        if module == "torch" and isinstance(
            found := getattr(torch, name, None), (torch.dtype, torch.layout, torch.memory_format)
        ):
            return found
        if (module, name) in OF_ARGUMENTS:
            return OF_ARGUMENTS[module, name]
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which no graph does")
