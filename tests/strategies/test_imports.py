"""The packages that ours import, by name or by `import_module`; import-linter checks the layers inside them."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STANDARD = set(sys.stdlib_module_names)
ALLOWED = {
    "strategies": {"torch", "numpy", "pydantic", "strategies"},
    "models": {"torch", "models", "strategies.collectives"},
    "runner": {
        *"torch numpy pydantic pydantic_core hydra omegaconf yaml jinja2 rich tqdm".split(),
        *"strategies runner conf recipes".split(),
    },
    "meshwright": {"torch", "omegaconf", "meshwright", "runner", "strategies"},
}
SPECIAL = {
    "strategies/optimizer/zero/engine.py": {"deepspeed"},
    "runner/build/huggingface.py": {"transformers"},
    "runner/commands/project/test_model.py": {"data", "meshwright", "model", "unittest"},  # of the new project
    "runner/data/documents.py": {"fsspec"},
    "runner/data/images.py": {"PIL"},
    "runner/data/tokenizer.py": {"tokenizers", "transformers"},
    "runner/training/loggers.py": {"mlflow", "wandb"},
    "runner/data/shards.py": {"fsspec", "pyarrow"},
}


def imported(source, siblings=0):
    """Dotted names that a source imports, anywhere in it. A model may import its siblings by relative names: it must
    find ours where the user's own package is called `models` too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= siblings, "imports are absolute"
            yield from (f"{'models.' * node.level}{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            first = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            if isinstance(first, ast.Constant):
                yield first.value


def wrong(path, package):
    allowed = STANDARD | ALLOWED[package] | SPECIAL.get(str(path.relative_to(ROOT)), set())
    return [
        name
        for name in imported(path.read_text(encoding="utf-8"), siblings=int(package == "models"))
        if not any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed)
    ]


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_allowed_ones(package):
    sources = sorted((ROOT / package).rglob("*.py"))
    assert sources
    assert {str(path.relative_to(ROOT)): names for path in sources if (names := wrong(path, package))} == {}


def test_imports_are_found_anywhere():
    source = "def f():\n    import a.b\n    from c import d, e\n    import_module('g')\n    import_module(f'h.{f}')\n"
    assert list(imported(source)) == ["a.b", "c.d", "c.e", "g", "h."]
