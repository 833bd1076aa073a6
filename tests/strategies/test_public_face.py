"""The names that notebooks use, and the example in the package's docstring."""

from __future__ import annotations

import doctest
import subprocess
import sys

import strategies


def test_example() -> None:
    found = doctest.testmod(strategies)
    assert found.attempted > 8 and found.failed == 0


def test_every_name_is_there() -> None:
    assert sorted(strategies._MODULES) == sorted(strategies.__all__)
    assert all(getattr(strategies, name) is not None for name in strategies.__all__)


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, strategies; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
