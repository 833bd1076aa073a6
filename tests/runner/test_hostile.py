"""Bad input at the edges of everyday training: one paragraph with its code, the exit code, and nothing left running.

What a config shows is refused with exit code 2 in this process; what training finds ends a run with 1.
"""

import json

import pyarrow
import pytest
from observed import ranks_of_this_process
from pyarrow import parquet
from small import MODES, SMALL

from runner.cli.verbs import VERBS

ONE = (*SMALL, *MODES["stand_alone"], "train.steps=4", "data.batch_size=4", "data.shuffle=false")
TWO = (*SMALL, *MODES["data_parallel"], "world_size=2", "train.steps=4", "data.batch_size=4", "data.shuffle=false")
WORKERS = "data.workers=2"
EVALUATED = "evaluate.every=2"
COMPOSED = "model={target: networks.Composed, args: {body: BODY, head: {target: torch.nn.Identity}}}"


def rows(way, *more):
    return (f"data={{target: hostile.Rows, args: {{way: {way}}}}}", *more)


def stream(way, *more):
    return (f"data={{target: hostile.Numbers, args: {{way: {way}}}}}", *more)


def shards(path, *more):
    return (f"data={{target: runner.data.shards.Shards, args: {{path: {path}}}}}", *more)


def packed(*args):
    return ("+recipe=gpt_packed", *(f"data.args.{arg}" for arg in args))


def metric(form, *more):
    return (f"evaluate.metrics=[{form}]", *more)


def hook(form, *more):
    return (f"train.callbacks=[{form}]", *more)


def body(form):
    return (COMPOSED.replace("BODY", form),)


# words, code, text: of `run` with the small model on one rank, unless the words begin with a verb or a recipe
REFUSED = [
    # samples
    (rows("negative"), "MW310", "hostile.Rows cannot be had: ValueError"),
    (rows("float"), "MW310", "'float' object"),
    (rows("right", "data.args.rows=0"), "MW310", "has no rows"),
    (rows("right", "data.args.rows=3"), "MW310", "at most 3"),
    (rows("length", "data.shuffle=true"), "MW311", "out of bounds for dimension 0 with size 64"),
    (rows("raises", "data.args.first=0"), "MW311", "row 0 cannot be read: ZeroDivisionError"),
    (rows("none", "data.args.first=0"), "MW312", "row 0 is None"),
    (rows("text", "data.args.first=0"), "MW312", "is a tuple, not a tensor"),
    (rows("meta", "data.args.first=0"), "MW312", "on the device meta, without values"),
    (rows("sparse", "data.args.first=0", "data.collate=hostile.stacked"), "MW312", "of layout torch.sparse_coo"),
    (rows("right", "data.workers=-1"), "MW204", "at least 0"),
    (rows("right", "data.workers=many"), "MW204", "Allowed too: auto"),
    # streams
    (stream("nothing"), "MW822", "yields no samples in pass 1"),
    (stream("raises_at_once"), "MW311", "PermissionError: no access"),
    (stream("texts"), "MW312", "is a str, not a tensor"),
    (stream("right", "train.steps=null", "train.epochs=1", "data.batch_size=21"), "MW310", "at most 20"),
    (("data.target=hostile.NotIterated",), "MW304", "NotIterated"),
    # files
    (shards("none*.jsonl"), "MW821", "there is no file none*.jsonl"),
    (shards("empty"), "MW821", "there is no file empty"),
    (shards("empty.jsonl"), "MW310", "has no rows"),
    (shards("corrupt.jsonl", "data.batch_size=2"), "MW821", "corrupt.jsonl, line 2 from byte 0 on is no JSON"),
    (shards("numbers.jsonl"), "MW821", "numbers.jsonl, line 1 from byte 0 on is no JSON object"),
    (shards("cut.parquet"), "MW821", "cut.parquet cannot be read: ArrowInvalid"),
    (shards("none.arrow"), "MW821", "none.arrow cannot be read: ArrowInvalid"),
    (shards("notes.txt"), "MW821", "none of *.parquet"),
    (shards("s4://x/*.parquet"), "MW821", "Protocol not known: s4"),
    (shards("mixed", "data.args.columns=[lable]"), "MW821", "has no column 'lable'. Known: x, label. Did you mean"),
    (shards("corrupt.jsonl", "data.args.columns=[y]", "data.batch_size=1"), "MW821", "Known: x."),
    # text
    (packed("path=latin.txt"), "MW314", "latin.txt is no UTF-8 text (byte 3)"),
    (packed("path=nowhere"), "MW314", "nowhere cannot be read"),
    (packed("path=corrupt.jsonl"), "MW314", "line 1 has no text under 'text'"),
    (packed("path=corrupt.jsonl", "field=x"), "MW314", "line 1 has list under 'x', where a string is expected"),
    (packed("path=notes.txt", "tokenizer=broken"), "MW830", "broken holds no tokenizer"),
    (packed("path=notes.txt", "tokenizer=missing.json"), "MW830", "there is no such tokenizer"),
    (packed("path=notes.txt", "length=400000"), "MW315", "3001 tokens together"),
    # metrics
    (metric("hostile.no_number"), "MW322", "no_number is a tensor of shape [4, 4]"),
    (metric("hostile.no_value"), "MW322", "no_value is a NoneType"),
    (metric("hostile.raises"), "MW322", "evaluate: the metric raises fails in evaluation: ValueError: no such class"),
    (metric("hostile.three"), "MW322", "three fails in evaluation: TypeError: three() missing"),
    (
        metric("accuracy", "data.target=hostile.TwoTargets", "loss.target=hostile.weighted"),
        "MW322",
        "It gets the output and all 2 targets; its `inputs`",
    ),
    (metric("hostile.NoCompute"), "MW305", "update, compute and reset"),
    (metric("hostile.Lacking"), "MW802", "hostile.Lacking lacks a package: ModuleNotFoundError: it needs cocotools"),
    (metric("hostile.ComputeRaises"), "MW322", "ComputeRaises fails in evaluation: ZeroDivisionError"),
    (metric("hostile.ComputesText"), "MW322", "ComputesText computes no number: quality"),
    (metric("hostile.ComputesTensors"), "MW322", "computes no number: matrix"),
    (metric("hostile.ComputesLoss"), "MW843", "two results are called 'loss'"),
    (metric("accuracy, accuracy"), "MW843", "evaluate.metrics[1]"),
    (metric("acuracy"), "MW204", "Did you mean 'accuracy'? (from the command line"),
    (metric("{target: accuracy, inputs: hostile.raises}"), "MW322", "accuracy fails in evaluation"),
    (metric("accuracy", "evaluate.args.rowz=3"), "MW303", "evaluate.args: networks.Points takes no argument 'rowz'"),
    (metric("accuracy", "checkpoint.best=acuracy"), "MW614", "Did you mean 'accuracy'"),
    # callbacks and loggers
    (hook("hostile.BadRanks"), "MW840", "ranks = 'some'"),
    (hook("hostile.NotMade"), "MW304", "RuntimeError: no licence"),
    (hook("hostile.nothing"), "MW301", "hostile has no 'nothing'"),
    (hook("hostile.no_value"), "MW303", "needs 'output' and 'target'"),
    (hook("early_stopping"), "MW842", "train.callbacks[0] (early_stopping) follows a result"),
    (hook("early_stopping", "evaluate.every=null", "train.steps=3"), "MW842", "nothing is evaluated before the end"),
    (hook("{target: early_stopping, args: {metric: los}}", EVALUATED), "MW614", "Did you mean 'loss'"),
    (hook("{target: ema, args: {decay: 2}}"), "MW304", "decay = 2 must be between 0 and 1"),
    (("report.loggers=[csvv]",), "MW204", "Did you mean 'csv'"),
    # nested objects
    (body("{target: torch.nn.Liner, args: {}}"), "MW301", "model.args.body.target = 'torch.nn.Liner'"),
    (body("{target: torch.nn.Linear, args: {in_featurs: 12}}"), "MW303", "Did you mean 'in_features'"),
    (body("{target: torch.nn.Linear, args: [12, 4]}"), "MW303", "model.args.body.args = [12, 4]"),
    (body("{target: nowhere.Net}"), "MW301", "there is no module 'nowhere'"),
    (body("{target: hostile.NotMade}"), "MW304", "model.args.body: hostile.NotMade cannot be made"),
    (("model.args.hidden=${model.args.hidden}",), "MW206", "Recursive interpolation"),
    # other commands
    (("init", "broken"), "MW860", "holds files already"),
    (("init", "1st"), "MW112", "'1st' ends in no name"),
    (("init", "x" * 300), "MW603", "File name too long"),
    (("completion", "tcsh"), "MW112", "Allowed: bash, zsh, fish"),
    (("explain", "MW9999"), "MW112", "there is no code MW9999"),
    (("schema", "nowhere/x.json"), "MW603", "nowhere/x.json cannot be written"),
    (("tokenize", "latin.txt", "vocabulary=300", "out=made"), "MW314", "no UTF-8"),
    (("tune", *ONE), "MW861", "stand_alone has none to choose between"),
    (("tune", "+recipe=gpt", "tune.plans=0"), "MW204", "at least 1"),
    (("plan", *TWO, "cluster.price_per_hour=-3"), "MW204", "greater than 0"),
    (("plan", *TWO, "cluster.price_per_hour=inf"), "MW204", "finite"),
    (("launch", "--dry-run", *TWO, "launch=kubernetes"), "MW205", "launch.image"),
    (("launch", "--dry-run", *TWO, "launch=skypilot", "launch.nodes=-1"), "MW204", "launch.nodes = -1"),
]

# words, code, text: of `run` with the small model on two ranks
FAILS = [
    (rows("raises"), "MW710", "ZeroDivisionError: division by zero. Where: row 7 of the data"),
    (rows("raises", WORKERS), "MW710", "ZeroDivisionError: division by zero. Where: row 7 of the data"),
    (rows("exits", WORKERS), "MW820", "which ended with exit code 3"),
    (rows("leaves", WORKERS), "MW710", "failed: SystemExit: enough. Where: row 7 of the data"),
    (rows("memory", WORKERS), "MW721", "can't allocate memory"),
    (rows("floats"), "MW312", "has '1' of torch.float32"),
    (rows("dims"), "MW312", "row 7 has '0' of shape (1, 12)"),
    (rows("keys", WORKERS), "MW312", "row 7 has the values 'x', 'other'"),
    (rows("more"), "MW312", "it has '2' beside them"),
    (rows("fewer"), "MW312", "it lacks '1'"),
    (rows("text"), "MW312", "row 7 has '0' of shape ()"),
    (rows("not_a_number"), "MW719", "The loss of step 2 is nan"),
    (("model.target=hooked.Root", "checkpoint.every=1"), "MW719", "its gradient is not finite (norm "),
    (("train.precision=fp16", "train.loss_scale=1e9"), "MW719", "overflowed in fp16 in 3 steps in a row"),
    (stream("raises", WORKERS), "MW710", "OSError: connection reset. Where: row 7 of the data"),
    (stream("shorter", "train.steps=null", "train.epochs=3", WORKERS), "MW822", "ends after 13 samples of epoch"),
    (
        shards("mixed", "data.batch_size=2", "train.steps=8"),
        "MW312",
        "has the values 'z'; the others have 'x', 'label'",
    ),
    (rows("right", EVALUATED, WORKERS, "evaluate.args={way: exits}"), "MW820", "which ended with exit code 3"),
    (metric("hostile.late"), "MW322", "late fails in evaluation: RuntimeError: second batch"),
    *(
        (hook(f"{{target: hostile.At, args: {{hook: {name}}}}}", EVALUATED), "MW841", f"hostile.At fails in {name} at")
        for name in "start before_step before_update after_step before_evaluation evaluation checkpoint end".split()
    ),
    (
        hook("{target: hostile.At, args: {hook: exception}}, {target: hostile.At, args: {hook: after_step, rank: 1}}"),
        "MW841",
        "rank 1 of 2 failed: train.callbacks: hostile.At#2 fails in after_step",
    ),
    (hook("hostile.WritesConfig"), "MW841", "ValidationError"),
    (hook("hostile.WritesWeights"), "MW710", "Where: operator inner"),
    (hook("hostile.LogsText"), "MW841", "could not convert string to float: 'many'"),
    (hook("hostile.FewArguments"), "MW841", "takes 1 positional argument but 2 were given"),
    (hook("hostile.BadState"), "MW609", "Can't pickle"),
    (hook("hostile.Leaves"), "MW841", "SystemExit"),
    (hook("nan_watch", "model.target=hooked.Logarithm"), "MW719", "operator log (log"),
]


QUICK = ("init", "completion", "explain", "schema", "tokenize")
"""Verbs that compose no config."""


def named(cases, sampled=1):
    """One case of every `sampled` and those of quick verbs are in the fast tests."""
    slow = [case[0][0] not in QUICK and number % sampled > 0 for number, case in enumerate(cases)]
    return pytest.mark.parametrize(
        ("words", "code", "says"),
        [
            pytest.param(*case, id=" ".join(case[0])[-60:], marks=[pytest.mark.slow] * late)
            for case, late in zip(cases, slow, strict=True)
        ],
    )


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A folder of faulty files."""
    folder = tmp_path_factory.mktemp("material")
    for name in ("empty", "mixed", "broken"):
        (folder / name).mkdir()
    x = [0.0] * 12
    parquet.write_table(pyarrow.table({"x": [x] * 8, "label": [1] * 8}), folder / "mixed" / "a.parquet")
    parquet.write_table(pyarrow.table({"z": [x] * 8}), folder / "mixed" / "b.parquet")
    texts = {
        "empty.jsonl": "",
        "corrupt.jsonl": json.dumps({"x": x}) + '\n{"x": [1,\n',
        "numbers.jsonl": "3\n" * 8,
        "notes.txt": "a b c\n" * 500,
        "broken/tokenizer.json": "{",
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    for name, content in (("cut.parquet", b"PAR1"), ("none.arrow", b""), ("latin.txt", b"caf\xe9 " * 400)):
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def hostile(command, material, monkeypatch):
    """`hostile(words)` runs the command in the folder of faulty files."""
    monkeypatch.chdir(material)
    return command


@named(REFUSED, sampled=20)
def test_refused(hostile, material, words, code, says):
    before = {*material.rglob("*")}
    alone = words[0] in VERBS or words[0].startswith("+recipe")
    done = hostile(*words) if alone else hostile(*ONE, *words)
    assert done.code == 2, done.err
    (paragraph,) = done.paragraphs
    assert paragraph.startswith("run: ") and paragraph.endswith(f"[{code}]") and says in paragraph
    assert {*material.rglob("*")} == before


@pytest.mark.slow
@named(FAILS)
def test_found_by_a_run(hostile, tmp_path, words, code, says):
    done = hostile(*TWO, *words, f"hydra.run.dir={tmp_path}/out")
    assert done.code == 1, done.err
    paragraph = done.paragraphs[0]
    assert paragraph.startswith("run: rank ") and paragraph.endswith(f"[{code}]") and says in paragraph
    assert "contextlib" not in paragraph
    assert code == "MW820" or len(done.paragraphs) == 1
    assert ranks_of_this_process() == []
