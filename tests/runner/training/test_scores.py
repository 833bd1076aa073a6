"""The metrics of an evaluation, and that checking them before the run changes no state."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from runner.build.divisors import Total
from runner.build.scores import accuracy, scores, try_evaluation
from runner.config.schema import MetricForm
from runner.errors import ConfigError
from strategies.capture import Objective


class Counting(nn.Module):
    """Counts its calls in a buffer, also in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.dense(x)


def test_trying_an_evaluation_leaves_the_model_as_it_was() -> None:
    step = Objective(Counting(), nn.CrossEntropyLoss(), ("0", "1"), ("1",))
    batch = {"0": torch.randn(2, 4), "1": torch.tensor([0, 2])}
    try_evaluation(step, batch, scores([MetricForm(target="accuracy")], step.loss))
    assert step.training and step.model.calls == 0


@pytest.mark.parametrize(
    ("output", "target"),
    [((2, 5, 7), (2, 5)), ((2, 7), (3,)), ((2,), (2,)), ((2, 7), (2, 1))],
    ids=["classes last", "other rows", "no classes", "a dim too many"],
)
def test_accuracy_reports_shapes_that_do_not_match(output, target) -> None:
    with pytest.raises(ConfigError, match=r"accuracy needs class scores \[n, classes, ...\].* choose evaluate.metric="):
        accuracy(torch.zeros(output), torch.zeros(target, dtype=torch.int64))


def test_accuracy_counts_positions() -> None:
    scored = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])  # 1 row, 2 classes, 2 positions
    assert accuracy(scored, torch.tensor([[0, 0]])) == 0.5


def batches(rows: int = 40) -> list[tuple[Tensor, Tensor]]:
    """Scores of 3 classes and classes, in batches of 16, 16 and 8."""
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(rows, 3, generator=draw), torch.randint(0, 3, (rows,), generator=draw)
    return [(x[at : at + 16], y[at : at + 16]) for at in range(0, rows, 16)]


def measured(*forms: dict[str, object]) -> dict[str, float]:
    made = scores([MetricForm.model_validate(form) for form in forms], nn.CrossEntropyLoss())
    for x, y in batches():
        made.update(len(x), x, [y])
    return made.results()


def as_binary(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return output.softmax(1)[:, 0], target == 0


class Kinds:
    """Not a function, and no metric."""


def test_values_of_a_corpus_are_those_of_one_batch() -> None:
    import torchmetrics

    f1 = {"target": "torchmetrics.F1Score", "args": {"task": "multiclass", "num_classes": 3, "average": "macro"}}
    auroc = {
        "target": "torchmetrics.AUROC",
        "args": {"task": "binary"},
        "inputs": f"{__name__}.as_binary",
        "name": "auc",
    }
    found = measured({"target": "accuracy"}, f1, auroc)
    x, y = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    exact = torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro")
    assert found["F1Score"] == pytest.approx(float(exact(x, y)), abs=1e-7)
    mean = sum(float(exact(x, y)) * len(x) for x, y in batches()) / 40
    assert abs(found["F1Score"] - mean) > 1e-3  # the mean over batches is another number
    assert found["auc"] == pytest.approx(float(torchmetrics.AUROC(task="binary")(*as_binary(x, y))), abs=1e-7)
    assert found["loss"] == pytest.approx(float(nn.functional.cross_entropy(x, y)), rel=1e-6)
    assert found["accuracy"] == float((x.argmax(1) == y).double().mean())


def test_a_metric_of_several_numbers_has_their_names() -> None:
    classes = {"task": "multiclass", "num_classes": 3}
    found = measured(
        {
            "target": "torchmetrics.MetricCollection",
            "args": {
                "metrics": [{"target": f"torchmetrics.{name}", "args": classes} for name in ("Recall", "Precision")]
            },
        }
    )
    assert {*found} == {"loss", "MulticlassRecall", "MulticlassPrecision"}


class Described:
    """Counts rows; beside them `compute` returns what is no number."""

    def __init__(self) -> None:
        self.rows = 0

    def reset(self) -> None:
        self.rows = 0

    def update(self, output: Tensor, target: Tensor) -> None:
        self.rows += len(output)

    def compute(self) -> dict[str, object]:
        return {"rows": self.rows, "name": "outputs", "nothing": None, "matrix": torch.eye(2), "both": [1, 2]}


def test_what_is_no_number_beside_others_is_left_out() -> None:
    assert {*measured({"target": f"{__name__}.Described"})} == {"loss", "rows"}


@pytest.mark.parametrize(
    ("form", "code", "words"),
    [
        ({"target": "torchmetrics.F1Scor"}, "MW301", "Did you mean 'F1Score'"),
        ({"target": "torchmetrics.F1Score", "args": {"task": "multiklass"}}, "MW304", "multiklass"),
        (
            {"target": "torchmetrics.ConfusionMatrix", "args": {"task": "multiclass", "num_classes": 3}},
            "MW322",
            r"\[3, 3\]",
        ),
        ({"target": f"{__name__}.Kinds"}, "MW305", "update, compute and reset"),
        ({"target": "runner.build.scores.accuracy"}, "MW843", "'accuracy'"),
    ],
)
def test_what_is_no_metric_is_refused(form: dict[str, object], code: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as found:
        measured({"target": "accuracy"}, form)
    assert found.value.code == code


class SumOfMeans(nn.Module):
    """A mean over classes, and means of what counts that are written out: of values, of functions of what a mask
    selects."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        losses, kept = functional.cross_entropy(x, y, reduction="none"), y > 0
        clamped = (losses * kept).sum() / kept.float().sum().clamp(min=1)
        weights = x.sigmoid().amax(1) * kept
        scaled = 0.5 * (losses * weights).sum() / weights.sum()
        selected = x[kept].square().mean() + functional.mse_loss(x[kept][:, 0], y[kept].double())
        return functional.cross_entropy(x, y, ignore_index=2) + clamped + scaled + selected + x.abs().mean()


class ProductOfMeans(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(x, y) * functional.cross_entropy(x, y, ignore_index=1)


@pytest.mark.parametrize("loss", [SumOfMeans(), ProductOfMeans()])
def test_means_are_those_over_all_batches(loss: nn.Module) -> None:
    made, given = scores([], loss), [(x.double(), y) for x, y in batches()]
    given[0][1][:] = 0  # nothing of this batch counts
    for x, y in given:
        made.update(len(x), x, [y])
    together = loss(torch.cat([x for x, _ in given]), torch.cat([y for _, y in given]))
    by_rows = sum(loss(x, y) * len(x) for x, y in given) / 40
    expected = together if isinstance(loss, SumOfMeans) else by_rows
    assert made.results()["loss"] == pytest.approx(float(expected), rel=1e-12)
    assert float(together) != pytest.approx(float(by_rows), rel=1e-3)


def test_a_batch_without_tokens_adds_nothing_to_the_loss_of_a_model() -> None:
    made = scores([], None)
    made.update(2, torch.tensor(3.0), [], tokens=Total(4.0))
    made.update(2, torch.tensor(torch.nan), [], tokens=Total(0.0))
    assert made.results() == {"loss": 3.0}


class Scaled(nn.Module):
    """A mean over what `target` marks or labels, by a share of weights that no batch decides."""

    def __init__(self, classes: bool) -> None:
        super().__init__()
        self.classes = classes
        self.register_buffer("weights", torch.tensor([3.0, 1.0]))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if self.classes:
            mean = functional.cross_entropy(output, target)
        else:
            mean = (output * target + 0 * (self.weights / (1 + target)[:, None]).sum(1)).sum() / target.sum()
        return mean * self.weights[0] / (2 * self.weights).sum()


@pytest.mark.parametrize("classes", [False, True])
def test_what_counts_is_of_the_batch(classes: bool) -> None:
    """Marks that are as many in batches of other sizes, and constants that are the same in all."""
    if classes:
        outputs, target = torch.randn(6, 3), torch.tensor([0, -100, -100, -100, 2, 1])
    else:
        outputs, target = torch.tensor([1.0, 2.0, 9.0, 9.0, 3.0, 5.0]), torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0])
    loss = Scaled(classes)
    made = scores([], loss)
    for part in (slice(0, 4), slice(4, 6)):
        made.update(part.stop - part.start, outputs[part], [target[part]])
    assert made.results() == {"loss": pytest.approx(loss(outputs, target).item())}
