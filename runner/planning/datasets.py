"""The data of a config: training, evaluation and prediction, and how many rows a batch of each has.

Invariant: a dataset that draws numbers while it is made, such as those of a split, is the same on every rank, in every
worker and after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.utils.data import Subset

from runner.build import targets
from runner.checkpoint.continuation import ENDLESS
from runner.config.schema import Config
from runner.data.lines import Lines
from runner.data.loader import Collate, MapDataset, build_dataset
from runner.data.order import Order
from runner.data.row_seeds import seeded
from runner.data.shards import Shards
from runner.data.streams import Stream
from runner.data.unbatched import Unbatched
from runner.errors import ConfigError


def datasets(config: Config, rows: int | None = None) -> tuple[MapDataset, MapDataset | None, Collate | None]:
    """Training data, evaluation data (None unless something under `evaluate` asks for it), and the user's collate.
    `rows` is how many training samples there are, if that is known."""
    name, given = config.data.collate, config.data.collate_args
    collate: Collate | None = None if name is None else targets.bound(name, given, "data.collate")
    if config.data.unbatched:
        collate = Unbatched(frozenset(map(str, config.data.unbatched)), collate)
    training = training_data(config, rows)
    return training, evaluation_data(config) if config.evaluate.wanted else None, collate


def evaluation_data(config: Config, rows: int | None = None) -> MapDataset:
    """The evaluation data, of which there are `rows`, if that is known. Raises ConfigError as `build_dataset`."""
    args, what = config.data.args | config.evaluate.args, "evaluate" if config.evaluate.args else "data"
    path = None if "path" in config.evaluate.args else config.data.path
    with seeded(config.train.seed):
        return _finite(build_dataset(config.data.target, args, path, what=what), rows)


def _finite(found: MapDataset, rows: int | None, most: int | None = None) -> MapDataset:
    return found.counted(rows, most) if isinstance(found, Stream) else found


def training_data(config: Config, rows: int | None = None) -> MapDataset:
    """The training data alone; a stream that is trained in epochs has `rows` samples, or is counted.

    Raises ConfigError: as `build_dataset`; a schedule by epochs where a stream has none.
    """
    data, train = config.data, config.train
    window = 2 * data.batch_size
    with seeded(train.seed):
        found = build_dataset(data.target, data.args, data.path, what="data", seed=train.seed, window=window)
    if not isinstance(found, Stream):
        return found
    if train.epochs is not None:
        return found.counted(rows)
    if config.optimizer.scheduler.target is not None and config.optimizer.scheduler.per == "epoch":
        raise ConfigError(
            "MW822",
            "optimizer.scheduler.per = 'epoch', but the samples of a stream are not counted where train.steps says how "
            "long to train; give train.epochs, or choose optimizer.scheduler.per=step.",
        )
    return found


def prediction_data(config: Config, known: int | None = None) -> tuple[MapDataset, Collate | None]:
    """The first `predict.rows` rows of `predict.data`, of which there are `known`, if that is known, and their collate.
    Raises ConfigError as `build_dataset`."""
    with seeded(config.train.seed):
        rows, collate = _prediction_rows(config, known)
    count = config.predict.rows
    return (rows if count is None or len(rows) <= count else Subset(rows, range(count))), collate  # type: ignore[arg-type]


def _prediction_rows(config: Config, known: int | None) -> tuple[MapDataset, Collate | None]:
    section, training = config.predict.data, config.data
    collate: Collate | None = None
    if section.collate is not None:
        collate = targets.bound(section.collate, section.collate_args, "predict.data.collate")
    elif training.collate is not None and section.target is None and not section.lines:
        collate = targets.bound(training.collate, training.collate_args, "data.collate")
    if section.lines:
        lines = f"{Lines.__module__}.{Lines.__qualname__}"
        return build_dataset(lines, {}, section.path, what="predict.data"), collate
    if section.target is not None:
        return _finite(
            build_dataset(section.target, section.args, section.path, what="predict.data"), known, config.predict.rows
        ), collate
    inherited, path = training.args | config.evaluate.args, section.path
    if path is not None:
        inherited.pop("path", None)
    elif "path" not in config.evaluate.args | section.args:
        path = training.path
    what = "predict.data" if section.args else "data"
    return _finite(
        build_dataset(training.target, inherited | section.args, path, what=what), known, config.predict.rows
    ), collate


def check_prediction_names(names: Sequence[str], known: Sequence[str], targeted: Sequence[str]) -> None:
    """Check that samples with the entries `names` suit a model that was trained on `known`, of which the loss alone
    took `targeted`. Raises ConfigError."""
    unknown = [name for name in names if name not in known]
    if unknown or not set(names) - set(targeted):
        raise ConfigError(
            "MW316",
            f"predict.data: the samples have the entries {', '.join(names)}, those of training {', '.join(known)}; "
            "entries are known by their names (of a tuple by their positions), and only those that the loss alone "
            "takes may be left out.",
        )


def order_of(config: Config, training: MapDataset) -> Order:
    """The batches of training data; those of a stream are in its own order. Raises ConfigError for fewer rows than one
    batch."""
    data, length = config.data, len(training)
    if length == ENDLESS:
        length -= length % data.batch_size
    shuffle = data.shuffle and not isinstance(training, Stream)
    shuffled = training.shuffled if isinstance(training, Shards) else None
    return Order(length, data.batch_size, config.train.seed, shuffle, data.drop_last, shuffled)


def micro_batch_rows(config: Config) -> int:
    """Rows of one micro-batch over all ranks."""
    return config.data.batch_size // config.parts


def evaluation_rows(config: Config) -> int:
    """Rows of one batch of an evaluation or a prediction."""
    rows = config.predict.batch_size if config.job.name == "predict" else None
    return rows or config.evaluate.batch_size or micro_batch_rows(config)
