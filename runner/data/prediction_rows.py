"""The rows to predict, and which of their entries the model gets."""

from __future__ import annotations

from collections.abc import Sequence

from torch.utils.data import Subset

from runner.build import targets
from runner.config.schema import Config
from runner.data.lines import Lines
from runner.data.loader import Collate, MapDataset, build_dataset
from runner.errors import ConfigError


def dataset(config: Config) -> tuple[MapDataset, Collate | None]:
    """The first `predict.rows` rows of `predict.data`, and how they become a batch. Raises ConfigError as
    `build_dataset`."""
    rows, collate = _all_rows(config)
    most = config.predict.rows
    return (rows if most is None or len(rows) <= most else Subset(rows, range(most))), collate  # type: ignore[arg-type]


def _all_rows(config: Config) -> tuple[MapDataset, Collate | None]:
    wanted, own = config.predict.data, config.data
    if wanted.collate is not None:
        collate: Collate | None = targets.bound(wanted.collate, wanted.collate_args, "predict.data.collate")
    elif own.collate is not None and wanted.target is None and not wanted.lines:
        collate = targets.bound(own.collate, own.collate_args, "data.collate")
    else:
        collate = None
    if wanted.lines:
        return build_dataset(f"{Lines.__module__}.{Lines.__qualname__}", {}, wanted.path, what="predict.data"), collate
    if wanted.target is not None:
        return build_dataset(wanted.target, wanted.args, wanted.path, what="predict.data"), collate
    args = own.args | config.evaluate.args | wanted.args
    return build_dataset(own.target, args, wanted.path or own.path, what="data"), collate


def check_names(names: Sequence[str], known: Sequence[str], targeted: Sequence[str]) -> None:
    """Raise ConfigError unless samples with the entries `names` can be predicted by a model that was given `known` in
    training, of which only the loss took `targeted`."""
    strangers = [name for name in names if name not in known]
    if strangers or not set(names) - set(targeted):
        raise ConfigError(
            "MW316",
            f"predict.data: the samples have the entries {', '.join(names)}, those of training {', '.join(known)}; "
            "entries are known by their names (of a tuple by their positions), and only those that the loss alone "
            "takes may be left out.",
        )
