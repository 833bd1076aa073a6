"""`run launch`: dry runs, and configs that cannot be launched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

import conf
from runner.config.launch import Launcher

QUICK = "+recipe=quickstart"
TWO = "launch.hosts=[127.0.0.1:4,127.0.0.2:4]"


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "slurm", "deepspeed", "rank_table"])
def test_a_dry_run_prints_and_leaves_nothing(command, left, launcher):
    done = command("launch", "--dry-run", QUICK, f"launch={launcher}", TWO)
    assert (done.code, done.err) == (0, "")
    assert "runner.join" in done.out
    assert (done.out.count("\n# on 127.0.0.2\n") == 1) == (launcher in ("torchrun", "rank_table"))
    assert ("127.0.0.2 slots=4" in done.out) == (launcher == "deepspeed")
    if launcher == "slurm":
        assert done.out.splitlines()[-1].endswith(f"-m runner train {QUICK} launch=slurm '{TWO}'")
    assert left() == []


def test_a_dry_run_asks_no_machine(command):
    done = command("launch", "--dry-run", QUICK, "launch=torchrun", "launch.hosts=[no.such.host.invalid:4,nor.this:4]")
    assert (done.code, done.err) == (0, "")
    assert "--master-addr=no.such.host.invalid --master-port=29500 " in done.out


def test_a_dry_run_in_other_words(command, left):
    for typed in (["train", "launch.dry_run=true"], ["launch.dry_run=true"]):
        done = command(*typed, QUICK, "launch=mpirun")
        assert done.code == 0 and "mpirun -np 8 --host localhost:8 " in done.out
    assert "forks of this command" in command("launch", "--dry-run", QUICK).out
    assert command("train", QUICK, "--dry-run").code == 2  # an option of one verb
    assert left() == []


def test_every_launcher_has_a_group():
    folder = Path(conf.__path__[0]) / "launch"
    assert {file.stem for file in folder.glob("*.yaml")} == set(get_args(Launcher))


def test_the_world_is_that_of_the_hosts(command):
    done = command("launch", "--dry-run", QUICK, "world_size=null", "launch=mpirun", "launch.hosts=[127.0.0.1:8]")
    assert "mpirun -np 8 --host 127.0.0.1:8 " in done.out


TABLE = {
    "twice": ([(0, "a", 0), (0, "b", 0)], "rank 0 more than once"),
    "a gap": ([(0, "a", 0), (2, "b", 0)], "but none has rank 1"),
    "one device": ([(0, "a", 0), (1, "a", 0)], "needs a device of its own"),
}

BAD = [
    (["launch=torchrum"], "Did you mean 'torchrun'?"),
    (["launch=mpirun", "launch.hosts=[a:x]"], "'a:x', which is not HOST:RANKS"),
    (["launch=mpirun", "launch.hosts=[a:0]"], "'a:0', which is not HOST:RANKS"),
    (["launch=mpirun", "launch.hosts=[a:4,a:4]"], "names a more than once"),
    (
        ["launch=mpirun", "launch.hosts=[a:2,b:2]"],
        "world_size = 8, but the hosts or devices of the launch have 4 ranks",
    ),
    (["launch.hosts=[a:8]"], "it starts all ranks on this machine"),
    (["launch=rank_table"], "give launch.rank_table=FILE.json"),
    (["launch=deepspeed"], "give launch.hostfile=FILE"),
    (["launch=deepspeed", "launch.hostfile=none"], "cannot be read"),
    (["launch=deepspeed", "launch.hostfile=none", TWO], "both say where the ranks run"),
    (["launch=mpirun", "launch.nodes=2"], "launch.nodes = 2 does not go with"),
    (["launch=slurm", "launch.hosts=[a:2,b:6]"], "equally many ranks on every host"),
    (["launch=mpirun", TWO, "launch.host=127.0.0.1"], "choose launch=rank_table"),
    (["launch=rank_table", TWO, "launch.host=127.0.0.1"], "set launch.port"),
    (["launch=rank_table", TWO, "launch.port=29400", "launch.host=c"], "'c' is not in the table: 127.0.0.1, 127.0.0.2"),
    (["launch=rank_table", TWO, "launch.port=29400", "launch.rank=8"], "launch.rank = 8 is not in the table"),
    (["launch=rank_table", TWO, "launch.port=0"], "launch.port = 0: must be at least 1"),
    (["launch=torchrun", TWO, "job=verify"], "use launch=local"),
    (
        ["launch=torchrun", TWO, "job=plan", "launch.dry_run=true"],
        "launch.dry_run = true does not go with job.name = 'plan'",
    ),
    (
        ["launch=torchrun", TWO, "launch.remote=[no-such-shell]", "launch.hosts=[127.0.0.1:4,192.0.2.1:4]"],
        "no-such-shell",
    ),
    (["launch=mpirun", "launch.hosts=[127.0.0.1:4,no.such.host.invalid:4]"], "'no.such.host.invalid' cannot be found"),
    (["launch=mpirun", "launch.hosts=[localhost:4,192.0.2.1:4]"], "cannot reach one that is called localhost"),
    (["launch=slurm", "launch.nodes=2"], "set launch.address"),
    (["launch=mpirun", TWO, "launch.min_ranks=4"], "set launch.max_restarts too"),
    (["launch=mpirun", TWO, "launch.min_ranks=9", "launch.max_restarts=1"], "with as many ranks or more"),
]


@pytest.mark.few(12)
@pytest.mark.parametrize(("words", "says"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_launches_are_one_paragraph(command, left, monkeypatch, words, says):
    monkeypatch.setattr(
        "runner.launch.launchers.start.shutil.which", lambda name: None if name.startswith("no-") else name
    )
    done = command("train", QUICK, *words)
    assert done.code == 2
    (paragraph,) = done.paragraphs
    assert says in paragraph
    assert left() == []


@pytest.mark.few(3)
@pytest.mark.parametrize("what", TABLE)
def test_bad_tables(command, tmp_path, what):
    rows, says = TABLE[what]
    (tmp_path / "table.json").write_text(
        json.dumps([{"rank": r, "host": h, "device": d} for r, h, d in rows]), encoding="utf-8"
    )
    done = command("train", QUICK, "world_size=null", "launch=rank_table", "launch.rank_table=table.json")
    assert (done.code, len(done.paragraphs)) == (2, 1)
    assert says in done.paragraphs[0]


@pytest.mark.parametrize(("launcher", "program"), [("mpirun", "mpirun"), ("slurm", "srun"), ("deepspeed", "pdsh")])
def test_a_missing_program(command, left, monkeypatch, launcher, program):
    monkeypatch.setattr("runner.launch.launchers.start.shutil.which", lambda name: None)
    done = command("train", QUICK, f"launch={launcher}", TWO)
    assert done.code == 2 and f"needs the program {program}, which is not here" in done.paragraphs[0]
    assert left() == []


def test_ranks_interleaved_over_hosts_need_the_table(command, tmp_path):
    rows = [{"rank": rank, "host": f"127.0.0.{1 + rank % 2}", "device": rank // 2} for rank in range(8)]
    (tmp_path / "table.json").write_text(json.dumps(rows), encoding="utf-8")
    done = command("train", QUICK, "launch=mpirun", "launch.rank_table=table.json")
    assert done.code == 2 and "use launch=rank_table" in done.paragraphs[0]
