"""Unsharded tensors in files, read block by block: safetensors files, torch state dicts, and folders of either.

Invariant: `index` reads headers alone, and a block costs reading and memory of the block's size, whatever the size of
the file. A safetensors file is 8 bytes with the length of a JSON header, the header {name: {dtype, shape,
data_offsets}}, and the tensors, each row by row.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strategies.core.bounded_files import is_count, parse, read_json
from strategies.core.errors import StrategyError
from strategies.core.layout import Block

SAFETENSORS = ".safetensors"
TORCH = (".pt", ".pth", ".bin")
INDEX = ".index.json"
NAMES = ("model.safetensors", "pytorch_model.bin")
"""What a folder of pretrained weights holds: one of these, or its index `NAME.index.json`."""
NESTED = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which training scripts keep a state dict beside other things."""
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
}  # fmt: skip
SIZES = {name: getattr(torch, name).itemsize for name in DTYPES.values()}
"""Bytes of an element, by torch's name of the dtype."""
READING = (OSError, RuntimeError, ValueError, LookupError, ArithmeticError, TypeError, AttributeError, EOFError)
"""What torch and python raise when they read a damaged file."""
MOST_HEADER = 100_000_000
"""Bytes of a safetensors header, as in the library of that name."""


@dataclass(frozen=True)
class StoredTensor:
    """An unsharded tensor: `key` in `file` (absolute path), with its shape and its dtype as stored (torch's name). In a
    safetensors file it begins at byte `offset`; None in a torch file. A tensor that is stored in `parts` has a file, an
    offset and a block for each of them."""

    file: str
    key: str
    shape: tuple[int, ...]
    dtype: str
    offset: int | None = None
    parts: tuple[tuple[str, int, Block], ...] = ()


class Reader:
    """Reads blocks. Torch files stay mapped as long as the reader lives."""

    def __init__(self) -> None:
        self._open: dict[str, dict[str, Tensor]] = {}

    def whole(self, stored: StoredTensor) -> Tensor:
        return self.block(stored, tuple((0, size) for size in stored.shape))

    def block(self, stored: StoredTensor, block: Block) -> Tensor:
        """The part `block` of a tensor, [stop - start, ...], in the stored dtype, as a copy.

        Raises StrategyError where the file is missing or damaged.
        """
        if stored.parts:
            return self._joined(stored, block)
        cut = tuple(slice(*bounds) for bounds in block)
        with _readable(stored.file):
            if stored.offset is not None:
                return _read(stored, stored.offset, cut)
            if stored.file not in self._open:
                self._open[stored.file] = _loaded(stored.file)
            return self._open[stored.file][stored.key][cut].clone(memory_format=torch.contiguous_format)

    def _joined(self, stored: StoredTensor, block: Block) -> Tensor:
        found = torch.empty([stop - start for start, stop in block], dtype=getattr(torch, stored.dtype))
        for file, offset, held in stored.parts:
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(block, held, strict=True)]
            if all(start < stop for start, stop in common):
                shape = tuple(stop - start for start, stop in held)
                inside = _from(common, held)
                part = self.block(StoredTensor(file, stored.key, shape, stored.dtype, offset), inside)
                found[tuple(slice(*bounds) for bounds in _from(common, block))] = part
        return found


def _from(block: Iterable[tuple[int, int]], origin: Block) -> Block:
    """`block` counted from the corner of `origin`."""
    return tuple((start - base, stop - base) for (start, stop), (base, _) in zip(block, origin, strict=True))


def _read(stored: StoredTensor, offset: int, cut: tuple[slice, ...]) -> Tensor:
    dtype: torch.dtype = getattr(torch, stored.dtype)
    size = math.prod(stored.shape) * dtype.itemsize
    if not size:
        return torch.empty(stored.shape, dtype=dtype)[cut].clone()
    mapped = np.memmap(stored.file, np.uint8, mode="r", offset=offset, shape=(size,))
    # numpy does not know every dtype of torch; numbers of the same width carry the bits
    whole = mapped.view(f"<u{dtype.itemsize}").reshape(stored.shape)
    return torch.from_numpy(np.array(whole[cut], order="C")).view(dtype)


def index(path: Path) -> dict[str, StoredTensor]:
    """Every tensor in `path` by name: a safetensors file, a torch state dict, an index of several files of either kind,
    or a folder with one of these.

    Raises StrategyError for anything else.
    """
    path = path.absolute()
    if path.is_dir():
        path = _in_folder(path)
    if not path.is_file():
        raise StrategyError("MW308", f"{path}: there is no such file or folder.")
    if path.name.endswith(INDEX):
        return _sharded(path)
    if path.suffix not in (SAFETENSORS, *TORCH):
        raise StrategyError(
            "MW308",
            f"{path}: weights are read from {SAFETENSORS}, {', '.join(TORCH)}, an {INDEX} file, or a folder with one "
            "of these.",
        )
    return dict(_entries(str(path)))


def _in_folder(folder: Path) -> Path:
    """The one file of weights, or index of several, that a folder holds."""
    for name in NAMES:
        for candidate in (folder / f"{name}{INDEX}", folder / name):
            if candidate.is_file():
                return candidate
    found = sorted(file for file in folder.iterdir() if file.suffix in (SAFETENSORS, *TORCH))
    if len(found) != 1:
        what = f"several of them ({', '.join(file.name for file in found[:6])})" if found else "no file of weights"
        raise StrategyError(
            "MW308",
            f"{folder}: this folder holds {what}; give the file itself, or a folder with {' or '.join(NAMES)} (or "
            f"their {INDEX}).",
        )
    return found[0]


def _sharded(path: Path) -> dict[str, StoredTensor]:
    with _readable(str(path)):
        named: Mapping[str, str] = read_json(path)["weight_map"]
        files = dict.fromkeys(named.values())
    found: dict[str, StoredTensor] = {}
    for file in files:
        if not isinstance(file, str) or ".." in Path(file).parts or Path(file).is_absolute() or "\0" in file:
            raise StrategyError("MW308", f"{path}: it names {file!r}, which is not a file beside it.")
        if Path(file).suffix not in (SAFETENSORS, *TORCH):
            raise StrategyError("MW308", f"{path}: it names {file!r}, which is not a file of weights.")
        if not (path.parent / file).is_file():
            raise StrategyError(
                "MW308", f"{path}: the file {file} that it names is not beside it; the download is incomplete?"
            )
        found |= {name: one for name, one in _entries(str(path.parent / file)) if named.get(name) == file}
    if lacking := [name for name in named if name not in found]:
        raise StrategyError("MW308", f"{path}: {lacking[0]} is not in {named[lacking[0]]}, although the index says so.")
    return found


def _entries(file: str) -> Iterator[tuple[str, StoredTensor]]:
    with _readable(file):
        if not file.endswith(SAFETENSORS):
            for name, tensor in _loaded(file).items():
                yield name, StoredTensor(file, name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            return
        header, start = _header(file)
        held: list[tuple[int, int]] = []
        for name, entry in header.items():
            kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            if not all(map(is_count, (begin, end, *shape))) or math.prod(max(one, 1) for one in shape) >= 2**63:
                raise ValueError(f"its header gives {name} a shape or a place that cannot be")
            if kind not in DTYPES:
                raise StrategyError(
                    "MW308",
                    f"{file}: {name} is stored as {kind}; quantised weights are not read, only {', '.join(DTYPES)}.",
                )
            size = math.prod(shape) * SIZES[DTYPES[kind]]
            held.append((begin, end))
            if end - begin != size or start + end > Path(file).stat().st_size:
                raise ValueError(f"it is cut off, or {name} is not where its header says")
            yield name, StoredTensor(file, name, shape, DTYPES[kind], start + begin)
        if any(end > begin for (_, end), (begin, _) in pairwise(sorted(held))):
            raise ValueError("tensors overlap in it")


def _header(file: str) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and the position of the first byte after it."""
    with open(file, "rb") as content:
        length = int.from_bytes(content.read(8), "little")
        if length > Path(file).stat().st_size - 8 or length > MOST_HEADER:
            raise ValueError("it does not begin with the length of a header")
        header: dict[str, Any] = parse(content.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    header.pop("__metadata__", None)
    return header, 8 + length


def _loaded(file: str) -> dict[str, Tensor]:
    return _state_dict(file, torch.load(file, mmap=True, weights_only=True, map_location="cpu"))


def _state_dict(file: str, content: Any) -> dict[str, Tensor]:
    """The state dict in what a file holds: all of it, or one entry of it."""
    for candidate in (content, *(content[key] for key in NESTED if isinstance(content, dict) and key in content)):
        if isinstance(candidate, dict) and candidate and all(isinstance(one, Tensor) for one in candidate.values()):
            return candidate
    held = ", ".join(map(str, list(content)[:8])) if isinstance(content, Mapping) else type(content).__name__
    raise StrategyError(
        "MW308",
        f"{file}: holds {held}, not a state dict (tensors by name, alone or under {', '.join(NESTED)}); save one with "
        "torch.save(model.state_dict(), FILE).",
    )


@contextmanager
def _readable(file: str) -> Iterator[None]:
    """Report an error while a file is read as one paragraph."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise StrategyError(
            "MW308",
            f"{file}: holds more than tensors and plain data, and is not read because that could run code from it; "
            "save the weights alone, with torch.save(model.state_dict(), FILE).",
        ) from error
    except READING as error:
        text = " ".join(str(error).split())[:200].rstrip(".")
        cure = "; store it anew with a current torch.save" if "mmap can only be used" in text else ""
        raise StrategyError(
            "MW308", f"{file}: cannot be read as weights ({type(error).__name__}: {text}){cure}."
        ) from error
