"""Objectives built from shapes alone: their graphs equal those of the real models, and nothing is allocated."""

from __future__ import annotations

import pytest
import torch
from composing import compose_config

from runner.build.modules import DTYPES, build_loss, build_model, captured_from_shapes, cast, objective, target_names
from runner.data.loader import flatten_batch, global_batch
from runner.errors import ConfigError
from runner.planning.datasets import datasets
from strategies.capture import LossFunction, capture
from strategies.core.errors import StrategyError

RECIPES = ["quickstart", "gpt", "llama", "moe", "resnet", "vit", "gpt_padded", "vocab_ffn", "hf_gpt2"]


def entries(config):
    training, _, collate = datasets(config)
    names, tensors = flatten_batch(global_batch(training, collate, range(config.data.batch_size)))
    return names, cast(tensors, DTYPES[config.train.precision])


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_graph_is_that_of_the_real_model(recipe):
    config = compose_config(f"+recipe={recipe}")
    names, tensors = entries(config)
    said = []
    step, found, _ = captured_from_shapes(config, names, tensors, said.append)
    real = capture(objective(config, names), tensors, training=True)
    assert found.graph.signature() == real.graph.signature()
    assert found.graph == real.graph
    assert said == []
    assert all(type(parameter.data).__name__ == "FakeTensor" for parameter in step.parameters())


class Passes(torch.nn.Module):
    """Takes whatever it is given, as models of transformers do."""

    def forward(self, x, mask=None, **kwargs):
        return x


def test_what_forward_only_takes_among_its_kwargs_goes_to_the_loss():
    config = compose_config("+recipe=quickstart")
    loss = build_loss(config)
    assert target_names(config, Passes(), loss, ("x", "label", "mask")) == ("label",)
    with pytest.raises(ConfigError, match=r"takes every entry of a sample"):
        target_names(config, Passes(), loss, ("x", "mask"))
    for none in (Passes(), torch.nn.Linear(2, 2)):
        with pytest.raises(ConfigError, match=r"takes none of the entries of a sample \(a, b\) by name, but (x|input)"):
            target_names(config, none, loss, ("a", "b"))


def spread(output, scale):
    return output.std() * scale


def test_a_loss_may_take_the_output_alone():
    config = compose_config("+recipe=quickstart")
    assert target_names(config, Passes(), LossFunction(spread, {"scale": 2.0}), ("x", "mask")) == ()
    assert target_names(config, Passes(), LossFunction(torch.std, {}), ("0", "1")) == ("1",)
    for loss in (LossFunction(spread, {}), torch.nn.MSELoss()):
        with pytest.raises(ConfigError) as refused:
            target_names(config, Passes(), loss, ("x", "mask"))
        assert refused.value.code == "MW313"


def test_parameters_of_model_and_loss_freeze():
    words = ("model.target=networks.TwoHeads", "loss.target=networks.WeighedLoss", "data.target=networks.Points")
    config = compose_config(*words, "data.args.keys=true", "train.steps=1", "optimizer.freeze=[loss.*, first.*]")
    step = objective(config, entries(config)[0])
    frozen = {name for name, parameter in step.named_parameters() if not parameter.requires_grad}
    assert frozen == {"loss.balance", "model.first.weight", "model.first.bias"}


@pytest.mark.parametrize(
    ("precision", "real", "wide"), [("fp32", torch.float32, torch.complex64), ("fp64", torch.float64, torch.complex128)]
)
def test_entries_of_a_batch_have_the_precision_of_parameters(precision, real, wide):
    entries = [torch.ones(2, dtype=one) for one in (torch.float64, torch.complex64, torch.complex128, torch.int16)]
    assert [one.dtype for one in cast(entries, DTYPES[precision])] == [real, wide, wide, torch.int16]


class Mixed(torch.nn.Linear):
    """A layer with a scale of higher and a mask of lower precision."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.register_buffer("mask", torch.ones(4, dtype=torch.float16))


@pytest.mark.parametrize(
    ("precision", "named"), [("fp32", "scale, mask cast from float16 and float64"), ("fp64", "mask cast from float16")]
)
def test_tensors_that_a_model_makes_in_another_dtype_are_named(precision, named):
    said = []
    words = ("+recipe=quickstart", f"model.target={__name__}.Mixed", "model.args={}", f"train.precision={precision}")
    model = build_model(compose_config(*words), said.append)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {DTYPES[precision]}
    assert said == [f"model: {named} to {precision} (train.precision)."]


LARGE = "model.args={vocabulary: 128256, length: 64, width: 8192, layers: 2, heads: 64, kv_heads: 8, hidden: 28672}"


def test_a_model_beyond_the_memory_is_captured():
    config = compose_config("+recipe=llama", LARGE, "train.precision=fp64")
    names, tensors = entries(config)
    step, found, _ = captured_from_shapes(config, names, tensors, print)
    size = sum(parameter.numel() * parameter.element_size() for parameter in step.parameters())
    assert size > 25 << 30
    assert sum(source.spec.elements for source in found.graph.of_kind("parameter")) * 8 == size


@pytest.mark.parametrize("when", ["built", "called"])
def test_a_model_that_reads_numbers_is_built_after_all(when):
    config = compose_config(
        "model.target=networks.Reading",
        f"model.args={{when: {when}}}",
        "data.target=networks.Points",
        "loss.target=torch.nn.CrossEntropyLoss",
        "job=plan",
    )
    names, tensors = entries(config)
    said = []
    step, found, _ = captured_from_shapes(config, names, tensors, said.append)
    assert found.graph == capture(objective(config, names), tensors, training=True).graph
    assert [type(parameter.data) for parameter in step.parameters()] == [torch.Tensor] * 2
    assert [line for line in said if "networks.Reading reads numbers while it is built" in line] == said
    assert bool(said) == (when == "built")


def test_an_error_of_a_model_is_reported_once():
    config = compose_config("+recipe=llama", "model.args.heads=7")
    names, tensors = entries(config)
    with pytest.raises(ConfigError, match="must be a multiple of heads"):
        captured_from_shapes(config, names, tensors, pytest.fail)


def test_a_large_model_that_cannot_be_captured_is_not_built(monkeypatch):
    monkeypatch.setattr("runner.build.modules.LARGEST_REBUILT", 0)
    config = compose_config(
        "model.target=networks.Reading",
        "model.args={when: called}",
        "data.target=networks.Points",
        "loss.target=torch.nn.CrossEntropyLoss",
        "job=plan",
    )
    names, tensors = entries(config)
    with pytest.raises(StrategyError, match="failed on the example batch"):
        captured_from_shapes(config, names, tensors, pytest.fail)
