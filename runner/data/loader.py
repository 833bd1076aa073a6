"""Load exactly the rows and slices that one rank needs.

A dataset is anything with `len()` and `dataset[i]` whose samples are flat: a dict (its keys are the keyword arguments
of `forward`, in any order), a tuple (positional arguments), or a single tensor. Reading a row must give the same sample
on every rank, because ranks that hold the same slice of a batch read it independently; random numbers from the global
generators are automatically equal (`runner.data.row_seeds`).

The invariant: `LocalBatches.load` returns the blocks of `global_batch`, while only the rows inside
the blocks are read, and only the slice of each row where the dataset offers `read(index, slices)`.
"""

from __future__ import annotations

import errno
import inspect
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, strided
from torch.utils.data import DataLoader, IterableDataset, default_collate

from runner.build import targets
from runner.data.lines import tensors_of
from runner.data.row_seeds import EVALUATION, row_seeds, unseeded, watched
from runner.data.streams import Stream, numbered, own
from runner.data.unbatched import unbatched
from runner.errors import ConfigError

TRYING = 0.5
"""Seconds for which batches after the first are tried."""
Block = tuple[tuple[int, int], ...]
"""(start, stop) for each dim of a tensor of the global micro-batch; dim 0 counts rows. Never empty."""

Collate = Callable[[list[Any]], Any]
"""From samples to a batch: a dict, tuple or list of tensors, or one tensor, each with the samples along dim 0.

A rank calls it with its own rows only, unless row r of a result is seen to depend on more than sample r, or random
numbers are drawn: then it is called with all rows on every rank. The sizes of the other dims must not depend on which
rows come together: pad to a fixed length, not to the longest of the batch.
"""


Read = Callable[[int, tuple[tuple[slice, ...], ...]], Any]
"""The optional method `read(index, slices)` of a dataset with large rows: a rank reads only its slice of each row.

It returns sample `index`, of the same structure as `dataset[index]`, with each tensor cut down to its slices. `slices`
has one entry per value of the sample, in the order of the first row of training; an entry has one `slice(start, stop)`
per dim of that value, 0 <= start <= stop <= size, and none for a scalar. Where a value is not needed from this row, its
slices are empty. Used only without a custom collate, and recognised by taking two arguments, whatever their names.
"""


SHARED_MEMORY = "/dev/shm, through which data workers hand over rows (data.workers=0 does without)"
FLAT = "samples must be flat dicts or tuples of tensors or numbers; set data.collate to a function that makes"


class MapDataset(Protocol):
    """The interface of every dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def build_dataset(
    target: str, args: Mapping[str, Any], path: str | None, *, what: str, seed: int = 0, window: int = 1024
) -> MapDataset:
    """Call the configured dataset.

    Args:
        target: its dotted name.
        args: its keyword arguments.
        path: given to it as the argument `path`, where one is configured.
        what: the config section, such as `data`, for messages.
        seed, window: those of the Stream that is returned for a dataset that can only be iterated.

    Raises:
        ConfigError: as `runner.build.targets.build`; a path for a dataset that takes none; an object without len() or
            indexing, which cannot be iterated again and again either; no rows.
    """
    function = targets.resolve(target, f"{what}.target")
    given = dict(args)
    if path is not None:
        if not targets.accepts(function, "path"):
            raise ConfigError(
                "MW315", f"{what}.path = {path!r}, but {target} takes no argument 'path'; leave {what}.path null."
            )
        if "path" in given:
            raise ConfigError("MW315", f"{what}.path and {what}.args.path are both set; set one of them.")
        given["path"] = path
    dataset = targets.call(function, given, target, what)
    convert = None
    if type(dataset).__module__.partition(".")[0] == "datasets":
        dataset, convert = _of_huggingface(dataset, target, what)
    if _only_iterated(dataset):
        return Stream(dataset, target, seed=seed, window=window, convert=convert)
    lacking = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    cause = _without_rows(dataset) or (f"without {' and '.join(lacking)}" if lacking else "")
    if cause:
        raise ConfigError(
            "MW305",
            f"{what}.target = {target!r} makes a {type(dataset).__name__} {cause}; a dataset with len() and "
            "dataset[i], or one that can be iterated again and again, is needed.",
        )
    try:
        length = len(dataset)
    except Exception as error:
        raise ConfigError(
            "MW310", f"{what}: the length of {target} cannot be had: {targets.describe(error)}."
        ) from error
    if length == 0:
        raise ConfigError("MW310", f"{what}: {target} has no rows; check {what}.args.")
    checked: MapDataset = dataset
    return checked


def _without_rows(dataset: Any) -> str:
    """Why dataset[i] is no sample, for objects that people have at hand; else nothing."""
    if isinstance(dataset, DataLoader):
        return "of batches, where samples are needed: return its dataset (data.batch_size, data.workers load it)"
    if hasattr(dataset, "iloc"):
        return "whose dataset[i] is a column: return its rows, such as frame.to_dict('records')"
    columns = type(dataset) is tuple and all(isinstance(one, Tensor) and one.dim() for one in dataset)
    if columns and len({len(one) for one in dataset}) == 1 and len(dataset) < len(dataset[0]):
        return "of columns: return torch.utils.data.TensorDataset(*columns)"
    if isinstance(dataset, Mapping) and 0 not in dataset:
        return "of columns: return its rows, a list of dicts"
    return ""


def _only_iterated(dataset: Any) -> bool:
    if isinstance(dataset, IterableDataset):
        return True
    refused = isinstance(dataset, Iterator | DataLoader)
    return isinstance(dataset, Iterable) and not refused and not hasattr(dataset, "__getitem__")


def _of_huggingface(dataset: Any, target: str, what: str) -> tuple[Any, Callable[[Any], Any] | None]:
    """A dataset of Hugging Face that returns tensors instead of lists and numbers, unless the user has chosen a format;
    of one that is iterated, what makes them of a sample, since those that are passed over need none. Raises ConfigError
    for several datasets."""
    if isinstance(dataset, Mapping):
        raise ConfigError(
            "MW305",
            f"{what}.target = {target!r} makes several datasets: {', '.join(map(str, dataset))}; name one, with "
            f"{what}.args.split={next(iter(dataset), 'train')}.",
        )
    if hasattr(dataset, "format"):
        return (dataset if dataset.format["type"] else dataset.with_format("torch")), None
    return dataset, None if getattr(dataset, "_formatting", None) else tensors_of


def at_epoch(dataset: MapDataset, epoch: int) -> None:
    """Let a stream read the samples of `epoch`."""
    if isinstance(dataset, Stream) and epoch != EVALUATION:
        dataset.set_epoch(epoch)


def global_batch(
    dataset: MapDataset, collate: Collate | None, rows: Sequence[int], seed: int = 0, epoch: int = EVALUATION
) -> Any:
    """The batch of `rows` as one device would load it.

    Args:
        dataset: the samples.
        collate: makes a batch of samples; None: torch's default stacking.
        rows: the indices of the samples, in order.
        seed, epoch: those from which random augmentation follows.

    Raises:
        ConfigError: the dataset or the collate fails, rows have different entries, or the collate returns another
            number of rows.
    """
    samples: list[Any] = []
    at_epoch(dataset, epoch)
    with row_seeds(seed, epoch) as begin:
        for row in rows:
            begin(row)
            try:
                samples.append(own(dataset[row]))
            except ConfigError:
                raise
            except Exception as error:
                raise ConfigError("MW311", f"data: row {row} cannot be read: {targets.describe(error)}.") from error
            if collate is None:
                where = f"data: row {row}"
                _ordered(*fields(samples[-1], where), fields(samples[0])[0], where)
        begin(rows[0], len(rows))
        try:
            batch = (collate or default_collate)(samples)
        except Exception as error:
            function, cure, where = "data.collate", "", ""
            if collate is None:
                function = "stacking"
                cure = (
                    " Samples are tensors, arrays and numbers of the same shapes; others need data.collate, a function "
                    "from a list of samples to a batch (runner.data.padding.pad makes lengths equal)."
                )
                where = _unlike(samples, rows)
            raise ConfigError(
                "MW311", f"data: {function} fails on {len(rows)} samples: {targets.describe(error)}{where}.{cure}"
            ) from error
    names, tensors = flatten_batch(batch)
    _check_dense(names, tensors)
    if collate is not None:
        _check_rows(names, tensors, len(rows), unbatched(collate))
    return batch


def _unlike(samples: Sequence[Any], rows: Sequence[int]) -> str:
    """The first of `samples`, of the rows `rows`, that has an entry of another shape than the first one."""
    names, first = fields(samples[0])
    for row, sample in zip(rows, samples, strict=True):
        for name, one, other in zip(names, first, _ordered(*fields(sample), names, ""), strict=True):
            shapes = [tuple(getattr(value, "shape", ())) for value in (one, other)]
            if shapes[0] != shapes[1]:
                return f" (row {row} has {name!r} of shape {shapes[1]}, row {rows[0]} of shape {shapes[0]})"
    return ""


def mixes_rows(dataset: MapDataset, collate: Collate, batches: Iterable[Sequence[int]], seed: int, epoch: int) -> bool:
    """Whether a row of a batch that `collate` makes depends on other rows, in the first of `batches`, which are the
    rows of each, or one of those that follow and are read within `TRYING` seconds. Raises ConfigError as
    `global_batch`."""
    started = time.monotonic()
    for number, rows in enumerate(batches):
        if number and time.monotonic() - started > TRYING:
            break
        if _mixed(dataset, collate, rows, seed, epoch):
            return True
    return False


def _mixed(dataset: MapDataset, collate: Collate, rows: Sequence[int], seed: int, epoch: int) -> bool:
    """Whether half of `rows`, the first or those from the second on, make other rows than all of them do."""
    half = len(rows) // 2
    if not half:
        return False
    parts = slice(0, half), slice(1, 1 + half)  # neighbours that are mixed two by two are torn apart in one of them
    names, complete = flatten_batch(global_batch(dataset, collate, rows, seed, epoch))
    alone = unbatched(collate)
    return any(
        one[part].shape != other.shape or not torch.equal(one[part].nan_to_num(), other.nan_to_num())
        for part in parts
        for name, one, other in zip(
            names, complete, flatten_batch(global_batch(dataset, collate, rows[part], seed, epoch))[1], strict=True
        )
        if name not in alone
    )


def flatten_batch(batch: Any, order: Sequence[str] | None = None) -> tuple[tuple[str, ...], list[Tensor]]:
    """The names and tensors of a batch, in its own order or that of the names `order`; names are the keys of a dict,
    else "0", "1", ...

    Raises ConfigError: no tensors at all, something that is not a tensor, a tensor without a dim for the rows, a key
    that cannot be the name of an argument, or other names than those of `order`.
    """
    names, values = fields(batch, "data: a batch")
    if not values:
        raise ConfigError(
            "MW312", "data: a batch without tensors; samples must be a dict or a tuple of tensors or numbers."
        )
    for name, value in zip(names, values, strict=True):
        where = f"data: the value {name!r} of a batch"
        if not isinstance(value, Tensor):
            raise ConfigError("MW312", f"{where} is a {type(value).__name__}, not a tensor; {FLAT} such a batch.")
        if value.dim() == 0:
            raise ConfigError("MW312", f"{where} is a scalar; dim 0 of every tensor must count the rows.")
        if isinstance(batch, Mapping) and not (isinstance(name, str) and name.isidentifier()):
            raise ConfigError(
                "MW312", f"data: the key {name!r} of a batch cannot be the name of an argument of forward."
            )
    return names if order is None else tuple(order), _ordered(names, values, order or names, "data: a batch")


class LocalBatches:
    """The blocks of each global micro-batch that one rank holds.

    `blocks` has one entry per tensor of the batch, in the order of `flatten_batch`. `names` and `shapes` are those
    of the global micro-batch; every row is checked against them. Where they are left out, the first row that this
    rank reads sets them, and only changes from there on are noticed. `seed` is that of random augmentation. With
    `together` the collate gets all rows of a micro-batch, whatever the blocks need. `floating` are the
    entries of floating point: integers in them become such numbers; as for `names` where it is left out.
    """

    def __init__(
        self,
        dataset: MapDataset,
        collate: Collate | None,
        blocks: Sequence[Block],
        *,
        names: Sequence[str] | None = None,
        shapes: Sequence[Sequence[int]] | None = None,
        seed: int = 0,
        together: bool = False,
        floating: Collection[str] | None = None,
    ) -> None:
        self._dataset, self._collate, self._seed, self._together = dataset, collate, seed, together
        self._blocks = tuple(blocks)
        self._names = None if names is None else tuple(names)
        self._shapes = None if shapes is None else [tuple(shape[1:]) for shape in shapes]
        self._read = None if collate else reader(dataset)
        self._floating = None if floating is None else [name in floating for name in self._names or ()]
        self._random = self._collate_random = False
        """Whether dataset or collate, and whether the collate were seen to use random numbers."""
        # Positions in the micro-batch whose rows some block needs, in order.
        self._unbatched = unbatched(collate)
        named = zip(names or map(str, range(len(blocks))), blocks, strict=True)
        rows = {position for name, block in named if name not in self._unbatched for position in range(*block[0])}
        self._needed = sorted(rows | {0} if self._unbatched else rows)

    def load(self, rows: Sequence[int], epoch: int = EVALUATION) -> list[Tensor]:
        """This rank's block of each tensor, for the global micro-batch made of `rows`, on the CPU.

        Raises ConfigError: rows whose names or shapes differ, or values that cannot be stacked. Exceptions of the
        dataset or the collate are passed on; those of the dataset have the row as their attribute `data_row`.
        """
        at_epoch(self._dataset, epoch)
        if not self._random:
            try:
                with watched() as draws:
                    parts = self._parts(rows, unseeded)
            except Exception:
                if not draws.any:
                    raise
            else:
                if not draws.any:
                    return parts
            self._random = True
        with row_seeds(self._seed, epoch) as begin:
            return self._parts(rows, begin)

    def _parts(self, rows: Sequence[int], begin: Callable[..., None]) -> list[Tensor]:
        """The blocks; `begin` is called before anything that may use random numbers."""
        parts = self._collated(rows, begin, self._collate) if self._collate else self._stacked(rows, begin)
        self._floating = self._floating or [part.is_floating_point() for part in parts]
        for number, (name, part, floating) in enumerate(zip(self._names or (), parts, self._floating, strict=True)):
            if floating and not part.is_complex():
                parts[number] = part if part.is_floating_point() else part.double()
            elif part.is_floating_point():
                raise ConfigError(
                    "MW312",
                    f"data: a batch of the rows {', '.join(map(str, rows))} has {name!r} of {part.dtype}, the batches "
                    "of other rows integers; all rows need one dtype.",
                )
        return parts

    def _stacked(self, rows: Sequence[int], begin: Callable[..., None]) -> list[Tensor]:
        values: dict[int, list[Any]] = {}
        for position in self._needed:
            begin(rows[position])
            with numbered(rows[position]):
                values[position] = self._row(rows[position], position)
        return [
            _stack([values[position][number] for position in range(*block[0])], number)
            for number, block in enumerate(self._blocks)
        ]

    def _row(self, row: int, position: int) -> list[Any]:
        """The values of one row, each cut to its block."""
        where = f"data: row {row}"
        if self._read is None:
            values = self._named(*fields(self._dataset[row], where), where)
            self._check([tuple(getattr(value, "shape", ())) for value in values], where)
            cuts = [tuple(slice(*span) for span in block[1:]) for block in self._blocks]
            return [value[cut] if cut else value for value, cut in zip(values, cuts, strict=True)]
        slices = tuple(
            tuple(slice(*span) if block[0][0] <= position < block[0][1] else slice(0, 0) for span in block[1:])
            for block in self._blocks
        )
        values = self._named(*fields(self._read(row, slices), where), where)
        for name, value, cut in zip(self._names or (), values, slices, strict=True):
            shape, wanted = tuple(getattr(value, "shape", ())), tuple(span.stop - span.start for span in cut)
            if shape != wanted:
                raise ConfigError(
                    "MW312", f"{where}: read() returns {name!r} of shape {shape} where {wanted} was requested."
                )
        return values

    def _collated(self, rows: Sequence[int], begin: Callable[..., None], collate: Collate) -> list[Tensor]:
        samples = []
        if self._together:
            self._needed = [*range(len(rows))]
        for position in self._needed:
            begin(rows[position])
            with numbered(rows[position]):
                samples.append(self._dataset[rows[position]])
        if self._random and not self._collate_random and len(self._needed) < len(rows):
            with watched() as draws:
                collate(samples)
            self._collate_random = draws.any
            if draws.any:  # for all rows together
                self._needed = [*range(len(rows))]
                return self._collated(rows, begin, collate)
        begin(rows[0], len(rows))
        names, tensors = flatten_batch(collate(samples))
        _check_dense(names, tensors)
        _check_rows(names, tensors, len(samples), self._unbatched)
        where = "data: a batch of data.collate"
        tensors = self._named(names, tensors, where)
        self._check([tuple(tensor.shape[1:]) for tensor in tensors], where)
        parts = []
        for name, tensor, (span, *beyond) in zip(self._names or (), tensors, self._blocks, strict=True):
            first = span[0] if name in self._unbatched else self._needed.index(span[0])
            cut = (slice(first, first + span[1] - span[0]), *(slice(*bounds) for bounds in beyond))
            parts.append(tensor[cut].contiguous())
        return parts

    def _named(self, names: tuple[str, ...], values: list[Any], where: str) -> list[Any]:
        """The values in the order of every other row's."""
        self._names = self._names or names
        if empty := [name for name, value in zip(names, values, strict=True) if value is None]:
            raise ConfigError(
                "MW312", f"{where} has None as {empty[0]!r}; every row needs a tensor, an array or a number there."
            )
        return _ordered(names, values, self._names, where)

    def _check(self, shapes: list[tuple[int, ...]], where: str) -> None:
        """Shapes without dim 0 must be those of every other row."""
        self._shapes = self._shapes or shapes
        for name, shape, expected, block in zip(self._names or (), shapes, self._shapes, self._blocks, strict=True):
            if shape != expected or len(shape) != len(block) - 1:
                raise ConfigError(
                    "MW312",
                    f"{where} has {name!r} of shape {shape}, where {expected} is expected; all rows need one shape: "
                    "pad or cut them in the dataset, or to a fixed length in data.collate.",
                )


def _ordered(names: Sequence[str], values: list[Any], order: Sequence[str], where: str) -> list[Any]:
    """`values` in the order of the names `order`. Raises ConfigError, naming the missing and unknown ones."""
    if tuple(names) == tuple(order):
        return values
    missing = [name for name in order if name not in names]
    unknown = [name for name in names if name not in order]
    if missing or unknown:
        clauses = ((missing, "lacks {}"), (unknown, "has {} beside them"))
        differs = " and ".join(text.format(_listed(entries)) for entries, text in clauses if entries)
        raise ConfigError(
            "MW312",
            f"{where} has the values {_listed(names)}; the others have {_listed(order)}: it {differs}. Every row needs "
            "the same entries.",
        )
    by_name = dict(zip(names, values, strict=True))
    return [by_name[name] for name in order]


def _check_dense(names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.is_meta or tensor.layout != strided:
            kind = "on the device meta, without values" if tensor.is_meta else f"of layout {tensor.layout}"
            raise ConfigError(
                "MW312", f"data: the value {name!r} of a batch is {kind}; dense tensors with values are needed."
            )


def _check_rows(names: Sequence[str], tensors: Sequence[Tensor], rows: int, unbatched_names: frozenset[str]) -> None:
    for name, tensor in zip(names, tensors, strict=True):
        if len(tensor) != rows and name not in unbatched_names:
            raise ConfigError(
                "MW312",
                f"data: data.collate makes {name!r} with {len(tensor)} rows from {rows} samples; dim 0 of every tensor "
                f"must count the samples, unless it is one for all of them (data.unbatched=[{name}]).",
            )


def reader(dataset: MapDataset) -> Read | None:
    """The method `read(index, slices)`, with any argument names; None if `read` takes another number of arguments."""
    read: Any = getattr(dataset, "read", None)
    try:
        signature = inspect.signature(read)
        taken = [signature.parameters[name] for name in signature.bind(0, ()).arguments]
    except (TypeError, ValueError):  # it takes others, is no function, or is one of C, which has no signature
        return None
    if len(taken) < 2 or taken[1].kind is inspect.Parameter.VAR_POSITIONAL:
        return None
    return read if taken[1].default is inspect.Parameter.empty or taken[1].name == "slices" else None


def fields(sample: Any, where: str = "data: a row") -> tuple[tuple[str, ...], list[Any]]:
    """The names of a sample's entries, and their values: keys of a dict, else positions. Raises ConfigError for None,
    at `where`."""
    if sample is None:
        raise ConfigError("MW312", f"{where} is None; return a dict or a tuple of tensors, arrays and numbers.")
    if isinstance(sample, Mapping):
        return tuple(sample), list(sample.values())
    values = list(sample) if isinstance(sample, (tuple, list)) else [sample]
    return tuple(map(str, range(len(values)))), values


def _stack(values: list[Any], number: int) -> Tensor:
    if all(isinstance(value, int | float) for value in values) and any(isinstance(value, float) for value in values):
        values = [float(value) for value in values]  # torch looks at the first one alone
    try:
        stacked = default_collate(values)
    except (TypeError, RuntimeError) as error:
        if "unable to allocate shared memory" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), SHARED_MEMORY) from error
        raise ConfigError(
            "MW312", f"data: value {number} of the samples cannot be stacked: {targets.describe(error)}."
        ) from error
    if not isinstance(stacked, Tensor):
        raise ConfigError(
            "MW312",
            f"data: value {number} of the samples is a {type(values[0]).__name__}; {FLAT} tensors of them.",
        )
    return stacked


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
