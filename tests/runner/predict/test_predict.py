"""Predictions equal those of the plain model, in every mode, whatever plan the weights were stored under."""

from __future__ import annotations

import json
import re
from pathlib import Path

import made_checkpoints as made
import networks
import pytest
import torch
from composing import compose_config
from safetensors.torch import load_file
from small import HYBRID, MODES, SMALL
from torch import Tensor
from torch.nn import functional

from runner.cli.recipes import catalogue
from runner.commands.predict import without_training
from runner.config.schema import Config
from runner.errors import ConfigError

PLACES = {
    **MODES,
    "hybrid": HYBRID,
    "zero": ("parallel=data_parallel", "parallel.zero.stage=3", "parallel.offload.optimizer=host"),
    "recompute": ("parallel=data_parallel", "parallel.recompute=full", "parallel.memory_limit=10MB"),
    "pipeline": ("parallel=data_parallel", "parallel.pipeline={stages: 2, micro_batches: 2, cuts: auto}"),
    "ranks that do not divide the batch": ("parallel=data_parallel", "world_size=3"),
    "searched": ("parallel=auto", "parallel.search=recursive_programming"),
}
ROWS = "predict.data.args={rows: 50, seed: 1}"


def trained() -> networks.Classifier:
    """A classifier whose weights no seed of a run produces."""
    torch.manual_seed(123)
    return networks.Classifier()


def keyed(model: torch.nn.Module) -> dict[str, Tensor]:
    return {f"model/{name}": tensor.detach() for name, tensor in model.state_dict().items()}


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def stored(tmp_path):
    return made.checkpoint(tmp_path / "trained" / "checkpoints", keyed(trained()), made.halves)


FEW = ("stand_alone", "semi_auto", "hybrid", "pipeline")
"""The places that say most; the others are slow."""


@pytest.mark.few(2)
@pytest.mark.parametrize("place", [pytest.param(one, marks=[pytest.mark.slow] * (one not in FEW)) for one in PLACES])
def test_every_mode_gives_what_the_plain_model_gives(start, stored, place):
    ended = start(
        *SMALL, *PLACES[place], ROWS, f"predict.checkpoint={stored}", "evaluate.metric=accuracy", verb="predict"
    )
    data = networks.Points(50, 1)
    with torch.no_grad():
        expected = trained()(data.x)
    found = lines(ended.folder)
    assert [line["row"] for line in found] == list(range(50))
    torch.testing.assert_close(torch.tensor([line["output"] for line in found]), expected, rtol=1e-5, atol=1e-6)
    record = json.loads((ended.folder / "predict.json").read_text(encoding="utf-8"))
    assert record["evaluation"]["accuracy"] == (expected.argmax(1) == data.y).double().mean()
    assert record["evaluation"]["loss"] == pytest.approx(functional.cross_entropy(expected, data.y).item(), rel=1e-5)
    assert (record["step"], record["rows"], ended.value) == (7, 50, record["evaluation"]["loss"])
    assert not (ended.folder / "checkpoints").exists()


def test_the_number_of_rows_is_limited(start, stored):
    ended = start(*SMALL, *MODES["stand_alone"], ROWS, f"predict.checkpoint={stored}", "predict.rows=7", verb="predict")
    data = networks.Points(50, 1)
    with torch.no_grad():
        expected = trained()(data.x)[:7]
    torch.testing.assert_close(torch.tensor([line["output"] for line in lines(ended.folder)]), expected)
    record = json.loads((ended.folder / "predict.json").read_text(encoding="utf-8"))
    assert record["rows"] == 7
    assert record["evaluation"]["loss"] == pytest.approx(
        functional.cross_entropy(expected, data.y[:7]).item(), rel=1e-5
    )


def centred(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A collate function whose rows depend on all of a batch."""
    x, y = (torch.stack([torch.as_tensor(sample[n]) for sample in samples]) for n in (0, 1))
    return x - x.mean(0), y


@pytest.mark.slow
def test_a_collate_that_mixes_rows_gets_all_of_a_batch(start, stored):
    ended = start(
        *SMALL,
        *MODES["data_parallel"],
        ROWS,
        f"data.collate={__name__}.centred",
        f"predict.checkpoint={stored}",
        verb="predict",
    )
    batches = torch.split(networks.Points(50, 1).x, 16)
    with torch.no_grad():
        expected = torch.cat([trained()(x - x.mean(0)) for x in batches])
    found = torch.tensor([line["output"] for line in lines(ended.folder)])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_rows_without_labels_from_a_file_in_safetensors(start, stored, tmp_path):
    data = networks.Points(7, 2)
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(x.tolist())}\n\n" for x in data.x), encoding="utf-8")
    ended = start(
        *SMALL,
        *MODES["semi_auto"],
        f"predict.data.path={tmp_path / 'rows.jsonl'}",
        "predict.batch_size=4",
        "predict.format=safetensors",
        f"predict.checkpoint={stored.parents[1]}",
        verb="predict",
    )
    with torch.no_grad():
        expected = trained()(data.x)
    torch.testing.assert_close(load_file(ended.folder / "predictions.safetensors")["output"], expected)
    assert json.loads((ended.folder / "predict.json").read_text(encoding="utf-8"))["evaluation"] == {}
    assert ended.value is None


def test_rows_with_names_lack_what_the_loss_takes_and_may_be_integers(start, tmp_path):
    torch.manual_seed(123)
    model = networks.TwoHeads()
    tensors = {f"model/{name}": tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    tensors |= {"model/loss.balance": torch.tensor([0.25]), "model/loss.factor": torch.tensor([2.0])}
    x = torch.randn(5, 12)
    x[2:] = x[2:].round()
    x[:2] = 10 * x[:2]
    rows = [[int(number) if number == number.round() else float(number) for number in row] for row in x]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"x": row}) + "\n" for row in rows), encoding="utf-8")
    ended = start(
        "world_size=2",
        "parallel=data_parallel",
        "model.target=networks.TwoHeads",
        "loss.target=networks.WeighedLoss",
        "data.target=networks.Points",
        "data.args.keys=true",
        "data.batch_size=16",
        f"predict.data.path={tmp_path / 'rows.jsonl'}",
        f"predict.checkpoint={made.checkpoint(tmp_path / 'made', tensors)}",
        "predict.batch_size=4",
        verb="predict",
    )
    with torch.no_grad():
        expected = model(x)
    for name, values in expected.items():
        torch.testing.assert_close(torch.tensor([line[name] for line in lines(ended.folder)]), values)


def other(tensors):
    return {("model/stranger" if key.endswith("outer.bias") else key): tensor for key, tensor in tensors.items()}


def wider(tensors):
    return {key: torch.cat([tensor, tensor]) if "outer" in key else tensor for key, tensor in tensors.items()}


@pytest.mark.parametrize("mode", ["stand_alone", "data_parallel"])
@pytest.mark.parametrize(
    ("change", "says"),
    [(other, "does not have outer.bias"), (wider, "outer.weight has shape [8, 16]")],
    ids=["names", "shapes"],
)
def test_a_checkpoint_of_another_model_is_refused(start, tmp_path, mode, change, says):
    path = made.checkpoint(tmp_path / "made", change(keyed(trained())))
    with pytest.raises(ConfigError, match=re.escape(says)):
        start(*SMALL, *MODES[mode], f"predict.checkpoint={path}", verb="predict")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_damaged_checkpoint_is_refused(start, stored):
    file = stored / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(ConfigError, match=r"rank-00001\.safetensors: its checksum"):
        start(*SMALL, *MODES["stand_alone"], f"predict.checkpoint={stored}", verb="predict")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "predict.checkpoint = null does not go with model.weights = null"),
        (("checkpoint=nowhere",), "predict.checkpoint = 'nowhere': this folder does not exist"),
        (("checkpoint=here.pt",), "model.weights=here.pt"),
        (
            ("checkpoint=nowhere", "predict.data.args={rows: 3}", "predict.data.path=a.jsonl"),
            "predict.data.args = {rows: 3} does not go with predict.data.path = 'a.jsonl'",
        ),
        (
            ("checkpoint=nowhere", "predict.data.collate_args={length: 3}"),
            "predict.data.collate_args = {length: 3} does not go with predict.data.collate = null",
        ),
    ],
    ids=["none", "nowhere", "file", "args", "collate"],
)
def test_bad_input_is_one_paragraph(command, tmp_path, words, says):
    (tmp_path / "here.pt").write_text("", encoding="utf-8")
    done = command("predict", "+recipe=quickstart", *words)
    assert done.code == 2
    (paragraph,) = done.paragraphs
    assert says in paragraph
    assert not (tmp_path / "runs").exists()


def test_rows_with_other_names_are_refused(start, stored, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"y": 3}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"predict\.data: the samples have the entries y, those of training 0, 1"):
        start(
            *SMALL,
            *MODES["stand_alone"],
            f"predict.data.path={tmp_path / 'rows.jsonl'}",
            f"predict.checkpoint={stored}",
            verb="predict",
        )


@pytest.mark.few(4)
@pytest.mark.parametrize("recipe", sorted(catalogue()))
def test_every_recipe_can_be_predicted_with(recipe):
    config = compose_config(f"+recipe={recipe}", "job=predict", "predict.checkpoint=somewhere")
    changed = without_training(config)
    assert Config.model_validate_json(changed.model_dump_json()) == changed
    assert changed.parallel.zero.stage == 0
    assert not changed.parallel.offload.on_disk


@pytest.mark.slow
def test_what_was_trained_is_predicted_under_another_plan(start, tmp_path):
    """On the rows of the run's evaluation, the score equals that of the run."""
    words = (*SMALL, "evaluate.metric=accuracy", "evaluate.args={rows: 50, seed: 1}", "optimizer.args.lr=0.5")
    zero = ("parallel=data_parallel", "parallel.zero.stage=2")
    trained_there = start(*words, *zero, "checkpoint.form=both", folder="trained")
    (score,) = trained_there.evaluations.values()
    ended = start(*words, *MODES["auto"], f"predict.checkpoint={trained_there.folder}", verb="predict")
    record = json.loads((ended.folder / "predict.json").read_text(encoding="utf-8"))
    assert record["evaluation"] == pytest.approx(score, rel=1e-5)
    assert record["step"] == 6
