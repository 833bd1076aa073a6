"""Rows from a file of JSON lines: numbers and nested lists of numbers become tensors.

An object is a sample with keys, which are the names of the model's arguments; a list or a number is a sample of one
entry. Integers become int64, other numbers float64, which a batch casts to the precision of training. Invariant: the
file is read line by line as rows are read; only the offsets of the lines are stored.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from runner import home
from runner.errors import ConfigError


class Lines:
    """The lines of the JSONL file `path`; empty ones are left out. Raises ConfigError if there is no such file, or
    nothing in it."""

    def __init__(self, path: str) -> None:
        self._path = home.expanded(path).absolute()
        self._places: list[tuple[int, int]] = []
        try:
            with self._path.open("rb") as file:
                place = 0
                for number, line in enumerate(file, 1):
                    if line.strip():
                        self._places.append((number, place))
                    place += len(line)
        except OSError as error:
            raise ConfigError("MW314", f"{self._path} cannot be read: {error.strerror}.") from error
        if not self._places:
            raise ConfigError("MW310", f"{self._path} has no lines with a sample.")

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Any:
        """The sample of a line. Raises ConfigError, naming the line, where it holds something else."""
        number, place = self._places[index]
        with self._path.open("rb") as file:
            file.seek(place)
            text = file.readline()
        where = f"{self._path}, line {number}"
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ConfigError("MW314", f"{where} is no JSON: {error}.") from error
        if isinstance(value, dict):
            return {name: tensor_of(entry, f"{where}, {name!r}") for name, entry in value.items()}
        return tensor_of(value, where)


def tensors_of(sample: dict[str, Any], where: str = "a sample") -> dict[str, Any]:
    """A sample whose numbers and lists of numbers are tensors; text and mappings stay as they are. Raises ConfigError
    for other lists."""
    return {
        name: tensor_of(value, f"{where}, {name!r}") if isinstance(value, int | float | list) else value
        for name, value in sample.items()
    }


def tensor_of(value: Any, where: str) -> Tensor:
    """A number or nested lists of numbers as a tensor. Raises ConfigError for anything else."""
    try:
        made = torch.tensor(value)
        return torch.tensor(value, dtype=torch.float64) if made.is_floating_point() else made
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            "MW314",
            f"{where}: a number, or lists of numbers of one length, are needed, but there is {str(value)[:60]}.",
        ) from error
