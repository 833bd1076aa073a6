"""`run tokenize`: what it writes is read by the dataset and by transformers; errors; a tokenizer that does not fit."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from runner.commands.tokenize import run
from runner.data import tokenizer
from runner.errors import ConfigError

TEXT = "the cat and the hat, the bat; ÄÖ\n"


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A folder of texts, equal but for a number, so that some are in the training part."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for number in range(12):
        (tmp_path / "texts" / f"{number}.txt").write_text(TEXT * 4 + str(number), encoding="utf-8")
    return str(tmp_path / "texts")


def test_a_tokenizer_is_trained_and_read_alike_by_all(texts, tmp_path, capsys):
    assert run([texts, "vocabulary=270", "out=made"]) == 0
    assert "model.args.vocabulary=270" in capsys.readouterr().out
    file, folder = (tokenizer.load(str(path)) for path in (tmp_path / "made" / "tokenizer.json", tmp_path / "made"))
    assert file.vocabulary == folder.vocabulary == 270
    assert file.end == folder.end is not None
    strange = TEXT + "\U0001f431 <\x00>"
    (ids,) = file.encode([strange])
    assert folder.encode([strange]) == [ids] and len(ids) < len(strange.encode())
    assert AutoTokenizer.from_pretrained(tmp_path / "made").decode(ids) == strange


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["vocabulary=300"], "MW112", "out="),
        (["vocabulary=many", "out=made"], "MW112", "many"),
        (["vocabulary=256", "out=made"], "MW830", "257"),
        (["words=300", "out=made"], "MW112", "words"),
        (["vocabulary=300", "out=texts"], "MW832", "texts"),
        (["nowhere", "vocabulary=300", "out=made"], "MW314", "nowhere"),
        (["texts", "limit=0", "vocabulary=300", "out=made"], "MW315", "limit"),
    ],
)
def test_errors_name_what_is_wrong(texts, tmp_path, words, code, says):
    with pytest.raises(ConfigError, match=says) as raised:
        run(words)
    assert raised.value.code == code and not (tmp_path / "made").exists()


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(command):
    done = command("plan", "+recipe=gpt_packed", "model.args.vocabulary=256", "data.args.limit=20000")
    assert done.code == 2 and "MW831" in done.err and len(done.paragraphs) == 1
    assert "tokens.weight" in done.err and "model.args.vocabulary=257" in done.err
