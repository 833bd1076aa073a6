"""Ranks start, communicate, and end together, whatever ends them: real processes, as few as possible."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.errors import ConfigError, RunFailed
from runner.launch import failure, network
from runner.launch.failure import (
    CauseOrder,
    Failure,
    dumped_place,
    end_of_log,
    from_exception,
    from_exit,
    message,
    root_cause,
)
from runner.launch.liveness import forks_of
from runner.launch.logs import console_may_close, keep_open
from strategies.core.errors import StrategyError
from tests.ranks import start_ranks

HERE = Path(__file__).parents[1]
ROOT = HERE.parents[1]

Run = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.syspath_prepend(str(HERE))

    def call(entry: str, payload: object = None, world_size: int = 4, timeout: float = 30.0) -> Any:
        return start_ranks(f"rank_entries:{entry}", payload, world_size, tmp_path, timeout=timeout)

    return call


def alive(folder: Path) -> list[int]:
    """The processes that wrote their id into `folder` and still exist 2 s after they should have ended."""
    pids = [int(path.read_text(encoding="utf-8")) for path in folder.glob("pid.*")]
    assert pids
    until = time.monotonic() + 2
    while (left := [pid for pid in pids if exists(pid)]) and time.monotonic() < until:
        time.sleep(0.02)
    return left


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")  # an orphan may wait for an init process to take note of its end
    try:
        return (
            not state.parent.parent.exists() or state.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
        )
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_result_of_rank_0(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANET", "set after the fork server was started")
    seen = run("describe", {"large": b"x" * 300_000, "small": (1, None)})
    assert seen["payload"] == {"large": b"x" * 300_000, "small": (1, None)}
    assert seen["total"] == 0 + 1 + 2 + 3
    assert seen["context"] == (0, 4, 0, "cpu", str(tmp_path))
    assert seen["environment"] == {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "LOCAL_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "PLANET": "set after the fork server was started",
    }
    assert (seen["threads"], seen["backend"]) == (1, "gloo")


def test_one_rank_and_again(run: Run) -> None:
    assert [run("describe", k, world_size=1)["payload"] for k in range(2)] == [0, 1]


def test_logs(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run("describe", world_size=2)
    run("describe", world_size=2)
    for rank in range(2):
        log = (tmp_path / "ranks" / f"{rank}.log").read_text(encoding="utf-8")
        assert log == f"hello from rank {rank}\nraw words of rank {rank}\n" * 2
    out, err = capfd.readouterr()
    assert out == "hello from rank 0\n" * 2
    assert err == ""


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("raise", "rank 2 of 4 failed: OperatorError: the shapes do not fit. Where: operator dense1.matmul, "),
        ("late", "rank 2 of 4 failed: ValueError: this is the cause. Where: "),
        ("exit", "rank 2 of 4 ended with exit code 7 before it was done."),
        ("SIGKILL", "rank 2 of 4 was killed by SIGKILL ("),
        ("SIGSEGV", "rank 2 of 4 was killed by SIGSEGV. Where: "),
    ],
)
def test_a_failure_ends_the_run(run: Run, tmp_path: Path, way: str, expected: str) -> None:
    run("describe", world_size=1)  # the fork server has done its imports
    start = time.monotonic()
    with pytest.raises(RunFailed) as caught:
        run("fail", (2, way))
    assert time.monotonic() - start < 5
    text = str(caught.value)
    assert text.startswith(expected)
    assert re.search(r"rank_entries\.py:\d+ \(fail\)", text) or way in ("exit", "SIGKILL")
    log = tmp_path / "ranks" / "2.log"
    assert log.read_text(encoding="utf-8").startswith("these are the last words\n")
    if way in ("raise", "late"):  # one paragraph
        assert text.endswith(f"(fail). The traceback is in {log}.") and "\n" not in text
        assert "Traceback (most recent call last):" in log.read_text(encoding="utf-8")
    else:
        assert f"The end of its log, {log}:\n" in text
        assert "    these are the last words" in text or way == "SIGSEGV"  # its stack trace is long
    assert alive(tmp_path) == []


def test_a_hanging_rank_is_named(run: Run, tmp_path: Path) -> None:
    with pytest.raises(RunFailed) as caught:
        run("fail", (1, "hang"), timeout=1.0)
    text = str(caught.value)
    call = "all_reduce #3 over (all ranks) of torch.distributed.all_reduce, in which ranks 0, 2, 3 waited 1 s. "
    assert text.startswith(f"rank 1 of 4 never joined {call}Rank 1 was in the start, ")
    assert re.search(r"Rank 1 was in the start, \S*rank_entries\.py:\d+ \(hang\)\.\n", text)
    assert alive(tmp_path) == []


@pytest.mark.parametrize(("way", "kind"), [("strategy", StrategyError), ("config", ConfigError)])
def test_wrong_input_found_by_a_rank(run: Run, tmp_path: Path, way: str, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        run("fail", (3, way))
    assert str(caught.value) in {"matmul cannot be sliced by 3. Use 2 or 4.", "data.path: there is no such file."}
    assert alive(tmp_path) == []


def test_the_same_failure_everywhere_is_reported_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.launch.supervision.CAUSE", 20.0)  # s; a busy machine starts the ranks far apart
    with pytest.raises(RunFailed) as caught:
        run("fail_everywhere", world_size=2)
    first_line = str(caught.value).splitlines()[0]
    assert re.match(r"rank [01] of 2 failed: ValueError: nobody can do this \(rank [01] too\)\. Where: ", first_line)


def test_the_place_is_the_users_line(run: Run) -> None:
    with pytest.raises(RunFailed, match=r"Where: \S*rank_entries\.py:\d+ \(fail_in_torch\)\. The traceback"):
        run("fail_in_torch", world_size=1)


def test_entry_and_result_that_cannot_be(run: Run) -> None:
    with pytest.raises(ConfigError, match="no function 'nothing'"):
        run("nothing", world_size=1)
    with pytest.raises(RunFailed, match="pickle"):
        run("unpicklable", world_size=1)


def test_children_of_ranks_end_too(run: Run, tmp_path: Path) -> None:
    run("leave_a_child", world_size=2)
    assert alive(tmp_path) == []


def test_modules_of_the_working_directory(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_network.py").write_text("NAME = 'mine'\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert run("call_user_module", "my_own_network", world_size=1) == "mine"


def test_handlers_are_restored(run: Run) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run("describe", world_size=1)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_the_fork_server_has_one_thread(run: Run) -> None:
    assert run("count_the_server", world_size=1)[0] == 1


PARENT = """
import sys
from pathlib import Path
from runner.launch import run_ranks, warm
assert not {"torch", "hydra"} & set(sys.modules), "the parent must not need torch"
if __name__ == "__main__":
    warm()
    print("warm", flush=True)
    entry, payload, run_dir = sys.argv[1:]
    try:
        value = run_ranks("rank_entries:" + entry, eval(payload), world_size=2, run_dir=Path(run_dir), device="cpu",
                          timeout=30, threads=1)
    except KeyboardInterrupt:
        sys.exit(130)
    print(value)
else:
    raise AssertionError("ranks must not run the parent's script")
"""


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts processes, each in a new process group, that start ranks."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT, encoding="utf-8")
    started: list[subprocess.Popen[str]] = []

    def start(entry: str, payload: object, run_dir: Path, **options: Any) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, str(script), entry, repr(payload), str(run_dir)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                start_new_session=True,
                **options,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "stopped"),
    [
        (signal.SIGINT, 130, False),
        (signal.SIGTERM, 130, True),
        (signal.SIGKILL, -signal.SIGKILL, False),
        (signal.SIGKILL, -signal.SIGKILL, True),
    ],
)
def test_the_parent_is_ended(
    parent: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    code: int,
    stopped: bool,
) -> None:
    """`stopped`: the ranks and their fork server are stopped first."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    semaphores = set(Path("/dev/shm").glob("sem.mp-*"))
    process = parent("wait_forever", None, tmp_path)
    until = time.monotonic() + 30
    while len(list(tmp_path.glob("pid.?"))) < 2:
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.02)
    if stopped:
        ranks = [int(path.read_text(encoding="utf-8")) for path in tmp_path.glob("pid.[01]")]
        for pid in [*ranks, parent_of(ranks[0])]:
            os.kill(pid, signal.SIGSTOP)
    if number is signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal sends it: to everything in the foreground
    else:
        process.send_signal(number)
    _, err = process.communicate(timeout=5)  # waits for every process with its streams, the fork server too
    assert (process.returncode, err) == (code, "")
    assert alive(tmp_path) == []
    assert list(temporary.glob("pymp-*")) == []
    assert set(Path("/dev/shm").glob("sem.mp-*")) <= semaphores


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


def test_ctrl_c_while_the_fork_server_imports(parent: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = parent("describe", None, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "warm\n"
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (130, "")


def test_the_fork_server_ends_while_it_imports_when_its_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, time; os.mkdir(os.environ['HERE'] + '/started'); time.sleep(60)", encoding="utf-8"
    )
    code = "import time; from runner.launch import warm; print(warm(('slow',)).pid, flush=True); time.sleep(60)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), "HERE": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        (tmp_path / "pid.server").write_text(process.stdout.readline(), encoding="utf-8")
        until = time.monotonic() + 30
        while not (tmp_path / "started").exists():
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.02)
        process.kill()
    assert alive(tmp_path) == []


def test_the_fork_server_ends_with_its_parent() -> None:
    code = "from runner.launch import warm; first = warm().pid; assert warm().pid == first; print(first)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    assert not exists(int(ended.stdout))
    assert ended.stderr == ""


@pytest.mark.slow
def test_two_runs_at_once(parent: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    # Files of the working directory must not be taken for the modules of the standard library.
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "random.py").write_text("raise ImportError('the wrong random')", encoding="utf-8")
    both = [parent("sum_slowly", value, tmp_path / str(value), cwd=tmp_path / "work") for value in (1.0, 2.0)]
    ends = [process.communicate(timeout=60) for process in both]
    assert ends == [("warm\n100.0\n", ""), ("warm\n200.0\n", "")]


def test_root_cause() -> None:
    lost = Failure(0, 1.0, CauseOrder.PEER_LOST, "lost")
    late = Failure(1, 2.0, CauseOrder.TIMEOUT, "timeout")
    cause = Failure(2, 3.0, CauseOrder.CAUSE, "cause")
    later = Failure(3, 4.0, CauseOrder.CAUSE, "later")
    assert root_cause([lost, late, later, cause]) is cause
    assert root_cause([lost, late]) is late
    assert message(cause, [3, 5], 8) == "rank 2 of 8 cause (ranks 3, 5 too)."


def test_connections_of_the_user_are_no_echoes() -> None:
    def caught(code: str, package: str) -> BaseException:
        try:
            exec(code, {"__name__": package})
        except Exception as error:
            return error
        raise AssertionError(code)

    refused = "raise ConnectionRefusedError(111, 'Connection refused')"
    late = "raise RuntimeError('request timed out after 5000ms')"
    gloo = "raise RuntimeError('[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9999')"
    assert [from_exception(0, caught(code, "my_store")).order for code in (refused, late, gloo)] == [0, 0, 2]
    assert [from_exception(0, caught(code, "torch.distributed")).order for code in (refused, late)] == [2, 1]
    worker = f"def reraise(): {refused}\nreraise()"
    assert from_exception(0, caught(worker, "torch._utils")).order is CauseOrder.CAUSE


@pytest.mark.parametrize(
    ("error", "order"),
    [
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9999"),
            CauseOrder.PEER_LOST,
        ),
        (RuntimeError("Read error [127.0.0.1]:61538: Connection reset by peer"), CauseOrder.PEER_LOST),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), CauseOrder.PEER_LOST),
        (
            RuntimeError("[unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation to complete"),
            CauseOrder.TIMEOUT,
        ),
        (RuntimeError("wait timeout after 30000ms, keys: /default_pg/0//cpu//0/rank_1"), CauseOrder.TIMEOUT),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), CauseOrder.CAUSE),
        (ValueError("Connection closed by peer is just my text"), CauseOrder.CAUSE),
    ],
)
def test_echoes_are_recognised(error: Exception, order: CauseOrder) -> None:
    wrapped = ValueError("a step failed")
    wrapped.__cause__ = error
    assert from_exception(0, error).order is order
    assert from_exception(0, wrapped).order is order


def test_a_watchdog_that_aborts_is_an_echo() -> None:
    log = "[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3) ran for 600029 milliseconds"
    assert from_exit(1, -signal.SIGABRT, log).order is CauseOrder.TIMEOUT
    assert from_exit(1, -signal.SIGABRT, "assertion failed").order is CauseOrder.CAUSE


def test_the_place_of_a_hang_is_that_of_the_process_with_own_code() -> None:
    """A rank that waits for a data worker is in a library, as are other workers that wait."""
    head = "Current thread 0x1 (most recent call first):\n"
    library = f'  File "{os.__file__}", line 3 in select\n  File "/x/runner/data/reading.py", line 7 in next\n'
    own = '  File "/x/torch/utils/data/fetch.py", line 4 in fetch\n  File "/home/rows.py", line 9 in __getitem__\n'
    for stacks in (library, own, library), (own, library), (library, library, own):
        log = "a line\n" + "".join(head + stack for stack in stacks)
        assert dumped_place(log) == ("/home/rows.py:9 (__getitem__)")
    assert dumped_place(head + library).endswith("os.py:3 (select)")
    assert dumped_place("a line\n") == ""


def test_workers_are_the_children_that_run_the_same_program() -> None:
    """Another program may not expect the signal."""
    other = subprocess.Popen(["sleep", "60"])
    worker = os.fork()
    if worker == 0:
        time.sleep(60)
        os._exit(0)
    try:
        until = time.monotonic() + 10
        while other.pid in forks_of(os.getpid()) and time.monotonic() < until:
            time.sleep(0.01)  # it has not begun its own program yet
        found = forks_of(os.getpid())
        assert worker in found and other.pid not in found
    finally:
        for pid in (worker, other.pid):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(worker, 0)
        other.wait()


def test_a_module_that_closes_stdout_takes_it_from_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / "log", "w", encoding="utf-8") as log:
        monkeypatch.setattr(sys, "stdout", log)
        with console_may_close():
            sys.stdout.close()
            print("heard", flush=True)
        keep_open(log)
        log.close()
        print("still heard", flush=True)
        del log.close
    assert (tmp_path / "log").read_text(encoding="utf-8") == "heard\nstill heard\n"


def test_a_failure_is_one_paragraph() -> None:
    assert from_exception(0, ValueError("bad row\n  second line")).what == "failed: ValueError: bad row second line"
    assert from_exception(0, RunFailed("MW712", "a worker hangs.")).what == "failed: a worker hangs."


@pytest.mark.parametrize(
    ("error", "code", "why"),
    [
        (OSError(errno.EROFS, "Read-only file system", "checkpoints"), "MW720", "the file system is read-only"),
        (OSError(errno.ENOSPC, "No space left on device"), "MW720", "the disk is full"),
        (MemoryError("of this host"), "MW721", "memory ran out"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "MW721", "memory ran out"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "MW721", "memory ran out"),
        (FloatingPointError("the loss is nan"), "MW719", "FloatingPointError"),
        (ValueError("bad row"), "MW710", "ValueError"),
    ],
)
def test_what_a_rank_lacks_has_a_code(error: Exception, code: str, why: str) -> None:
    found = from_exception(0, error)
    assert found.code == code
    assert found.what.startswith(f"failed: {why}: ")


@pytest.mark.parametrize("opened", [True, False])
def test_a_file_that_cannot_be_written_is_named(opened: bool, tmp_path: Path) -> None:
    """Python's error of a write does not."""
    small, (most, hard) = tmp_path / "small.txt", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError) as caught:
            if opened:
                with small.open("w", encoding="utf-8") as file:
                    file.write("0" * 100)
                    file.flush()
            else:
                small.write_text("0" * 100, encoding="utf-8")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    found = from_exception(0, caught.value)
    assert found.code == "MW720"
    assert f"writing {small}" in found.where


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")]
)
def test_limits_that_memory_and_threads_may_reach_are_named(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    limits = {resource.RLIMIT_AS: 1200 * 2**20}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits.get(which, resource.RLIM_INFINITY), -1))
    assert from_exception(0, error).what.endswith("; the limits of this process: 1228800 (ulimit -v)")
    assert "ulimit" not in from_exception(0, RuntimeError("another")).what
    limits.clear()
    assert "ulimit" not in from_exception(0, error).what


def test_a_lack_of_memory_is_known_from_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 7\noom_kill 3\noom_killed 9\n", encoding="ascii")
    assert failure.oom_kills(tmp_path / "vmstat") == 3
    assert failure.oom_kills(tmp_path / "none") is None
    monkeypatch.setattr(failure, "oom_kills", lambda: 3)
    causes = {2: "memory was short: the kernel's OOM killer was at work", 3: "not by the kernel's OOM killer"}
    for before, cause in (causes | {None: "was memory short?"}).items():
        assert from_exit(1, -signal.SIGKILL, "", before).what == f"was killed by SIGKILL ({cause})"
    assert "memory" not in from_exit(1, -signal.SIGSEGV, "", 2).what


def test_ranks_meet_by_ipv6_where_there_is_no_other_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = network.towards

    def towards(address: str) -> str:
        if address == network.LOOPBACK:
            raise ConfigError("MW702", "there is no way to it.")
        return plain(address) if address != "::1" else address

    monkeypatch.setattr(network, "towards", towards)
    assert network.loopback() == "::1"


def test_output_to_a_closed_console_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    console = open(writing, "w", encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", console)
    with console_may_close():
        print("heard", flush=True)
        assert os.read(reading, 100) == b"heard\n"
        os.close(reading)
        print("dropped", flush=True)
        print("this too", flush=True)
    assert sys.stdout is console
    print("and what comes later", flush=True)
    console.close()


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise KeyError("text")


def test_an_exception_without_a_text_keeps_its_name(tmp_path: Path) -> None:
    try:
        raise Unspeakable
    except Unspeakable as error:
        failure = from_exception(1, error)
    assert "Unspeakable: its text cannot be shown (KeyError)" in message(failure, (), 2)
    assert (
        end_of_log(None, tmp_path / "1.log", "a\n\x1b[2Jb\x00\n\x00")
        == f"\nThe end of its log, {tmp_path}/1.log:\n    a\n    [2Jb"
    )
