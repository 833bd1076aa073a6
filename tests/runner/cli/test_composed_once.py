"""Hydra composes the config of a command once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COUNTED = """
import atexit, sys
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from runner.cli.main import main
load, count = ConfigLoaderImpl.load_configuration, []
ConfigLoaderImpl.load_configuration = lambda *args, **named: count.append(1) or load(*args, **named)
atexit.register(lambda: print("composed", len(count)))
sys.argv[1:] = {words}
main()
"""


def test_a_command_composes_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COUNTED.format(words=["plan", "+recipe=ffn_auto", "train.steps=abc"])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=60, check=False)
    assert (done.returncode, "[MW204]" in done.stderr) == (2, True), done.stderr
    assert done.stdout.splitlines()[-1] == "composed 1"
