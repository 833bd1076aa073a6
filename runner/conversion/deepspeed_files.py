"""The weights in checkpoints of DeepSpeed's engine: `mp_rank_*_model_states.pt` and `*zero_pp_rank_*_optim_states.pt`.

Under ZeRO the fp32 weights are in flat partitions, one per rank: at stages 1 and 2 the parameters of a group one after
the other, cut into equal parts for the ranks; at stage 3 every parameter cut for itself, each rank's parts one after
the other (the arithmetic is that of deepspeed/utils/zero_to_fp32.py). Invariant: files are mapped and read with
weights_only; other pickled objects are replaced by inert stand-ins, so no code of a file is run.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.errors import ConfigError
from strategies.core.layout import Block, indices
from strategies.runtime.shards import MODEL, Shard, full, of_range, overlaps, replicated
from strategies.runtime.tensor_files import StoredTensor

LATEST = "latest"
MODELS, STATES = "*_model_states.pt", "*_optim_states.pt"
HARMLESS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""Classes whose instances DeepSpeed saves, and of which nothing is needed."""


class StandIn:
    """Replaces an instance of one of `HARMLESS`."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        self.state = state


class DeepSpeed:
    """The weights of a DeepSpeed checkpoint, by key; each in disjoint shards, which are views of mapped files."""

    def __init__(self, weights: Iterable[tuple[str, list[Shard]]]) -> None:
        self._shards = {MODEL + name: shards for name, shards in weights}
        self.tensors = {
            key: StoredTensor(one.shape, str(one.view.dtype).removeprefix("torch."))
            for key, (one, *_) in self._shards.items()
        }

    def read(self, key: str, block: Block | None = None) -> Tensor:
        shards = self._shards[key]
        block = full(shards[0].shape) if block is None else block
        tensor = torch.empty([stop - start for start, stop in block], dtype=shards[0].view.dtype)
        for number, source, target in overlaps(block, [one.block for one in shards]):
            tensor[indices(target)] = shards[number].view[indices(source)]
        return tensor


def folder_of(path: Path) -> Path | None:
    """The folder with DeepSpeed's files that `path` means: itself, or the one in it that `latest` names."""
    if not path.is_dir():
        return None
    if (path / LATEST).is_file():
        tag = (path / LATEST).read_text(encoding="utf-8").strip()
        path = path / tag if tag == Path(tag).name else path
    return path if any(path.glob(MODELS)) else None


def read(folder: Path) -> DeepSpeed:
    """The weights in `folder`. Raises ConfigError for files that cannot be read without running code, and for
    checkpoints of DeepSpeed's own tensor or pipeline parallelism."""
    files = sorted(folder.glob(MODELS), key=_number)
    foreign = [file for file in folder.glob("*.pt") if "mp_rank_" not in file.name or "mp_rank_00" not in file.name]
    if foreign:
        raise ConfigError(
            "MW611",
            f"{folder}: {foreign[0].name} belongs to tensor, pipeline or expert parallelism of DeepSpeed; only "
            "checkpoints of data parallelism and ZeRO are converted.",
        )
    models, states = list(map(_loaded, files)), list(map(_loaded, sorted(folder.glob(STATES), key=_number)))
    try:
        if not states:
            return DeepSpeed(_left(models[0]["module"], ()))
        return DeepSpeed(_of_zero(folder, models, [one["optimizer_state_dict"] for one in states]))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(
            "MW611", f"{folder} holds no checkpoint of DeepSpeed that is known here ({type(error).__name__}: {error})."
        ) from error


def _of_zero(
    folder: Path, models: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, list[Shard]]]:
    first, count = models[0], states[0]["partition_count"]
    world = max(count) if isinstance(count, list) else count
    if world != len(states):
        raise ConfigError(
            "MW611", f"{folder} was saved by {world} ranks, but has the states of {len(states)}; copy all files."
        )
    if _stage(states[0]["zero_stage"]) == 3:
        buffers = {name: first["module"][name] for name in first["buffer_names"] if name in first["module"]}
        yield from _left(buffers, ())
        yield from _of_stage_3(models, [one["fp32_flat_groups"] for one in states])
    else:
        partitioned = dict(_of_stage_1(first, states))
        yield from partitioned.items()
        yield from _left(first["module"], partitioned)  # buffers, and frozen parameters


def _of_stage_1(model: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Shard]]]:
    """Stages 1 and 2: a group's parameters one after the other, cut into parts for the ranks."""
    between = states[0].get("param_alignment_paddings")
    for number, shapes in enumerate(model["param_shapes"]):
        parts = [one["single_partition_of_fp32_groups"][number] for one in states]
        paddings = [0] * len(shapes) if between is None else between[number]
        at = 0
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            size = math.prod(shape)
            yield name, _shards(shape, _cut(parts, at, size), parts[0])
            at += size + padding


def _of_stage_3(
    models: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[Tensor]]
) -> Iterator[tuple[str, list[Shard]]]:
    """Stage 3: of every parameter an equal part on each rank, the last one padded."""
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        yield name, _divided(shape, [[one["frozen_param_fragments"][name]] for one in models], 0)
    at = 0
    for name, shape in chain.from_iterable(shapes.items() for shapes in models[0]["param_shapes"]):
        yield name, _divided(shape, groups, at)
        at += -(-math.prod(shape) // len(groups))


def _divided(shape: Sequence[int], parts_by_rank: Sequence[Sequence[Tensor]], at: int) -> list[Shard]:
    """The parameter of which each rank holds a part from element `at` of its flat tensors on."""
    size = math.prod(shape)
    share = -(-size // len(parts_by_rank))
    cuts = (_cut(parts, at, max(0, min(share, size - rank * share))) for rank, parts in enumerate(parts_by_rank))
    return _shards(shape, chain.from_iterable(cuts), parts_by_rank[0][0])


def _cut(parts: Sequence[Tensor], first: int, count: int) -> Iterator[Tensor]:
    """`count` elements from `first` on of flat tensors that follow each other."""
    for part in parts:
        start, stop = max(first, 0), min(first + count, part.numel())
        if start < stop:
            yield part[start:stop]
        first -= part.numel()


def _shards(shape: Sequence[int], flat: Iterable[Tensor], like: Tensor) -> list[Shard]:
    """A parameter whose elements are those of `flat`, one after the other; without any it has the dtype of `like`."""
    shards, at = [], 0
    for part in flat:
        shards += of_range(shape, [(full(shape), full(shape))], shape, at, part)
        at += part.numel()
    if at != math.prod(shape):
        raise IndexError(f"{at} elements for a parameter of shape {list(shape)}")
    return shards or [replicated(like.new_empty(tuple(shape)))]


def _left(module: Mapping[str, Tensor], known: Collection[str]) -> Iterator[tuple[str, list[Shard]]]:
    """The tensors of a state dict that are not in `known`, each under the first of its names."""
    names: dict[object, list[str]] = {}
    for name, tensor in module.items():
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape)
        names.setdefault(place if tensor.numel() else name, []).append(name)  # tied weights have one place
    for tied in names.values():
        if not any(name in known for name in tied):
            yield tied[0], [replicated(module[tied[0]])]


def _stage(value: Any) -> int:
    return int(value.values[0] if isinstance(value, StandIn) else value)


def _number(file: Path) -> tuple[int, str]:
    """Sort key: files in numeric order of their ranks."""
    words = file.name.partition("zero_pp_rank_")[2].partition("_")[0]
    return (int(words) if words.isdigit() else 0, file.name)


def _loaded(file: Path) -> Mapping[str, Any]:
    harmless: list[Any] = [(StandIn, name) for name in HARMLESS]
    try:
        with torch.serialization.safe_globals(harmless):
            content: Mapping[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        line = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line), "")[:200]
        raise ConfigError(
            "MW611",
            f"{file} holds more than tensors and plain data, and is not read because that could run code from it."
            f" {line}".rstrip(),
        ) from error
    except (OSError, RuntimeError, EOFError) as error:
        text = " ".join(str(error).split())[:200]
        raise ConfigError("MW611", f"{file} is damaged ({type(error).__name__}: {text}).") from error
    return content
