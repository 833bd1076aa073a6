"""Prediction files: complete or absent, in order, readable by other users."""

import json
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file

from runner.build.outputs import by_row, row_names
from runner.data.lines import Lines
from runner.errors import ConfigError
from runner.predict.files import Predictions


@dataclass
class Answer:
    loss: torch.Tensor
    scores: torch.Tensor


def test_what_counts_rows_is_found_wherever_it_is():
    output = {"loss": torch.tensor(1.0), "heads": (torch.zeros(3, 2), Answer(torch.ones(()), torch.ones(3)))}
    assert list(by_row(output, 3, row_names(output, 3))) == ["heads.0", "heads.1.scores"]
    assert row_names(torch.zeros(3), 3) == {"output"}


def test_nothing_to_write_is_refused():
    output = {"loss": torch.tensor(1.0), "cache": torch.zeros(5, 3)}
    with pytest.raises(ConfigError, match="nothing that has a value for each row"):
        by_row(output, 3, row_names(output, 3))


@pytest.mark.parametrize("form", ["jsonl", "safetensors"])
def test_a_tensor_without_values_for_the_rows_of_a_later_batch_is_refused(tmp_path, form):
    state = torch.zeros(2, 5)  # of two layers
    with pytest.raises(ConfigError, match="for a batch of 1 rows the model returns"):
        with Predictions(tmp_path, form, 3) as file:
            file.add([0, 1], (torch.zeros(2), state))
            file.add([2], (torch.zeros(1), state))
    with Predictions(tmp_path, form, 3, ["0"]) as file:
        file.add([0, 1], (torch.zeros(2), state))
        file.add([2], (torch.zeros(1), state))
    assert [path.name for path in tmp_path.iterdir()] == [f"predictions.{form}"]


def test_safetensors_holds_batches_of_several_tensors(tmp_path):
    logits, best = torch.randn(7, 2, 3).bfloat16(), torch.arange(7)
    with Predictions(tmp_path, "safetensors", 7) as file:
        for rows in (range(3), range(3, 6), range(6, 7)):
            part = slice(rows.start, rows.stop)
            file.add(rows, {"logits": logits[part], "best": best[part]})
    found = load_file(tmp_path / "predictions.safetensors")
    assert found["logits"].equal(logits) and found["best"].equal(best)


def test_lines_are_json_whatever_the_numbers(tmp_path):
    with Predictions(tmp_path, "jsonl", 2) as file:
        file.add([0, 1], (torch.tensor([float("nan"), 1.5]), torch.tensor([[1, 2], [3, 4]])))
    read = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text(encoding="utf-8").splitlines()]
    assert read == [{"row": 0, "0": None, "1": [1, 2]}, {"row": 1, "0": 1.5, "1": [3, 4]}]


def test_complex_numbers_are_pairs(tmp_path):
    with Predictions(tmp_path, "jsonl", 1) as file:
        file.add([0], torch.tensor([[1 + 2j, complex(3, float("nan"))]]))
    assert json.loads((tmp_path / "predictions.jsonl").read_text(encoding="utf-8")) == {
        "row": 0,
        "output": [[1.0, 2.0], [3.0, None]],
    }


def test_what_fails_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), Predictions(tmp_path, "jsonl", 4) as file:
        file.add([0], torch.zeros(1))
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_lines_are_samples(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"ids": [1, 2], "weight": 1}\n\n[0.5, 1]\n3\n', encoding="utf-8")
    first, second, third = Lines(str(path))
    assert {name: (tensor.tolist(), tensor.dtype) for name, tensor in first.items()} == {
        "ids": ([1, 2], torch.int64),
        "weight": (1, torch.int64),
    }
    assert second.tolist() == [0.5, 1.0] and second.dtype == torch.float64 and third.tolist() == 3
    path.write_text("\n \n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"rows\.jsonl has no lines with a sample"):
        Lines(str(path))


@pytest.mark.parametrize("line", ['{"ids": [1, [2]]}', '{"ids": "a"}', "{ids: 1}", "null"])
def test_an_invalid_line_is_reported_by_number(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"1\n{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2"):
        Lines(str(path))[1]
