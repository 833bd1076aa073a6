"""What the loss of a graph divides by, found in the graph."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from models.losses import NextTokenLoss
from runner.build.divisors import values
from runner.planning.counted import (
    Counted,
    Divisor,
    InitialTensors,
    check_weighed,
    counted,
    each_counted,
    nonlinear_in_means,
    shares,
    unknown_division,
    unknown_labels,
)
from strategies.capture.model import Captured, LossFunction, Objective, capture
from strategies.core.errors import StrategyError
from strategies.runtime.tensor_files import index

ROWS, LENGTH, CLASSES = 3, 6, 5


FUNCTIONS = {
    "sum": lambda one, other: torch.where(one > 0, 0.5 * one - other / 3, 0.0),
    "product": lambda one, other: one * other + one,
    "quotient": lambda one, other: one / other,
    "root": lambda one, other: one.sqrt() + 0.3 * other,
}
"""Of two means."""


class Tokens(nn.Module):
    """Returns logits, or with labels a loss as models of transformers do: of the labels from the second on."""

    def __init__(self, loss: str = "") -> None:
        super().__init__()
        self.table, self.loss = nn.Embedding(CLASSES, CLASSES), loss

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits: Tensor = self.table(input_ids)
        if labels is None:
            return logits
        if self.loss == "written out, smoothed":
            mask = labels != -100
            return (logits.square().mean(-1) * mask).sum() / (mask.sum() + 1)
        if self.loss == "written out":
            losses, mask = functional.cross_entropy(logits.mT, labels, reduction="none"), labels != -100
            return (losses * mask).sum() / mask.float().sum().clamp(min=1)
        if self.loss == "by a Python number":
            losses, mask = functional.cross_entropy(logits.mT, labels, reduction="none"), (labels != -100).float()
            return (losses * mask).sum() / max(1, int(mask.sum()))
        if self.loss == "one class for all":
            kept = logits[labels != -100]
            return functional.cross_entropy(kept, torch.zeros(len(kept), dtype=torch.long))
        if self.loss == "expanded":
            return logits.square()[(labels != -100)[..., None].expand(-1, -1, CLASSES)].mean()
        if self.loss == "by a length":
            losses = functional.cross_entropy(logits.mT, labels, reduction="none")[labels != -100]
            return losses.sum() / max(1, len(losses))
        if self.loss in ("weights of sum 1", "losses by a sum"):
            losses, mask = functional.cross_entropy(logits.mT, labels, reduction="none"), (labels != -100).float()
            return (losses * (mask / mask.sum()) if self.loss == "weights of sum 1" else losses / mask.sum()).sum()
        if self.loss == "before a mean for a log":
            losses, mask = functional.cross_entropy(logits.mT, labels, reduction="none"), labels != -100
            (logits.square().mean(-1) * mask).sum() / mask.sum()
            return losses[mask].sum().divide_(mask.sum())
        if self.loss == "rows that have labels":
            rows = (labels[:, 2:] >= 0).any(1)
            return (logits.square().mean((1, 2)) * rows).sum() / rows.sum()
        if self.loss in FUNCTIONS:
            mean = functional.cross_entropy(logits.mT, labels)
            return FUNCTIONS[self.loss](mean, functional.cross_entropy(logits.mT, labels, ignore_index=0))
        if self.loss == "by a maximum":
            return logits.square().mean() / labels.max()
        if self.loss == "by less than all rows":  # a label of each has no token before it
            mask = labels != -100
            return (logits.square().mean(-1) * mask).sum() / (mask.sum() - len(mask)).clamp(min=1)
        if self.loss == "by counts of classes":
            chosen = functional.one_hot(labels.clamp(min=0), CLASSES).float()
            return ((logits.square() * chosen).sum((0, 1)) / chosen.sum((0, 1)).clamp(min=1)).mean()
        if self.loss == "times an inverse":
            return logits.square().sum() * (1.0 / (labels > 0).sum())
        if self.loss == "selected":
            return functional.cross_entropy(logits[labels != -100], labels[labels != -100])
        flat = logits.flatten(0, 1)
        if self.loss == "shifted":
            labels = functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
        elif self.loss == "masked":
            labels = labels.where(input_ids > 1, -100)
        elif self.loss == "looked up":
            labels = labels.where(torch.tensor([False, True, True, False, True])[input_ids], -100)
        elif self.loss == "mixed rows":
            labels = labels.where(labels[:1] > 1, -100)
        elif self.loss == "reversed rows":
            labels = labels.flip(0) + 0
        elif self.loss == "padded with a class":
            labels = functional.pad(labels, (0, 1), value=3)[:, 1:].contiguous()
        loss = functional.cross_entropy(flat, labels.reshape(-1)) * 0.5
        if self.loss == "penalty":
            loss = loss + flat.square().mean()
        if self.loss == "two":
            loss = loss + functional.cross_entropy(flat, labels.reshape(-1), ignore_index=0)
        return loss


def captured(model: nn.Module, loss: nn.Module | None, rows: int = ROWS) -> tuple[Captured, list[Tensor]]:
    torch.manual_seed(0)
    labels = torch.randint(CLASSES, (ROWS, LENGTH))
    labels[0, 0] = labels[1, 2:] = -100
    batch = [torch.randint(CLASSES, (ROWS, LENGTH))[:rows], labels[:rows]]
    objective = Objective(model, loss, ("input_ids", "labels"), () if loss is None else ("labels",))
    return capture(objective, batch, training=True), batch


def found(model: nn.Module, loss: nn.Module | None) -> tuple[Counted | None, list[Tensor]]:
    captured_model, batch = captured(model, loss)
    return counted(captured_model.graph, captured_model.tensors), batch


def everywhere(shape: torch.Size) -> tuple[tuple[int, int], ...]:
    return tuple((0, size) for size in shape)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [("next", ROWS * LENGTH - 5), ("own", ROWS * LENGTH - 5), ("shifted", ROWS * (LENGTH - 1) - 4)],
)
def test_labels_that_count(loss, expected):
    count, batch = found(Tokens(loss), NextTokenLoss() if loss == "next" else None)
    assert count is not None and count.entry == 1
    assert count.of(batch, everywhere(batch[1].shape)) == expected
    halves = [[entry[:, part] for entry in batch] for part in (slice(0, 2), slice(2, LENGTH))]
    blocks = [((0, ROWS), (0, 2)), ((0, ROWS), (2, LENGTH))]
    assert sum(count.of(half, block) for half, block in zip(halves, blocks, strict=True)) == expected


@pytest.mark.parametrize(("loss", "ignored"), [("own", []), ("masked", []), ("penalty", [-100]), ("two", [-100, 0])])
def test_each_mean_counts_where_they_are_not_all_of_the_loss(loss, ignored):
    captured_model, _ = captured(Tokens(loss), None)
    means = each_counted(captured_model.graph, captured_model.tensors)
    assert [one.ignored for one in means if one is not None] == ignored


@pytest.mark.parametrize("loss", ["masked", "selected", "looked up", "padded with a class"])
def test_labels_that_a_forward_computes_row_by_row_count(loss):
    count, (ids, labels) = found(Tokens(loss), None)
    wanted = {
        "masked": lambda: int(((labels != -100) & (ids > 1)).sum()),
        "selected": lambda: int((labels != -100).sum()),
        "looked up": lambda: int(((labels != -100) & (ids != 0) & (ids != 3)).sum()),
        "padded with a class": lambda: int((labels[:, 1:] != -100).sum()) + ROWS,
    }[loss]()
    assert count is not None
    assert count.of([ids, labels], everywhere(labels.shape)) == wanted
    rows = [[entry[part] for entry in (ids, labels)] for part in (slice(0, 1), slice(1, ROWS))]
    assert sum(count.of(part, everywhere(part[0].shape)) for part in rows) == wanted
    twice = [torch.cat((entry, entry)) for entry in (ids, labels)]
    assert count.of(twice, everywhere(twice[0].shape)) == 2 * wanted


@pytest.mark.parametrize("loss", ["written out", "by a length"])
def test_a_mean_that_is_written_out_counts(loss):
    captured_model, batch = captured(Tokens(loss), None)
    (divisor,) = each_counted(captured_model.graph, captured_model.tensors)
    assert isinstance(divisor, Divisor)
    rows = [[entry[part] for entry in batch] for part in (slice(0, 1), slice(1, ROWS))]
    counts = [divisor.of(part, everywhere(part[0].shape)) for part in rows]
    assert counts == [float((part[1] != -100).sum()) for part in rows]
    assert [divisor.value(count) for count in (0, *counts)] == [1, *counts]  # clamped
    assert shares([0.0, 3.0], divisor) == [1 / 3, 1]


@pytest.mark.parametrize(("loss", "matches"), [("written out", True), ("before a mean for a log", False)])
def test_a_weight_of_another_mean_is_seen(loss, matches):
    """A forward sees the mean that is not used, a graph that which is divided in place."""
    model, (ids, labels) = captured(Tokens(loss), None)
    step = Objective(Tokens(loss), None, ["input_ids", "labels"], []).weighed(1)
    weighed = capture(step, [ids, labels, torch.tensor(1.0)], training=True).graph
    with nullcontext() if matches else pytest.raises(StrategyError, match=r"test_counted\.py:\d+"):
        check_weighed(weighed, model.graph, ["mean_weight_0"])


def test_rows_are_counted_by_what_is_reduced_in_each():
    captured_model, batch = captured(Tokens("rows that have labels"), None)
    (divisor,) = each_counted(captured_model.graph, captured_model.tensors)
    assert isinstance(divisor, Divisor)
    assert divisor.of(batch, everywhere(batch[1].shape)) == ROWS - 1


@pytest.mark.parametrize("loss", FUNCTIONS)
def test_a_loss_that_is_no_sum_of_means_is_seen(loss):
    captured_model, _ = captured(Tokens(loss), None)
    expected = {"sum": [], "product": ["mul"], "quotient": ["div"], "root": ["sqrt"]}[loss]
    assert [operator.op for operator in nonlinear_in_means(captured_model.graph)] == expected
    each = [one is not None for one in each_counted(captured_model.graph, captured_model.tensors)]
    assert each == {"sum": [True, True], "root": [False, True]}.get(loss, [])


UNKNOWN = (
    "by a maximum",
    "by counts of classes",
    "by less than all rows",
    "times an inverse",
    "weights of sum 1",
    "losses by a sum",
)


@pytest.mark.parametrize("loss", [*UNKNOWN, "own", "written out"])
def test_a_division_by_what_is_no_sum_is_seen(loss):
    captured_model, _ = captured(Tokens(loss), None)
    division = unknown_division(captured_model.graph, captured_model.tensors)
    assert (division is not None) == (loss in UNKNOWN)


def test_a_size_of_one_row_is_no_number_of_the_loss():
    """But one that bounds a divisor is, however many rows there are."""
    smoothed, bounded = Tokens("written out, smoothed"), Tokens("written out")
    for net, rows, known in ((smoothed, 1, False), (smoothed, ROWS, True), (bounded, 1, True)):
        model, _ = captured(net, None, rows)
        assert [one is not None for one in each_counted(model.graph, model.tensors)] == [True] * known


def test_computed_labels_need_the_same_complete_rows_of_every_entry():
    count, _ = found(Tokens("masked"), None)
    assert count is not None and count.entries == {0, 1}
    rows, columns, complete = (("dp",), ()), ((), ("dp",)), ((), ())
    for first, second, readable in ((rows, rows, True), (rows, complete, False), (columns, columns, False)):
        assert count.readable([first, second]) == readable


def test_a_divisor_may_be_a_number_of_python():
    model, batch = captured(Tokens("by a Python number"), None)
    (divisor,) = each_counted(model.graph, model.tensors)
    assert isinstance(divisor, Divisor)
    assert divisor.of(batch, ()) == ROWS * LENGTH - 5
    assert [divisor.value(total) for total in (0.0, 3.0)] == [1.0, 3.0]


def test_a_mask_that_is_expanded_counts_its_elements():
    model, batch = captured(Tokens("expanded"), None)
    (divisor,) = each_counted(model.graph, model.tensors)
    assert isinstance(divisor, Divisor)
    assert divisor.of(batch, ()) == (ROWS * LENGTH - 5) * CLASSES


def test_a_divisor_by_element_is_that_of_all_parts_of_rows():
    model, batch = captured(Tokens("written out"), None)
    (divisor,) = each_counted(model.graph, model.tensors)
    columns, complete = ((), ("cp",)), ((), ())
    assert isinstance(divisor, Divisor) and divisor.readable([complete, columns])
    parts = [[entry[:, first : first + 2] for entry in batch] for first in range(0, LENGTH, 2)]
    assert sum(divisor.of(part, ()) for part in parts) == ROWS * LENGTH - 5 == divisor.of(batch, ())


def test_classes_that_a_loss_makes_for_what_it_selects_count():
    count, batch = found(Tokens("one class for all"), None)
    assert isinstance(count, Counted)
    assert count.of(batch, everywhere(batch[1].shape)) == ROWS * LENGTH - 5


@pytest.mark.parametrize(
    ("loss", "known"), [("mixed rows", False), ("reversed rows", False), ("masked", True), ("looked up", True)]
)
def test_labels_that_do_not_follow_row_by_row_are_found(loss: str, known: bool) -> None:
    model, _ = captured(Tokens(loss), None)
    assert (unknown_labels(model.graph, model.tensors) is None) == known


@pytest.mark.parametrize("loss", ["two", "mixed rows", "reversed rows"])
def test_nothing_where_means_differ_or_rows_mix(loss):
    assert found(Tokens(loss), None)[0] is None


class Weighted(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input.transpose(1, 2), target)


def test_class_weights_count():
    weights = torch.tensor([0.5, 1.0, 2.0, 4.0, 8.0])
    count, batch = found(Tokens(), Weighted(weights))
    assert count is not None
    expected = weights[batch[1][batch[1] != -100]].double().sum()
    assert count.of(batch, everywhere(batch[1].shape)) == pytest.approx(float(expected))


def test_class_weights_are_those_with_which_training_begins(tmp_path):
    """Not those with which the model was made, where a file has others."""
    model, _ = captured(Tokens(), Weighted(torch.ones(CLASSES)))
    (name,) = {source.name for source in model.graph.of_kind("buffer")}
    torch.save({name: torch.arange(1.0, 6)}, tmp_path / "weights.pt")
    count = counted(model.graph, InitialTensors(model.tensors, index(tmp_path / "weights.pt")))
    assert count is not None and count.weight is not None and count.weight.tolist() == [1, 2, 3, 4, 5]


def made(output: Tensor, target: Tensor) -> Tensor:
    """Class weights that the loss makes."""
    weights = torch.tensor([0.5, 1.0, 2.0, 4.0, 8.0]).to(output)
    return functional.cross_entropy(output.transpose(1, 2), target, weight=weights)


def balanced(output: Tensor, target: Tensor) -> Tensor:
    """Class weights that depend on the batch."""
    seen = functional.one_hot(target.clamp(min=0), CLASSES).sum((0, 1))
    return functional.cross_entropy(output.transpose(1, 2), target, weight=1.0 / (1 + seen))


def test_class_weights_that_a_loss_makes_count():
    count, _ = found(Tokens(), LossFunction(made, {}))
    assert count is not None and count.weight is not None and count.weight.tolist() == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert found(Tokens(), LossFunction(balanced, {}))[0] is None


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.float32])
def test_labels_of_any_dtype_count_as_classes(dtype: torch.dtype) -> None:
    """Bytes would be a mask, and other dtypes no index."""
    labels, weight = torch.tensor([1, 3, 2, 0]), torch.tensor([0.5, 1.0, 2.0, 4.0])
    expected = torch.tensor([0.0, 4.0, 2.0, 0.5]).double()
    assert torch.equal(values(labels.to(dtype), 1, weight), expected)
