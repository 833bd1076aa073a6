"""Documents and packing: parts, formats, boundaries, tokenizers; errors."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from runner.data.documents import Documents
from runner.data.packing import Packed
from runner.errors import ConfigError

WORDS = ["a", "b", "c", "d", "e", "</s>"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer.json of five words and an end."""
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, "e"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """Three documents of 3, 1 and 4 words."""
    file = tmp_path / "lines.jsonl"
    texts = ["a b c", "d", "  ", "c b a a"]
    file.write_text("\n".join(json.dumps({"body": text}) for text in texts) + "\n\n", encoding="utf-8")
    return file


def packed(tmp_path: Path, **given: object) -> Packed:
    return Packed(**{"train": None, "cache": str(tmp_path / "cache")} | given)  # type: ignore[arg-type]


def test_rows_are_full_and_name_the_document_and_place_of_every_token(tmp_path, tokenizer, lines):
    rows = packed(tmp_path, length=5, tokenizer=str(tokenizer), path=str(lines), field="body")
    # the stream: a b c </s> | d </s> | c b a a </s>, cut into rows of five
    assert len(rows) == 2 and rows.vocabulary == 6
    first, second = ({name: values.tolist() for name, values in rows[index].items()} for index in range(2))
    assert first == {
        "input_ids": [0, 1, 2, 5, 3],
        "documents": [0, 0, 0, 0, 1],
        "positions": [0, 1, 2, 3, 0],
        "labels": [1, 2, 5, -100, 5],
    }
    assert second == {
        "input_ids": [5, 2, 1, 0, 0],
        "documents": [0, 1, 1, 1, 1],
        "positions": [0, 0, 1, 2, 3],
        "labels": [-100, 1, 0, 0, 5],
    }
    assert all(values.dtype == torch.int64 for values in rows[1].values())
    with pytest.raises(IndexError):
        rows[2]


def test_the_last_label_of_the_last_row_is_left_out(tmp_path, tokenizer, lines):
    rows = packed(tmp_path, length=11, tokenizer=str(tokenizer), path=str(lines), field="body")
    assert rows[0]["labels"].tolist() == [1, 2, 5, -100, 5, -100, 1, 0, 0, 5, -100]


def test_a_folder_of_transformers_gives_the_same_rows(tmp_path, tokenizer, lines):
    folder = tmp_path / "saved"
    PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), eos_token="</s>").save_pretrained(folder)
    one, other = (
        packed(tmp_path, length=5, tokenizer=str(path), path=str(lines), field="body") for path in (tokenizer, folder)
    )
    assert all(torch.equal(one[row][name], other[row][name]) for row in range(2) for name in one[row])


def test_bytes_are_tokens_where_no_tokenizer_is_given(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("hé\n\ny", encoding="utf-8")
    with gzip.open(tmp_path / "texts" / "b.txt.gz", "wb") as file:
        file.write(b"z")
    (tmp_path / "texts" / ".a.txt").write_text("hidden", encoding="utf-8")
    rows = packed(tmp_path, length=8, path=str(tmp_path / "texts"), separator="\n\n")
    assert rows.vocabulary == 257
    assert rows[0]["input_ids"].tolist() == [*"hé".encode(), 256, ord("y"), 256, ord("z"), 256]
    assert rows[0]["documents"].tolist() == [0, 0, 0, 0, 1, 1, 2, 2]


def test_every_document_is_in_one_part_and_stays_there(tmp_path):
    texts = [f"text {number}" for number in range(60)]
    file = tmp_path / "some.jsonl"

    def parts(texts: list[str]) -> list[set[str]]:
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        return [set(Documents(str(file), train=train)) for train in (True, False)]

    training, test = parts(texts)
    assert training | test == set(texts) and not training & test and len(test) > 1
    assert parts(["another", *texts[7:]])[1] >= test & set(texts[7:])
    assert len([*Documents(str(file), limit=15)]) == 3


def test_an_address_of_fsspec_is_read(tmp_path, tokenizer, lines):
    import fsspec

    fsspec.filesystem("memory").pipe("/corpus/lines.jsonl", lines.read_bytes())
    one, other = (
        packed(tmp_path, length=5, tokenizer=str(tokenizer), path=path, field="body")
        for path in (str(lines), "memory://corpus")
    )
    assert torch.equal(one[1]["input_ids"], other[1]["input_ids"])


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        ({"length": 0}, "MW315", "length = 0"),
        ({"length": 12}, "MW315", "11 tokens"),
        ({"tokenizer": "none.json"}, "MW830", "no such tokenizer"),
        ({"tokenizer": "broken.json"}, "MW830", "broken.json"),
        ({"end": "<eos>"}, "MW830", "<eos>"),
        ({"end": "</s>", "tokenizer": None}, "MW830", "256"),
        ({"field": "text"}, "MW314", "line 1"),
        ({"path": "none.jsonl"}, "MW314", "none.jsonl"),
        ({"path": "latin.txt"}, "MW314", "byte 1"),
        ({"path": "nowhere://x"}, "MW314", "nowhere"),
        ({"limit": 0}, "MW315", "limit"),
        ({"separator": ""}, "MW315", "separator"),
    ],
)
def test_errors_name_what_is_wrong(tmp_path, monkeypatch, tokenizer, lines, given, code, says):
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text("{}", encoding="utf-8")
    Path("latin.txt").write_bytes(b"h\xe9")
    usual = {"length": 5, "tokenizer": str(tokenizer), "path": str(lines), "field": "body"}
    with pytest.raises(ConfigError, match=says) as raised:
        packed(tmp_path, **usual | given)
    assert raised.value.code == code


def test_models_that_shift_labels_get_the_tokens_themselves(tmp_path, tokenizer, lines):
    rows = packed(tmp_path, length=5, tokenizer=str(tokenizer), path=str(lines), field="body", shift=False)
    first, second = ({name: values.tolist() for name, values in rows[index].items()} for index in range(2))
    assert first == {
        "input_ids": [0, 1, 2, 5, 3],
        "position_ids": [0, 1, 2, 3, 0],
        "labels": [-100, 1, 2, 5, -100],
    }
    assert second["position_ids"] == [0, 0, 1, 2, 3] and second["labels"] == [-100, -100, 1, 0, 0]
