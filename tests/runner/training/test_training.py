"""Training in every mode and with every option equals training in one process: compared with a plain torch loop, with
`stand_alone`, and with itself under other batch splits."""

import networks
import pytest
import torch
from small import ALONE, DOUBLE, HYBRID, MODES, SMALL
from torch.nn import functional

from runner.data.order import Order


@pytest.fixture
def train(start):
    """`train("auto", "train.steps=2")` trains the small classifier."""

    def call(mode, *overrides, **options):
        return start(*SMALL, *(HYBRID if mode == "hybrid" else MODES[mode]), *overrides, **options)

    return call


EVERYTHING = (
    DOUBLE,
    "optimizer.target=torch.optim.AdamW",
    "optimizer.args={lr: 0.02}",
    "optimizer.groups=[{match: ['*.bias'], args: {lr: 0.1, weight_decay: 0.0}}]",
    "optimizer.freeze=['inner.bias']",
    "optimizer.scheduler={target: torch.optim.lr_scheduler.StepLR, args: {step_size: 2, gamma: 0.5}}",
    "train.clip=0.3",
    "train.accumulate=2",
    "train.log_every=1",
    "train.seed=3",
)


def by_hand(steps=6):
    """Train EVERYTHING in plain torch. Returns (loss, learning rate, norm before clipping) of every step."""
    torch.manual_seed(3)
    model, data = networks.Classifier().double(), networks.Points()
    model.inner.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [
            {"params": [model.inner.weight, model.outer.weight]},
            {"params": [model.outer.bias], "lr": 0.1, "weight_decay": 0.0},
        ],
        lr=0.02,
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    order = Order(len(data), 16, 3)
    for step in range(steps):
        rows, total = order.rows(step), 0.0
        for half in (rows[:8], rows[8:]):
            loss = functional.cross_entropy(model(data.x[half].double()), data.y[half]) / 2
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.3)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield total, rate, norm.item()


@pytest.mark.few(2)
@pytest.mark.essential
@pytest.mark.parametrize("mode", MODES)
def test_everything_at_once_is_what_plain_torch_does(train, mode):
    records = train(mode, *EVERYTHING).records
    found = [(record["loss"], record["lr"], record["grad_norm"]) for record in records]
    assert found == [pytest.approx(step, rel=1e-10) for step in by_hand()]


@pytest.mark.essential
@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2)), 3])
def test_zero_does_the_same(train, stage):
    records = train("semi_auto", *EVERYTHING[1:], f"parallel.zero.stage={stage}").records
    found = [(record["loss"], record["lr"], record["grad_norm"]) for record in records]
    assert found == [pytest.approx(step, rel=2e-5) for step in by_hand()]


@pytest.mark.parametrize(
    "stage",
    [pytest.param(0, marks=pytest.mark.essential), *(pytest.param(stage, marks=pytest.mark.slow) for stage in (2, 3))],
)
def test_hybrid_does_the_same(train, stage):
    options = [option for option in EVERYTHING if option != DOUBLE or not stage]
    records = train("hybrid", *options, f"parallel.zero.stage={stage}").records
    found = [(record["loss"], record["lr"], record["grad_norm"]) for record in records]
    assert found == [pytest.approx(step, rel=2e-5 if stage else 1e-10) for step in by_hand()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "tolerance"), [pytest.param("fp32", 1e-5, marks=pytest.mark.slow), ("fp64", 1e-10)]
)
def test_digits_are_learnt_as_on_one_process(start, precision, tolerance):
    options = ("+recipe=ffn_auto", "train.steps=20", f"train.precision={precision}")
    alone = start(*options, *ALONE, "parallel.mode=stand_alone", "parallel.strategies=null", folder="alone")
    found = start(*options)
    assert len(found.losses) == 20
    assert found.losses == pytest.approx(alone.losses, rel=tolerance)
    assert found.evaluations[20] == pytest.approx(alone.evaluations[20], rel=tolerance)


@pytest.mark.slow
def test_digits_are_learnt_well(start):
    ended = start("+recipe=ffn_auto")
    assert ended.evaluations[450]["accuracy"] > 0.93


COUNTED = (DOUBLE, "train.log_every=1", "data.batch_size=32", "loss.args={ignore_index: 0}")
"""Micro-batches with different numbers of rows that count."""


@pytest.mark.slow
def test_accumulation_changes_nothing(train):
    full_batch, *others = (train("semi_auto", *COUNTED, f"train.accumulate={count}").losses for count in (1, 2, 4))
    for losses in others:
        assert losses == pytest.approx(full_batch, rel=1e-10)


STAGES = ("parallel.pipeline={stages: 2, micro_batches: 2}", "parallel.strategies=null")
MIXED, WRITTEN_OUT, ADDED = (f"loss.target=networks.{name}Loss" for name in ("Mixed", "WrittenOut", "Added"))


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("semi_auto", (MIXED, "train.accumulate=16")),
        ("semi_auto", ("loss.target=networks.JoinedLoss", "train.accumulate=2")),
        ("data_parallel", (ADDED, "data.drop_last=false", "data.args.rows=90", "train.steps=6")),
        *(
            pytest.param(mode, options, marks=pytest.mark.slow)
            for mode, options in (
                ("stand_alone", ("train.accumulate=32",)),  # some have nothing that counts
                ("semi_auto", ("train.accumulate=16",)),
                ("data_parallel", ("loss.target=networks.WeightedLoss",)),
                ("stand_alone", (MIXED, "train.accumulate=32")),
                ("semi_auto", (MIXED, "data.drop_last=false", "data.args.rows=90", "train.steps=6")),
                ("semi_auto", (MIXED, *STAGES)),
                ("data_parallel", (MIXED, "parallel.recompute={operators: full, modules: [outer, loss]}")),
                ("stand_alone", (WRITTEN_OUT, "train.accumulate=8")),
                ("data_parallel", (WRITTEN_OUT, "train.accumulate=8")),
                ("semi_auto", (WRITTEN_OUT, *STAGES)),
                ("data_parallel", ("loss.target=networks.ByNumbersLoss", "train.accumulate=8")),
                *(
                    (mode, ("loss.target=networks.UnusedLoss", *parts))
                    for mode, parts in (
                        ("stand_alone", ("train.accumulate=8",)),
                        (
                            "data_parallel",
                            ("train.accumulate=8", "data.drop_last=false", "data.args.rows=90", "train.steps=6"),
                        ),
                        ("semi_auto", STAGES),
                    )
                ),
                ("stand_alone", (ADDED, "train.accumulate=8")),
                ("semi_auto", (ADDED, *STAGES)),
                ("data_parallel", (ADDED, "parallel.zero.stage=2", "train.precision=fp32")),
                ("data_parallel", (MIXED, "parallel.copies=2")),
                ("data_parallel", (MIXED, "parallel.batch_rows=[5,3]", "world_size=2")),
                ("data_parallel", (MIXED, "train.compile=true")),
                ("semi_auto", ("train.clip=0.3", "data.drop_last=false", "data.args.rows=90", "train.steps=6")),
                *(("data_parallel", (f"parallel.zero.stage={stage}", "train.precision=fp32")) for stage in (1, 2, 3)),
                ("semi_auto", STAGES),
            )
        ),
    ],
)
def test_the_mean_is_over_what_counts_in_all_micro_batches(train, mode, options):
    """Accumulated losses and gradient norms are those of the full batch on one device."""
    apart = ("parallel", "train.accumulate", "train.compile", "world_size")
    single = tuple(option for option in options if not option.startswith(apart))
    alone = train("stand_alone", *COUNTED, *single, folder="alone").records
    found = train(mode, *COUNTED, "train.accumulate=4", *options).records
    tolerance = 1e-5 if "train.precision=fp32" in options else 1e-10
    for name in ("loss", "grad_norm"):
        wanted = [record[name] for record in alone if name in record]
        assert [record[name] for record in found if name in record] == pytest.approx(wanted, rel=tolerance)


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["stand_alone", "data_parallel"])
def test_class_weights_of_a_checkpoint_count(train, mode):
    """Not those that the loss was made with."""

    def weighted(first):
        return DOUBLE, f"loss.args={{weight: {{target: torch.tensor, args: {{data: [{first}, 3.0, 0.5, 2.0]}}}}}}"

    first = train(mode, *weighted(9.0), "train.steps=1", folder="first").folder
    later = weighted(1.0), "train.steps=3", f"train.resume={first}"
    at_once, parts = (
        train(mode, *later[0], *later[1:], f"train.accumulate={count}", folder=str(count)).records for count in (1, 4)
    )
    assert [one["loss"] for one in parts] == pytest.approx([one["loss"] for one in at_once], rel=1e-12)


@pytest.mark.parametrize(("count", "said"), [(2, True), (1, False)])
def test_what_takes_the_rows_of_a_micro_batch_together_is_named(train, capfd, count, said):
    train("data_parallel", "model.args.norm=true", "train.steps=1", f"train.accumulate={count}")
    line = "norm.batch_norm (batch_norm_training, runner/networks.py:"
    assert (line in (printed := capfd.readouterr().out)) == said
    assert ("takes the rows of a micro-batch together" in printed) == said


@pytest.mark.parametrize("mode", ["stand_alone", pytest.param("data_parallel", marks=pytest.mark.slow)])
def test_a_loss_that_micro_batches_change_is_named(train, capfd, mode):
    train(mode, "loss.target=networks.NeighbourLoss", "train.steps=1", "train.accumulate=2")
    assert "the loss of two micro-batches in one is " in capfd.readouterr().out


def test_epochs_drop_what_fills_no_batch_and_say_so(train, capfd):
    ended = train(
        "data_parallel",
        "data.args.rows=70",
        "train.steps=null",
        "train.epochs=3",
        "evaluate.args.seed=1",
        "optimizer.scheduler={target: torch.optim.lr_scheduler.StepLR, args: {step_size: 1, gamma: 0.1}, per: epoch}",
        "optimizer.args.lr=0.1",
    )
    assert "data: 6 of 70 samples fill no complete batch of 16; every epoch drops as many." in capfd.readouterr().out
    assert list(ended.evaluations) == [4, 8, 12]
    rates = [record["lr"] for record in ended.records if "lr" in record]
    assert rates == pytest.approx([0.1] * 4 + [0.01] * 4 + [0.001] * 4)


@pytest.mark.slow
def test_bf16_trains_near_fp32(train):
    exact = train("semi_auto").losses
    for stage in (0, 1):
        losses = train("semi_auto", "train.precision=bf16", f"parallel.zero.stage={stage}").losses
        assert losses == pytest.approx(exact, rel=2e-2)
        assert losses != exact


@pytest.mark.slow
def test_random_numbers_are_those_of_one_process_on_demand(train):
    dropped = ("model.args.dropout=0.5", DOUBLE)
    alone = train("stand_alone", *dropped).losses
    exact = train("semi_auto", *dropped, "train.random=exact").losses
    fast = train("semi_auto", *dropped).losses
    assert exact == pytest.approx(alone, rel=1e-10)
    assert fast != pytest.approx(alone, rel=1e-3)
    assert fast == train("semi_auto", *dropped).losses
    assert fast != train("semi_auto", *dropped, "train.seed=1").losses


def test_hybrid_models_draw_by_rows(train):
    """Random numbers differ between shards of the rows, and are equal on ranks with the same rows."""
    losses = train("hybrid", "model.target=networks.RandomLoss", "loss.target=null", "optimizer.args.lr=0.0").losses
    assert losses == pytest.approx([0.5] * 6, rel=0.1)  # the mean of two numbers has half the variance of one


@pytest.mark.slow
def test_seed_decides(train):
    assert train("auto").losses == train("auto").losses != train("auto", "train.seed=1").losses
