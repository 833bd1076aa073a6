"""Random corruptions of checkpoints, plan cache entries and run folders are detected; a sample for every test run."""

import pytest
from corruptions import Corruptions


@pytest.mark.parametrize(("first", "count"), [(0, 12), pytest.param(12, 1488, marks=pytest.mark.slow)])
def test_no_corruption_goes_unnoticed(tmp_path, capfd, first, count):
    made = Corruptions(tmp_path)
    outcomes = {made.one(number) for number in range(first, first + count)}
    assert outcomes >= {"checkpoint: taken", "checkpoint: an older one taken", "forged: refused", "cache: ignored"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [556, 1129], ids=["a terabyte of metrics", "a mesh of strings"])
def test_run_folders_are_read_within_limits(tmp_path, number):
    Corruptions(tmp_path).one(number)
