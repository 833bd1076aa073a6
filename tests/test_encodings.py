"""Text I/O never depends on the locale: every call that opens a text file names its encoding."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("meshwright", "runner", "strategies", "models", "benchmarks", "tests")
TEXT = {"read_text": 0, "write_text": 1}
"""Methods that always open text, and the position of `encoding` among their arguments."""
MODE = {"open": 1, "fdopen": 1, "makefile": 0, "NamedTemporaryFile": 0, "TemporaryFile": 0}
"""Callables that open text or bytes, and the position of `mode`; one earlier for the method of a Path."""
PROCESSES = ("run", "Popen", "check_output", "check_call", "call")
CALLED = {*TEXT, *MODE, *PROCESSES}
MODULES = {"builtins", "io", "os", "codecs"}
OTHERS = {"os.open", "gzip.open", "bz2.open", "self.open", "looking.open", "system.open", "folder.write_text"}
"""Calls that open no text, or name the encoding."""


def without(source: str) -> list[int]:
    """The lines of calls that leave the encoding to the locale."""
    return [node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and _left_out(node)]


def _left_out(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name not in CALLED:
        return False
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    owner = ast.unparse(call.func).rpartition(".")[0]
    if "encoding" in named or f"{owner}.{name}" in OTHERS:
        return False
    if owner == "subprocess":
        return "text" in named or "universal_newlines" in named
    if name in TEXT:
        return len(call.args) <= TEXT[name]
    if name in PROCESSES:
        return False
    at = MODE[name] - (name == "open" and owner != "" and owner not in MODULES)
    mode = named.get("mode", call.args[at] if len(call.args) > at else None)
    if mode is None:
        return "Temporary" not in name
    return not (isinstance(mode, ast.Constant) and "b" in str(mode.value))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_text_names_its_encoding(package):
    sources = sorted((ROOT / package).rglob("*.py"))
    assert sources
    lines = {str(path.relative_to(ROOT)): without(path.read_text(encoding="utf-8")) for path in sources}
    assert {path: found for path, found in lines.items() if found} == {}


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("open(a)", True),
        ("open(a, 'w')", True),
        ("open(a, mode)", True),
        ("open(a, 'rb')", False),
        ("open(a, encoding='ascii')", False),
        ("a.b.open()", True),
        ("a.open('x')", True),
        ("a.open('ab')", False),
        ("os.fdopen(a, 'w')", True),
        ("os.open(a, os.O_RDONLY)", False),
        ("tempfile.NamedTemporaryFile()", False),
        ("tempfile.NamedTemporaryFile('w')", True),
        ("(a / b).read_text()", True),
        ("a.read_text('utf-8')", False),
        ("f'{a.write_text(b)}'", True),
        ("subprocess.run(a, text=True)", True),
        ("subprocess.run(a)", False),
    ],
)
def test_such_calls_are_found(call, found):
    assert without(call) == [1] * found
