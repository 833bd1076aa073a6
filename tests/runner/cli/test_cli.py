"""The command line interface: output, exit codes and the files that it leaves."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.errors import MissingConfigException

from runner.cli.hydra_errors import reword
from runner.cli.verbs import VERBS
from runner.config.keys import table
from runner.errors import ConfigError, RunFailed
from strategies.core.errors import StrategyError

QUICK = "+recipe=quickstart"
CUBE = "+recipe=advanced_layout"

# words of the command line, texts in the error
BAD = [
    ([], "run --help"),
    (["+recipe=quikstart"], "Did you mean 'quickstart'? (from the command line: +recipe=quikstart)"),
    (["recipe=quickstart"], "+recipe=NAME"),
    (["+recipes=quickstart"], "Did you mean 'recipe'?"),
    (["recipes=quickstart"], "Did you mean 'recipe'?"),
    ([QUICK, "+recipe=zero"], "chosen twice"),
    (["trian", QUICK], "Did you mean 'train'?"),
    (["train", "plan", QUICK], "two verbs"),
    (["explain", "runs/plan.json"], "parallel.plan=FILE"),
    ([QUICK, "job=trian"], "Did you mean 'train'?"),
    ([QUICK, "=3"], "names no key"),
    ([QUICK, "--bad"], "--bad"),
    ([QUICK, "--cfg", "jobs"], "invalid choice: 'jobs'"),
    (["--config-dir", "nowhere", QUICK], "nowhere' not found"),
    (["--config-name", "nothing"], "primary config 'nothing'"),
    ([QUICK, "parallel.serach=x"], "Did you mean 'search'? (from the command line: parallel.serach=x)"),
    ([QUICK, "+train.stepz=3"], "Did you mean 'steps'? (from the command line: +train.stepz=3)"),
    ([QUICK, "train.steps.x=3"], "train.steps has no keys of its own"),
    ([QUICK, "trian.steps=3"], "trian is not a config key. Allowed: recipe, world_size"),
    ([QUICK, "data.arg.x=3"], "data.arg is not a config key. Allowed: target, args"),
    ([QUICK, "+train.steps=5"], "without the plus"),
    ([QUICK, "~train.stepz"], "Did you mean 'steps'?"),
    ([QUICK, "~train.steps"], "train.steps = null does not go with train.epochs = null"),
    ([QUICK, "train.steps=???"], "train.steps has no value and no default"),
    ([QUICK, "train.steps=-3"], "train.steps = -3: must be at least 1. (from the command line: train.steps=-3)"),
    ([QUICK, "train.steps=many"], "train.steps = 'many': must be an integer"),
    ([QUICK, "train.steps=2.5"], "train.steps = 2.5: must be an integer"),
    ([QUICK, "train.steps=true"], "train.steps = true: must be an integer"),
    ([QUICK, "train.steps="], "train.steps = '': must be an integer"),
    ([QUICK, "train.epochs=2"], "train.steps from recipe/quickstart, train.epochs from the command line"),
    ([QUICK, "train.steps=null"], "train.steps=100 or train.epochs=10"),
    ([QUICK, "train.clip=0"], "must be greater than 0."),
    ([QUICK, "train.clip=inf"], "must be a finite number"),
    ([QUICK, "train.precision=fp61"], "Allowed: fp32, fp64, bf16, fp16, bf16_autocast. Did you mean 'fp"),
    ([QUICK, "train=5"], "train = 5: must be a mapping"),
    ([QUICK, "train.accumulate=5"], "train.accumulate = 5 must divide data.batch_size = 16"),
    ([QUICK, "+data.collate_args={length: 8}"], "does not go with data.collate = null"),
    ([QUICK, "report.progress=maybe"], "Allowed: auto, true, false"),
    ([QUICK, "report.tensorboard=3"], "must be true or false"),
    ([QUICK, "model.target=Net"], "is not a dotted name"),
    ([QUICK, "evaluate.metric=acuracy"], "Did you mean 'accuracy'?"),
    ([QUICK, "optimizer.groups=[{match: [], args: {}}]"], "optimizer.groups.0.match = []: must not be empty"),
    ([QUICK, "data.args.rows=${nope}"], "nope"),
    ([QUICK, "world_size=0"], "world_size = 0: must be at least 1"),
    ([QUICK, "world_size=6"], "[2, 4] makes 8 slices, which do not divide world_size = 6. (from recipe/quickstart)"),
    (
        [QUICK, "world_size=8", "parallel.pipeline.stages=2"],
        "makes 8 slices, which do not divide world_size / parallel.pipeline.stages = 4.",
    ),
    ([QUICK, "device=gpu"], "Allowed: auto, cpu, cuda"),
    ([QUICK, "parallel=atuo"], "Did you mean 'auto'?"),
    ([QUICK, "parallel.mode=atuo"], "Did you mean 'auto'?"),
    ([QUICK, "parallel=parameter_server"], "drop it with parallel.strategies=null"),
    ([QUICK, "parallel.search=sharding_propogation"], "Did you mean 'sharding_propagation'?"),
    ([QUICK, "parallel=stand_alone"], "parallel.mode from the command line: parallel=stand_alone"),
    ([QUICK, "parallel=data_parallel"], "drop it with parallel.strategies=null"),
    ([QUICK, "parallel.mesh={dp:2,tp:3}"], "parallel.mesh = [2, 3] has 6 devices, but world_size = 8 has 8"),
    ([QUICK, "parallel.mesh.dp=-1"], "parallel.mesh.dp = -1: must be at least 1"),
    ([QUICK, "parallel.mesh.dp=8", "parallel=data_parallel", "parallel.strategies=null"], "parallel.mesh=null"),
    ([QUICK, "parallel.strategies.matmul=[[2,3],[3,1]]"], "[2, 3] makes 6 slices"),
    ([QUICK, "parallel.strategies.matmul=[[2,0],[4,1]]"], "input 0: dim 1: 0 is not a number of slices"),
    ([QUICK, "parallel.strategies.matmul=[2,4]"], "input 0: 2 is not a list of counts"),
    ([QUICK, "parallel.strategies.matmul=3"], "expected one entry per input"),
    ([QUICK, "parallel.strategies.matmul2={in:[[8,1],[1,1]],out:8}"], "matmul2 = 8: expected one entry per output"),
    ([QUICK, "parallel.strategies=[1]"], "parallel.strategies = [1]: must be a mapping"),
    ([QUICK, "parallel.strategies.mat*=[[2,4],[4,1]]"], "keys of a mapping"),
    ([CUBE, "+parallel.strategies={relu1:[{layout:cub,dims:[mp,null]}]}"], "Did you mean 'cube'?"),
    ([CUBE, "+parallel.strategies={relu1:[{layout:cube,dims:[mp,tp]}]}"], "'tp' is not an axis of layout 'cube'"),
    ([CUBE, "+parallel.strategies={relu1:[{layout:cube,dims:[mp,[mp,sp]]}]}"], "'mp' is used twice"),
    ([CUBE, "+parallel.strategies={relu1:[{layout:cube}]}"], "is not a layout"),
    ([CUBE, "parallel.layouts.line.device_matrix=[4]"], "parallel.layouts.line = [4] has 4 devices"),
    ([CUBE, "parallel.layouts.line.axes=[a,b]"], "must name each of the 1 axes"),
    ([CUBE, "parallel.layouts.cube.axes=[a,a,b]"], "must name each of the 3 axes"),
    (
        ["+recipe=zero", "train.precision=fp64", "parallel.zero.engine=deepspeed"],
        "choose train.precision=fp32, or parallel.zero.engine=auto",
    ),
    (["+recipe=zero", "parallel.zero.stage=4"], "must be at most 3"),
    (
        ["+recipe=zero", "parallel=stand_alone", "world_size=1"],
        "parallel.zero.stage = 1 does not go with parallel.mode",
    ),
    (
        ["+recipe=zero", "parallel.zero.stage=0", "parallel.zero.options={overlap_comm: true}"],
        "does not go with parallel.zero.stage = 0: ",
    ),
    (["+recipe=data_parallel", "parallel=stand_alone"], "set world_size=1"),
    (["+recipe=data_parallel", "parallel.dataset_strategy=full_batch"], "Allowed here: data_parallel"),
    (["+recipe=data_parallel", "parallel.dataset_strategy=full_btach"], "Did you mean 'full_batch'?"),
    (["+recipe=hybrid_matmul", "parallel.dataset_strategy=[[3,1],[1,1]]"], "parallel.dataset_strategy: input 0"),
    ([QUICK, "checkpoint.best=loss"], "set evaluate.every"),
    ([QUICK, "data.path=x,{y"], "a bracket, brace or quote is not closed"),
    ([QUICK, "data.path=[x]]"], "needs quotes inside quotes"),
    ([QUICK, "parallel.strategies={[ab]: [[2,1],[2,1]]}"], r"escaped: '{\[qkv\]_proj: [[2,4],[4,1]]}'"),
    (
        [QUICK, "parallel.strategies={a: [[2,1],[2,1]], '[ab].*': [[2,1]]}"],
        "brackets in the key of a mapping are escaped",
    ),
    ([QUICK, 'parallel.mesh={"": 4}'], "keys of a mapping stand without quotes"),
    ([QUICK, "parallel.mesh={dp:2"], "a bracket, brace or quote is not closed"),
    ([QUICK, "train={steps: 1, stps: 2}"], "train.stps is not a config key"),
    ([QUICK, "train.steps=1,2"], "add -m"),
    ([QUICK, "train.steps=range(1,3)"], "add -m"),
    (["-m", QUICK, "train.steps=3,-1"], "job #1 (+recipe=quickstart train.steps=-1): train.steps = -1"),
    (["-m", "+recipe=quickstart,quikstart"], "job #1 (+recipe=quikstart): recipe = 'quikstart' does not exist"),
    (["+recipe=/tmp/mine.yaml"], "recipes/NAME.yaml is +recipe=NAME. (from the command line: +recipe=/tmp/mine.yaml)"),
    (["plan", QUICK, "cluster=/tmp/mine.yaml"], "cluster = '/tmp/mine.yaml' does not exist. Allowed: a100, auto"),
    (["plan", QUICK, "cluster=mine"], "named by its file: cluster.file=PATH."),
    (["+recipe=1"], "recipe = '1' does not exist. Allowed: advanced_layout"),
    ([QUICK, "parallel.server.staleness=2"], "parallel.server.consistency from its default"),
    (["+recipe=null"], "recipe = 'null' does not exist"),
    (["quickstart"], "`run +recipe=quickstart`"),
    (["plan", "quikstart"], "`run plan +recipe=quickstart`"),
    ([QUICK, "parallel.mode=autoparallel"], "Did you mean 'auto'?"),
    ([QUICK, "parallel.mode=auto_parallel"], "Did you mean 'auto'?"),
    ([QUICK, "parallel.mode=data"], "Did you mean 'data_parallel'?"),
    ([CUBE, "+parallel.strategies={relu1:[{layout:cube,dims:[mp,None]}]}"], "A dim that no axis slices is null."),
    ([QUICK, "train.clip=None"], "No value is written null."),
    ([QUICK, "parallel.strategies.matmul=((2,4),(4,1))"], "parallel.strategies.matmul=[[2,4],[4,1]]"),
    (["recipes", "quikstart"], "Did you mean 'quickstart'?"),
    (["doctor", "now"], "doctor = 'now': this folder does not exist"),
]


@pytest.fixture
def mine(tmp_path):
    """`mine(text)` writes a recipe of that name in the working directory."""

    def write(text):
        (tmp_path / "recipes").mkdir()
        (tmp_path / "recipes" / "mine.yaml").write_text(text, encoding="utf-8")

    return write


@pytest.mark.few(10)
@pytest.mark.parametrize(("words", "says"), BAD, ids=[" ".join(words) or "nothing" for words, _ in BAD])
def test_bad_input_is_one_paragraph(command, left, words, says):
    done = command(*words)
    assert done.code == 2
    (paragraph,) = done.paragraphs
    assert paragraph.startswith("run: ")
    assert says in paragraph
    assert done.out == ""
    assert left() == []


def test_every_invalid_key_is_reported(command):
    done = command(QUICK, "train.steps=x", "train.seed=-1", "data.batch_size=0")
    assert [paragraph.split()[1] for paragraph in done.paragraphs] == ["data.batch_size", "train.steps", "train.seed"]


def test_every_bad_job_of_a_sweep_is_reported(command, left):
    done = command("-m", QUICK, "train.steps=-1,3,0")
    assert done.code == 2
    assert [paragraph.split()[2] for paragraph in done.paragraphs] == ["#0", "#2"]
    assert left() == []


def test_a_broken_recipe_of_the_user_harms_no_other(command, mine):
    mine("# @package _global_\ntrain: {steps: [\n")
    assert command(QUICK, "--cfg", "job").code == 0


RECIPES = {
    "train: {steps: 3}\n": "must begin with the line `# @package _global_`",
    "# @package model\ntarget: a.B\n": "must begin with the line `# @package _global_`",
    "": "is empty",
    "# @package _global_\n": "is empty",
    "- a\n- b\n": "holds a list",
    "# @package _global_\ntrain: {steps: [\n": "is not valid YAML",
    "# @package _global_\ndefaults: [{parallel: auto}, _self_]\nworld_size: 2\n": "`- override /parallel: auto`",
    "# @package _global_\ndefaults: [{/parallel: auto}, _self_]\nworld_size: 2\n": "`- override /parallel: auto`",
    "# @package _global_\ndefaults: [{override cluster: a100}]\nworld_size: 2\n": "`- override /cluster: a100`",
    "# @package _global_\ndefaults: 3\n": "defaults must be a list",
    "# @package _global_\ndefaults: [quickstrat, _self_]\n": "its defaults name 'quickstrat', which does not exist",
    "# @package _global_\ntrain: [1, 2]\n": "mine.yaml: a section, such as model, data or train, is a list",
    "# @package _global_\nmodel: {args: {null: 1}}\n": "model.args: null cannot be a key",
    "# @package _global_\nparallel: {strategies: {matmul: '((2,4),(4,1))'}}\n": "write counts such as [[2, 4], [4, 1]]",
    "# @package _global_\nparallel: {strategies: {a: [(2,4),(4,1)]}}\n": "lists have square brackets",
}


@pytest.mark.parametrize("text", RECIPES)
def test_a_file_that_is_no_recipe_is_named_with_its_fault(command, left, mine, text):
    mine(text)
    done = command("+recipe=[quickstart,mine]")
    (paragraph,) = done.paragraphs
    assert done.code == 2 and RECIPES[text] in paragraph and "mine" in paragraph, paragraph
    assert "<unicode string>" not in paragraph
    assert [path.name for path in left()] == ["recipes", "mine.yaml"]


def test_every_job_of_a_sweep_with_a_wrong_recipe_is_reported(command, mine):
    mine("train: {steps: 3}\n")
    done = command("-m", "+recipe=mine,quickstart", "train.steps=0,1")
    assert [paragraph.split()[2] for paragraph in done.paragraphs] == ["#0", "#1", "#2"] and done.code == 2


@pytest.mark.parametrize("group", ["hydra/launcher=joblib", "hydra/sweeper=optuna"])
def test_an_optional_part_says_what_to_install(group):
    missing = MissingConfigException("", missing_cfg_file=group.replace("=", "/"), options=["basic"])
    assert 'pip install "meshwright[sweep]"' in str(reword(missing, [group]))


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"}, "world_size=8 launch=mpirun"),
        ({"PMI_RANK": "1", "PMI_SIZE": "8"}, "world_size=8 launch=mpirun"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "world_size=4 launch=slurm"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "world_size=2 launch=torchrun"),
    ],
)
def test_another_launcher_is_suggested(command, variables, launcher):
    assert launcher in command(QUICK, **variables).err


@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"])
@pytest.mark.parametrize("words", [["-m", QUICK, "train.steps=1,2"], [QUICK]], ids=["sweep", "run"])
def test_other_launchers_are_refused(command, left, variable, words):
    done = command(*words, **{variable: "0"})
    assert done.code == 2
    assert variable in done.paragraphs[0]
    assert left() == []


def test_a_launcher_with_one_process_is_no_harm(command, job):
    job(lambda config, run_dir: None)
    assert command(QUICK, SLURM_PROCID="0", SLURM_NTASKS="1").code == 0


def test_a_launcher_may_start_the_parts_of_a_run(command, job):
    job(lambda config, run_dir: None)
    hosts = ("launch=rank_table", "launch.hosts=[a:1,b:1]", "world_size=2", "launch.port=29400")
    assert command("+recipe=data_parallel", *hosts, "launch.rank=1", SLURM_PROCID="1", SLURM_NTASKS="2").code == 0


def test_help_shows_verbs_recipes_and_examples(command):
    text = command("--help").out
    assert "143" in text
    for name, verb in VERBS.items():
        assert re.search(rf"^  {name} +{re.escape(verb.summary)}", text, re.M)
        assert verb.example in text
    assert re.search(r"^  quickstart +The smallest", text, re.M)
    assert "parallel: auto, data_parallel, hybrid, parameter_server, semi_auto, stand_alone" in text


@pytest.mark.few(4)
@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb(command, verb):
    for words in ((verb, "--help"), ("-h", verb)):
        done = command(*words)
        assert done.code == 0 and re.match(rf"run {verb}\s", done.out) and VERBS[verb].example in done.out
        assert "143" in done.out


@pytest.mark.parametrize(
    ("verb", "keys", "not_there"),
    [
        ("calibrate", ["calibrate.seconds=60.0", "launch.threads=1"], "verify.steps"),
        (
            "plan",
            ["parallel.zero.stage=0", "cluster.nodes=", "parallel.comm_fusion.all_reduce.mode="],
            "calibrate.file",
        ),
        ("verify", ["verify.tolerance=null"], "predict.rows"),
        ("predict", ["predict.format=jsonl", "predict.data.path=null"], "train.steps"),
        ("train", ["optimizer.args.lr=auto", "checkpoint.keep=null"], "verify.steps"),
    ],
)
def test_help_of_a_verb_has_its_keys_with_what_they_mean(command, verb, keys, not_there):
    lines = [line.split() for line in command(verb, "--help").out.splitlines() if line]
    for key in keys:
        (line,) = [line for line in lines if line[0].startswith(key)]
        assert len(line) > 1
    assert not any(line[0].startswith(not_there) for line in lines)


@pytest.mark.slow
def test_every_key_that_a_help_names_is_explained():
    rows = [row for verb in VERBS.values() for key in verb.keys for row in table((key,)).splitlines() or [key]]
    assert [row for row in rows if not re.fullmatch(r"  \S+=.*?  +\S.*", row)] == []


def test_the_end_of_a_command_is_that_of_a_process():
    """What runs at exit has run, threads have ended, and nothing that was printed is lost."""
    begin = (
        "import atexit, sys, threading; sys.argv[1:] = ['--version']; atexit.register(print, 'exit')",
        "last = lambda: (threading.main_thread().join(), print('thread'))",
        "if sys.stdin.read(): threading.Thread(target=last).start()",
        "from runner.__main__ import main; main()",
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for given, said in (("", ["exit"]), ("thread", ["thread", "exit"])):
        done = subprocess.run(
            [sys.executable, "-c", "\n".join(begin)],
            env=environment,
            input=given,
            capture_output=True,
            encoding="utf-8",
        )
        assert (done.returncode, done.stdout.split()[2:]) == (0, said), done.stderr


def test_version_is_ours(command):
    assert re.fullmatch(r"meshwright \d+\.\d+\.\d+\n", command("--version").out)


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("run +recipe=zero train.precision=", ["fp32", "fp64", "bf16", "fp16", "bf16_autocast"]),
        ("run plan train.precision=f", ["fp32", "fp64", "fp16"]),
        ("run parallel.zero.stage=", ["auto", "0", "1", "2", "3"]),
        ("run parallel.zero=", ["auto", "0", "1", "2", "3"]),
        ("run parallel.search=rec", ["recursive_programming"]),
        ("run train.compile=", ["true", "false"]),
        ("run report.progress=", ["auto", "true", "false"]),
        ("run checkpoint.best_mode=", ["min", "max", "null"]),
        ("run parallel.pipeline.schedule=1", ["1f1b"]),
        ("run parallel.comm_fusion.all_gather.mode=", ["auto", "size", "index", "none"]),
    ],
)
def test_completion_offers_every_value_of_an_enumeration(command, line, offers):
    key = line.rpartition(" ")[2].partition("=")[0]
    assert command("-sc", "query=bash", COMP_LINE=line).out.split() == [f"{key}={one}" for one in offers]


def test_origins_name_the_override_that_was_given(command, tmp_path):
    done = command("verify", QUICK, "launch=deepspeed")
    assert done.code == 2 and "(from the command line: launch=deepspeed)" in done.err
    (tmp_path / "hosts").write_text("127.0.0.1 slots=4\n", encoding="utf-8")
    done = command(QUICK, "launch=torchrun", "launch.hostfile=hosts")
    assert done.code == 2 and "launch.hosts from the command line: launch.hostfile=hosts" in done.err


@pytest.mark.slow
def test_folders_of_the_user_do_not_hide_ours(tmp_path, mine):
    """`python -m` puts the working directory first; launchers start ranks that way."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("raise RuntimeError('the wrong models')\n", encoding="utf-8")
    mine("# @package _global_\n# Mine\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for words in (["recipes"], ["plan", QUICK, "parallel.plan_cache=null", "hydra.run.dir=here"]):
        line = [sys.executable, "-m", "runner", *words]
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", check=False)
        assert done.returncode == 0, done.stderr
        assert words != ["recipes"] or {"mine", "quickstart"} <= {row.split()[0] for row in done.stdout.splitlines()}


@pytest.mark.parametrize(
    ("words", "said"), [(("recipes",), 0), (("--version",), 0), ((QUICK, "job=doctor_of_nobody"), 1)]
)
def test_a_reader_that_goes_away_ends_the_command_quietly(tmp_path, words, said):
    """`run recipes | head -1`; errors still go to stderr."""
    reading, writing = os.pipe()
    os.close(reading)
    line = [sys.executable, "-m", "runner", *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("PYTHONUNBUFFERED", None)  # output must stay buffered until the command ends
    done = subprocess.run(
        line, cwd=tmp_path, env=environment, stdout=writing, stderr=subprocess.PIPE, encoding="utf-8", check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr.count("\n")) == (2 if said else 141, said), done.stderr


def test_job_gets_config_and_folder(command, job, left):
    seen = []
    job(lambda config, run_dir: seen.append((config, run_dir)))
    assert command(QUICK, "train.steps=7", "model.args.width=8").code == 0
    ((config, run_dir),) = seen
    assert (config.train.steps, config.model.args, config.job.name) == (7, {"width": 8}, "train")
    assert re.fullmatch(
        r"runs/quickstart/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-[0-9a-f]{4}", str(run_dir.relative_to(Path.cwd()))
    )
    assert json.loads((run_dir / "config.json").read_text(encoding="utf-8"))["train"]["steps"] == 7
    assert [path.name for path in left()][-1] == "config.json"


def test_verb_chooses_the_job(command, monkeypatch, job):
    seen = []
    job(lambda config, run_dir: seen.append(config.job.name))
    monkeypatch.setitem(VERBS, "plan", VERBS["train"])
    for words in (["plan", QUICK], [QUICK, "plan"], [QUICK, "job=plan"], [QUICK]):
        assert command(*words).code == 0
    assert seen == ["plan", "plan", "plan", "train"]


def test_a_chosen_mode_that_a_recipe_overrules_is_refused(command, mine):
    mine("# @package _global_\ndefaults: [data_parallel, _self_]\nparallel: {mode: semi_auto}\n")
    done = command("+recipe=mine", "parallel=auto")
    assert done.code == 2
    assert "write parallel.mode=auto. (from recipe/mine)" in done.paragraphs[0]


@pytest.mark.parametrize("error", [StrategyError, ConfigError])
def test_a_job_that_cannot_be_planned_leaves_nothing(command, job, left, error):
    def refuse(config, run_dir):
        raise error("MW211", "no operator is called 'matmull'.")

    job(refuse)
    done = command(QUICK)
    assert (done.code, done.paragraphs) == (2, ["run: no operator is called 'matmull'. [MW211]"])
    assert left() == []


def test_a_job_that_cannot_be_planned_keeps_what_was_written(command, job, left):
    def refuse(config, run_dir):
        (run_dir / "plan.json").write_text("{}", encoding="utf-8")
        raise StrategyError("MW402", "no.")

    job(refuse)
    assert command(QUICK).code == 2
    assert "plan.json" in {path.name for path in left()}


def test_failed_run_exits_1_and_keeps_its_folder(command, job, left):
    def fail(config, run_dir):
        raise RunFailed("MW711", "rank 3 was killed.\n  its last line")

    job(fail)
    done = command(QUICK)
    assert (done.code, done.err) == (1, "run: rank 3 was killed. [MW711]\n  its last line\n")
    assert {path.name for path in left()} >= {"config.json", "error.txt"}


def test_the_error_of_an_earlier_run_goes_when_training_has_succeeded(command, job, tmp_path):
    def fail(config, run_dir):
        raise RunFailed("MW711", "rank 3 was killed.")

    job(fail)
    assert command(QUICK, "hydra.run.dir=out").code == 1
    assert (tmp_path / "out" / "error.txt").exists()
    job(lambda config, run_dir: 1.0)
    assert command(QUICK, "hydra.run.dir=out").code == 0
    assert not (tmp_path / "out" / "error.txt").exists()


def test_unexpected_error_is_one_paragraph_with_its_traceback_in_a_file(command, job, tmp_path):
    def crash(config, run_dir):
        raise KeyError("no such thing")

    job(crash)
    done = command(QUICK)
    assert done.code == 1
    (paragraph,) = done.paragraphs
    assert "unexpected KeyError" in paragraph
    assert "in crash" in paragraph
    assert str(tmp_path) in paragraph
    (file,) = tmp_path.rglob("error.txt")
    assert "Traceback" in file.read_text(encoding="utf-8")


def test_traceback_on_the_terminal_on_request(command, job):
    def crash(config, run_dir):
        raise KeyError("no such thing")

    job(crash)
    assert "Traceback" in command(QUICK, MESHWRIGHT_TRACEBACK="1").err


def test_interrupt_exits_130(command, job):
    def interrupt(config, run_dir):
        raise KeyboardInterrupt

    job(interrupt)
    done = command(QUICK)
    assert (done.code, done.paragraphs) == (130, ["run: interrupted."])


@pytest.mark.slow
def test_sweep_goes_on_after_a_failed_job(command, job, tmp_path):
    seen = []

    def fail_once(config, run_dir):
        seen.append((config.train.seed, run_dir.name))
        if config.train.seed == 2:
            raise RunFailed("MW711", "rank 0 was killed.")
        return 0.5

    job(fail_once)
    done = command("-m", QUICK, "train.seed=1,2,3")
    assert done.code == 1
    assert seen == [(1, "0"), (2, "1"), (3, "2")]
    assert "run: job #1 (+recipe=quickstart train.seed=2): rank 0 was killed. [MW711]" in done.paragraphs
    (file,) = tmp_path.glob("sweeps/quickstart/*/1/error.txt")
    assert file.read_text(encoding="utf-8") == "rank 0 was killed. [MW711]\n"


def test_sweep_of_good_jobs_exits_0(command, job):
    job(lambda config, run_dir: float(config.train.seed))
    assert command("-m", QUICK, "train.seed=1,2").code == 0


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("run pl", "plan"),
        ("run ", "verify"),
        ("run +recipe=quick", "+recipe=quickstart"),
        ("run plan +recipe=quick", "+recipe=quickstart"),
        ("run plan +recipe=quickstart train.st", "train.steps="),
    ],
)
def test_completion(command, line, offers):
    done = command("-sc", "query=bash", COMP_LINE=line)
    assert done.code == 0
    assert offers in done.out.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_installs(command, shell):
    assert "COMP_LINE" in command("-sc", f"install={shell}").out


def test_config_of_a_recipe_is_shown(command):
    assert "target: models.quickstart.Net" in command(QUICK, "--cfg", "job").out


def test_training_command_needs_no_torch():
    """Its fork server imports torch meanwhile."""
    code = "import runner.cli.main, runner.commands.train, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_refusal_needs_no_torch_and_little_time(tmp_path):
    """A bad config takes less than six times the processor time of the imports of Hydra and pydantic, so torch, which
    takes more than that, is not imported."""
    check = "import sys; from runner.cli.main import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def spent(*words):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    ratios = []
    for _ in range(3):
        _, imports = spent(sys.executable, "-c", "import hydra, pydantic")
        done, refusal = spent(sys.executable, "-c", check, QUICK, "train.steps=-3")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        ratios.append(refusal / imports)
    assert min(ratios) < 6, ratios
