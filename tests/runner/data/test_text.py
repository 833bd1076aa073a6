"""Text as bytes: the corpus file, its parts and its cache; windows; functions; errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch

from runner.data.functions import Functions
from runner.data.loader import LocalBatches, global_batch
from runner.data.text import Windows, cached, corpus
from runner.errors import ConfigError

SOURCE = """\
import this


class Greeter:
    def greet(
        self, name: str = "you"
    ) -> str:
        # a comment

        def inner():
            return name
        return f"hello {inner()}"

    async def later(self): pass


def last():
    return 0
"""
FUNCTIONS = [
    SOURCE[SOURCE.index("def greet") : SOURCE.index("\n\n    async")],
    "async def later(self): pass",
    "def last():\n    return 0",
]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Forty small files, and some that are ignored."""
    place = tmp_path / "texts"
    (place / "deep").mkdir(parents=True)
    for number in range(40):
        (place / ("deep" if number % 2 else ".") / f"file{number:02}.py").write_text(
            f"text {number}\n" * 3, encoding="utf-8"
        )
    (place / ".hidden").mkdir()
    for name in ("notes.txt", ".notes.txt", ".hidden/notes.txt", ".hidden/file.py"):
        (place / name).write_text("other text", encoding="utf-8")
    return str(place)


@pytest.fixture
def cache(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def text(**arguments: object) -> bytes:
    return corpus(**arguments).read_bytes()  # type: ignore[arg-type]


def test_files_are_joined_in_the_order_of_their_paths(folder: str, cache: str) -> None:
    names = sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("file??.py"))
    expected = b"".join(Path(folder, name).read_bytes() + b"\0" for name in names)
    assert text(train=None, cache=cache, path=folder) == expected
    assert text(train=None, cache=cache, path=folder, limit=100) == expected[:100]
    assert text(train=None, pattern="*.txt", cache=cache, path=folder) == b"other text\0"


def test_every_file_is_in_one_part_and_stays_there(folder: str, cache: str) -> None:
    parts = {part: set(text(train=part, cache=cache, path=folder).split(b"\0")) - {b""} for part in (True, False)}
    assert not parts[True] & parts[False]
    assert len(parts[True] | parts[False]) == 40
    assert 1 <= len(parts[False]) <= 10
    Path(folder, "another.py").write_text("new", encoding="utf-8")
    assert set(text(train=False, cache=cache, path=folder).split(b"\0")) - {b"", b"new"} == parts[False]


def test_a_joined_text_is_made_once_and_again_when_a_file_changes(folder: str, cache: str) -> None:
    first = corpus(train=None, cache=cache, path=folder)
    made = first.stat().st_mtime_ns
    assert corpus(train=None, cache=cache, path=folder) == first and first.stat().st_mtime_ns == made
    changed = Path(folder, "file00.py")
    changed.write_text("x" * changed.stat().st_size, encoding="utf-8")
    os.utime(changed, ns=(0, changed.stat().st_mtime_ns + 1))  # as if it were written within one tick of the clock
    second = corpus(train=None, cache=cache, path=folder)
    assert second != first and b"xxxxxxxx" in second.read_bytes()
    assert sorted(os.listdir(cache)) == sorted([first.name, second.name]), "nothing unfinished is left"


def test_several_that_start_at_once_all_see_the_complete_file(cache: str) -> None:
    together = Barrier(4, timeout=60)

    def content() -> Iterator[bytes]:
        yield b"first half, "
        together.wait()  # until all threads have started
        yield b"second half"

    with ThreadPoolExecutor(4) as pool:
        files = [one.result() for one in [pool.submit(cached, "text", content, cache) for _ in range(4)]]
    assert set(files) == {Path(cache, "text")} and files[0].read_bytes() == b"first half, second half"
    assert os.listdir(cache) == ["text"]


def test_what_breaks_off_leaves_nothing(cache: str) -> None:
    def content() -> Iterator[bytes]:
        yield b"first half, "
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached("text", content, cache)
    assert os.listdir(cache) == []


def test_the_cache_is_the_users(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert corpus(path=folder).parent == tmp_path / "home" / "meshwright"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "other"))
    assert corpus(path=folder).parent == tmp_path / "other" / ".cache" / "meshwright"


def test_installed_packages_are_no_part_of_the_standard_library(
    folder: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = text(train=None, cache=cache, path=folder)
    for name in ("site-packages", "test"):
        Path(folder, name).mkdir()
        Path(folder, name, "other.py").write_text("other people's", encoding="utf-8")
    monkeypatch.setattr("runner.data.text.sysconfig.get_path", lambda name: folder)
    assert text(train=None, cache=cache) == expected
    assert b"other people's" in text(train=None, cache=cache, path=folder)


def test_the_standard_library_is_at_hand(cache: str) -> None:
    train, test = text(cache=cache), text(train=False, cache=cache)
    assert 3_000_000 < len(train) and 0.03 < len(test) / len(train) < 0.3
    assert b"class Fraction(numbers.Rational):" in train + test
    assert b"def sqrt(" in train + test


def test_windows_follow_each_other_and_labels_are_one_byte_on(folder: str, cache: str) -> None:
    content = text(train=None, cache=cache, path=folder)
    windows = Windows(16, train=None, cache=cache, path=folder)
    assert len(windows) == (len(content) - 1) // 16
    joined = b"".join(bytes(windows[i]["input_ids"].tolist()) for i in range(len(windows)))
    assert joined == content[: len(joined)]
    last = windows[len(windows) - 1]
    assert last["input_ids"].dtype == last["labels"].dtype == torch.int64
    assert bytes(last["labels"].tolist()) == content[len(joined) - 15 : len(joined) + 1]
    with pytest.raises(IndexError):
        windows[len(windows)]
    assert len(Windows(16, train=None, limit=64, cache=cache, path=folder)) == 3, "the last label is behind the text"


def test_labels_can_be_the_input_itself(folder: str, cache: str) -> None:
    sample = Windows(16, cache=cache, path=folder, shift=False)[1]
    assert torch.equal(sample["input_ids"], sample["labels"])


def test_a_rank_reads_its_positions_alone(folder: str, cache: str) -> None:
    windows = Windows(16, train=None, cache=cache, path=folder)
    full_batch = global_batch(windows, None, [3, 1, 4, 5])
    blocks = (((2, 4), (8, 16)), ((0, 4), (0, 8)))
    ids, labels = LocalBatches(windows, None, blocks).load([3, 1, 4, 5])
    assert torch.equal(ids, full_batch["input_ids"][2:4, 8:16])
    assert torch.equal(labels, full_batch["labels"][:, :8])


def test_functions_are_complete_and_of_different_lengths(tmp_path: Path, cache: str) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text(SOURCE, encoding="utf-8")
    samples = Functions(1000, train=None, cache=cache, path=str(tmp_path / "code"))
    texts = [bytes([*sample["input_ids"].tolist(), int(sample["labels"][-1])]).decode() for sample in samples]
    assert texts == FUNCTIONS
    assert torch.equal(samples[0]["input_ids"][1:], samples[0]["labels"][:-1])
    short = Functions(len(FUNCTIONS[1]) - 1, train=None, cache=cache, path=str(tmp_path / "code"))
    assert [len(sample["labels"]) for sample in short] == [len(text) - 1 for text in FUNCTIONS[1:]]


def test_functions_of_the_standard_library_compile(cache: str) -> None:
    samples = Functions(300, limit=300_000, cache=cache)
    assert len(samples) > 150 and len({len(samples[i]["labels"]) for i in range(50)}) > 10
    compiled = 0
    for i in range(100):
        content = bytes([*samples[i]["input_ids"].tolist(), int(samples[i]["labels"][-1])])
        first, *others = content.decode().split("\n")
        shift = min((len(line) - len(line.lstrip()) for line in others if line.strip()), default=4) - 4
        try:
            compile("\n".join([first, *(line[shift:] for line in others)]), "function", "exec")
            compiled += 1
        except SyntaxError:  # text in triple quotes may start at the margin
            continue
    assert compiled >= 95


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"length": 0}, "length = 0 must be 1 or more"),
        ({"length": 4, "limit": 0}, "limit = 0 must be 1 or more"),
        ({"length": 100_000}, "length = 100000, but the text has"),
        ({"length": 4, "pattern": "*.rs"}, "no file for the training part of the text is called '\\*.rs'"),
        ({"length": 4, "path": "/nowhere/at/all"}, "no such folder"),
    ],
)
def test_what_cannot_be_read_is_refused(folder: str, cache: str, arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Windows(**{"cache": cache, "path": folder, **arguments})  # type: ignore[arg-type]


def test_a_cache_that_cannot_be_written_is_refused(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cannot be kept there.*data\.args\.cache"):
        Windows(4, cache=str(tmp_path / "file" / "cache"), path=folder)


def test_functions_that_are_all_too_long_are_refused(cache: str) -> None:
    with pytest.raises(ConfigError, match="longest = 2: none of"):
        Functions(2, limit=100_000, cache=cache)
