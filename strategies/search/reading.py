"""Solutions of a network, read back all at once: what the uses of values pay, what operators take and keep.

Uses are places in flat arrays, so a solution of thousands of operators is a few gathers; what repeated layers use is
looked at once. Invariant: a target that several uses of a value want is paid once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strategies.search.options import Choices, Side
from strategies.search.transfers import Integers
from strategies.search.uses import Pair

Use = tuple[int, Pair]
"""The user's variable, and what it may pay."""
Entry = tuple[Pair, int, int]
"""Of a pair's seconds: the row and the target."""


class Joined:
    """Arrays behind one another, each once; `start` tells where one begins."""

    def __init__(self) -> None:
        self.starts: dict[int, int] = {}
        self.parts: list[Integers] = []
        self.length = 0

    def start(self, part: Integers) -> int:
        name = id(part)
        if name not in self.starts:
            self.starts[name] = self.length
            self.parts.append(part)
            self.length += len(part)
        return self.starts[name]

    def all(self) -> Integers:
        return np.concatenate([np.zeros(0, dtype=np.int64), *self.parts])


class Uses:
    """All uses of the values of a network with so many variables: per value its producer, how it is handed on, and its
    users."""

    def __init__(self, variables: int, values: Sequence[tuple[int | None, Side, Sequence[Use]]]) -> None:
        options, names = Joined(), Joined()
        kinds: dict[int, int] = {}
        self.pairs: list[Pair] = []
        told: list[tuple[int, int, int, int]] = []
        first, targets = 0, dict[tuple[bytes, bytes], int]()
        users: list[int] = []
        used: list[int] = []
        for _, _, uses in values:
            for user, pair in uses:
                if id(pair) not in kinds:
                    kinds[id(pair)] = len(kinds)
                    found = np.array([targets.setdefault(target, len(targets)) for target in pair.targets])
                    told.append((first, len(pair.targets), options.start(pair.of_option), names.start(found)))
                    self.pairs.append(pair)
                    first += len(pair.given) * len(pair.targets)
                users.append(user)
                used.append(kinds[id(pair)])
        told_values = [
            (number, variables if producer is None else producer, options.start(given.of_option))
            for number, (producer, given, _) in enumerate(values)
        ]
        counts = [len(uses) for _, _, uses in values]
        numbers = np.array(told_values, dtype=np.int64).reshape(len(values), 3)
        self.value, self.come, self.start = np.repeat(numbers, np.array(counts, dtype=np.int64), axis=0).T
        self.user = np.array(users, dtype=np.int64)
        each = np.array(told, dtype=np.int64).reshape(len(told), 4)
        self.firsts = each[:, 0]
        """The first number of every pair's entries."""
        self.first, self.width, self.of_option, self.name = each[np.array(used, dtype=np.int64)].T
        self.options, self.names, self.targets = options.all(), names.all(), len(targets)

    def entries(self, picks: Sequence[int], *, once: bool = False) -> list[tuple[Entry, int]]:
        """What a solution pays, and how often; `once`: a target that several uses of a value want counts once."""
        numbers, targets = self._taken(picks)
        if once:
            numbers = numbers[np.unique(self._told(targets), return_index=True)[1]]
        found, counts = np.unique(numbers, return_counts=True)
        pairs = np.searchsorted(self.firsts, found, side="right") - 1
        places = found - self.firsts[pairs]
        return [
            ((pair, *divmod(place, len(pair.targets))), count)
            for pair, place, count in zip(
                map(self.pairs.__getitem__, pairs.tolist()), places.tolist(), counts.tolist(), strict=True
            )
        ]

    def disagreeing(self, picks: Sequence[int]) -> list[int]:
        """The values whose uses want different targets in a solution."""
        targets = self._taken(picks)[1]
        names = np.unique(self._told(targets))
        values, counts = np.unique(names // max(self.targets, 1), return_counts=True)
        return [int(value) for value in values[counts > 1]]

    def _told(self, targets: Integers) -> Integers:
        """A number per use that tells its value and what it wants of it."""
        return np.asarray(self.value * self.targets + self.names[self.name + targets])

    def _taken(self, picks: Sequence[int]) -> tuple[Integers, Integers]:
        """Per use, the number of its entry and its target."""
        chosen = np.array([*picks, 0])
        rows = self.options[self.start + chosen[self.come]]
        targets = self.options[self.of_option + chosen[self.user]]
        return self.first + rows * self.width + targets, targets


class Owned:
    """What operators take and keep by themselves."""

    def __init__(self, choices: Sequence[Choices], variables: Sequence[int]) -> None:
        every = {id(one): one for one in choices}
        starts = dict(zip(every, np.cumsum([0, *map(len, every.values())]).tolist(), strict=False))
        self.starts = np.array([starts[id(one)] for one in choices], dtype=np.int64)
        self.variables = np.array(variables, dtype=np.int64)
        self.seconds = np.concatenate([np.zeros(0), *(one.own for one in every.values())])
        self.bytes = np.concatenate([np.zeros(0), *(one.bytes for one in every.values())])

    def taken(self, picks: Sequence[int]) -> tuple[float, float]:
        """Seconds and bytes of a solution."""
        places = self.starts + np.array([*picks, 0])[self.variables]
        return float(self.seconds[places].sum()), float(self.bytes[places].sum())
