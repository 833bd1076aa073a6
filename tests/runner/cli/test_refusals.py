"""Bad input ends in one paragraph: exit code 2 where the input alone shows the error, 1 where training finds it."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from observed import ranks_of_this_process
from small import HYBRID, MODES, SMALL

from runner.data import mnist

QUICK = ("+recipe=quickstart",)
DIGITS = ("+recipe=ffn_auto", "train.steps=1")
CUBE = ("+recipe=advanced_layout",)
PARALLEL = (*SMALL, *MODES["data_parallel"])
SLOWING = (*PARALLEL, "optimizer.target=networks.Slowing")
SEMI = (*SMALL, *MODES["semi_auto"])
AXES = "parallel.layouts={{a: {{device_matrix: {a}, axes: {x}}}, b: {{device_matrix: {b}, axes: {y}}}}}"

# words of the command line, texts in the error
BAD = [
    # words
    ((*QUICK, "hydra.run.dir="), "hydra.run.dir is empty"),
    ((*QUICK, "~train.clip"), "leave the word out"),
    ((*QUICK, "cluster.name=dgx_h100"), "choose one with cluster=dgx_h100"),
    # the model
    ((*PARALLEL, "model.target=nowhere.Net"), "there is no module 'nowhere'"),
    ((*PARALLEL, "model.target=networks.Clasifier"), "Did you mean 'Classifier'?"),
    ((*PARALLEL, "model.target=faulty.Net"), "importing the module faulty fails: ZeroDivisionError"),
    ((*PARALLEL, "model.target=networks.Points"), "makes a Points; a torch.nn.Module is needed"),
    (
        (*PARALLEL, "model.args.hiden=3"),
        "takes no argument 'hiden'. Known: dropout, norm, hidden. Did you mean 'hidden'? '~model.args.hiden' on the",
    ),
    ((*PARALLEL, "model.args.hidden=many"), "networks.Classifier cannot be made with model.args"),
    ((*QUICK, "model.target=models.ffn.FFN"), "models.ffn.FFN needs 'sizes'; set model.args.sizes=VALUE"),
    ((*PARALLEL, "model.target=faults.Raises"), "(ValueError: nothing works today)"),
    ((*PARALLEL, "model.target=faults.Branches"), "takes a branch or a shape from the values of a tensor"),
    ((*PARALLEL, "model.target=faults.Shapes"), "The model failed on the example batch at "),
    # the loss
    ((*PARALLEL, "loss.target=null"), "The model's forward takes (x), but is called with the entries 0, 1"),
    ((*PARALLEL, "loss.target=null", "model.target=faults.Scores"), "so it must return its loss) returned a tensor"),
    ((*PARALLEL, "loss.args.reduction=none"), "returned a tensor float32[16]; training needs one floating-point"),
    ((*PARALLEL, "loss.target=networks.padded"), "The loss takes (samples), but is called with the model's output and"),
    ((*PARALLEL, "loss.target=torch.nn.CrossEntropy"), "Did you mean 'CrossEntropyLoss'?"),
    (
        (*PARALLEL, "loss.target=torch.nn.MultiLabelMarginLoss"),
        "The loss failed on the model's output, a tensor float32[16, 4], and a tensor int64[16] (RuntimeError: ",
    ),
    ((*PARALLEL, "loss.args.reductoin=sum"), "takes no argument 'reductoin'"),
    # the data
    ((*DIGITS, "data.path=nowhere"), "nowhere: there is no such folder"),
    ((*DIGITS, "data.path=corrupt"), "corrupt/train-images-idx3-ubyte: starts with the bytes 00 00 0c 03"),
    ((*DIGITS, "data.path=short"), "is cut off: its header states"),
    ((*QUICK, "data.path=corrupt"), "takes no argument 'path'"),
    ((*PARALLEL, "data.args.rows=15"), "data.batch_size = 16 is more than the 15 rows of the dataset"),
    ((*PARALLEL, "data.args.rows=-1"), "data"),
    ((*PARALLEL, "data.target=networks.Classifier"), "without __len__ and __getitem__"),
    ((*PARALLEL, "data.target=networks.Words"), "data: stacking fails on 16 samples"),
    ((*PARALLEL, "data.collate=networks.nothing"), "networks has no 'nothing'"),
    ((*PARALLEL, "data.collate=networks.halves"), "data: data.collate fails on 16 samples"),
    ((*PARALLEL, "data={target: networks.Trouble, args: {way: shape, rows: 41}}", "data.batch_size=40"), "samples"),
    # the optimizer
    ((*PARALLEL, "optimizer.target=torch.optim.SDG"), "torch.optim has no 'SDG'."),
    ((*PARALLEL, "optimizer.args.momentun=0.9"), "Did you mean 'momentum'?"),
    ((*PARALLEL, "optimizer.args.lr=-1.0"), "optimizer: torch.optim.SGD cannot be made with optimizer.args"),
    ((*PARALLEL, "optimizer.freeze=[inner.wieght]"), "optimizer.freeze[0] = 'inner.wieght' matches no parameter"),
    ((*PARALLEL, "optimizer.freeze=['*']"), "nothing to train"),
    ((*PARALLEL, "optimizer.groups=[{match: ['*.gain'], args: {}}]"), "optimizer.groups[0].match[0] = '*.gain'"),
    ((*PARALLEL, "optimizer.scheduler.target=torch.optim.lr_scheduler.StepLR"), "needs 'step_size'"),
    ((*PARALLEL, "optimizer.scheduler.target=torch.optim.SGD"), "optimizer.scheduler"),
    ((*PARALLEL, "parallel.zero={stage: 1, options: {stag3: 1}}"), "DeepSpeed has no such option of ZeRO"),
    ((*PARALLEL, "parallel.zero={stage: 1, options: {reduce_scatter: false}}"), "it must stay true"),
    ((*PARALLEL, "parallel.zero.stage=2", "optimizer.target=torch.optim.LBFGS"), "LBFGS cannot be used here"),
    ((*PARALLEL, "optimizer.target=networks.ScheduleFree"), "train.callbacks=[ema]"),
    ((*SLOWING, "optimizer.args.kind=dict", "parallel.zero.stage=1"), "Slowing keeps tensors in a dict, 'steps'"),
    (
        (*SLOWING, "optimizer.args.kind=beside", "launch.max_restarts=1"),
        "Slowing keeps steps beside the states of parameters",
    ),
    ((*SLOWING, "optimizer.args.kind=deque"), "numbers, strings, lists, dicts and tensors (a collections.deque)"),
    # devices and batch
    ((*PARALLEL, "device=cuda"), "device = cuda needs 4 GPUs (world_size), but this machine has"),
    ((*PARALLEL, "data.batch_size=18"), "a micro-batch has 18 samples (data.batch_size / train.accumulate)"),
    ((*PARALLEL, "data.batch_size=16", "train.accumulate=8"), "a micro-batch has 2 samples"),
    ((*SMALL, *HYBRID, "parallel.dataset_strategy=[[2,1]]"), "gives 1 entries, the batch has 2 (0, 1)"),
    ((*SMALL, *HYBRID, "data.batch_size=15"), "(2, 1) cannot slice batch entry '0' of shape (15, 12)"),
    (
        (*SMALL, *HYBRID, "parallel.dataset_strategy=[[1,4],[2]]", "parallel.mesh={dp: 4, tp: 1}"),
        "no neighbouring axes",
    ),
    # the plan
    ((*QUICK, "parallel.strategies.matmul3=[[8,1],[1,1]]"), "matmul3"),
    ((*QUICK, "parallel.strategies.matmul=[[1,3],[3,1]]", "world_size=3"), "cannot be cut into 3 equal slices"),
    ((*QUICK, "parallel.strategies.relu=[[2,4],[4,1]]"), "relu"),
    ((*QUICK, "parallel.strategies.matmul=[[2,4],[2,1]]"), "matmul"),
    ((*QUICK, "parallel.strategies.matmul=[[2,4,1],[4,1]]"), "matmul"),
    ((*QUICK, "parallel.strategies=null"), "parallel"),
    (
        (*QUICK, "parallel.set_data_parallel=[matmul3]"),
        "matches no module of the model. Known: loss, matmul, matmul2, relu.",
    ),
    ((*QUICK, "parallel.dataset_strategy=[[2,1]]"), "gives 1 entries, the batch has 2 (0, 1)"),
    ((*SEMI, "parallel.dataset_strategy=[[1,8],[1]]", "world_size=8"), "dim 1 of shape (16, 12) cannot be cut into 8"),
    (
        (
            *QUICK,
            "world_size=24",
            AXES.format(a="[3,8]", x="[p,q]", b="[8,3]", y="[r,s]"),
            "parallel.strategies.matmul=[{layout: a, dims: [q, null]}, {layout: a, dims: [null, null]}]",
            "parallel.strategies.relu=[{layout: b, dims: [r, null]}]",
        ),
        "common refinement",
    ),
    (
        (
            *SMALL,
            "model.target=networks.Tied",
            "parallel=semi_auto",
            "parallel.strategies={enter.matmul: [[1,1],[1,4]], leave.matmul: [[4,1],[1,1]]}",
        ),
        "Parameter enter.weight is used by two operators whose strategies slice it differently: enter",
    ),
    # communication
    (
        (*PARALLEL, "parallel.comm_fusion.all_gather={mode: index, config: [1]}"),
        "only all_reduce, the sum of gradients",
    ),
    (
        (*PARALLEL, "parallel.comm_fusion.all_reduce.mode=size"),
        "takes a number of megabytes above 0, e.g. 25; change one",
    ),
    (
        (*PARALLEL, "parallel.comm_fusion.all_reduce={mode: size, config: -1}"),
        "parallel.comm_fusion.all_reduce.config = -1: must be greater than 0",
    ),
    ((*PARALLEL, "parallel.comm_fusion.all_reduce.config=3"), "'auto', which takes nothing (null)"),
    (
        (*PARALLEL, "parallel.comm_fusion.all_reduce={mode: index, config: [2, 1]}"),
        "a list of increasing positions in the order in which backward completes the gradients, e.g. [4, 8]",
    ),
    (
        (*PARALLEL, "parallel.comm_fusion.all_reduce={mode: index, config: [1, 50]}"),
        "cuts behind gradient 50, but there",
    ),
    ((*PARALLEL, "parallel.comm_fusion.all_reduce.mode=some"), "is not allowed"),
    ((*PARALLEL, "+parallel.comm_fusion.allreduce.mode=auto"), "Did you mean 'all_reduce'?"),
    (
        (*PARALLEL, "parallel.zero.stage=1", "parallel.comm_fusion.all_reduce={mode: index, config: [1]}"),
        "ZeRO cuts its reductions by size; choose mode size or auto, or parallel.zero.stage=0",
    ),
    (
        (*SMALL, *MODES["stand_alone"], "parallel.comm_fusion.all_reduce={mode: size, config: 1}"),
        "choose another mode or parallel.comm_fusion.all_reduce.mode=auto",
    ),
    (
        (*SMALL, *HYBRID, "parallel.comm_fusion.reduce_scatter={mode: size, config: 1}"),
        "leaves such calls to the module",
    ),
    # resuming
    ((*PARALLEL, "train.resume=nowhere"), "train.resume = 'nowhere': this folder does not exist"),
    ((*PARALLEL, "train.resume=corrupt"), "train.resume = 'corrupt': this folder holds no complete checkpoint"),
    ((*PARALLEL, "train.resume=step-00000002"), "The checkpoint step-00000002 is damaged"),
]

FAULTS = """
import torch
from networks import Classifier

class Raises(Classifier):
    def forward(self, x):
        raise ValueError("nothing works today")

class Branches(Classifier):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else x[x > 0])

class Scores(Classifier):
    def forward(self, x, label):
        return super().forward(x)

class Shapes(Classifier):
    def forward(self, x):
        return super().forward(x[:, 1:])
"""


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A folder with faulty files."""
    folder = tmp_path_factory.mktemp("material")
    (folder / "faults.py").write_text(FAULTS, encoding="utf-8")
    (folder / "faulty.py").write_text("NUMBER = 1 / 0\n", encoding="utf-8")
    good = (mnist.SHIPPED / "train-labels-idx1-ubyte.gz").read_bytes()
    for name, content in (("corrupt", b"\0\0\x0c\x03 nothing of use"), ("short", b"\0\0\x08\x03\0\0\0\x01\0\0\0\x01")):
        (folder / name).mkdir()
        (folder / name / "train-images-idx3-ubyte").write_bytes(content.ljust(20, b"\1"))
        (folder / name / "train-labels-idx1-ubyte.gz").write_bytes(good)
    (folder / "step-00000002").mkdir()
    (folder / "step-00000002" / "checkpoint.json").write_text('{"step": 2', encoding="utf-8")
    return folder


@pytest.fixture
def bad(command, tmp_path, material, monkeypatch):
    """`bad(words)` runs the command in a folder with the faulty files; the error must leave no new file there."""
    for path in material.iterdir():
        (tmp_path / path.name).symlink_to(path)
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])

    def call(*words):
        done = command(*words)
        for name in ("faults", "faulty"):
            sys.modules.pop(name, None)
        assert sorted(path for path in tmp_path.iterdir() if path.name != "__pycache__") == before
        return done

    return call


@pytest.mark.few(10)
@pytest.mark.parametrize(("words", "says"), BAD, ids=[" ".join(words[-2:])[:70] for words, _ in BAD])
def test_refused(bad, words, says):
    done = bad(*words)
    assert done.code == 2, done.err
    (paragraph,) = done.paragraphs
    assert paragraph.startswith("run: ")
    assert says in paragraph
    assert "Traceback" not in done.err + done.out


def test_conflicting_strategies_are_reported_with_operators_and_layouts(bad):
    words = next(words for words, says in BAD if says.startswith("Parameter enter.weight"))
    (paragraph,) = bad(*words).paragraphs
    for part in ("enter (linear, runner/networks.py:", "leave (linear, runner/networks.py:", "(4, 1)", "(1, 1)"):
        assert part in paragraph


@pytest.mark.few(1)
@pytest.mark.parametrize("verb", ["plan", "explain", "verify"])
def test_every_verb_refuses(bad, verb):
    for words in ((*PARALLEL, "model.target=faults.Raises"), (*QUICK, "parallel.strategies.matmul3=[[8,1],[1,1]]")):
        done = bad(verb, *words)
        assert (done.code, len(done.paragraphs)) == (2, 1)
    if verb == "verify":
        assert bad(verb, *PARALLEL, "parallel.zero={stage: 1, options: {stag3: 1}}").code == 2


TROUBLE = {
    "shape": (
        r"rank \d of 4 failed: data: row \d+ has '0' of shape \(11,\), where \(12,\) is expected",
        "",
    ),
    "names": (r"rank \d of 4 failed: data: row \d+ has the values 'x', 'label'", ""),
    "raise": (r"rank \d of 4 failed: LookupError: row \d+ is not to be had", r"networks\.py:\d+ \(__getitem__\)"),
    "class": (r"rank \d of 4 failed: IndexError: Target \d is out of bounds", "operator loss"),
    "poison": (r"rank \d of 4 failed: FloatingPointError: The loss of step \d is nan", ""),
    "kill": (r"rank \d of 4 was killed by SIGKILL", ""),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("way", TROUBLE)
def test_found_while_training(command, tmp_path, way):
    """The first 40 rows are valid, and with this seed the first step reads no others."""
    started = time.monotonic()
    words = (
        *PARALLEL,
        "data={target: networks.Trouble}",
        f"data.args.way={way}",
        "data.batch_size=4",
        "train.steps=16",
    )
    done = command(*words, f"train.seed={SEED}", "hydra.run.dir=out")
    assert time.monotonic() - started < 15
    assert done.code == 1
    message, where = TROUBLE[way]
    assert re.search(message, done.err) and re.search(where, done.err)
    assert "out/ranks/" in done.err and done.err.count("run: ") == 1
    if way == "kill":
        assert "The end of its log, " in done.err
    else:  # one paragraph, without a traceback of the project's files
        assert len(done.paragraphs) == 1 and "The traceback is in " in done.err
        assert not re.search(r"(runner|strategies)/\w+/\w+\.py:", done.err.replace("tests/runner", ""))
    assert len((tmp_path / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) >= 1
    assert (tmp_path / "out" / "error.txt").exists()


def seed_that_begins_well():
    """The first seed with which step 1 of 4 rows reads rows below 40 only, and step 2 does not."""
    from runner.data.order import Order

    for seed in range(100):
        order = Order(64, 4, seed)
        if max(order.rows(0)) < 40 <= max(order.rows(1)):
            return seed
    raise AssertionError


SEED = seed_that_begins_well()


def test_a_rank_that_is_killed_ends_the_run(command, tmp_path):
    killed = []

    def kill_one():
        metrics = tmp_path / "out" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text(encoding="utf-8").count("\n") > 3):
            time.sleep(0.01)
        os.kill(ranks_of_this_process()[-1], signal.SIGKILL)
        killed.append(time.monotonic())

    killer = threading.Thread(target=kill_one)
    killer.start()
    done = command(*PARALLEL, "train.steps=100000", "hydra.run.dir=out")
    ended = time.monotonic()
    killer.join()
    assert done.code == 1
    assert re.match(r"run: rank \d of 4 was killed by SIGKILL \(.*\)\. \[MW711\]\nThe end of its log, ", done.err)
    assert ended - killed[0] < 5
    assert ranks_of_this_process() == []


@pytest.fixture
def real(tmp_path):
    """`real(words)` starts the command in a new process and process group."""
    started = []

    def call(*words):
        path = os.pathsep.join([os.environ["PYTHONPATH"], str(Path(__file__).parents[1])])
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "runner", *words],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                start_new_session=True,
            )
        )
        return started[-1]

    yield call
    for process in started:
        process.kill()
        process.communicate()


def test_the_real_command_refuses_too(real, tmp_path):
    process = real(*QUICK, "parallel.strategies.matmul3=[[8,1],[1,1]]")
    _, err = process.communicate(timeout=60)  # waits for all processes with its streams, so none is left
    assert (process.returncode, err.count("\n")) == (2, 1)
    assert "matmul3" in err and err.startswith("run: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_real_command_fails_too(real):
    data = ("data={target: networks.Trouble, args: {way: raise}}", "data.batch_size=4", f"train.seed={SEED}")
    process = real(*PARALLEL, *data, "train.steps=16", "hydra.run.dir=out")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.match(r"run: rank \d of 4 failed: LookupError: row \d+ is not to be had\. Where: ", err)


@pytest.mark.slow  # recovery/test_stopping.py tests every signal
def test_ctrl_c(real, tmp_path):
    process = real(*PARALLEL, "train.steps=100000", "hydra.run.dir=out")
    metrics = tmp_path / "out" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text(encoding="utf-8").count("\n") > 3):
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=5)
    assert process.returncode == 130
    assert re.search(r"stopped by SIGINT after step \d+, which is saved\. .* train\.resume=auto\n$", err)
