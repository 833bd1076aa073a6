"""Every error in a dotted name or its arguments is one paragraph that starts with the config key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runner.build import targets
from runner.errors import ConfigError

MODULE = """
LIMIT = 3


class Box:
    def __init__(self, width, height=1, **rest):
        if width < 0:
            raise ValueError("width is negative.")
        self.area = width * height


def plain(width, height=1):
    return width, height


def raises_config(width):
    from runner.errors import ConfigError

    raise ConfigError("MW304", "as it was said")
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a user module; `sys.path` and `sys.modules` are restored afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "shapes_of_mine.py").write_text(MODULE, encoding="utf-8")
    return tmp_path


def message(target: str, **args: object) -> str:
    with pytest.raises(ConfigError) as caught:
        targets.build(target, args, "model")
    text = str(caught.value)
    assert "\n" not in text and "Traceback" not in text
    return text


def test_resolves_a_class_of_the_working_directory_and_nested_names() -> None:
    assert targets.build("shapes_of_mine.Box", {"width": 2, "height": 3}, "model").area == 6
    assert targets.resolve("collections.OrderedDict.fromkeys", "x")("ab") == {"a": None, "b": None}
    assert targets.resolve("xml.dom.minidom.Document", "x").__name__ == "Document"


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("Box", ["model.target = 'Box'", "package.module.Name"]),
        ("shapes_of_mine.2", ["package.module.Name"]),
        ("shapes_of_mien.Box", ["no module 'shapes_of_mien'", "Did you mean 'shapes_of_mine'?"]),
        ("shapes_of_mine.Bocks", ["has no 'Bocks'", "Did you mean 'Box'?"]),
        ("xml.dom.minidon.Document", ["xml.dom has no 'minidon'", "Did you mean 'minidom'?"]),
        ("xml.dom.minidom", ["is a module", "Document"]),
        ("shapes_of_mine.LIMIT", ["is a int", "class or function"]),
    ],
)
def test_a_wrong_name_is_explained(target: str, parts: list[str]) -> None:
    text = message(target)
    assert text.startswith("model.target = ")
    for part in parts:
        assert part in text


def test_a_module_that_fails_on_import_is_named_with_its_line(workplace: Path) -> None:
    (workplace / "broken_one.py").write_text("import math\nimport package_that_is_not_there\n", encoding="utf-8")
    (workplace / "broken_two.py").write_text("def (:\n", encoding="utf-8")
    (workplace / "broken_three.py").write_text("raise SystemExit(0)\n", encoding="utf-8")
    first = message("broken_one.Net")
    assert "importing the module broken_one fails: ModuleNotFoundError" in first
    assert "broken_one.py, line 2" in first
    assert "SyntaxError" in message("broken_two.Net")
    assert "SystemExit: 0 (broken_three.py, line 1)" in message("broken_three.Net")


def test_a_file_behind_an_installed_package_is_pointed_out(workplace: Path) -> None:
    (workplace / "xml").mkdir()
    (workplace / "xml" / "mine.py").write_text("class Net: ...\n", encoding="utf-8")
    text = message("xml.mine.Net")
    assert "xml/mine.py is not searched" in text and "rename yours" in text


def test_a_package_below_src_is_pointed_out(workplace: Path) -> None:
    (workplace / "src" / "acme_of_mine").mkdir(parents=True)
    text = message("acme_of_mine.nets.Net")
    assert "no module 'acme_of_mine'" in text and "PYTHONPATH=src" in text and "src.acme_of_mine.nets.Net" in text


def test_wrong_arguments_are_named() -> None:
    assert "takes no argument 'widht'. Known: width, height. Did you mean 'width'?" in message(
        "shapes_of_mine.plain", widht=1
    )
    text = message("shapes_of_mine.plain")
    assert text == "model.args: shapes_of_mine.plain needs 'width'; set model.args.width=VALUE."
    assert "needs 'width'" in message("shapes_of_mine.Box", depth=1)


def test_an_exception_of_the_call_is_reported_with_its_line() -> None:
    text = message("shapes_of_mine.Box", width=-1)
    assert "ValueError: width is negative (shapes_of_mine.py, line 8)." in text


def test_a_config_error_of_the_call_comes_through_unchanged() -> None:
    assert message("shapes_of_mine.raises_config", width=1) == "as it was said"


def test_bound_gives_arguments_once_and_for_all() -> None:
    width = targets.bound("shapes_of_mine.plain", {"height": 3}, "data.collate")
    assert width(2) == targets.resolve("shapes_of_mine.plain", "x")(2, height=3)
    assert targets.bound("shapes_of_mine.plain", {}, "x") is targets.resolve("shapes_of_mine.plain", "x")
    with pytest.raises(
        ConfigError, match=r"data\.collate_args: shapes_of_mine\.plain takes no argument 'hight'.*height"
    ):
        targets.bound("shapes_of_mine.plain", {"hight": 3}, "data.collate")


def test_accepts() -> None:
    assert targets.accepts(targets.resolve("shapes_of_mine.Box", "x"), "path")
    assert not targets.accepts(targets.resolve("shapes_of_mine.plain", "x"), "path")
    assert targets.accepts(targets.resolve("shapes_of_mine.plain", "x"), "height")


def test_torch_stays_out_until_a_target_needs_it() -> None:
    code = "import sys, runner.build.targets, runner.data.idx; sys.exit('torch' in sys.modules)"
    root = Path(targets.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
