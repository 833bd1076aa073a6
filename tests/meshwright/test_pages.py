"""The code of the README, of docs/library.md and of notebooks runs, and the loop there trains as one device does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)


def loop_of(page: str) -> str:
    (code,) = [block for block in blocks(page) if block.startswith("# loop.py\n")]
    return code


@pytest.mark.essential
def test_the_page_runs_like_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cells = [block for block in blocks("docs/library.md") if not block.startswith("# loop.py")]
    assert len(cells) == 5
    names: dict[str, object] = {"__name__": "notebook"}
    for cell in cells:
        exec(compile(cell, "docs/library.md", "exec"), names)
    assert {"plan.html", "plan.json"} <= {file.name for file in tmp_path.iterdir()}


@pytest.mark.essential
@pytest.mark.parametrize("file", sorted((ROOT / "docs/notebooks").glob("*.ipynb")), ids=lambda file: file.stem)
def test_notebooks_print_what_they_show(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for numbers, which depend on the machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names: dict[str, object] = {"__name__": "notebook"}
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), file.name, "exec"), names)
            shown = "".join(line for output in cell["outputs"] for line in output["text"])
            assert first_words(capsys.readouterr().out) == first_words(shown)
    assert {"plan.html", "plan.json"} <= {written.name for written in tmp_path.iterdir()}


def first_words(printed: str) -> list[str]:
    """Of every line but those of the worst gradients, which rounding chooses."""
    lines = [line.split() for line in printed.splitlines() if not re.match(r"    [\d.]+[\w.]*  ", line)]
    return [re.sub(r"[\d.]+", "0", words[0]) for words in lines if words]


@pytest.mark.essential
def test_the_lines_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (lines,) = blocks("README.md")
    assert lines.count("\n") <= 5
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    exec(lines, {"module": module, "x": torch.randn(8, 8), "y": torch.randn(8, 4), "loss": torch.nn.MSELoss()})
    assert (tmp_path / "plan.json").exists()


@pytest.mark.essential
def test_the_loop_trains_as_one_device(tmp_path: Path) -> None:
    """With processes that torchrun starts, and a process group that the script makes."""
    code = loop_of("docs/library.md")
    assert len(code.splitlines()) <= 60
    (tmp_path / "loop.py").write_text(code, encoding="utf-8")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "loop.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(value) for value in re.findall(r"(?:loss|evaluated) ([\d.]+)", done.stdout)]
    names: dict[str, object] = {"__name__": "one_device"}
    exec(compile(code, "loop.py", "exec"), names)
    expected = on_one_device(names)
    assert len(losses) == len(expected) == len({*losses}) == 5
    assert losses == pytest.approx(expected, rel=1e-10)


def on_one_device(names: dict[str, object]) -> list[float]:
    """The losses of the same loop in plain torch, that of the evaluation last."""
    loss_of, batch_of, gpt = (names[name] for name in ("loss_of", "batch_of", "GPT"))
    torch.manual_seed(0)
    module = gpt(vocabulary=64, length=16, width=32, layers=2, heads=4).double()  # type: ignore[operator]
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.003)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    losses = []
    for step in range(4):
        tokens, targets = batch_of(step)  # type: ignore[operator]
        loss = loss_of(module(tokens), targets)  # type: ignore[operator]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    tokens, targets = batch_of(4)  # type: ignore[operator]
    return [*losses, loss_of(module.eval()(tokens), targets).item()]  # type: ignore[operator]
