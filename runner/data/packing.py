"""Documents packed to full sequences: tokens of any number of documents in one row, none of them padding.

The documents are tokenised once, one after the other, and kept as a memory-mapped file in the cache; row i is tokens
[i * length, (i + 1) * length). The invariant: a row says of each token which document it is of and where in it, and no
label is of another document than its token; with attention inside of documents (`models.transformer.block_causal`), the
loss of a document is that of the document alone, whatever is beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.data import tokenizer as tokenizers
from runner.data.documents import Documents
from runner.data.text import cached
from runner.errors import ConfigError

IGNORED = -100
"""The label of a token whose next one is of another document."""
AT_ONCE = 512
"""Documents that are tokenised together."""


class Packed:
    """Samples {input_ids, documents, positions, labels}, each [length] int64.

    `documents` numbers the documents of the row from 0, `positions` counts inside of each from 0: what continues a
    document of the row before starts again. The label of a token is the next one, or -100 behind the last of a
    document. A partial row at the end is dropped.

    With `shift=False` samples are {input_ids, position_ids, labels} for models of transformers, which find the
    documents where `position_ids` start again, and shift the labels by themselves: the label of a token is that token,
    or -100 for the first of a document.

    Args:
        length: tokens of a row.
        tokenizer: a tokenizer.json, or a folder as transformers saves one; None: every byte of UTF-8 is a token, and
            256 the end of a document.
        path, pattern, field, separator, train, limit: see `runner.data.documents.Documents`.
        end: the token at the end of each document; None: the tokenizer's own, if it has one.
        cache: the folder for the tokens; None: `meshwright` in the user's cache.
        shift: whether labels are those of the next token.

    Attributes:
        boundaries: the entries that separate documents, with their kinds.
        vocabulary: the number of tokens: every id is less.

    Raises:
        ConfigError: as `Documents` and `tokenizer.load`, or a text shorter than one row.
    """

    def __init__(
        self,
        length: int,
        tokenizer: str | None = None,
        path: str | None = None,
        pattern: str | None = None,
        field: str = "text",
        separator: str | None = None,
        train: bool | None = True,
        limit: int | None = None,
        end: str | None = None,
        cache: str | None = None,
        shift: bool = True,
    ) -> None:
        if length < 1:
            raise ConfigError("MW315", f"data.args.length = {length} must be 1 or more.")
        documents = Documents(path, pattern, field, separator, train, limit)
        facts = "\n".join([repr(end), *tokenizers.facts(tokenizer), *documents.facts()])
        digest = hashlib.sha256(facts.encode("utf-8", "surrogateescape")).hexdigest()[:16]

        def tokens() -> Iterator[bytes]:
            made = tokenizers.load(tokenizer, end)
            yield np.array([made.vocabulary], np.int32).tobytes()
            ending, texts = [] if made.end is None else [made.end], iter(documents)
            while some := list(islice(texts, AT_ONCE)):
                for ids in made.encode(some):
                    stored = np.array([*ids, *ending], np.int32)
                    stored[:1] = ~stored[:1]  # negative: a document begins
                    yield stored.tobytes()

        stored: NDArray[np.int32] = np.memmap(cached(f"tokens-{digest}.int32", tokens, cache), np.int32, mode="r")
        self.vocabulary, self._tokens, self._length, self._shift = int(stored[0]), stored[1:], length, shift
        kinds = ("documents", "positions")
        self.boundaries = dict(zip(kinds, kinds, strict=True)) if shift else {"position_ids": "positions"}
        if len(self._tokens) < length:
            raise ConfigError(
                "MW315",
                f"data.args.length = {length}, but the documents have {len(self._tokens)} tokens together; choose "
                "shorter rows, more documents, or data.args.train=null for all of them.",
            )

    def __len__(self) -> int:
        return len(self._tokens) // self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} is not one of the {len(self)} rows")
        length, start = self._length, index * self._length
        stored = self._tokens[start : start + length + 1].astype(np.int64)
        begins = stored < 0
        tokens = np.where(begins, ~stored, stored)
        following = np.full(length, IGNORED)
        following[: len(tokens) - 1] = np.where(begins, IGNORED, tokens)[1:]
        first, places = begins[:length], np.arange(length)
        first[0] = True
        positions = places - np.maximum.accumulate(np.where(first, places, 0))
        if self._shift:
            row = {
                "input_ids": tokens[:length],
                "documents": np.cumsum(first) - 1,
                "positions": positions,
                "labels": following,
            }
        else:
            labels = np.where(first, IGNORED, tokens[:length])
            row = {"input_ids": tokens[:length], "position_ids": positions, "labels": labels}
        return {name: torch.from_numpy(values) for name, values in row.items()}
