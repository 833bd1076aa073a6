"""Unsharded tensors in files, read block by block: safetensors files, torch state dicts, and folders of either.

Invariant: `index` reads headers alone, and a block costs reading and memory of the block's size, whatever the size of
the file. A safetensors file is 8 bytes with the length of a JSON header, the header {name: {dtype, shape,
data_offsets}}, and the tensors, each row by row.
"""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping
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
from strategies.core.layout import Block, indices
from strategies.runtime.shards import full, overlaps

SAFETENSORS = ".safetensors"
TORCH = (".pt", ".pth", ".bin")
INDEX = ".index.json"
NAMES = ("model.safetensors", "pytorch_model.bin")
"""What a folder of pretrained weights holds: one of these, or its index `NAME.index.json`."""
NESTED = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which training scripts keep a state dict beside other things."""
EXTRA = "_extra_state"
"""How the name of what `torch.nn.Module.get_extra_state` returns ends, which may be anything."""
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "C64": "complex64", "C128": "complex128",
}  # fmt: skip
"""What safetensors calls torch's dtypes; C128 is ours, which the library of that name does not read."""
SIZES = {name: getattr(torch, name).itemsize for name in DTYPES.values()}
"""Bytes of an element, by torch's name of the dtype."""
READING = (OSError, RuntimeError, ValueError, LookupError, ArithmeticError, TypeError, AttributeError, EOFError)
"""What torch and python raise when they read a damaged file."""
MOST_HEADER = 100_000_000
"""Bytes of a safetensors header, as in the library of that name."""


@dataclass(frozen=True)
class Part:
    """The block `block` of a tensor in `file`, row by row from byte `offset` on; None in a torch file."""

    file: str
    offset: int | None
    block: Block

    @property
    def elements(self) -> int:
        return math.prod(stop - start for start, stop in self.block)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in files: global shape, torch's name of the stored dtype, and parts; `key` is its name in the file."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...] = ()
    key: str = ""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class TensorReader:
    """Reads blocks of tensors whose files are in `folder`, or have absolute paths. Torch files stay mapped as long as
    the reader lives; `bytes_read` counts bytes by file."""

    def __init__(self, folder: Path = Path()) -> None:
        self._folder = folder
        self._open: dict[str, dict[str, Tensor]] = {}
        self.bytes_read: Counter[str] = Counter()

    def block(self, stored: StoredTensor, block: Block | None = None) -> Tensor:
        """The part `block` of a tensor (default all of it), [stop - start, ...], in the stored dtype, as a copy.

        Raises StrategyError where a file is missing or damaged.
        """
        block = full(stored.shape) if block is None else block
        found = list(overlaps(block, [part.block for part in stored.parts]))
        if len(found) == 1 and found[0][2] == full([stop - start for start, stop in block]):
            return self._read(stored, *found[0][:2])
        tensor = torch.empty([stop - start for start, stop in block], dtype=getattr(torch, stored.dtype))
        self.fill(stored, block, tensor)
        return tensor

    def fill(self, stored: StoredTensor, block: Block, view: Tensor) -> None:
        """Copy the part `block` of a tensor to `view`, cast to its dtype, part by part. Raises as `block`."""
        for number, source, target in overlaps(block, [part.block for part in stored.parts]):
            view[indices(target)].copy_(self._read(stored, number, source))

    def _read(self, stored: StoredTensor, number: int, source: Block) -> Tensor:
        part, cut = stored.parts[number], indices(source)
        file = str(self._folder / part.file)
        with _readable(file):
            if part.offset is not None:
                found = _mapped(file, part.offset, part.block, stored.dtype, cut)
            else:
                if file not in self._open:
                    self._open[file] = _loaded(file)
                found = self._open[file][stored.key][cut].clone(memory_format=torch.contiguous_format)
        self.bytes_read[part.file] += found.nbytes
        return found


def _mapped(file: str, offset: int, block: Block, name: str, cut: tuple[slice, ...]) -> Tensor:
    dtype: torch.dtype = getattr(torch, name)
    shape = [stop - start for start, stop in block]
    mapped = np.memmap(file, np.uint8, mode="r", offset=offset, shape=(math.prod(shape) * dtype.itemsize,))
    # numpy does not know every dtype of torch; numbers of the same width carry the bits
    numbers = mapped.view("<c16" if dtype == torch.complex128 else f"<u{dtype.itemsize}").reshape(shape)
    return torch.from_numpy(np.array(numbers[cut], order="C")).view(dtype)


def save(content: Any, path: Path) -> None:
    """`torch.save`. Raises OSError where the disk is full, for which torch has other words."""
    try:
        with path.open("wb") as file:
            torch.save(content, file)
    except RuntimeError as error:
        if isinstance(cause := error.__context__, OSError):
            raise OSError(cause.errno, cause.strerror, str(path)) from None
        raise


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
                dtype = str(tensor.dtype).removeprefix("torch.")
                yield name, StoredTensor(tuple(tensor.shape), dtype, (Part(file, None, full(tensor.shape)),), name)
            return
        header, start = _header(file)
        spans: list[tuple[int, int]] = []
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
            spans.append((begin, end))
            if end - begin != size or start + end > Path(file).stat().st_size:
                raise ValueError(f"it is cut off, or {name} is not where its header says")
            yield name, StoredTensor(shape, DTYPES[kind], (Part(file, start + begin, full(shape)),), name)
        if any(end > begin for (_, end), (begin, _) in pairwise(sorted(spans))):
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
    """The state dict in what a file holds: all of it, or one entry of it; without what modules keep beside tensors."""
    for candidate in (content, *(content[key] for key in NESTED if isinstance(content, dict) and key in content)):
        if not isinstance(candidate, dict):
            continue
        tensors = {name: value.detach() for name, value in candidate.items() if isinstance(value, Tensor)}
        if tensors and all(str(name).endswith(EXTRA) for name in candidate if name not in tensors):
            return tensors
    entries = ", ".join(map(str, list(content)[:8])) if isinstance(content, Mapping) else type(content).__name__
    raise StrategyError(
        "MW308",
        f"{file}: holds {entries}, not a state dict (tensors by name, alone or under {', '.join(NESTED)}); save one "
        "with torch.save(model.state_dict(), FILE).",
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
