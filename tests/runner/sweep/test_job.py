"""The records of a sweep: which jobs are done, and which folder belongs to which job."""

import pytest

from runner.run_folder import CONFIG_FILE
from runner.run_folder.metrics import records
from runner.sweep.job import SweepJob, folder_of, jobs, read

DONE = SweepJob(0, ("lr=1",), "train", "first", status="done", value=0.5, evaluation={"accuracy": 0.9}, seconds=2.0)


@pytest.fixture
def put(tmp_path):
    def write(name, job, config="{}"):
        (tmp_path / name).mkdir()
        job.write(tmp_path / name)
        (tmp_path / name / CONFIG_FILE).write_text(config, encoding="utf-8")
        return tmp_path / name

    return write


def test_a_job_reads_back(put):
    assert read(put("0", DONE)) == DONE


def test_no_job_is_none(tmp_path):
    assert read(tmp_path) is None


def test_a_done_job_is_found_with_its_new_number(put):
    again = SweepJob(3, ("lr=1",), "train", "second")
    found = again.finished_before(put("0", DONE), "{}")
    assert (found.number, found.sweep, found.value, found.status) == (3, "second", 0.5, "done")


@pytest.mark.parametrize(
    ("status", "config"),
    [("failed", "{}"), ("running", "{}"), ("done", '{"train": 2}')],
    ids=["failed", "killed", "new"],
)
def test_other_jobs_run_again(put, status, config):
    folder = put("0", SweepJob(0, ("lr=1",), "train", "first", status=status))
    assert SweepJob(0, ("lr=1",), "train", "second").finished_before(folder, config) is None


def test_a_job_keeps_its_folder_whatever_its_number(put, tmp_path):
    put("0", DONE)
    assert folder_of(str(tmp_path), 7, ["lr=1"]) == "0"
    assert folder_of(str(tmp_path), 7, ["++lr=1"]) == "0"


def test_a_job_never_gets_the_folder_of_another(put, tmp_path):
    put("0", DONE)
    other, third = (folder_of(str(tmp_path), 0, [f"lr={rate}"]) for rate in (2, 3))
    assert len({"0", other, third}) == 3
    assert folder_of(str(tmp_path), 1, ["lr=2"]) == "1"
    assert folder_of(str(tmp_path / "none"), 1, ["lr=2"]) == "1"


def test_jobs_are_in_the_order_of_their_numbers(put, tmp_path):
    for number in (10, 2, 1):
        put(str(number), SweepJob(number, (f"lr={number}",), "train", "first"))
    assert [job.number for _, job in jobs(tmp_path)] == [1, 2, 10]


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo', encoding="utf-8")
    assert list(records(tmp_path)) == [{"step": 1, "loss": 2.0}]


def test_jobs_that_begin_elsewhere_have_folders_of_their_own(put, tmp_path):
    put("0", SweepJob(0, ("lr=1", "train.resume=a"), "train", "first", status="done"))
    begins = {"a": "0", "auto": "0", "b": "1"}
    assert {one: folder_of(str(tmp_path), 1, ["lr=1", f"train.resume={one}"]) for one in begins} == begins
