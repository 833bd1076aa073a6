"""Texts of different lengths: the functions of Python sources, one sample each.

The invariant: a sample is the complete text of one function or method, from `def` to its last line, as bytes; where
each begins and ends is found once, kept beside the joined text (`runner.data.text.corpus`), and memory-mapped like it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.data.text import Bytes, cached, corpus
from runner.errors import ConfigError

FUNCTION = re.compile(rb"^([ ]*)(?:async )?def .*\n(?:(?:\1[ \t)].*)?\n)*", re.MULTILINE)
"""A line that starts with def, and the lines below it that are empty, indented deeper, or close its parenthesis."""


class Functions:
    """Samples {input_ids [n], labels [n]}, int64 bytes, n different for each; labels are the input one byte on.

    Functions of more than `longest` + 1 bytes, which would need n > longest, are left out. `train` chooses the part,
    None takes both; the other arguments are those of `runner.data.text.corpus`. Samples must be padded to one length:
    see `runner.data.padding.pad`. Raises ConfigError: as `corpus`, or no function that is short enough.
    """

    def __init__(
        self,
        longest: int,
        train: bool | None = True,
        limit: int | None = None,
        cache: str | None = None,
        path: str | None = None,
    ) -> None:
        text = corpus(train, "*.py", limit, cache, path)
        self._bytes: Bytes = np.memmap(text, np.uint8, mode="r")

        def spans_in_bytes() -> Iterator[bytes]:
            for match in FUNCTION.finditer(self._bytes.tobytes()):
                start = match.start() + len(match[1])
                stop = match.start() + len(match[0].rstrip())
                yield np.array([start, stop], np.int64).tobytes()

        places = cached(f"{text.stem}-functions.int64", spans_in_bytes, cache)
        spans: NDArray[np.int64] = np.fromfile(places, np.int64).reshape(-1, 2)
        self._spans = spans[spans[:, 1] - spans[:, 0] <= longest + 1]
        if not len(self._spans):
            raise ConfigError(
                "MW315",
                f"data.args.longest = {longest}: none of {len(spans)} functions has so few bytes; allow longer ones.",
            )

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start, stop = map(int, self._spans[index])
        text = torch.from_numpy(self._bytes[start:stop].astype(np.int64))
        return {"input_ids": text[:-1], "labels": text[1:]}
