"""Settings for every test: one thread per process, because many run side by side on few cores, and signals that arrive:
a shell that starts the suite in the background, or nohup, may ignore them, and programs under test would inherit that.

`--part` divides the suite in two. The `sample` has every test marked `essential` and, of every file, a share chosen by
`--seed`, none of them slow; the `rest` has all others. In both, tests marked `few(n)` run with n of their parameter
sets, chosen by `--seed`; the others are slow. Whoever runs both with the same seed and slow tests has run every test.
"""

import gc
import signal
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest
import torch

gc.disable()  # imported modules and collected tests stay, and the collector would go through it again and again
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

SHARE = 24
"""The sample holds one of every `SHARE` tests of a file, rounded up."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parts of the suite")
    group.addoption("--part", choices=["all", "sample", "rest"], default="all", help="which part of the suite to run")
    group.addoption("--seed", type=int, default=0, help="draws the sample (0)")


def shuffled(names: Iterable[str], seed: int) -> list[str]:
    return sorted(names, key=lambda name: zlib.crc32(f"{seed} {name}".encode()))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    part, seed = config.getoption("part"), config.getoption("seed")
    if part != "all":
        mark_slow(items, seed)  # before `-m` deselects slow tests
    yield
    if part != "all":
        choose(config, items, part, seed)


def mark_slow(items: list[pytest.Item], seed: int) -> None:
    """Of tests marked `few(n)` all parameter sets but n."""
    by_test: dict[str, dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            by_test[item.nodeid.partition("[")[0]][item.nodeid] = item
    for sets in by_test.values():
        first, *_ = sets.values()
        marker = first.get_closest_marker("few")
        assert marker is not None
        for name in shuffled(sets, seed)[marker.args[0] :]:
            sets[name].add_marker("slow")


def choose(config: pytest.Config, items: list[pytest.Item], part: str, seed: int) -> None:
    by_file: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("slow"):
            by_file[str(item.path)].append(item)
    sample: set[str] = set()
    for tests in by_file.values():
        essential = {item.nodeid for item in tests if item.get_closest_marker("essential")}
        others = {item.nodeid for item in tests} - essential
        sample |= essential.union(shuffled(others, seed)[: max(0, -(-len(tests) // SHARE) - len(essential))])
    chosen = {item.nodeid: (item.nodeid in sample) == (part == "sample") for item in items}
    config.hook.pytest_deselected(items=[item for item in items if not chosen[item.nodeid]])
    items[:] = [item for item in items if chosen[item.nodeid]]


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    """A test that leaves another default dtype would change what those after it compute."""
    yield
    assert torch.get_default_dtype() is torch.float32
