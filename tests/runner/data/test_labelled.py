"""Texts with labels: parts, numbers of labels, tokens; errors."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from runner.data.labelled import Labelled
from runner.errors import ConfigError


def written(tmp_path: Path, *rows: object) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    return str(file)


def test_every_byte_is_a_token_and_labels_are_numbered_in_order(tmp_path):
    path = written(tmp_path, {"body": "ab", "kind": "y"}, {"body": "é", "kind": "x"}, {"body": "abcdef", "kind": "y"})
    rows = Labelled(4, path=path, field="body", label="kind", train=None)
    assert (rows.labels, rows.vocabulary, len(rows)) == (["x", "y"], 257, 3)
    assert [(rows[i]["input_ids"].tolist(), rows[i]["label"].item()) for i in range(3)] == [
        ([256, 97, 98], 1),
        ([256, 195, 169], 0),
        ([256, 97, 98, 99], 1),
    ]
    numbers = written(tmp_path, *({"text": "a", "label": label} for label in (10, 2)))
    assert Labelled(4, path=numbers, train=None).labels == [2, 10]


def test_a_tokenizer_puts_its_special_tokens_at_the_ends(tmp_path):
    made = Tokenizer(models.WordLevel({"[CLS]": 0, "[SEP]": 1, "good": 2, "soup": 3}, "soup"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    made.save(str(tmp_path / "tokenizer.json"))
    path = written(tmp_path, {"text": "good soup", "label": 0}, {"text": "soup", "label": 1})
    rows = Labelled(8, str(tmp_path / "tokenizer.json"), path, train=None)
    assert rows[0]["input_ids"].tolist() == [0, 2, 3, 1] and rows.vocabulary == 4


def test_a_text_is_in_one_part_and_the_reviews_are_half_positive():
    parts = [Labelled(64, train=train) for train in (True, False, None)]
    assert len(parts[0]) + len(parts[1]) == len(parts[2]) == 4000 and 200 < len(parts[1]) < 600
    texts = [{tuple(part[i]["input_ids"].tolist()) for i in range(len(part))} for part in parts[:2]]
    assert not texts[0] & texts[1]
    assert 0.45 < Counter(parts[2][i]["label"].item() for i in range(4000))[1] / 4000 < 0.55


@pytest.mark.parametrize(
    ("rows", "given", "message"),
    [
        ([{"text": "a"}], {}, "line 1 has no label"),
        ([{"text": "a", "label": 1.5}], {}, "line 1 has no label"),
        ([{"text": "a", "label": "x"}, {"label": "x"}], {}, "line 2 has no text under 'text'; it holds 'label'"),
        ([[1]], {}, "holds list"),
        ([{"text": "a", "label": "x"}], {}, "1 label under 'label'"),
        ([], {}, "no label under"),
        ([{"text": "a", "label": 0}, {"text": "a", "label": 1}], {"train": False}, "no text is in the test part"),
        ([], {"longest": 1}, "must be 2 or more"),
    ],
)
def test_rows_that_cannot_be_read_are_reported(tmp_path, rows, given, message):
    with pytest.raises(ConfigError, match=message) as caught:
        Labelled(**{"longest": 8, "path": written(tmp_path, *rows)} | given)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_json_or_is_not_there(tmp_path):
    (tmp_path / "no.jsonl").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 1 is no JSON"):
        Labelled(8, path=str(tmp_path / "no.jsonl"))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Labelled(8, path=str(tmp_path / "none.jsonl"))
