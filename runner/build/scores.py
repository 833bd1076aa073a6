"""Evaluation scores: the loss and a metric of one batch, from the model's output and the targets.

A metric is `accuracy` or any function (output, target, ...) -> number, an average over the rows of the batch, with the
arguments of the loss. Invariant: output and targets are full tensors here, without padding rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from runner.build import targets
from runner.errors import ConfigError
from strategies.capture import Objective, loss_in

Metric = Callable[..., Any]


@dataclass(frozen=True)
class Structure:
    """The structure of a model's output around its tensors, in the order in which a captured model returns them."""

    spec: Any
    leaves: tuple[Any, ...]

    @staticmethod
    def of(output: Any) -> Structure:
        leaves, spec = _pytree.tree_flatten(_plain(output))
        return Structure(spec, tuple(... if isinstance(leaf, Tensor) else leaf for leaf in leaves))

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """The output with `tensors` in it."""
        left = iter(tensors)
        return _pytree.tree_unflatten([next(left) if leaf is ... else leaf for leaf in self.leaves], self.spec)


@dataclass(frozen=True)
class Scores:
    """The loss (None: the model returns it) and the metric of a run, with its name in the results."""

    loss: nn.Module | None
    metric: Metric | None
    name: str

    def of(self, output: Any, target: Sequence[Tensor]) -> dict[str, float]:
        """The scores of one batch. Raises whatever the user's functions raise, and ConfigError for a result that is not
        a number."""
        if self.loss is None:
            return {"loss": _number(loss_in(output), "the model's loss")}
        results = {"loss": _number(loss_in(self.loss(output, *target)), "the loss")}
        if self.metric is not None:
            results[self.name] = _number(self.metric(output, *target), f"evaluate.metric = {self.name}")
        return results


def scores(metric: str | None, loss: nn.Module | None) -> Scores:
    """Raises ConfigError for a metric that cannot be found."""
    if metric is None or metric == "accuracy":
        return Scores(loss, None if metric is None else accuracy, metric or "")
    name = metric.rpartition(".")[2]
    return Scores(loss, targets.resolve(metric, "evaluate.metric"), metric if name == "loss" else name)


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


def try_evaluation(step: Objective, batch: Mapping[str, Tensor], measured: Scores) -> Structure:
    """Evaluate one full batch on this process, and return the structure of the model's output. A batch that lacks
    training entries is not scored.

    Raises ConfigError for a model, loss or metric that cannot be evaluated.
    """
    kept = [name for name in batch if name not in step.targets]
    buffers = [(buffer, buffer.clone()) for buffer in step.buffers()]  # which forward may write, also in evaluation
    step.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(()):
            output = Objective(step.model, None, kept, (), step.autocast)(*(batch[name] for name in kept))
            if step.loss is not None and output is not _plain(output):
                raise ConfigError(
                    "MW322",
                    f"evaluate: the model returns a {type(output).__name__}, which cannot be handed to the loss in "
                    "pieces; return a tensor, a tuple or a dict, or let the model return its loss (loss.target=null).",
                )
            if set(step.names) <= set(batch):
                measured.of(output, [batch[name] for name in step.names if name in step.targets])
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            "MW322", f"evaluate: the first batch cannot be evaluated: {targets.describe(error)}."
        ) from error
    finally:
        step.train()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    return Structure.of(output)


def _plain(output: Any) -> Any:
    """The output as a captured model returns it: a dataclass that torch does not know becomes a dict."""
    if is_dataclass(output) and not isinstance(output, type) and type(output) not in _pytree.SUPPORTED_NODES:
        pairs = ((field.name, getattr(output, field.name)) for field in fields(output))
        return {name: value for name, value in pairs if value is not None}
    return output


def _number(value: Any, what: str) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ConfigError(
            "MW322", f"{what} is a tensor of shape {list(value.shape)} in evaluation; one number is needed."
        )
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError("MW322", f"{what} is a {type(value).__name__} in evaluation; one number is needed.") from None
