"""The process of a host that stays from one attempt to the next."""

from __future__ import annotations

import os
from multiprocessing import Pipe
from pathlib import Path

from runner.launch import messages
from runner.launch.launchers.warm_hosts import HostProcess


def test_a_process_that_still_imports_takes_the_next_attempt(tmp_path: Path) -> None:
    """Ended and started for each attempt, it would be late for all of them."""
    process = HostProcess(["sleep", "60"], os.environ, tmp_path / "log")
    ours, theirs = Pipe()
    try:
        process.begin(tmp_path / "first")
        assert process.usable
        process.begin(tmp_path / "second")
        process.called(ours)
        assert messages.receive(theirs) == str(tmp_path / "second")
        assert not process.usable  # it runs that one
        messages.send(theirs, 0)
        assert process.usable
        process.begin(tmp_path / "third")
        theirs.close()
        assert process.poll() is None and not process.usable
    finally:
        process.process.kill()
        process.process.wait()
