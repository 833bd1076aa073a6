"""Config files mean what OmegaConf's own parser makes of them, and errors read the same."""

from __future__ import annotations

import io

import pytest
import yaml
from omegaconf import OmegaConf

from runner.cli.libyaml import read_by_libyaml
from runner.packages import ROOT

FILES = sorted(file for folder in ("conf", "recipes") for file in (ROOT / folder).rglob("*.yaml"))
TEXTS = (
    "",
    "# nothing",
    "- 1\n- 2",
    "a: 1e-3\nb: .5\nc: 1_000\nd: 2026-11-27\ne: 1:30\nf: [.inf, .nan, ~]",
    "\ufeffa: 1",
    "a: on\nb: 'on'\nc: 0x1F\nd: 0o17\ne: 017",
    "a: ${b}\nb: &x {c: 1}\nd: *x\ne: {<<: *x, f: 2}",
    "a: |\n  b\n\n  c\n",
    "a: 1\na: 2",
    "a: [1",
    "a: b: c",
    "a:\n\tb: 1",
    "a: !!python/object:os.system {}",
    "a: 1\n---\nb: 2",
    "a: \x00",
    "? [a, b]\n: 1",
    "1: a\ntrue: b",
    "a: *x",
    "@a: 1",
    "a: %b",
)


def parsed(text: str) -> tuple[object, ...]:
    try:
        read = OmegaConf.load(io.StringIO(text))
    except Exception as error:
        return type(error), str(error)
    return type(read), repr(OmegaConf.to_container(read, resolve=False))


def test_files_and_errors_are_read_alike() -> None:
    texts = [*(file.read_text(encoding="utf-8") for file in FILES), *TEXTS]
    expected = [parsed(text) for text in texts]
    with read_by_libyaml():
        assert [parsed(text) for text in texts] == expected


def test_the_parser_in_python_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml.SafeLoader, "get_single_node", lambda _: pytest.fail("read by the other parser"))
    with read_by_libyaml():
        for file in FILES:
            with file.open(encoding="utf-8") as stream:
                OmegaConf.load(stream)
