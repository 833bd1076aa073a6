"""The table and the page of a sweep, and restarting a sweep."""

import csv
import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from runner.errors import RunFailed
from runner.sweep.job import SweepJob
from runner.sweep.pareto import compared, front_chart, front_table
from runner.sweep.results import Sweep, bars, curves, printed, table

QUICK = "+recipe=quickstart"
GOOD = SweepJob(
    0, (QUICK, "lr=1", "seed=0"), "train", "s", status="done", value=0.5, evaluation={"accuracy": 0.9}, seconds=2
)
FAILURE = "rank 0 <failed>: " + "x" * 100
BAD = SweepJob(1, (QUICK, "lr=2", "seed=0"), "train", "s", status="failed", error=FAILURE, seconds=1)
KILLED = SweepJob(2, (QUICK, "lr=3", "seed=0"), "train", "s")


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_table_shows_what_was_varied_and_the_results():
    head, *rows = table([GOOD, BAD, KILLED], [Path("0"), Path("1"), Path("2")])
    assert head == ["job", "folder", "status", "lr", "loss", "test accuracy", "seconds", "error"]
    assert rows[0] == ["0", "0", "done", "1", "0.5", "0.9", "2.0", ""]
    assert rows[1] == ["1", "1", "failed", "2", "", "", "1.0", BAD.error]
    assert rows[2][2] == "unfinished"


def test_values_of_other_verbs_have_their_own_name():
    plan = SweepJob(3, (QUICK,), "plan", "s", status="done", value=0.25)
    head, *rows = table([GOOD, plan], [Path("0"), Path("3")])
    assert [row[head.index("seconds per step")] for row in rows] == ["", "0.25"]


def test_long_errors_are_cut_on_the_terminal_only():
    rows = table([GOOD, BAD], [Path("0"), Path("1")])
    assert printed(rows).splitlines()[-1].endswith("x...")
    assert "x" * 100 in rows[-1][-1]


class Counting(HTMLParser):
    """Counts elements and missing end tags."""

    def __init__(self, text):
        super().__init__()
        self.seen, self.open = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def put(sweep: Sweep, job: SweepJob, losses=()) -> None:
    folder = sweep.folder / str(job.number)
    folder.mkdir()
    SweepJob(**{**vars(job), "sweep": sweep.mark}).write(folder)
    lines = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")


def test_the_page_draws_every_job(tmp_path, capsys):
    sweep = Sweep.begin(tmp_path / "sweep")
    put(sweep, GOOD, [3, 2, 1])
    put(sweep, BAD, [3, None, 9000])
    put(sweep, KILLED)
    assert not sweep.end()
    text = (tmp_path / "sweep" / "report.html").read_text(encoding="utf-8")
    page = Counting(text)
    assert page.open == []
    assert page.seen.count("path") == 2  # the killed job has no curve
    assert page.seen.count("tr") == 4
    assert "&lt;failed&gt;" in text
    assert "1 of 3 jobs done" in capsys.readouterr().out


def test_only_jobs_of_this_start_count(tmp_path):
    first = Sweep.begin(tmp_path)
    put(first, BAD)
    first.end()
    second = Sweep.begin(tmp_path)
    put(second, GOOD)
    assert second.end()
    assert not first.end()


def test_curves_keep_the_last_step_and_state_their_scale(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {n}, "loss": {10.0**-n}}}\n' for n in range(1, 8)), encoding="utf-8"
    )
    chart = curves({"#0": tmp_path})
    assert chart is not None and chart["logarithmic"]
    assert "step 7" in [label for _, _, label in chart["ticks"]]
    assert curves({"none": tmp_path / "none"}) is None


def test_bars_are_shares_of_the_largest():
    chart = bars({"a": 1.0, "b": -4.0, "c": 0.0})
    assert [bar["width"] for bar in chart] == [112.5, 450.0, 1.0] and bars({}) == []


@pytest.mark.slow
def test_a_sweep_started_again_runs_what_is_missing(command, job, tmp_path):
    seen = []

    def fail_once(config, run_dir):
        seen.append(config.train.seed)
        if config.train.seed == 2 and len(seen) < 4:
            raise RunFailed("MW711", "rank 0 was killed.")
        return config.train.seed / 2

    job(fail_once)
    words = ("-m", QUICK, "optimizer.args.lr=0.5", "hydra.sweep.dir=mine")
    done = command(*words, "train.seed=1,2,3")
    assert done.code == 1
    assert "2 of 3 jobs done" in done.out
    assert [row["status"] for row in rows_of(tmp_path / "mine")] == ["done", "failed", "done"]
    assert rows_of(tmp_path / "mine")[1]["error"] == "rank 0 was killed. [MW711]"
    assert (tmp_path / "mine" / "1" / "error.txt").exists()

    done = command(*words, "train.seed=1,2,3")
    assert done.code == 0
    assert seen == [1, 2, 3, 2]
    assert "job #0 (+recipe=quickstart optimizer.args.lr=0.5 train.seed=1): done before" in done.out
    assert not (tmp_path / "mine" / "1" / "error.txt").exists()
    assert [row["loss"] for row in rows_of(tmp_path / "mine")] == ["0.5", "1", "1.5"]

    done = command(*words, "train.seed=3,4")  # other jobs in the same folder
    assert done.code == 0
    assert seen == [1, 2, 3, 2, 4]
    assert {row["folder"]: row["train.seed"] for row in rows_of(tmp_path / "mine")} == {
        "0": "1",
        "1": "2",
        "2": "3",
        next(row["folder"] for row in rows_of(tmp_path / "mine") if row["train.seed"] == "4"): "4",
    }


def test_jobs_whose_keys_exclude_each_other_are_left_out(command, job, tmp_path):
    job(lambda config, run_dir: 0.5)
    words = ("-m", "+recipe=data_parallel", "world_size=2", "parallel.pipeline.stages=2")
    done = command(*words, "parallel.zero.stage=0,3", "hydra.sweep.dir=mine")
    assert (done.code, "1 of 2 jobs done, 1 left out" in done.out) == (0, True)
    assert [row["status"] for row in rows_of(tmp_path / "mine")] == ["done", "excluded"]
    assert "parallel.pipeline.stages = 2 does not go with parallel.zero.stage = 3" in done.err
    for others in ("parallel.zero.stage=2,3", "parallel.zero.stage=0,3,5"):
        assert command(*words, others, "hydra.sweep.dir=other").code == 2
        assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_a_job_whose_config_has_changed_runs_again(command, job, tmp_path):
    seen = []
    job(lambda config, run_dir: seen.append(config.train.steps))
    (tmp_path / "recipes").mkdir()
    recipe = tmp_path / "recipes" / "mine.yaml"
    for steps in (3, 4, 4):
        recipe.write_text(
            f"# @package _global_\ndefaults: [quickstart, _self_]\ntrain: {{steps: {steps}}}\n", encoding="utf-8"
        )
        assert command("-m", "+recipe=mine", "train.seed=1", "hydra.sweep.dir=mine").code == 0
    assert seen == [3, 4]


def test_an_interrupted_sweep_leaves_its_table(command, job, tmp_path):
    def interrupt(config, run_dir):
        if config.train.seed == 2:
            raise KeyboardInterrupt
        return 0.5

    job(interrupt)
    done = command("-m", QUICK, "train.seed=1,2,3", "hydra.sweep.dir=mine")
    assert done.code == 130
    assert [row["status"] for row in rows_of(tmp_path / "mine")] == ["done", "unfinished"]


@pytest.mark.slow
def test_batches_go_on_after_a_failed_one(command, job, tmp_path):
    def fail(config, run_dir):
        raise RunFailed("MW711", "rank 0 was killed.")

    job(fail)
    words = ("-m", QUICK, "train.seed=1,2,3", "hydra.sweep.dir=mine", "hydra.sweeper.max_batch_size=1")
    assert command(*words).code == 1
    assert [row["status"] for row in rows_of(tmp_path / "mine")] == ["failed"] * 3


def test_the_command_of_a_sweep_never_imports_torch():
    code = "import runner.cli.main, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def planned(folder: Path, number: int, predicted: tuple[float, int], measured: tuple[float, int] | None) -> None:
    """The files of a job that trained with a plan; without measured memory where `measured` is None."""
    place = folder / str(number)
    place.mkdir(parents=True, exist_ok=True)
    prediction = {"seconds": predicted[0], "memory": predicted[1]}
    (place / "plan.json").write_text(json.dumps({"prediction": prediction}), encoding="utf-8")
    if measured is not None:
        (place / "memory.json").write_text(
            json.dumps({"measured": [{"peak": 1}, {"peak": measured[1]}]}), encoding="utf-8"
        )
        slow_first = [9.0] * 5 + [measured[0]] * 3
        lines = (json.dumps({"step": n, "seconds": value}) + "\n" for n, value in enumerate(slow_first, 1))
        (place / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")


def test_the_pareto_front_is_that_of_what_was_measured(tmp_path):
    planned(tmp_path, 0, (1.0, 100), (2.0, 110))  # beaten by 1 in both, though predicted to be the fastest
    planned(tmp_path, 1, (1.5, 90), (1.4, 95))
    planned(tmp_path, 2, (3.0, 50), None)
    planned(tmp_path, 3, (1.2, 100), (1.3, 95))
    (tmp_path / "4").mkdir()  # hybrid mode has no plan
    plans = compared([(f"#{n}", tmp_path / str(n)) for n in range(5)])
    assert [(one.title, one.best) for one in plans] == [("#3", True), ("#1", False), ("#0", False), ("#2", True)]
    assert plans[0].costs == (1.3, 95) and plans[-1].costs == (3.0, 50)
    rows = front_table(plans)
    assert rows[1][1:] == ["1.30 s", "1.20 s", "95 B", "100 B", "yes"] and rows[-1][1:] == [
        "",
        "3.00 s",
        "",
        "50 B",
        "yes",
    ]
    chart = front_chart(plans)
    assert [one["best"] for one in chart["points"]] == [True, False, False, True]
    assert [one["predicted"] is None for one in chart["points"]] == [False, False, False, True]
    assert chart["front"].count("H") == 1


def test_a_sweep_of_something_else_has_no_front(tmp_path):
    for number in (0, 1):
        planned(tmp_path, number, (1.0, 100), (2.0 + number, 110))
    assert compared([(f"#{n}", tmp_path / str(n)) for n in range(2)]) == []


def test_the_front_is_printed_and_drawn(tmp_path, capsys):
    sweep = Sweep.begin(tmp_path / "sweep")
    put(sweep, GOOD)
    put(sweep, SweepJob(1, (QUICK, "lr=2", "seed=0"), "train", "s", status="done", value=0.5))
    for number in (0, 1):
        planned(sweep.folder, number, (1.0 + number, 100 - number), (2.0 + number, 110 - number))
    assert sweep.end()
    assert "Pareto front of step time and peak memory: 2 of 2 plans" in capsys.readouterr().out
    page = Counting((sweep.folder / "report.html").read_text(encoding="utf-8"))
    assert page.open == [] and page.seen.count("circle") == 4


@pytest.mark.slow
def test_plans_of_real_runs_are_compared(command, tmp_path):
    words = ("-m", "+recipe=data_parallel", "world_size=2", "train.steps=7")
    sweeps = ("parallel.zero.stage=0,2", "train.measure_memory=true", "hydra.sweep.dir=mine")
    done = command(*words, *sweeps)
    assert done.code == 0, done.out
    assert "Pareto front of step time and peak memory" in done.out
    plans = compared([(str(n), tmp_path / "mine" / str(n)) for n in (0, 1)])
    assert len(plans) == 2
    for one in plans:
        assert one.bytes == pytest.approx(one.predicted_bytes, rel=0.01)
