"""The data of a config: training, evaluation and prediction, and how many rows a batch of each has."""

from __future__ import annotations

from collections.abc import Sequence

from torch.utils.data import Subset

from runner.build import targets
from runner.config.schema import Config
from runner.data.lines import Lines
from runner.data.loader import Collate, MapDataset, build_dataset
from runner.data.order import Order
from runner.data.unbatched import Unbatched
from runner.errors import ConfigError


def datasets(config: Config) -> tuple[MapDataset, MapDataset | None, Collate | None]:
    """Training data, evaluation data (None unless something under `evaluate` asks for it), and the user's collate."""
    name, given = config.data.collate, config.data.collate_args
    collate: Collate | None = None if name is None else targets.bound(name, given, "data.collate")
    if config.data.unbatched:
        collate = Unbatched(frozenset(map(str, config.data.unbatched)), collate)
    training = build_dataset(config.data.target, config.data.args, config.data.path, what="data")
    if not config.evaluate.wanted:
        return training, None, collate
    args = config.data.args | config.evaluate.args
    return training, build_dataset(config.data.target, args, config.data.path, what="data"), collate


def prediction_data(config: Config) -> tuple[MapDataset, Collate | None]:
    """The first `predict.rows` rows of `predict.data`, and their collate. Raises ConfigError as `build_dataset`."""
    rows, collate = _prediction_rows(config)
    count = config.predict.rows
    return (rows if count is None or len(rows) <= count else Subset(rows, range(count))), collate  # type: ignore[arg-type]


def _prediction_rows(config: Config) -> tuple[MapDataset, Collate | None]:
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
        return build_dataset(section.target, section.args, section.path, what="predict.data"), collate
    args = training.args | config.evaluate.args | section.args
    return build_dataset(training.target, args, section.path or training.path, what="data"), collate


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


def order_of(config: Config, length: int) -> Order:
    """The batches of training data of `length` rows. Raises ConfigError for fewer rows than one batch."""
    data = config.data
    return Order(length, data.batch_size, config.train.seed, data.shuffle, data.drop_last)


def micro_batch_rows(config: Config) -> int:
    """Rows of one micro-batch over all ranks."""
    return config.data.batch_size // config.parts


def evaluation_rows(config: Config) -> int:
    """Rows of one batch of an evaluation or a prediction."""
    rows = config.predict.batch_size if config.job.name == "predict" else None
    return rows or config.evaluate.batch_size or micro_batch_rows(config)
