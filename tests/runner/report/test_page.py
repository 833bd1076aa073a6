"""report.html: strictly well-formed, self-contained, small at any model depth; and rendered by a real browser."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
import subprocess
from collections import Counter
from html.parser import HTMLParser

import pytest
from composing import compose_config

from runner.commands import plan as planning
from runner.report.layers import kinds
from runner.report.page import bar, gauge, layer_drawing, mesh_drawing, plan_page

VOID = {"meta", "br"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell", "firefox")


class Strict(HTMLParser):
    """Counts elements and collects texts; fails at mismatched end tags and at unclosed elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: Counter[str] = Counter()
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never ended: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.seen[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert "svg" in self.open, f"<{tag}/> outside of a picture"
        self.seen[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("report")
    options = ("+recipe=megatron_tp", "job=plan", "parallel.plan_cache=null", "cluster=dgx_h100")
    planning.run(compose_config(*options), found)
    return found


@pytest.fixture(scope="module")
def content(folder):
    return json.loads((folder / "plan.json").read_text(encoding="utf-8"))


def check(text):
    """Check the invariants of every page. Returns it parsed."""
    parsed = Strict(text)
    assert text.startswith("<!DOCTYPE html>\n<html lang=")
    assert parsed.seen["html"] == parsed.seen["head"] == parsed.seen["body"] == 1
    assert not parsed.seen.keys() & {"script", "link", "img", "iframe", "object", "embed"}
    assert not re.search(r"https?://|//[a-z]|url\(|@import|\bon\w+=|javascript:", text)
    assert not {name for name, _ in parsed.attributes} & {"href", "src", "srcset", "action"}
    return parsed


def test_the_report_of_a_plan(folder, content):
    text = (folder / "report.html").read_text(encoding="utf-8")
    parsed = check(text)
    assert len(text) < 100_000
    shown = " ".join(parsed.texts)
    for needed in (
        "models.gpt.GPT, parallel.mode=auto",
        "Time of a step",
        "Memory of a rank",
        "layers.[0-1] x 2",
        "attention.q_proj",
        "(dp, -, -) (tp, -) (tp) -> (dp, -, tp)",
        ": 4 ranks across, over the gpu link",
        "is the bottleneck",
        "by what limits it",
        "operator calls ",
        "results of operators, of a rank",
        "layers.[0-1] x 2 0.",
        "sliced over tp",
        "thick red: something is sent",
    ):
        assert needed in shown, needed
    assert "0 ms" not in parsed.texts and "0 B" not in parsed.texts, "cells of nothing are empty"
    found = kinds(content["operators"])
    assert parsed.seen["tr"] == 1 + sum(1 + len(kind.rows) for kind in found)
    assert parsed.seen["details"] == len(found)


def test_the_size_does_not_grow_with_the_depth(content):
    deeper = json.loads(json.dumps(content))
    layers = [entry for entry in deeper["operators"] if entry["name"].startswith("layers.1")]
    for number in range(2, 60):
        text = json.dumps(layers).replace("layers.1", f"layers.{number}")
        deeper["operators"] += json.loads(text)
    text = plan_page(deeper, "deep")
    assert "layers.[0-59] x 60" in text
    assert len(text) < 1.1 * len(plan_page(content, "deep"))
    check(text)


def test_names_cannot_break_out(content):
    hostile = json.loads(json.dumps(content).replace("attention.q_proj", "<script>alert(1)</script>&amp;'"))
    parsed = check(plan_page(hostile, '"><b>'))
    assert any("<script>alert(1)</script>&amp;'" in text for text in parsed.texts)
    assert parsed.texts.count('"><b>') == 1


def test_a_plan_that_does_not_fit_says_so(content):
    other = json.loads(json.dumps(content))
    other["prediction"] |= {"memory_limit": 1000, "binding": "memory", "shrunk": {"parallel.zero.stage=3": 900}}
    shown = " ".join(check(plan_page(other, "small")).texts)
    assert "; parallel.zero.stage=3 would need 900 B and fit" in shown and "of 1000 B are needed at once" in shown


@pytest.mark.slow
def test_a_pipeline_has_a_report(start):
    ended = start("+recipe=gpt_pipeline", verb="explain")
    shown = " ".join(check((ended.folder / "report.html").read_text(encoding="utf-8")).texts)
    assert "waiting" in shown and "send" in shown
    assert "by what limits it, all stages together" in shown and "2 such meshes follow one another" in shown


@pytest.mark.parametrize(
    ("mesh", "cells"),
    [
        ({"d": 1}, 1),
        ({"dp": 2, "tp": 4}, 8),
        ({"pp": 2, "dp": 2, "one": 1, "tp": 2}, 8),
        ({"dp": 512}, 8),
        ({"pp": 8, "dp": 64, "tp": 8}, 125),
    ],
)
def test_the_mesh_is_rendered_as_far_as_it_fits(mesh, cells):
    drawing = mesh_drawing(mesh)
    ranks = [cell["rank"] for cell in drawing["cells"]]
    assert len(ranks) == len({(cell["x"], cell["y"]) for cell in drawing["cells"]}) == cells
    assert sorted(set(ranks)) == ranks and max(ranks) < math.prod(mesh.values())
    assert drawing["omitted"] == math.prod(mesh.values()) - cells
    assert all(0 <= cell["x"] < drawing["width"] and 0 <= cell["y"] < drawing["height"] for cell in drawing["cells"])


def test_ranks_that_are_not_rendered_are_counted(content):
    other = json.loads(json.dumps(content)) | {"mesh": {"dp": 512}}
    other["prediction"] |= {"axes": {"dp": "node"}, "ranks": 512}
    assert "504 more ranks are not drawn." in check(plan_page(other, "large")).texts


def test_a_bar_is_to_scale():
    segments = bar({"a": 3.0, "none": 0.0, "b": 1.0}, str)
    assert [tuple(one[key] for key in ("name", "text", "x", "width", "share")) for one in segments] == [
        ("a", "3.0", 0.0, 720.0, 0.75),
        ("b", "1.0", 720.0, 240.0, 0.25),
    ]


def test_a_gauge_marks_what_is_too_much():
    below, above = gauge(25.0, 100.0), gauge(200.0, 100.0)
    assert below == {"limit": 960.0, "used": 240.0, "beyond": 0.0}
    assert above == {"limit": 480.0, "used": 480.0, "beyond": 480.0}


def test_edges_over_which_something_is_sent_are_marked(content):
    (layers,) = [kind for kind in kinds(content["operators"]) if kind.count == 2]
    sent = [edge["sent"] for edge in layer_drawing(layers, list(content["mesh"]))["edges"] if edge["sent"]]
    assert len(sent) == len([text for text in sent if ": all_reduce over tp, " in text]) == 4  # two in forward
    assert any(text.startswith("operand, backward: all_reduce") for text in sent)
    parsed = Strict(plan_page(content, "t"))
    assert parsed.attributes.count(("class", "sent")) >= 4 and set(sent) <= set(parsed.texts)


@pytest.mark.slow
def test_a_browser_draws_it(folder, tmp_path):
    """In every browser on this machine, all elements keep their place, and the screenshot is not blank."""
    file = folder / "report.html"
    expected = check(file.read_text(encoding="utf-8")).seen
    found = [path for path in map(shutil.which, BROWSERS) if path]
    assert found, "no browser draws the report: apt-get install chromium (make browser)"
    for path in found:
        options = [path, "--headless", "--window-size=1300,2000"]
        if "firefox" not in path:
            options += ["--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
            done = subprocess.run(
                [*options, "--dump-dom", file.as_uri()], capture_output=True, encoding="utf-8", timeout=120, check=True
            )
            rendered = Counter(re.findall(r"<([a-z]+)[ >/]", done.stdout))
            for tag in ("tr", "td", "details", "svg", "rect", "path", "section", "li"):
                assert rendered[tag] == expected[tag], (path, tag)
        picture = tmp_path / "picture.png"
        subprocess.run(
            [*options, f"--screenshot={picture}", file.as_uri()], capture_output=True, timeout=120, check=True
        )
        data = picture.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 50_000
        assert struct.unpack(">II", data[16:24]) == (1300, 2000)
