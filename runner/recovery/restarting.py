"""A run that fails, in its preparation or in training, is restarted from its newest checkpoint in the same folder, up
to the configured number of times.

A run that goes on with fewer ranks can take lost ones back: it then stops between two steps, and starts with more.

First `runner.launch` stops the surviving ranks; then every rank starts anew, so only the files of the failed attempt
are used. Invariant: after a restart training is bitwise identical to an undisturbed run, as long as all ranks are
available. Does not import torch.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.config.schema import Config
from runner.errors import ConfigError, RunFailed
from runner.launch.interrupts import Interrupts
from runner.launch.launchers.start import Ready, check, make_ready, run_alone, start
from runner.launch.launchers.warm_hosts import WarmHosts, warm_hosts
from runner.launch.startup import marked
from runner.recovery.growing import Return
from runner.recovery.resizing import resized, with_standby
from runner.run_folder import lineage
from strategies.core.errors import StrategyError

RESTARTS = "restarts.jsonl"
"""In the run folder: a line for every restart, with the checkpoint that it continues."""


ENTRY = "runner.commands.entries:train_prepared"
"""Of a rank."""


def train(config: Config, run_dir: Path, payload: dict[str, Any]) -> Any:
    """Prepare, and train on all ranks, `1 + launch.max_restarts` times at most; returns what rank 0 returns. `payload`
    has the "folder" of the preparation and the "marks" of the time until now.

    A host that no longer answers, and a rank that has failed twice without a save in between, are permanently down. A
    host of `launch.standby` takes the place of one that is down, or on which ranks have failed twice without a save in
    between; or else, if `launch.min_ranks` allows it, the run goes on without them, and with `launch.max_ranks` takes
    them back later. Raises RunFailed as the last attempt did; wrong input (ConfigError, StrategyError) is not tried
    again. Host processes stay from attempt to attempt.
    """
    check(config.launch)
    with warm_hosts(config.launch, run_dir) as hosts:
        return _train(config, run_dir, payload, hosts)


def _train(config: Config, run_dir: Path, payload: dict[str, Any], hosts: WarmHosts | None) -> Any:
    most, count, before = config.launch.max_restarts, 0, dict[str | int | None, str | None]()
    attempts = itertools.count()
    folder, marks = Path(payload["folder"]), payload["marks"]
    ready: Ready | None = None
    given: str | None = None
    failed: RunFailed | None = None
    lost = Lost(config)
    while True:
        try:
            if ready is None:
                ready = make_ready(config, run_dir, folder)
                given, lost.ranks, lost.pipeline = ready.resume, ready.world_size, ready.pipeline
                lineage.begin(config, run_dir, ready.resume, ready.ancestry)
                payload = payload | {"marks": () if count else marked(marks, "imports, capture and plan")}
            elif failed is not None:
                began, newest, who = time.monotonic(), _newest(config, run_dir) or given, "It"
                rank, host = failed.rank, "" if failed.rank is None else config.launch.host_of(failed.rank)
                again = {where for where in (rank, host) if where in before and before[where] == newest}
                before = {where: newest for where in (rank, host) if where not in (None, "")}
                gone = failed.hosts or rank in again
                worn = failed.hosts or ((host,) if host in again else ())
                if worn and lost.replace(worn, ready.world_size):
                    config = lost.complete
                    who = f"With {', '.join(host.name for host in config.launch.hosts)}, it"
                elif gone and config.launch.min_ranks is not None:
                    left = range(_left(ready, config, failed), config.launch.min_ranks - 1, -1)
                    try:
                        rank = None if failed.hosts else failed.rank
                        config, ready = resized(config, left, failed.hosts, run_dir, folder, ready.pipeline, rank)
                        lost.add(failed.hosts)
                        who = _searched(ready, lost.ranks)
                    except ConfigError as refused:
                        print(f"no smaller run can be prepared, so all ranks are tried again. {refused}", flush=True)
                ready = replace(ready, resume=newest)
                payload = payload | {"marks": ()}  # the time to the first step is reported once
                how = _going_on(ready, who, time.monotonic() - began)
                _report(run_dir, count, most, failed, newest, ready.world_size, how)
            failed, payload = None, payload | {"attempt": next(attempts)}
            with lost.returning(ready.world_size, run_dir) as returned:
                result = start(
                    "runner.commands.entries:train_prepared", ready, config, run_dir, payload, returned, hosts
                )
            if returned is None or not returned.requested or result["stopped"] is None or Interrupts.requested:
                return result
            began, newest = time.monotonic(), _newest(config, run_dir) or given
            more = range(lost.without(returned), ready.world_size, -1)
            try:
                config, ready = resized(lost.complete, more, lost.hosts, run_dir, folder, lost.pipeline)
                who = _searched(ready, lost.ranks)
            except ConfigError as refused:
                print(f"no larger run can be prepared. {refused}", flush=True)
                lost.tries += 1  # or every checkpoint would end in another attempt
                who = "It"
            ready, payload = replace(ready, resume=newest), payload | {"marks": ()}
            cause, how = str(returned), _going_on(ready, who, time.monotonic() - began)
            _record(
                run_dir, {"restart": count, "cause": cause, "resume": newest, "ranks": ready.world_size, "how": how}
            )
            print(f"growing: {cause}. {how}", flush=True)
        except (ConfigError, StrategyError) as refused:
            if not count or ready is None:
                raise
            raise RunFailed("MW718", f"Restart {count} of {most} failed: {refused}") from refused
        except RunFailed as caught:
            if count == most:
                if not count:
                    raise
                which = f"restart {count} of {most}"
                raise RunFailed(
                    caught.code, f"{caught}\nThe run was given up after {which} (launch.max_restarts)."
                ) from caught
            failed, count = caught, count + 1
            if ready is None:
                _report(run_dir, count, most, failed, None, config.world_size, "It is prepared again.")


class Lost:
    """What a run goes on without.

    Attributes:
        complete: the config with all ranks; spare hosts have taken the places of others.
        ranks, pipeline: of the complete run.
        hosts: those that are down.
        tries: how often a rank on a host that is up was tried again.
    """

    def __init__(self, config: Config) -> None:
        self.complete, self.ranks, self.pipeline = config, 0, (1, 1)
        self.hosts: tuple[str, ...] = ()
        self.tries = 0

    def replace(self, hosts: Collection[str], ranks: int) -> bool:
        """Give the places of `hosts` to spare ones, if the run of `ranks` is complete and there are enough of them."""
        replaced = with_standby(self.complete, hosts) if ranks == self.ranks else None
        self.complete = replaced or self.complete
        return replaced is not None

    def add(self, hosts: Collection[str]) -> None:
        """Go on without `hosts`, or without a rank."""
        self.hosts += tuple(hosts)
        self.tries += not hosts

    @contextmanager
    def returning(self, ranks: int, run_dir: Path) -> Iterator[Return | None]:
        """What says when a run of `ranks` ranks can grow; None where it is not to."""
        most = self.complete.launch.max_ranks
        if most is None or ranks >= min(most, self.ranks):
            yield None
            return
        found = Return(self.complete.launch, self.hosts, run_dir / "checkpoints", 2 ** max(self.tries - 1, 0))
        try:
            yield found
        finally:
            found.close()

    def without(self, returned: Return) -> int:
        """Take back what has returned; the number of ranks that there are now, `launch.max_ranks` at most."""
        self.hosts = tuple(name for name in self.hosts if name not in returned.returned)
        down = sum(len(host.ranks) for host in self.complete.launch.hosts if host.name in self.hosts)
        return min(self.complete.launch.max_ranks or self.ranks, self.ranks - down)


def _left(ready: Ready, config: Config, failed: RunFailed) -> int:
    """The number of ranks that are not down."""
    lost = sum(len(host.ranks) for host in config.launch.hosts if host.name in failed.hosts)
    return ready.world_size - max(lost, 1)


def _report(
    run_dir: Path, count: int, most: int, failed: RunFailed, resume: str | None, ranks: int | None, how: str
) -> None:
    """Record and print a restart."""
    cause = str(failed).partition("\n")[0].rstrip(".")
    _record(run_dir, {"restart": count, "cause": cause, "resume": resume, "ranks": ranks, "how": how})
    print(f"restart {count} of {most}: {cause}. {how}", flush=True)


def _record(run_dir: Path, restart: dict[str, Any]) -> None:
    try:
        with (run_dir / RESTARTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(restart) + "\n")
    except OSError as error:  # the disk may be full: that is why it is started again
        print(f"{RESTARTS} cannot be written: {error.strerror}", flush=True)


def _newest(config: Config, run_dir: Path) -> str | None:
    """The newest checkpoint of the run that passes its checks."""
    newest: str | None = run_alone("find_again", None, config, run_dir, "the search for a checkpoint")["resume"]
    return newest


def _searched(ready: Ready, complete: int) -> str:
    """Who goes on: a run of `complete` ranks has its own plan, one of fewer another."""
    plan = "the plan that it began with" if ready.world_size == complete else "a plan searched anew"
    return f"With {ready.world_size} rank{'s' if ready.world_size > 1 else ''}, and {plan}, it"


def _going_on(ready: Ready, who: str, seconds: float) -> str:
    if ready.resume is None:
        return f"There is no checkpoint yet. {who} starts from the beginning."
    return f"{who} goes on from {Path(ready.resume).name}, found in {seconds:.1f} s."
