"""Evaluation scores: the loss and any number of metrics, from the model's outputs and the targets of all batches.

A metric is a function (output, target, ...) -> number, an average over the rows of a batch, or an object that is
updated with every batch and computed at the end, as those of torchmetrics. Invariant: output and targets are full
tensors here, without padding rows, and one process updates a metric with every batch in order; so its state is that of
one device, whatever it holds (counts, lists of scores, boxes), and nothing of it has to be merged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from runner.build import targets
from runner.build.divisors import Divisors, EvaluatedMeans, Total, total
from runner.config.schema import MetricForm
from runner.errors import ConfigError
from strategies.capture import Objective, loss_in, plain_outputs
from strategies.capture.changing_attributes import unchanged
from strategies.capture.mean_weights import WeighedMean


@dataclass(frozen=True)
class Structure:
    """The structure of a model's output around its tensors, in the order in which a captured model returns them."""

    spec: Any
    leaves: tuple[Any, ...]

    @staticmethod
    def of(output: Any) -> Structure:
        leaves, spec = _pytree.tree_flatten(plain_outputs(output))
        return Structure(spec, tuple(... if isinstance(leaf, Tensor) else leaf for leaf in leaves))

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """The output with `tensors` in it."""
        left = iter(tensors)
        return _pytree.tree_unflatten([next(left) if leaf is ... else leaf for leaf in self.leaves], self.spec)


class Average:
    """A function (output, target, ...) -> number as a metric: the mean over all rows."""

    def __init__(self, function: Callable[..., Any], what: str) -> None:
        self._function, self._what = function, what
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self._total, self._rows = 0.0, 0

    def update(self, rows: int, *given: Any) -> None:
        """Add a batch of `rows` rows."""
        self._total += _number(self._function(*given), self._what) * rows
        self._rows += rows

    def compute(self) -> float:
        """The mean over all rows so far."""
        return self._total / self._rows


@dataclass(frozen=True)
class Term:
    """A mean in a loss: what it adds to the loss, times what it divides by, and the sum of which that is a function.

    `by_rows` is what it adds times the rows. That counts where the mean does not divide by the `same` function of a sum
    in all batches, as by a share of the batch.
    """

    added: float
    total: Total
    by_rows: float
    same: bool = True

    @property
    def mean(self) -> float | None:
        """What it adds; None where it divides by nothing."""
        count = self.total.divisor(self.total.sum)
        return self.added / count if count else None

    def __add__(self, other: Term) -> Term:
        """The mean over the rows of both."""
        return Term(
            self.added + other.added,
            replace(self.total, sum=self.total.sum + other.total.sum),
            self.by_rows + other.by_rows,
            self.same and self.total.divisor(other.total.sum) == other.total.divisor(other.total.sum),
        )


class MeanLoss(Average):
    """The loss: its means over classes, and those that are written out, are over all that they divide by in all
    batches; its other terms over all rows. All of it is over all rows where it is no sum of means, or batches have
    different numbers of them."""

    def __init__(self, function: Callable[..., Any], what: str, constants: Sequence[Tensor] = ()) -> None:
        super().__init__(function, what)
        self._constants = constants

    def reset(self) -> None:
        super().reset()
        self._rest = 0.0
        self._terms: list[Term] | None = None
        self._by_rows = False

    def update(self, rows: int, *given: Any, tokens: Total | None = None) -> None:
        """Add a batch of `rows` rows; `tokens` is what a model that returns its loss has divided by."""
        if tokens is None:
            value, rest, terms = self._parts(given, rows)
        else:
            value = _number(self._function(*given), self._what)
            rest, terms = 0.0, [_term(value, tokens, rows)]
        self._total += value * rows
        self._rows += rows
        self._rest += rest * rows
        if self._terms is None:
            self._terms = terms
        elif len(self._terms) == len(terms):
            self._terms = [a + b for a, b in zip(self._terms, terms, strict=True)]
        else:
            self._by_rows = True

    def _parts(self, given: Sequence[Any], rows: int) -> tuple[float, float, list[Term]]:
        """The loss, its terms beside the means, and the means."""
        weighed = WeighedMean()
        with Divisors() as divisors, EvaluatedMeans(weighed, constants=self._constants) as seen:
            result = self._function(*given)
        means, only, value = seen.means, divisors.only, _number(result, self._what)
        if not means:
            return (value, value, []) if only is None else (value, 0.0, [_term(value, Total(only), rows)])
        each = [seen.written.get(number) or total(arguments, rows) for number, (_, arguments) in enumerate(means)]
        if len(means) == 1 and value == float(means[0][0]):
            return value, 0.0, [_term(value, each[0], rows)]

        def with_means(kept: int | None) -> float:
            """The loss with one of its means, or none."""
            weights = [torch.full_like(mean, float(number == kept)) for number, (mean, _) in enumerate(means)]
            with EvaluatedMeans(weighed, weights, constants=self._constants):
                return _number(self._function(*given), self._what)

        rest = with_means(None)
        terms = [_term(with_means(number) - rest, divides_by, rows) for number, divides_by in enumerate(each)]
        parts = [rest, *(term.mean or 0.0 for term in terms)]
        rounding = torch.finfo(result.dtype).eps if isinstance(result, Tensor) else torch.finfo(torch.float64).eps
        if math.isfinite(value) and not abs(sum(parts) - value) <= 64 * rounding * (abs(value) + sum(map(abs, parts))):
            self._by_rows = True  # as in a product of means, or where a part is not finite
        return value, rest, terms

    def compute(self) -> float:
        """The mean over all batches so far."""
        means = [term.mean if term.same else term.by_rows / self._rows for term in self._terms or []]
        if self._by_rows or not means:
            return super().compute()
        known = [mean for mean in means if mean is not None]
        return super().compute() if len(known) < len(means) else self._rest / self._rows + sum(known)


def _term(mean: float, divides_by: Total, rows: int) -> Term:
    """A mean of one batch; of nothing it is not a number."""
    count = divides_by.divisor(divides_by.sum)
    return Term(mean * count if count else 0.0, divides_by, mean * rows)


class Updated:
    """An object with `update`, `compute` and `reset` as a metric; `compute` returns a number, or numbers by name."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        for part in metric.modules() if isinstance(metric, nn.Module) else ():
            if hasattr(part, "distributed_available_fn"):
                vars(part)["distributed_available_fn"] = _alone  # torchmetrics would wait for ranks that have no state
        self.reset: Callable[[], Any] = metric.reset
        self.compute: Callable[[], Any] = metric.compute

    def update(self, rows: int, *given: Any) -> None:
        """Add a batch."""
        tensors = [one for one in _pytree.tree_leaves(given) if isinstance(one, Tensor)]  # also those in lists of dicts
        if isinstance(self._metric, nn.Module) and tensors:
            self._metric.to(tensors[0].device)
        self._metric.update(*given)


def _alone() -> bool:
    """Whether metrics are distributed: no other process has a part of their state."""
    return False


@dataclass(frozen=True)
class Scores:
    """The loss (None: the model returns it) and the metrics of a run, by their names in the results; `inputs` makes the
    arguments of some of them. Of several numbers of a metric that is `named`, those that another one has, too, are
    called NAME.KEY."""

    loss: nn.Module | None
    metrics: Mapping[str, Average | MeanLoss | Updated]
    inputs: Mapping[str, Callable[..., Any]]
    named: frozenset[str] = frozenset()

    def reset(self) -> None:
        """Forget all batches."""
        for metric in self.metrics.values():
            metric.reset()

    def update(self, rows: int, output: Any, target: Sequence[Tensor], tokens: Total | None = None) -> None:
        """Add a batch of `rows` rows; `tokens` as `MeanLoss.update` takes it. Raises ConfigError where a user's
        function fails or its result is no number."""
        for name, metric in self.metrics.items():
            given: tuple[Any, ...] = (output, *target)
            with _named(name, len(target)):
                if name in self.inputs:
                    made = self.inputs[name](*given)
                    given = tuple(made) if isinstance(made, tuple | list) else (made,)
                if isinstance(metric, MeanLoss):
                    metric.update(rows, *given, tokens=tokens)
                else:
                    metric.update(rows, *given)

    def results(self) -> dict[str, float]:
        """The results of all batches by name; of a metric that computes several numbers by theirs.

        Raises:
            ConfigError: a metric fails or computes no number, or two results have one name.
        """
        found: dict[str, float] = {}
        every: dict[str, Mapping[Any, Any]] = {}
        for name, metric in self.metrics.items():
            what = f"evaluate: the metric {name}"
            with _named(name):
                value = metric.compute()
            values: Mapping[Any, Any] = {name: value}
            if isinstance(value, Mapping):
                values = {key: one for key, one in value.items() if _is_number(one)}
                if not values:
                    raise ConfigError("MW322", f"{what} computes no number: {', '.join(map(str, value)) or 'nothing'}.")
            every[name] = values
        counts = Counter(str(key) for values in every.values() for key in values)
        for name, values in every.items():
            for key, one in values.items():
                known = f"{name}.{key}" if counts[str(key)] > 1 and name in self.named else str(key)
                if known in found:
                    raise _twice("evaluate.metrics", known)
                found[known] = _number(one, f"evaluate: the metric {name}")
        return found


def scores(forms: Sequence[MetricForm], loss: nn.Module | None) -> Scores:
    """The loss and the metrics of a run, without any batch.

    Raises:
        ConfigError: a metric that cannot be found or made, or two of one name.
    """
    function: Callable[..., Any] = loss_in if loss is None else lambda output, *target: loss_in(loss(output, *target))
    metrics: dict[str, Average | MeanLoss | Updated] = {
        "loss": MeanLoss(function, "the model's loss" if loss is None else "the loss", _tensors(loss))
    }
    inputs: dict[str, Callable[..., Any]] = {"loss": lambda output, *_: (output,)} if loss is None else {}
    for number, form in enumerate(forms):
        where, last = f"evaluate.metrics[{number}]", form.target.rpartition(".")[2]
        name = form.name or (form.target if last == "loss" else last)
        if name in metrics:
            raise _twice(where, name)
        metrics[name] = _metric(form, where, name)
        if form.inputs is not None:
            inputs[name] = targets.resolve(form.inputs, f"{where}.inputs")
    return Scores(loss, metrics, inputs, frozenset(form.name for form in forms if form.name))


def _tensors(loss: nn.Module | None) -> list[Tensor]:
    return [] if loss is None else [*loss.parameters(), *loss.buffers()]


@contextmanager
def _named(name: str, targets_given: int = 1) -> Iterator[None]:
    """Turn what the function or class of a user raises into one paragraph that names the result, and says how to choose
    among several targets."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        what = "the loss" if name == "loss" else f"evaluate: the metric {name}"
        text = f"{what} fails in evaluation: {targets.describe(error)}."
        if targets_given > 1 and name != "loss":
            text += f" It gets the output and all {targets_given} targets; its `inputs`, a function of these, chooses."
        raise ConfigError("MW322", text) from error


def _twice(where: str, name: str) -> ConfigError:
    return ConfigError(
        "MW843",
        f"{where}: two results are called {name!r}; give one of the metrics another name: {{target: ..., name: ...}}.",
    )


def _metric(form: MetricForm, where: str, name: str) -> Average | Updated:
    """Raises ConfigError for a target that cannot be found, or be made with its arguments."""
    what = f"evaluate: the metric {name}"
    if form.target == "accuracy":
        return Average(accuracy, what)
    function = targets.resolve(form.target, "evaluate.metric")
    if not isinstance(function, type):
        return Average(targets.bound(form.target, form.args, where), what)
    made = targets.call(function, form.args, form.target, where)
    if all(callable(getattr(made, method, None)) for method in ("update", "compute", "reset")):
        return Updated(made)
    if not callable(made):
        raise ConfigError(
            "MW305",
            f"{where}: {form.target} made a {type(made).__name__}, which can neither be called nor has the methods "
            "update, compute and reset.",
        )
    return Average(made, what)


def accuracy(output: Any, target: Tensor) -> float:
    """Share of rows of `output` [n, classes, ...] whose largest class is `target` [n, ...]; of several outputs the
    first counts."""
    found = next(leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, Tensor))
    if found.shape[:1] + found.shape[2:] != target.shape or found.dim() < 2 or target.is_floating_point():
        raise ConfigError(
            "MW322",
            "evaluate.metric = accuracy needs class scores [n, classes, ...] and class indices [n, ...]; the model "
            f"returns {list(found.shape)} for targets {list(target.shape)} of {target.dtype}. Name a function of your "
            "own in evaluate.metric, or choose evaluate.metric=null for the loss alone.",
        )
    return float((found.argmax(1) == target).double().mean())


def try_evaluation(
    step: Objective, batch: Mapping[str, Tensor], measured: Scores, what: str = "evaluate"
) -> tuple[Structure, Any]:
    """Evaluate one full batch on this process, and return the structure of the model's output, and the output. A batch
    that lacks training entries is not scored.

    Raises ConfigError for a model, loss or metric that cannot be evaluated.
    """
    kept = [name for name in batch if name not in step.targets]
    try:
        with torch.no_grad(), torch.random.fork_rng(()), unchanged(step):
            step.eval()
            output = Objective(step.model, None, kept, (), step.autocast)(*(batch[name] for name in kept))
            if step.loss is not None and type(output) is not type(plain_outputs(output)):
                raise ConfigError(
                    "MW322",
                    f"evaluate: the model returns a {type(output).__name__}, which cannot be handed to the loss in "
                    "pieces; return a tensor, a tuple or a dict, or let the model return its loss (loss.target=null).",
                )
            if set(step.names) <= set(batch):
                measured.reset()
                rows = len(next(iter(batch.values())))
                measured.update(rows, output, [batch[name] for name in step.names if name in step.targets])
                measured.results()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            "MW322", f"{what}: the first batch cannot be evaluated: {targets.describe(error)}."
        ) from error
    step.train()
    return Structure.of(output), output


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str)


def _number(value: Any, what: str) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ConfigError(
            "MW322", f"{what} is a tensor of shape {list(value.shape)} in evaluation; one number is needed."
        )
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError("MW322", f"{what} is a {type(value).__name__} in evaluation; one number is needed.") from None
