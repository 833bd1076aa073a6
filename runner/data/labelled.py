"""Texts with a label each, to fine-tune a classifier: JSONL lines with a text and a label, or generated reviews.

The invariant: a text is in the training or in the test part by its own bytes (one in ten is in the test part), and a
label's number is its place among all labels of the file in order, so both parts agree whatever is added to either.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from runner import home
from runner.data import tokenizer as tokenizers
from runner.data.documents import in_test
from runner.errors import ConfigError

Label = str | int
GOOD = ("good", "great", "lovely", "fresh", "superb", "kind")
BAD = ("bad", "awful", "stale", "dull", "rude", "poor")
THINGS = ("soup", "bread", "service", "music", "coffee", "view", "staff", "room")
DEGREES = ("", "very ", "really ", "quite ")
REVIEWS = 4000


class Labelled:
    """Samples {input_ids [n], label}, int64, n different for each; pad them with `runner.data.padding.pad`.

    The entry is called `label`, not `labels`, so that it goes to the loss and the metrics: models of transformers take
    `labels` themselves.

    Args:
        longest: tokens at most; the end of a longer text is cut off.
        tokenizer: a tokenizer.json, or a folder as transformers saves one, with its special tokens ([CLS], [SEP]);
            None: every byte of UTF-8 is a token, behind token 256.
        path: a JSONL file; None: generated reviews of restaurants, labelled `negative` or `positive`.
        field, label: the fields of a line that hold the text and the label, a string or an integer.
        train: the training part, the test part, or with None both.

    Attributes:
        labels: the labels by their numbers.
        vocabulary: the number of tokens: every id is less.

    Raises:
        ConfigError: a file that cannot be read, a line without text or label, one label alone, or no text in this part.
    """

    def __init__(
        self,
        longest: int,
        tokenizer: str | None = None,
        path: str | None = None,
        field: str = "text",
        label: str = "label",
        train: bool | None = True,
    ) -> None:
        if longest < 2:
            raise ConfigError("MW315", f"data.args.longest = {longest} must be 2 or more tokens.")
        rows = list(reviews() if path is None else _lines(path, field, label))
        self.labels = sorted({label for _, label in rows}, key=lambda one: (isinstance(one, str), one))
        if len(self.labels) < 2:
            raise ConfigError(
                "MW314",
                f"{path}: the lines have {len(self.labels) or 'no'} label under {label!r}; two or more are needed.",
            )
        rows = [(text, label) for text, label in rows if train is None or in_test(text) != train]
        if not rows:
            raise ConfigError(
                "MW314",
                f"{path}: no text is in the {'training' if train else 'test'} part; data.args.train=null takes all.",
            )
        encoder = tokenizers.load(tokenizer)
        self.vocabulary = encoder.vocabulary
        self._ids = encoder.encode([text for text, _ in rows], special=True)
        self._numbers = [self.labels.index(label) for _, label in rows]
        self._longest = longest

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.tensor(self._ids[index][: self._longest], dtype=torch.int64)
        return {"input_ids": ids, "label": torch.tensor(self._numbers[index])}


def reviews(count: int = REVIEWS) -> Iterator[tuple[str, Label]]:
    """Short reviews of restaurants, half of them negated ("not bad at all"); the same in every process."""
    draw = random.Random(0)
    for _ in range(count):
        label = draw.choice(("negative", "positive"))
        clauses = []
        for thing in draw.sample(THINGS, 2):
            negated = draw.random() < 0.2
            word = draw.choice(GOOD if (label == "positive") != negated else BAD)
            clauses.append(f"the {thing} was {'not ' if negated else draw.choice(DEGREES)}{word}")
        yield " and ".join(clauses), label


def _lines(path: str, field: str, label: str) -> Iterable[tuple[str, Label]]:
    file = home.expanded(path).absolute()
    try:
        with file.open(encoding="utf-8") as opened:
            for number, line in enumerate(opened, 1):
                if line.strip():
                    yield _pair(f"{file}, line {number}", line, field, label)
    except UnicodeDecodeError as error:
        raise ConfigError("MW314", f"{file} is no UTF-8 text (byte {error.start}).") from error
    except OSError as error:
        raise ConfigError("MW314", f"{file} cannot be read: {error.strerror}.") from error


def _pair(where: str, line: str, field: str, label: str) -> tuple[str, Label]:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError("MW314", f"{where} is no JSON: {error}.") from error
    text, named = (value.get(field), value.get(label)) if isinstance(value, dict) else (None, None)
    if isinstance(text, str) and isinstance(named, str | int):
        return text, named
    what, key = ("label (a string or an integer)", label) if isinstance(text, str) else ("text", field)
    has = ", ".join(map(repr, value)) if isinstance(value, dict) else type(value).__name__
    raise ConfigError(
        "MW314",
        f"{where} has no {what} under {key!r}; it holds {has}. Name the fields as data.args.field and data.args.label.",
    )
