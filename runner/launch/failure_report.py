"""What the user is told of ranks that failed or hang: one paragraph, and the end of the log that matters."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from runner.errors import ConfigError, RunFailed
from runner.launch import failure, hangs
from runner.launch.failure import Failure, Order
from runner.launch.messages import Done
from runner.launch.rank import whereabouts_of
from strategies.core.errors import StrategyError

DUMP = 0.5  # seconds for a hung rank to write where it is


class Watched(Protocol):
    """A rank as its parent knows it. `report` is its last word, None until it has come."""

    number: int
    log: Path
    report: Done | Failure | None

    def said(self) -> str:
        """What it has written to its log since it was started."""

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to it, if it is alive."""

    def wait(self, seconds: float) -> bool:
        """Wait until it has ended, `seconds` at most."""


def tell(
    failures: Sequence[Failure],
    ranks: Sequence[Watched],
    run_dir: Path,
    world_size: int,
    timeout: float,
    name: str | None = None,
) -> None:
    """Raise what the user is to see of `failures`; without any, the ranks hang. `name` is that of a lone process which
    is not a rank."""
    cause = failure.root_cause(failures) if failures else None
    hung: tuple[int, ...] = ()
    if cause is not None and cause.refusal == "config":
        raise ConfigError(cause.text)
    if cause is not None and cause.refusal == "strategy":
        raise StrategyError(cause.text)
    if name is not None:
        named = ranks[0]
        sentence = _alone(named, name, timeout) if cause is None else failure.message(cause, [], world_size, name)
    elif cause is None or cause.order is Order.TIMEOUT:
        here = {rank.number: rank for rank in ranks}
        sentence, number, hung = _hang(cause, here, run_dir, world_size, timeout)
        named = here[number]
    else:
        named = next(rank for rank in ranks if rank.number == cause.rank)
        alike = [other.rank for other in failures if other is not cause and other.what == cause.what]
        sentence = failure.message(cause, alike, world_size)
    rank = named.number if name is None else None
    shown = None if hung or cause is None or cause.order is Order.TIMEOUT else cause
    raise RunFailed(f"{sentence}{failure.end_of_log(shown, named.log, named.said())}", rank=rank, hung=hung)


def _alone(process: Watched, name: str, timeout: float) -> str:
    """The sentence about a lone process that hangs."""
    process.send_signal(signal.SIGUSR1)
    process.wait(DUMP)
    place = failure.dumped_place(process.said())
    was = f"It was in {place}" if place else "It was stopped, or did not say where it was"
    return f"{name} hung: it has shown no sign of life for {timeout:g} s. {was}."


def _hang(
    cause: Failure | None, ranks: Mapping[int, Watched], run_dir: Path, world_size: int, timeout: float
) -> tuple[str, int, tuple[int, ...]]:
    """The sentence about ranks that hang, the one of this host to look at, and those that keep the others waiting;
    `cause` has waited in vain."""
    at = [hangs.where(whereabouts_of(run_dir, number)) for number in range(world_size)]
    found = hangs.diagnose(at, timeout)
    hung = () if found is None else found.hung
    asked = [number for number, rank in ranks.items() if rank.report is None] if found is None else list(hung)
    here = [number for number in asked if number in ranks]
    for number in here:
        ranks[number].send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + DUMP
    for number in here:
        ranks[number].wait(deadline - time.monotonic())
    places = {number: failure.dumped_place(ranks[number].said()) for number in here}
    halted = [number for number in here if not places[number] and ranks[number].report is None]
    if halted and (found is None or len(halted) < len(hung)):
        # Who answers only waits, in a call that all of them have joined, for one who does not.
        found = hangs.diagnose(at, timeout, halted) or found
    if found is not None:
        asked, hung = list(found.hung), found.hung
        here = [number for number in asked if number in ranks]
    if found is None and cause is not None and len(asked) == 1:
        return failure.missing_message(cause, asked[0], places[asked[0]], timeout, world_size), asked[0], tuple(asked)
    if found is None and cause is not None:
        told = failure.message(cause, [], world_size).rstrip(".")
        if asked:
            told = f"rank {cause.rank} of {world_size} waited {timeout:g} s in vain ({cause.where})"
    else:
        told = f"no rank has moved on for {timeout:g} s" if found is None else found.told
    for number in asked:
        spot, place = at[number], places.get(number)
        told += f". Rank {number} was in {'the start' if spot is None else spot.told}"
        if number in places:
            told += f", {place}" if place else " and did not say where" if ranks[number].report is None else ""
    seen = [*here[-1:], *([] if cause is None else [cause.rank]), *ranks]
    return f"{told}.", seen[0], hung
