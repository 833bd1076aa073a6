"""A job that is suspended as a whole for longer than `launch.timeout` goes on when it is continued."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from small import MODES, SMALL

SERVERS = ("parallel=parameter_server", "parallel.server={servers: 1}", "world_size=3")
TIMEOUT = 2.0


def family(pid):
    """A process and its descendants."""
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [one for child in children.read_text(encoding="utf-8").split() for one in family(int(child))]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", [MODES["data_parallel"], MODES["semi_auto"], SERVERS], ids=lambda words: words[0])
def test_a_suspended_job_goes_on(start, tmp_path, mode):
    words = (*SMALL, *mode, "train.steps=600", "train.log_every=100", f"launch.timeout={TIMEOUT}")
    folder = tmp_path / "suspended"
    metrics = folder / "metrics.jsonl"
    typed = [sys.executable, "-m", "runner", *words, f"hydra.run.dir={folder}"]
    with subprocess.Popen(typed, cwd=tmp_path, stdout=subprocess.DEVNULL) as command:
        while not metrics.exists() or len(metrics.read_bytes().splitlines()) < 2:
            assert command.poll() is None
            time.sleep(0.02)
        for _ in range(2):  # some may have started others
            stopped = family(command.pid)
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
        time.sleep(TIMEOUT + 3.0)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        assert command.wait(120) == 0
    losses = [json.loads(line)["loss"] for line in metrics.read_text(encoding="utf-8").splitlines()]
    assert losses == start(*words).losses
