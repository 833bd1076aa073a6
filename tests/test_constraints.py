"""Each pinned version has a marker for the Python versions it supports; on others pip could not install it."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

PINNED = Path(__file__).parents[1] / "constraints.txt"


def supported(pinned: Requirement) -> SpecifierSet:
    """The Python versions that a pinned version supports; any if that version is not installed here."""
    try:
        found = distribution(pinned.name)
    except PackageNotFoundError:
        return SpecifierSet()
    same = pinned.specifier.contains(found.version)
    return SpecifierSet(found.metadata.get("Requires-Python") or "" if same else "")


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_pinned_versions_support_the_python(python):
    lines = PINNED.read_text(encoding="utf-8").splitlines()
    pinned = [Requirement(line) for line in lines if not line.startswith("#")]
    used = [one for one in pinned if one.marker is None or one.marker.evaluate({"python_version": python})]
    assert len(used) > 60 and [one.name for one in used if f"{python}.20" not in supported(one)] == []
