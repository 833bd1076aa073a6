"""The jobs on the shipped recipes: their plans, their training, and the agreement of each with one process."""

import json
import math
import re

import pytest
from small import MODES, SMALL

from runner.errors import ConfigError, RunFailed
from runner.planning import prepare
from runner.report.text import MEMORY as PARTS
from strategies.core.layout import Layout
from strategies.core.plan import Plan
from strategies.rules.registry import RULES

SHARDED = [
    "advanced_layout",
    "data_parallel",
    "ffn_auto",
    "ffn_fused",
    "layout_out_strategy",
    "quickstart",
    "reduce_mean",
    "semi_auto_matmul",
    "semi_auto_redistribution",
    "zero",
]
RECIPES = [*SHARDED, "hybrid_matmul"]
EVALUATED = {"advanced_layout", "data_parallel", "ffn_auto", "ffn_fused", "zero"}


REDISTRIBUTED = {"advanced_layout", "data_parallel", "ffn_fused", "semi_auto_redistribution"}
"""One of every kind of traffic."""


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "recipe", [pytest.param(one, marks=[pytest.mark.slow] * (one not in REDISTRIBUTED)) for one in SHARDED]
)
def test_recipe_trains_and_sends_what_was_predicted(start, recipe):
    only_steps = ["train.clip=null", "parallel.zero.stage=0", "train.log_every=100"]
    only_steps += ["evaluate.metric=null", "~evaluate.args.train"] if recipe in EVALUATED else []
    ended = start(f"+recipe={recipe}", "train.steps=3", "parallel.dump_ir=true", *only_steps)
    assert [record["step"] for record in ended.records] == [1, 2, 3]
    assert ended.value == ended.losses[-1] == ended.results[-1]["loss"]
    sent, predicted = ended.results[-1]["sent"], ended.plan["communication"]
    norm = 2 * 8  # the last step measures the gradient's norm: an all-reduce of one double over 8 ranks
    if "exchange" in predicted:  # a plan predicts the busiest rank; rank 0 may send less
        text = (ended.folder / "ir" / "rank_0" / "step_parallel_end.ir").read_text(encoding="utf-8")
        own = sum(int(count) for count in re.findall(r"ward: exchange.* (\d+) bytes sent", text))
        assert own <= predicted["exchange"]
        predicted["exchange"] = own
    assert sent == {kind: 3 * count + norm * (kind == "all_reduce") for kind, count in predicted.items()}


def test_hybrid_recipe_trains(start):
    ended = start("+recipe=hybrid_matmul", "train.steps=3")
    assert len(ended.losses) == 3
    assert not (ended.folder / "plan.json").exists()


def verified(start, recipe, tolerance, *overrides):
    ended = start(f"+recipe={recipe}", "verify.steps=2", *overrides, verb="verify")
    verdict = ended.verdict
    assert verdict["passed"] and verdict["steps"] == 2 and verdict["tolerance"] == tolerance
    differences = [verdict["loss_max_rel_diff"]]
    differences += [*verdict["grad_max_rel_diff"].values(), *verdict["weight_max_rel_diff"].values()]
    assert max(differences) == ended.value <= tolerance
    assert verdict["grad_max_rel_diff"].keys() == verdict["weight_max_rel_diff"].keys()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_is_verified_in_double_precision(start, recipe):
    verified(start, recipe, 1e-10, "train.precision=fp64", "parallel.zero.stage=0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "recipe"),
    [
        pytest.param(1, "semi_auto_matmul", marks=pytest.mark.slow),
        (2, "hybrid_matmul"),
        pytest.param(2, "reduce_mean", marks=pytest.mark.slow),
        pytest.param(3, "zero", marks=pytest.mark.slow),
    ],
)
def test_recipe_is_verified_with_zero(start, stage, recipe):
    """One recipe for each stage, and one hybrid recipe; the tests below verify all recipes at all stages."""
    verified(start, recipe, 1e-5, f"parallel.zero.stage={stage}")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_is_verified_at_every_stage(start, recipe, stage):
    verified(start, recipe, 1e-5, f"parallel.zero.stage={stage}")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_in_half_precision(start, recipe, stage):
    """Through relus, because ranks sum in fp32."""
    verified(start, recipe, 2e-2, "train.precision=bf16", f"parallel.zero.stage={stage}")


@pytest.fixture
def mended(monkeypatch):
    """Reverts the bugs that `broken.Broken` injects in this process."""
    monkeypatch.setattr(prepare, "capture", prepare.capture)
    before = dict(RULES)
    yield
    RULES.update(before)


@pytest.mark.few(1)
@pytest.mark.parametrize("mistake", ["sum", "mean", "operator", "gradient", "slight"])
def test_verify_finds_a_mistake(start, mended, tmp_path, mistake):
    broken = ("data.target=broken.Broken", f"+data.args.mistake={mistake}")
    with pytest.raises(RunFailed, match=r"verify: the sharded run differs from one process beyond 1e-05"):
        start("+recipe=quickstart", "verify.steps=1", *broken, verb="verify")
    verdict = json.loads((tmp_path / "run" / "verify.json").read_text(encoding="utf-8"))
    assert not verdict["passed"]
    if mistake == "slight":  # as small as rounding errors, but this network does not amplify it
        assert 1e-5 < max(verdict["grad_max_rel_diff"].values()) < 2e-4
        assert max(verdict["rounding"]["grad_max_rel_diff"].values()) < 1e-5
    else:
        assert verdict["rounding"] is None
    if mistake in ("gradient", "slight"):  # only there the loss of the first step is correct
        assert verdict["loss_max_rel_diff"] < 1e-5 < max(verdict["grad_max_rel_diff"].values())
    else:
        assert verdict["loss_max_rel_diff"] > 1e-3


CANCELLING = (*SMALL, "model.target=networks.Cancelling", "verify.steps=2")
ROUNDED = {
    "ZeRO, accumulation, dropout and noise": (
        *MODES["data_parallel"],
        *("model.args.dropout=0.2", "parallel.zero.stage=2", "train.accumulate=2", "data.batch_size=32"),
    ),
    "pipeline": ("parallel=data_parallel", "parallel.pipeline={stages: 2, micro_batches: 2}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROUNDED)
def test_verify_allows_for_one_process_own_rounding(start, capfd, kind):
    ended = start(*CANCELLING, *ROUNDED[kind], verb="verify")
    verdict, out = ended.verdict, capfd.readouterr().out
    assert verdict["passed"] and verdict["tolerance"] == 1e-5 < ended.value
    own = verdict["rounding"]["grad_max_rel_diff"]
    assert verdict["rounding"]["times"] == 3
    assert all(value <= max(1e-5, 3 * own[name]) for name, value in verdict["grad_max_rel_diff"].items())
    assert 1e-5 < max(own.values()) < 1e-2
    assert "verify passed" in out and "from fp64" in out


@pytest.mark.slow
def test_verify_of_a_table_that_grows(start):
    ended = start(*SMALL, *MODES["data_parallel"], "model.target=networks.Growing", "verify.steps=2", verb="verify")
    assert ended.verdict["passed"]


def test_verify_measures_by_neighbouring_weights_where_a_model_has_no_fp64(start, capfd):
    ended = start(*CANCELLING, *MODES["data_parallel"], "+model.args.single=true", verb="verify")
    own, out = ended.verdict["rounding"]["grad_max_rel_diff"], capfd.readouterr().out
    assert ended.verdict["passed"] and 1e-5 < max(ended.verdict["grad_max_rel_diff"].values()) <= 3 * max(own.values())
    assert "no kernel for Double" in out and "from one with neighbouring weights" in out


@pytest.mark.slow
def test_verify_keeps_a_tolerance_that_is_given(start, tmp_path):
    with pytest.raises(RunFailed, match=r"beyond 2e-06"):
        start(*CANCELLING, *MODES["data_parallel"], "verify.tolerance=2e-6", verb="verify")
    assert json.loads((tmp_path / "run" / "verify.json").read_text(encoding="utf-8"))["rounding"] is None


@pytest.mark.slow
def test_verify_finds_a_hybrid_model_that_forgets_its_collective(start):
    options = (
        "parallel=hybrid",
        "world_size=2",
        "model.target=networks.Hybrid",
        "model.args={axes: world}",
        "data.target=networks.Points",
        "loss.target=torch.nn.CrossEntropyLoss",
        "parallel.dataset_strategy=full_batch",
        "verify.reference.target=networks.Classifier",
        "verify.steps=1",
    )
    with pytest.raises(RunFailed, match="differs from one process"):
        start(*options, "model.args.forgets=true", verb="verify")
    assert start(*options, verb="verify").verdict["passed"]


def test_verify_of_a_hybrid_model_needs_its_reference(start, tmp_path):
    with pytest.raises(ConfigError, match=r"set verify\.reference\.target"):
        start("+recipe=hybrid_matmul", "verify.reference.target=null", verb="verify")
    with pytest.raises(ConfigError, match=r"verify\.reference: matmul\.weight \[512, 128\] does not exist"):
        start("+recipe=hybrid_matmul", "verify.reference.target=models.matmul.OneMatMul", verb="verify")


KEYS = {
    "name", "module", "op", "source", "origin", "in_strategy", "out_strategy", "device_matrix", "redistributions"
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("recipe", SHARDED)
def test_plan_json_is_as_agreed(start, recipe):
    ended = start(f"+recipe={recipe}", verb="plan")
    plan = ended.plan
    assert ended.value == plan["cost"]["total"] > 0
    assert math.prod(plan["mesh"].values()) == 8
    for operator in plan["operators"]:
        assert operator.keys() >= KEYS
        assert math.prod(operator["device_matrix"]) == 8
        for entry in operator["redistributions"]:
            assert all(8 % len(step["group"]) == 0 for way in ("forward", "backward") for step in entry[way])
    for name, parameter in plan["parameters"].items():
        assert parameter.keys() >= {"shape", "local_shape", "replica_group_size"}, name
        elements, local = math.prod(parameter["shape"]), math.prod(parameter["local_shape"])
        assert elements // local * parameter["replica_group_size"] == 8
    assert plan["communication"] and plan["memory"]["total"] == sum(plan["memory"][part] for part in PARTS)
    assert plan["search"].keys() >= {"algorithm", "seconds", "cost", "lower_bound"}
    assert plan["search"]["cost"] == plan["cost"]["total"]
    assert Plan.from_json(plan).to_json().items() <= plan.items()


def operators_of(plan):
    return {operator["name"]: operator for operator in plan["operators"]}


def forward_steps(operator, operand=0):
    return [step for entry in operator["redistributions"] if entry["operand"] == operand for step in entry["forward"]]


@pytest.mark.slow
def test_ir_in_a_folder_of_its_own(start, tmp_path):
    ended = start("+recipe=quickstart", f"parallel.dump_ir='{tmp_path}/my programs'", verb="plan")
    assert not (ended.folder / "ir").exists()
    found = sorted(str(file.relative_to(tmp_path / "my programs")) for file in tmp_path.glob("my programs/*/*"))
    assert found == [f"rank_{rank}/step_parallel_{part}.ir" for rank in range(8) for part in ("begin", "end")]
    (tmp_path / "taken").touch()
    with pytest.raises(ConfigError, match=r"parallel.dump_ir = .*taken.* cannot be written"):
        start("+recipe=quickstart", f"parallel.dump_ir={tmp_path}/taken", verb="plan")


def test_quickstart_plan(start):
    ended = start("+recipe=quickstart", "parallel.dump_ir=true", verb="plan")
    found = operators_of(ended.plan)
    assert (found["matmul"]["origin"], found["relu"]["origin"]) == ("configured", "propagated")
    assert found["relu"]["in_strategy"] == [[2, 4]]
    assert found["matmul2"]["in_strategy"] == [[2, 4], [4, 1]]
    assert found["matmul"]["device_matrix"] == found["matmul2"]["device_matrix"] == [2, 4, 1]
    assert [step["group"] for step in forward_steps(found["relu"])] == [[0, 1, 2, 3]]
    assert [step["collective"] for step in forward_steps(found["relu"])] == ["reduce_scatter"]

    assert sorted(folder.name for folder in (ended.folder / "ir").iterdir()) == [f"rank_{rank}" for rank in range(8)]
    begin = (ended.folder / "ir" / "rank_0" / "step_parallel_begin.ir").read_text(encoding="utf-8")
    assert "name relu  module relu  in_strategy ((2, 4))  out_strategy ((2, 4))" in begin
    assert "models/quickstart.py:" in begin and "float32[16,32]" in begin
    lines = (ended.folder / "ir" / "rank_0" / "step_parallel_end.ir").read_text(encoding="utf-8").splitlines()
    indices = [lines.index(line) for line in lines if "of matmul:" in line or "for operand 0 of relu" in line]
    indices += [lines.index(line) for line in lines if "of matmul2:" in line and "redistribute" not in line]
    assert indices == sorted(indices) and len(indices) == 3
    assert "(float32[8,8], float32[8,16]) -> float32[8,16]" in lines[indices[0]]
    assert "reduce_scatter dim 1" in lines[indices[1] + 1]
    assert "float32[8,16] partial -> float32[8,4]  group (0, 1, 2, 3), 384 bytes" in lines[indices[1] + 1]
    assert "(float32[8,4], float32[4,16])" in lines[indices[2]]


def test_semi_auto_redistribution_plan(start):
    """All-gather over the columns and slicing the rows, or one all-to-all that sends no more."""
    found = operators_of(start("+recipe=semi_auto_redistribution", verb="plan").plan)
    assert (found["matmul1"]["in_strategy"], found["matmul2"]["in_strategy"]) == (
        [[1, 1], [1, 2]],
        [[8, 1], [1, 1]],
    )
    gathered = 16 * 32 * 4  # bytes of one column shard of the [16, 64] result, which an all-gather sends
    assert 0 < sum(step["bytes"] for step in forward_steps(found["matmul2"])) <= gathered


def test_semi_auto_matmul_plan(start):
    found = operators_of(start("+recipe=semi_auto_matmul", verb="plan").plan)
    assert (found["matmul2"]["origin"], found["matmul2"]["in_strategy"]) == ("default", [[8, 1], [1, 1]])


def test_advanced_layout_plan(start):
    """The four shards of a row of x are on ranks 0, 4, 2 and 6."""
    ended = start("+recipe=advanced_layout", verb="plan")
    plan = Plan.from_json(ended.plan)
    assert dict(plan.mesh.axes) and plan.mesh.size == 8
    rows, columns = (plan.operators["matmul1"].assignment[factor] for factor in ("m", "k"))
    layout = Layout((rows, columns))
    blocks = {rank: layout.block((32, 784), plan.mesh, rank) for rank in range(8)}
    first = {block[1][0] // 196: rank for rank, block in blocks.items() if block[0][0] == 0}
    assert [first[piece] for piece in range(4)] == [0, 4, 2, 6]
    found = operators_of(ended.plan)
    assert found["matmul1"]["in_strategy"] == [[2, 4], [4, 1]]
    assert found["relu1"]["in_strategy"] == [[4, 1]]
    assert found["matmul2"]["in_strategy"] == [[1, 8], [8, 1]]
    assert found["relu2"]["in_strategy"] == [[8, 1]]


def test_quickstart_learns_as_one_process_does(start):
    ended = start("+recipe=quickstart", "train.steps=12")
    alone = start("+recipe=quickstart", "train.steps=12", *ALONE, folder="alone")
    assert ended.losses[-1] < 0.6 * ended.losses[0]
    assert ended.losses == pytest.approx(alone.losses, rel=1e-5)


ALONE = ("parallel=stand_alone", "parallel.mode=stand_alone", "world_size=1", "parallel.strategies=null")


def test_explain_summarizes_the_plan(start, capsys):
    start("+recipe=quickstart", verb="explain")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    relu = next(number for number, line in enumerate(lines) if line.startswith("relu "))
    assert lines[relu].startswith("relu ((16,16)) ((2,4)) ((2,4)) propagated models/quickstart.py:")
    assert lines[relu - 2] == ("operand 0, forward: reduce_scatter dim 1 over d1, rank 0 with [0, 1, 2, 3], 384 B")
    assert any(line.startswith("sent per step and rank: ") for line in lines)


@pytest.mark.slow
def test_sweep_trains_every_job_on_ranks_of_its_own(command, tmp_path):
    done = command("-m", "+recipe=quickstart", "train.steps=2", "optimizer.args.lr=0.1,0.2,1e30")
    assert done.code == 1
    (error,) = [paragraph for paragraph in done.paragraphs if paragraph.startswith("run: ")]
    assert error.startswith("run: job #2 (+recipe=quickstart train.steps=2 optimizer.args.lr=1e+30): rank ")
    (sweep,) = tmp_path.glob("sweeps/quickstart/*")
    for number, rate in enumerate((0.1, 0.2)):
        records = [
            json.loads(line)
            for line in (sweep / str(number) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        assert [record["lr"] for record in records] == [rate, rate]
        assert len(list((sweep / str(number) / "ranks").iterdir())) == 8
    assert "The loss of step 2 is" in (sweep / "2" / "error.txt").read_text(encoding="utf-8")
