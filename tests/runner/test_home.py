"""A user without a home folder: neither HOME nor an entry for the account."""

import pwd
from pathlib import Path

import pytest

from runner import home
from runner.data.text import corpus
from runner.errors import ConfigError
from runner.home import plan_cache


@pytest.fixture(autouse=True)
def homeless(monkeypatch):
    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_no_plan_is_kept_and_that_is_said():
    said: list[str] = []
    assert plan_cache("auto", said.append) is None
    assert len(said) == 1 and "parallel.plan_cache" in said[0]
    assert plan_cache("here", said.append) == Path("here") and len(said) == 1


def test_a_run_goes_on_without(command, tmp_path):
    done = command("plan", "+recipe=quickstart", "parallel.mode=auto", "parallel.search=sharding_propagation")
    assert done.code == 0 and "plan cache: none" in done.out + done.err
    assert not (tmp_path / "~").exists()


def test_joined_text_needs_a_folder(tmp_path):
    (tmp_path / "a.py").write_text("a", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"data\.args\.cache"):
        corpus(train=None, path=str(tmp_path))
    assert corpus(train=None, path=str(tmp_path), cache=str(tmp_path / "cache")).parent == tmp_path / "cache"


@pytest.mark.parametrize("path", ["~/a", "~nobody-of-that-name/a"])
def test_a_path_in_it_is_refused(path):
    with pytest.raises(ConfigError, match="home folder") as refused:
        home.expanded(path)
    assert path in str(refused.value)


def test_weights_in_it_are_refused(command):
    done = command("predict", "~/weights", "+recipe=quickstart")
    assert done.code == 2 and len(done.paragraphs) == 1 and "~/weights" in done.err
