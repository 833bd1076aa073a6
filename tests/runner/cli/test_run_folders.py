"""A folder belongs to one run, and one process at a time uses it."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
from composing import compose_config

from runner.cli.run_folders import without_trace
from runner.errors import ConfigError
from runner.run_folder import lineage
from runner.run_folder import lock as occupancy
from runner.run_folder.atomic import replace_text
from runner.run_folder.lock import Occupant

QUICK = "+recipe=quickstart"
HOLD = """
import os, sys, time
from pathlib import Path
from runner.run_folder.lock import Occupant, occupied
with occupied(Path(sys.argv[1]), Occupant.now("train", "mine")):
    if sys.argv[2] != "fork" or not os.fork():
        print("locked", flush=True)
    time.sleep(60)
    os._exit(0)
"""


@contextmanager
def locked(folder, how=""):
    """Another process locks `folder`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), how], stdout=subprocess.PIPE, encoding="utf-8", start_new_session=True
    )
    try:
        assert process.stdout.readline() == "locked\n"
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def trained(folder, steps=(4,), **changes):
    """Write the files of a training run that another run reads."""
    began = Occupant("0123456789abcdef", "train", "mine", 1, "there", "2026-01-02 03:04:05+0000")
    for step in steps:
        (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        (folder / "checkpoints" / f"step-{step:08d}" / "file").write_text("kept", encoding="utf-8")
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n', encoding="utf-8")
    content = vars(began) | {"history": [], "resumed": None} | changes
    (folder / "run.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "config.json").write_text("{}", encoding="utf-8")


@pytest.mark.parametrize("verb", ["train", "plan", "verify", "predict"])
def test_a_folder_in_use_is_refused(command, tmp_path, verb):
    with locked(tmp_path / "out") as other:
        before = sorted((tmp_path / "out").iterdir())
        done = command(verb, QUICK, "hydra.run.dir=out", "run.overwrite=true", "model.weights=x")
        assert done.code == 2 and len(done.paragraphs) == 1
        who = json.loads((tmp_path / "out" / ".lock").read_text(encoding="utf-8"))
        for said in (str(other.pid), who["run"], who["started"], "recipe mine", "hydra.run.dir=", "train.resume=auto"):
            assert said in done.err
        assert sorted((tmp_path / "out").iterdir()) == before


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ((), {"kept"}),
        (("launch.rank=0",), {"kept"}),
        (("launch.rank=1",), {"kept"}),
        (("launch.rank=1", ".lock"), {".lock", "checkpoints", "kept", "plan.json"}),
        (("launch.rank=1", ".start-7-a"), {".start-7-a", "checkpoints", "kept", "plan.json"}),
        (("launch.rank=0", ".start-7-a"), {".start-7-a", "checkpoints", "kept"}),
    ],
)
def test_a_refused_command_removes_what_is_its_own(tmp_path, words, left):
    """Commands that start their ranks by hand may share the folder: that of rank 0 has locked it, and others that wait
    have folders there."""
    hosts = ("launch=rank_table", "launch.hosts=[127.0.0.1:1,127.0.0.2:1]", "launch.port=29543", "world_size=2")
    config = compose_config("+recipe=data_parallel", *(hosts if words else ()), *words[:1])
    for name in ("kept", *words[1:]):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="refused"), without_trace(config, tmp_path):
        (tmp_path / "plan.json").touch()
        (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
        raise ConfigError("MW310", "refused")
    assert {one.name for one in tmp_path.iterdir()} == left


def test_commands_may_write_a_file_at_once(tmp_path):
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: replace_text(tmp_path / "config.json", str(number)), range(800)))
    assert [one.name for one in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.slow
def test_a_sweep_folder_in_use_is_refused(command, tmp_path, job):
    job(lambda config, run_dir: 0.5)
    words = ("-m", QUICK, "train.seed=1,2", "hydra.sweep.dir=out")
    with locked(tmp_path / "out") as other:
        done = command(*words)
        assert done.code == 2 and len(done.paragraphs) == 1
        assert str(other.pid) in done.err and "hydra.sweep.dir=" in done.err
        assert not (tmp_path / "out" / "sweep.json").exists()
    assert command(*words).code == 0
    assert not (tmp_path / "out" / ".lock").exists()
    assert command(*words).code == 0


@pytest.mark.slow
def test_a_sweep_holds_its_folder_to_its_end(command, tmp_path, job):
    found = []

    def look(config, run_dir):
        try:
            occupancy.occupy(run_dir.parent, Occupant.now("sweep", None), key=occupancy.SWEEP)
        except ConfigError as error:
            found.append(str(error))
        return 0.5

    job(look)
    assert command("-m", QUICK, "train.seed=1,2", "hydra.sweep.dir=out").code == 0
    assert len(found) == 2 and all("quickstart" in text for text in found)


@pytest.mark.parametrize("how", ["", "fork"])
def test_the_lock_goes_with_its_process(tmp_path, how):
    """Also where a forked child outlives the process."""
    with locked(tmp_path / "out", how) as other:
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        with occupancy.occupied(tmp_path / "out", Occupant.now("train", None)):
            assert occupancy.occupant_of(tmp_path / "out") is not None
    assert not (tmp_path / "out" / ".lock").exists()


def test_a_lock_is_not_that_of_a_file_that_was_removed(tmp_path):
    """A process that waits on the open lock file must not take the lock of a deleted file."""
    with occupancy.occupied(tmp_path, Occupant.now("train", None)):
        (tmp_path / ".lock").unlink()
        with locked(tmp_path):
            pass  # it locks a new file


@pytest.mark.parametrize("verb", ["train", "launch"])
def test_a_new_run_does_not_mix_with_another(command, tmp_path, job, verb):
    (tmp_path / "out").mkdir()
    trained(tmp_path / "out")
    before = {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()}
    for words in ((), (f"train.resume={tmp_path}/elsewhere",)):
        done = command(verb, QUICK, "hydra.run.dir=out", *words)
        assert done.code == 2 and len(done.paragraphs) == 1
        for said in ("0123456789abcdef", "2026-01-02 03:04:05", "recipe mine"):
            assert said in done.err
        for said in ("train.resume=auto", "hydra.run.dir=", "run.overwrite=true"):
            assert said in done.err
        assert {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("verb", ["plan", "explain", "verify", "predict"])
def test_other_verbs_do_not_replace_the_files_of_a_run(command, tmp_path, verb):
    (tmp_path / "out").mkdir()
    trained(tmp_path / "out")
    done = command(verb, QUICK, "hydra.run.dir=out", "model.weights=x")
    assert done.code == 2 and "0123456789abcdef" in done.err and f"`run {verb}`" in done.err
    assert (tmp_path / "out" / "config.json").read_text(encoding="utf-8") == "{}"


@pytest.mark.parametrize("words", [("train.resume=auto",), ("train.resume=out",), ("run.overwrite=true",)], ids=str)
def test_what_a_user_says_on_purpose_is_done(command, tmp_path, job, words):
    ran = []
    job(lambda config, run_dir: ran.append(run_dir))
    (tmp_path / "out").mkdir()
    trained(tmp_path / "out")
    assert command(QUICK, "hydra.run.dir=out", *words).code == 0
    assert len(ran) == 1


def test_a_folder_in_which_nothing_was_trained_is_free(command, tmp_path, job):
    job(lambda config, run_dir: None)
    (tmp_path / "out").mkdir()
    trained(tmp_path / "out", steps=())
    (tmp_path / "out" / "metrics.jsonl").write_text("", encoding="utf-8")
    assert command(QUICK, "hydra.run.dir=out").code == 0


@pytest.mark.slow
def test_jobs_of_a_sweep_begin_again_in_their_folders(command, tmp_path, job):
    def fail(config, run_dir):
        trained(run_dir)
        raise ValueError("no")

    job(fail)
    words = ("-m", QUICK, "train.seed=1", "hydra.sweep.dir=out")
    assert command(*words).code == 1
    job(lambda config, run_dir: 0.5)
    assert command(*words).code == 0


def link_to_itself(path):
    path.symlink_to(path.name)


@pytest.mark.few(3)
@pytest.mark.parametrize("make", [os.mkfifo, link_to_itself])
@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "run.json"])
def test_what_is_no_file_in_a_run_folder_is_refused(command, tmp_path, name, make):
    (tmp_path / "out").mkdir()
    make(tmp_path / "out" / name)
    done = command("plan", QUICK, "hydra.run.dir=out")
    assert done.code == 2 and name in done.err


@pytest.mark.slow
def test_overwriting_removes_what_a_run_left_and_nothing_else(tmp_path, job, command):
    folder = tmp_path / "out"
    folder.mkdir()
    trained(folder, steps=(4, 8))
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    (folder / "checkpoints" / "mine").mkdir()
    job(lambda config, run_dir: lineage.begin(config, run_dir, None, ()))
    assert command(QUICK, "hydra.run.dir=out", "run.overwrite=true").code == 0
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["mine"]
    assert not (folder / "metrics.jsonl").exists() and (folder / "notes.txt").exists()
    assert lineage.read(folder).lineage.run != "0123456789abcdef"


def test_a_run_that_is_resumed_keeps_its_id_and_another_remembers_where_it_came_from(tmp_path, job, command):
    folder, given = tmp_path / "out", []

    def begin(config, run_dir):
        lineage.begin(config, run_dir, *given.pop())

    job(begin)
    given.append((None, ()))
    assert command(QUICK, "hydra.run.dir=out").code == 0
    first = lineage.read(folder)
    assert first.began.recipe == "quickstart" and first.lineage.history == () and first.resumed is None
    given.append(("step-4", ((first.lineage.run, 4),)))
    assert command(QUICK, "hydra.run.dir=out", "train.resume=auto").code == 0
    assert lineage.read(folder).lineage == first.lineage
    given.append(("step-2", ((first.lineage.run, 2), ("older", 1))))
    assert command(QUICK, "hydra.run.dir=out", "train.resume=out/checkpoints/step-2").code == 0
    second = lineage.read(folder)
    assert second.lineage.run != first.lineage.run and second.resumed == "step-2"
    assert second.lineage.history == ((first.lineage.run, 2), ("older", 1))
    included = [second.lineage.includes(run, step) for run, step in ((first.lineage.run, 2), (first.lineage.run, 3))]
    assert included == [True, False] and second.lineage.includes("older", 1) and not second.lineage.includes("x", 1)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(30, "Read-only file system")

    with (
        monkeypatch.context() as patch,
        pytest.raises(ConfigError, match=r"cannot be written \(Read-only file system\)"),
    ):
        patch.setattr(occupancy.os, "open", refuse)
        occupancy.occupy(tmp_path, Occupant.now("train", None), key=occupancy.RUN)


def test_where_there_are_no_locks_a_run_goes_on_with_a_warning(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(occupancy.fcntl, "flock", refuse)
    with occupancy.occupied(tmp_path, Occupant.now("train", None)):
        assert "No locks available" in capsys.readouterr().out


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["config.json", "plan.json"])
@pytest.mark.parametrize("verb", ["train", "plan"])
def test_files_of_somebody_else_are_not_replaced(command, tmp_path, job, verb, name):
    (tmp_path / "out").mkdir()
    file = tmp_path / "out" / name
    file.write_text('{"architectures": ["Llama"]}', encoding="utf-8")
    done = command(verb, QUICK, "hydra.run.dir=out")
    assert done.code == 2 and len(done.paragraphs) == 1
    assert f"out/{name} is not a file of this program" in done.err and "run.overwrite=true" in done.err
    assert file.read_text(encoding="utf-8") == '{"architectures": ["Llama"]}'
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]
    job(lambda config, run_dir: 0.5)
    assert command(verb, QUICK, "hydra.run.dir=out", "run.overwrite=true").code == 0


@pytest.mark.slow
def test_two_real_runs_at_once(tmp_path):
    """A second run is refused while the first one trains; once that is killed, the folder is free."""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    words = [sys.executable, "-m", "runner", QUICK, "hydra.run.dir=out", "checkpoint.every=2"]
    first = subprocess.Popen(
        [*words, "train.steps=100000"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "out" / "checkpoints" / "step-00000002").is_dir():
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        second = subprocess.run(
            [*words, "train.steps=4"], cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8"
        )
        assert second.returncode == 2 and f"pid {first.pid} " in second.stderr
        assert lineage.read(tmp_path / "out").lineage.run in second.stderr
    finally:
        first.kill()
        first.communicate()
    with occupancy.occupied(tmp_path / "out", Occupant.now("train", None)):
        pass
