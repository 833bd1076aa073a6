"""The weights in checkpoints of DeepSpeed's engine: `mp_rank_*_model_states.pt` and `*zero_pp_rank_*_optim_states.pt`.

Under ZeRO the fp32 weights are in flat partitions, one per rank: at stages 1 and 2 the parameters of a group one after
the other, cut into equal parts for the ranks; at stage 3 every parameter cut for itself, each rank's parts one after
the other (the arithmetic is that of deepspeed/utils/zero_to_fp32.py). Invariant: files are mapped and read with
weights_only; other pickled objects are replaced by inert stand-ins, so no code of a file is run.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.checkpoint.index import Entry
from runner.errors import ConfigError
from strategies.core.layout import Block
from strategies.runtime.shards import MODEL

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


@dataclass(frozen=True)
class FlatRun:
    """`count` elements of a parameter, counted row by row, from `first` of a flat tensor on."""

    flat: Tensor
    first: int
    count: int


@dataclass(frozen=True)
class Flat:
    """A parameter in runs of elements, in their order."""

    shape: tuple[int, ...]
    runs: tuple[FlatRun, ...]

    def elements(self, first: int, count: int) -> Tensor:
        """`count` elements from `first` on."""
        found, at = [], 0
        for run in self.runs:
            start, stop = max(first, at), min(first + count, at + run.count)
            if start < stop:
                found.append(run.flat[run.first + start - at : run.first + stop - at])
            at += run.count
        return torch.cat(found) if found else self.runs[0].flat[:0]


class DeepSpeed:
    """The weights of a DeepSpeed checkpoint."""

    def __init__(self, weights: Mapping[str, Flat]) -> None:
        self._weights = weights
        self.tensors = {
            MODEL + name: Entry(one.shape, str(one.runs[0].flat.dtype).removeprefix("torch."), ())
            for name, one in weights.items()
        }

    def read(self, key: str, block: Block | None = None) -> Tensor:
        one = self._weights[key.removeprefix(MODEL)]
        block = tuple((0, size) for size in one.shape) if block is None else block
        sizes = [stop - start for start, stop in block]
        inner = len(block)  # the dims from here on are complete, so their elements are contiguous
        while inner and block[inner - 1] == (0, one.shape[inner - 1]):
            inner -= 1
        inner = max(inner - 1, 0)
        strides = [math.prod(one.shape[dim + 1 :]) for dim in range(len(block))]
        count = math.prod(sizes[inner:])
        parts = []
        for outer in product(*(range(*bounds) for bounds in block[:inner])):
            offset = block[inner][0] * strides[inner] if block else 0
            first = sum(at * stride for at, stride in zip(outer, strides, strict=False)) + offset
            parts.append(one.elements(first, count))
        return torch.cat(parts).reshape(sizes).clone() if parts else torch.empty(sizes, dtype=one.runs[0].flat.dtype)


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
            return DeepSpeed(dict(_left(models[0]["module"], {})))
        return DeepSpeed(dict(_of_zero(folder, models, [one["optimizer_state_dict"] for one in states])))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(
            "MW611", f"{folder} holds no checkpoint of DeepSpeed that is known here ({type(error).__name__}: {error})."
        ) from error


def _of_zero(
    folder: Path, models: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Flat]]:
    first, count = models[0], states[0]["partition_count"]
    world = max(count) if isinstance(count, list) else count
    if world != len(states):
        raise ConfigError(
            "MW611", f"{folder} was saved by {world} ranks, but has the states of {len(states)}; copy all files."
        )
    if _stage(states[0]["zero_stage"]) == 3:
        buffers = {name: first["module"][name] for name in first["buffer_names"] if name in first["module"]}
        yield from _left(buffers, {})
        fragments = [one.get("frozen_param_fragments") or {} for one in models]
        yield from _of_stage_3(first, fragments, [one["fp32_flat_groups"] for one in states], world)
    else:
        found = dict(_of_stage_1(first, states))
        yield from found.items()
        yield from _left(first["module"], found)  # buffers, and frozen parameters


def _of_stage_1(model: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Flat]]:
    """Stages 1 and 2: a group's parameters one after the other, cut into parts for the ranks."""
    between = states[0].get("param_alignment_paddings")
    for number, shapes in enumerate(model["param_shapes"]):
        parts = [one["single_partition_of_fp32_groups"][number] for one in states]
        paddings = [0] * len(shapes) if between is None else between[number]
        at = 0
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            size = math.prod(shape)
            yield name, _flat(shape, list(_runs(parts, at, size)), parts[0])
            at += size + padding


def _of_stage_3(
    model: Mapping[str, Any],
    frozen: Sequence[Mapping[str, Tensor]],
    groups: Sequence[Sequence[Tensor]],
    world: int,
) -> Iterator[tuple[str, Flat]]:
    """Stage 3: of every parameter an equal part on each rank, the last one padded."""
    for name, shape in (model.get("frozen_param_shapes") or {}).items():
        yield name, _divided(tuple(shape), [[one[name]] for one in frozen], 0)
    at = 0
    for shapes in model["param_shapes"]:
        for name, shape in shapes.items():
            yield name, _divided(tuple(shape), groups, at)
            at += -(-math.prod(shape) // world)


def _divided(shape: tuple[int, ...], parts_by_rank: Sequence[Sequence[Tensor]], at: int) -> Flat:
    """The parameter of which each rank holds a part from element `at` of its flat tensors on."""
    size = math.prod(shape)
    share = -(-size // len(parts_by_rank))
    runs = [
        run
        for rank, parts in enumerate(parts_by_rank)
        for run in _runs(parts, at, max(0, min(share, size - rank * share)))
    ]
    return _flat(shape, runs, parts_by_rank[0][0])


def _flat(shape: Sequence[int], runs: Sequence[FlatRun], like: Tensor) -> Flat:
    """A parameter; one without elements still has the dtype of `like`."""
    return Flat(tuple(shape), tuple(runs) or (FlatRun(like, 0, 0),))


def _runs(parts: Sequence[Tensor], first: int, count: int) -> Iterator[FlatRun]:
    """`count` elements from `first` on of flat tensors that follow each other."""
    at = 0
    for part in parts:
        start, stop = max(first, at), min(first + count, at + part.numel())
        if start < stop:
            yield FlatRun(part, start - at, stop - start)
        at += part.numel()


def _alone(tensor: Tensor) -> Flat:
    return Flat(tuple(tensor.shape), (FlatRun(tensor.reshape(-1), 0, tensor.numel()),))


def _left(module: Mapping[str, Tensor], found: Mapping[str, Flat]) -> Iterator[tuple[str, Flat]]:
    """The tensors of a state dict that are not in `found`, each under the first of its names."""
    names: dict[object, list[str]] = {}
    for name, tensor in module.items():
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape)
        names.setdefault(place if tensor.numel() else name, []).append(name)  # tied weights have one place
    for tied in names.values():
        if not any(name in found for name in tied):
            yield tied[0], _alone(module[tied[0]])


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
