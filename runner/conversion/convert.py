"""A checkpoint in another form or for another plan: read from a source of tensors (`opened`), assigned to ranks
(`cut_of`), written merged or sharded (`write`).

Invariants: opening a source only reads headers, and a block costs memory of its size; the blocks of all ranks together
hold every element once; the output is a checkpoint as a run would have saved it, and appears atomically.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from runner.build import huggingface
from runner.checkpoint import Checkpoint, folder, is_one, locate, read, verify, weights, writing
from runner.checkpoint.content import name_of
from runner.checkpoint.folder import HEADER, INDEX
from runner.checkpoint.index import Index, joined, place, to_json
from runner.checkpoint.manifest import Header, Stamp, read_header, to_text
from runner.checkpoint.reading import TensorSource
from runner.checkpoint.saving import MERGED, SHARDED
from runner.checkpoint.writing import DESCRIPTION, Companions
from runner.config.schema import Model
from runner.conversion import deepspeed_files
from runner.errors import ConfigError
from runner.run_folder.plan_file import read_content
from strategies.capture.shapes import shapes_only
from strategies.core.errors import StrategyError
from strategies.core.layout import Block, Layout
from strategies.core.plan import Plan
from strategies.lowering.pipeline_schedule import owners_in
from strategies.runtime.shards import MODEL
from strategies.runtime.tensor_files import StoredTensor, TensorReader

MOST_RANKS = 2**20


@dataclass(frozen=True)
class Files:
    """Unsharded weights in files."""

    tensors: Mapping[str, StoredTensor]
    reader: TensorReader = field(default_factory=TensorReader)

    def read(self, key: str, block: Block | None = None) -> Tensor:
        return self.reader.block(self.tensors[key], block)


def opened(path: Path) -> tuple[TensorSource, str]:
    """The source in `path`, and a short description of it. The checksums of a checkpoint are verified.

    Raises ConfigError if `path` is none of these, or damaged.
    """
    if path.is_dir() and is_one(path):
        place = locate(path, "convert")
        verify(place)
        checkpoint = read(place)
        form = checkpoint.header.form
        return checkpoint, f"the {'sharded and merged' if form == 'both' else form} checkpoint {place}"
    if (folder := deepspeed_files.folder_of(path)) is not None:
        what = f"the DeepSpeed checkpoint {folder} (its weights; optimizer states are left out)"
        return deepspeed_files.read(folder), what
    try:
        return Files({MODEL + name: one for name, one in weights(path).items()}), f"the weights in {path}"
    except StrategyError as error:
        raise ConfigError("MW604", f"convert: {error} A checkpoint, or what DeepSpeed saves, would do too.") from error


@dataclass(frozen=True)
class Cut:
    """`plan` on each of `groups` groups of ranks, `group` being the group of a tensor in a pipeline (default 0)."""

    plan: Plan
    groups: int
    group: Mapping[str, int]

    @property
    def ranks(self) -> int:
        return self.plan.mesh.size * self.groups

    def blocks(self, rank: int, tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Block]]:
        """The block of each tensor that `rank` stores, by key."""
        mesh = self.plan.mesh
        group, local = divmod(rank, mesh.size)
        for number, (key, entry) in enumerate(tensors.items()):
            name = name_of(key)
            if self.group.get(name, 0) != group or 0 in entry.shape:
                continue
            layout = self.plan.tensors.get(name)
            if layout is None or len(layout.dims) != len(entry.shape):  # a state that has not its parameter's shape
                layout = Layout.replicated(len(entry.shape))
            replicas = layout.replica_axes(mesh)
            block = layout.block(entry.shape, mesh, local)
            turn = mesh.index(local, replicas) == number % mesh.product(replicas)
            if turn and all(start < stop for start, stop in block):
                yield key, block


def cut_of(path: Path, tensors: Mapping[str, StoredTensor]) -> Cut:
    """How the plan in `path` (a plan.json, a run folder or a checkpoint) cuts `tensors`.

    Raises ConfigError if `path` holds no plan, or the plan of another model.
    """
    content: Any = read_header(path).plan if (path / HEADER).is_file() else read_content(path)
    where = f"plan={path}"
    try:
        plan = Plan.from_json(content)
        parameters: Mapping[str, Any] = content.get("parameters", {})
        owners = owners_in(content["pipeline"]) if content.get("pipeline") else (0,)
        groups = 1 + max(owners)
        group = {name: owners[int(entry["stages"][0])] for name, entry in parameters.items() if "stages" in entry}
        shapes = {name: tuple(entry["shape"]) for name, entry in parameters.items()}
        axes = {axis for layout in plan.tensors.values() for dim in layout.dims for axis in dim}
        if groups < 1 or plan.mesh.size * groups > MOST_RANKS or not axes <= set(plan.mesh.names):
            raise ValueError(f"{groups} stages on the mesh {dict(plan.mesh.axes)}")
    except (LookupError, ArithmeticError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ConfigError("MW420", f"{where} is not a plan.json ({type(error).__name__}: {error}).") from None
    for key, entry in tensors.items():
        name = name_of(key)
        if name not in plan.tensors:
            raise ConfigError("MW612", f"{where} says nothing of {name}, so it belongs to another model; plan anew.")
        if key == f"model/{name}" and shapes.get(name, entry.shape) != entry.shape:
            raise ConfigError(
                "MW612",
                f"{where} has {name} with shape {list(shapes[name])}, but it is stored with {list(entry.shape)}; plan "
                "anew for this model.",
            )
    return Cut(plan, groups, group)


def write(source: TensorSource, target: Path, cut: Cut | None) -> None:
    """Write all that `source` holds as the checkpoint `target`, merged, or as `cut` says. Raises OSError (a full
    disk); then nothing is left. Raises ConfigError where `target` has the name of another step."""
    header = source.header if isinstance(source, Checkpoint) else Header(0, (0, 0), SHARDED, 1, {}, {}, "", {}, ())
    if folder.NAME.fullmatch(target.name) and folder.number(target) != header.step:
        raise ConfigError(
            "MW605",
            f"convert: {target} is the name of another checkpoint than one of step {header.step}; call it "
            f"{folder.target(target.parent, header.step).name}, or anything that is not step-NUMBER.",
        )
    hidden = folder.hidden(target)
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    try:
        if cut is None:
            companions, published = described(header.config)
            files, index = writing.merged(source, hidden, published, companions)
        else:
            files, index = _sharded(source, hidden, cut)
        if isinstance(source, Checkpoint):
            files |= _copied(source, hidden, without=files)
            plain = tuple(tuple(name for name in names if name in files) for names in header.plain)
            header = replace(header, plain=plain)
        files[INDEX] = writing.write_bytes(hidden / INDEX, json.dumps([to_json(index)]).encode())
        form = MERGED if cut is None else SHARDED
        writing.write_bytes(hidden / HEADER, to_text(replace(header, form=form, files=files)).encode())
        folder.sync(hidden)
        folder.put(hidden, target)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _sharded(source: TensorSource, target: Path, cut: Cut) -> tuple[dict[str, Stamp], dict[str, StoredTensor]]:
    files: dict[str, Stamp] = {}
    indices: list[Index] = []
    for rank in range(cut.ranks):
        name = f"rank-{rank:05d}.safetensors"
        blocks = [
            writing.block_of(source, key, place(key, block), block) for key, block in cut.blocks(rank, source.tensors)
        ]
        if blocks:
            files[name], index = writing.write(target / name, blocks)
            indices.append(index)
    return files, joined(indices)


def _copied(source: Checkpoint, target: Path, without: Mapping[str, Stamp]) -> dict[str, Stamp]:
    """The small files next to the tensors: non-tensor state and the model's config. No other file of the header is
    copied."""
    ranks = (f"rank-{rank:05d}.pt" for rank in range(source.header.world_size))
    wanted = [name for name in (*ranks, DESCRIPTION) if name in source.header.files]
    there = [name for name in wanted if name not in without and name not in source.lost]
    return {name: writing.write_bytes(target / name, (source.path / name).read_bytes()) for name in there}


def described(config: Mapping[str, Any]) -> tuple[Companions, frozenset[str] | None]:
    """What transformers needs next to merged weights, for a model of that library: its config.json, and the names in
    its state dict, without non-persistent buffers; None if unknown.

    Both follow from the config of the run that saved. Importing anything else that a file names would run its code. The
    model is built from shapes alone.
    """
    model = config.get("model", {})
    if not str(model.get("target", "")).startswith(f"{huggingface.LIBRARY}."):
        return Companions(), None
    try:
        with shapes_only():
            module = huggingface.build(Model(**model | {"weights": None, "rename": (), "new": ()}))
    except ConfigError:  # the library is not installed, or is another; the weights are the same without it
        return Companions(), None
    return huggingface.companions(module), frozenset(module.state_dict())
