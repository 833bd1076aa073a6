"""`parallel.offload` and `parallel.place` through the command: errors, reports, and resuming with a disk folder."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from observed import content
from small import HYBRID, MODES, SMALL

PARALLEL = (*SMALL, *MODES["data_parallel"])
OFFLOAD = "parallel.offload"
STAGE3 = "parallel.zero.stage=3"

# words of the command line, the keys that clash, the alternative
BAD = [
    ((f"{OFFLOAD}.optimizer=host",), (f"{OFFLOAD}.optimizer = 'host'", "parallel.zero.stage = 0"), "=none"),
    (
        (f"{OFFLOAD}.optimizer=disk", "parallel.zero.stage=2"),
        (f"{OFFLOAD}.optimizer", "parallel.zero.stage"),
        "host with ZeRO 1 and 2",
    ),
    ((f"{OFFLOAD}.parameters=host", "parallel.zero.stage=2"), (f"{OFFLOAD}.parameters", "parallel.zero"), "=none"),
    ((f"{OFFLOAD}.folder=/tmp",), (f"{OFFLOAD}.folder = '/tmp'",), "or drop the folder"),
    ((f"{OFFLOAD}.activations=host",), (f"{OFFLOAD}.activations",), "activations.to=host"),
    ((f"{OFFLOAD}.activations.larger_than=1",), ("larger_than = 1.0", "activations.to = 'none'"), "host or disk"),
    ((f"{OFFLOAD}.activations={{to: host, modules: [iner]}}",), ("activations.modules: 'iner'",), "'inner'"),
    (
        (f"{OFFLOAD}.activations.to=host", "train.compile=true"),
        ("train.compile = true", f"{OFFLOAD}.activations.to"),
        "drop one",
    ),
    (
        (f"{OFFLOAD}.optimizer=host", STAGE3, "parallel.zero.options={offload_optimizer: {device: cpu}}"),
        ("parallel.zero.options.offload_optimizer", f"{OFFLOAD}.optimizer"),
        "choose one",
    ),
    ((f"{OFFLOAD}.activations.to=disk", f"{OFFLOAD}.folder=nowhere"), (f"{OFFLOAD}.folder = 'nowhere'",), "make it"),
    ((f"{OFFLOAD}.optimizer=disk", STAGE3), (f"{OFFLOAD}.optimizer = 'disk'",), f"{OFFLOAD}.optimizer=host"),
    (("+parallel.place.iner=host",), ("parallel.place: 'iner'",), "'inner'"),
    (("+parallel.place.inner=disk",), ("parallel.place.inner",), "host"),
    (("+parallel.place.inner=host", "train.compile=true"), ("parallel.place", "train.compile"), "drop one"),
    (("+parallel.place.inner=host", "parallel=stand_alone", "world_size=1"), ("parallel.place", "mode"), "auto"),
]


@pytest.mark.few(6)
@pytest.mark.parametrize(("words", "keys", "choose"), BAD, ids=[" ".join(words)[:60] for words, _, _ in BAD])
def test_refused(command, tmp_path, words, keys, choose):
    done = command(*PARALLEL, *words)
    assert done.code == 2, done.err
    (paragraph,) = done.paragraphs
    assert all(part in paragraph for part in (*keys, choose)), paragraph
    assert list(tmp_path.rglob("*.json")) == list(tmp_path.rglob(".offload*")) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["stand_alone", "semi_auto", "hybrid"])
def test_activations_move_without_a_trace(start, mode):
    """Bit-identical losses in every mode; every line of metrics and the run's result record the bytes moved."""
    words = (*SMALL, *(HYBRID if mode == "hybrid" else MODES[mode]), "train.accumulate=2")
    plain = start(*words, folder="plain")
    assert "offload" not in plain.records[0] and plain.results[-1]["offload"] == {}
    for where in ("host", "disk"):
        moving = start(*words, f"{OFFLOAD}.activations.to={where}", folder=where)
        assert moving.losses == plain.losses
        steps = [record["offload"] for record in moving.records]
        assert len(steps) == 6 and all(step["activations_out"] > 0 for step in steps)
        assert sum(step["activations_out"] for step in steps) == moving.results[-1]["offload"]["activations_out"]
        assert steps[0]["activations_held"] * 2 == steps[0]["activations_out"], "the micro-batches come one by one"
        assert [path for path in moving.folder.iterdir() if path.name.startswith(".")] == []


@pytest.mark.slow
def test_modules_and_sizes_choose(start):
    words = (*SMALL, *MODES["semi_auto"], "train.steps=1", f"{OFFLOAD}.activations.to=host")
    everything, inner, large = (
        start(*words, *more, folder=f"{number}").results[-1]["offload"].get("activations_out")
        for number, more in enumerate(
            ((), (f"{OFFLOAD}.activations.modules=[inn*]",), (f"{OFFLOAD}.activations.larger_than=9",))
        )
    )
    assert 0 < inner < everything and large == 0


def test_the_summary_line_and_the_configured_folder(start, tmp_path, capfd):
    (tmp_path / "fast").mkdir()
    start(*SMALL, *MODES["data_parallel"], f"{OFFLOAD}.activations.to=disk", f"{OFFLOAD}.folder={tmp_path / 'fast'}")
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("offload (rank 0)")]
    assert "activations to disk: " in line and " bytes out, " in line
    assert list((tmp_path / "fast").iterdir()) == []


@pytest.mark.slow
def test_placed_operators_are_counted(start):
    words = (*SMALL, *MODES["semi_auto"], "train.steps=2")
    plain = start(*words, folder="plain")
    placed = start(*words, "+parallel.place.inner=host", "parallel.dump_ir=true", folder="placed")
    assert placed.losses == plain.losses
    assert [record["offload"]["place_out"] > 0 for record in placed.records] == [True, True]
    dump = (placed.folder / "ir" / "rank_3" / "step_parallel_end.ir").read_text(encoding="utf-8")
    assert "copy_to_host(" in dump and "copy_to_device(" in dump and "  on the host" in dump


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_offload_host", "gpt_offload_disk"])
def test_recipes_are_verified(start, name):
    ended = start(f"+recipe={name}", "+data.args.limit=200000", verb="verify")
    assert ended.verdict["passed"]
    for kind in ("optimizer", "parameters", "activations"):
        assert ended.results[0]["offload"][f"{kind}_held"] > 0


@pytest.mark.slow  # the killed run below resumes from such states, too
def test_going_on_from_states_on_a_disk(start):
    """Saved from the disk and read back to it: the same bits as a run that was never stopped."""
    words = ("+recipe=gpt_offload_disk", "+data.args.limit=200000", "train.log_every=1")
    start(*words, "train.steps=3", folder="uninterrupted")
    start(*words, "train.steps=2", folder="halves")
    halves = start(*words, "train.steps=3", "train.resume=auto", folder="halves")
    uninterrupted = halves.folder.parent / "uninterrupted"
    (name, expected), (same_name, found) = content(uninterrupted), content(halves.folder)
    assert name == same_name and expected.keys() == found.keys()
    assert [key for key, value in expected.items() if not torch.equal(found[key], value)] == []
    losses = [
        json.loads(line)["loss"] for line in (uninterrupted / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert losses == halves.losses


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_to_the_next_and_is_continued(start, tmp_path):
    """The command and its ranks are killed during a step, while tensors are being written to the disk."""
    words = ("+recipe=gpt_offload_disk", "+data.args.limit=200000", "train.log_every=1", "checkpoint.every=1")
    start(*words, "train.steps=4", folder="uninterrupted")
    folder = tmp_path / "killed"
    command = [sys.executable, "-m", "runner", *words, "train.steps=1000", f"hydra.run.dir={folder}"]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, cwd=tmp_path) as running:
        saved = folder / "checkpoints"
        while not (saved.is_dir() and any(path.name.startswith("step") for path in saved.iterdir())):
            assert running.poll() is None
            time.sleep(0.01)
        os.killpg(running.pid, signal.SIGKILL)

    def hidden():
        """Except for the lock, which the kernel has released."""
        return [path for path in folder.iterdir() if path.name.startswith(".") and path.name != ".lock"]

    left = hidden()
    assert left != [] and not any(file.is_file() for one in left if "offload" in one.name for file in one.rglob("*"))
    killed = start(*words, "train.steps=4", "train.resume=auto", folder="killed")
    assert hidden() == []
    (name, expected), (same_name, found) = content(tmp_path / "uninterrupted"), content(killed.folder)
    assert name == same_name and expected.keys() == found.keys()
    assert [key for key, value in expected.items() if not torch.equal(found[key], value)] == []
