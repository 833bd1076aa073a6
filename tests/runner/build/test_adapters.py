"""Adapters of peft: weights by the names of the base, files that peft loads, and what cannot be saved."""

from __future__ import annotations

import json

import pytest
import torch
from composing import compose_config
from small import SMALL
from torch import nn

from runner.build import adapters, modules, pretrained
from runner.config.schema import Model
from runner.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
LORA = {"r": 2, "target_modules": ["q"], "modules_to_save": ["head"]}


def base() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Module()
    made.q, made.v, made.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)
    return made


def adapted(**given: object) -> nn.Module:
    import peft

    return peft.PeftModel(base(), peft.LoraConfig(**LORA | given))


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(3, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.q(ids)


def test_entries_go_to_the_forward_that_an_adapter_wraps():
    import peft

    model = peft.get_peft_model(Embedded(), peft.LoraConfig(r=2, target_modules=["q"]))
    config = compose_config(*SMALL, "parallel=data_parallel")
    assert config.loss.target is not None
    assert modules.target_names(config, model, nn.MSELoss(), ("ids", "labels")) == ("labels",)
    with pytest.raises(ConfigError, match="takes none of the entries"):
        modules.target_names(config, model, nn.MSELoss(), ("tokens", "labels"))


def test_weights_of_the_base_are_found_by_its_names_and_adapters_are_new(tmp_path):
    torch.save(base().state_dict(), tmp_path / "base.pt")
    model = adapted()
    found = pretrained.locate(Model(target="a.B", weights=str(tmp_path / "base.pt")), model)
    assert {name: stored.key for name, stored in found.items()} == {
        f"base_model.model.{name}.{part}": f"{name[0]}.{part}"
        for name in ("v", "q.base_layer")
        for part in ("weight", "bias")
    } | {
        f"base_model.model.head.{name}.{part}": f"head.{part}"  # both begin as the head of the base
        for name in ("original_module", "modules_to_save.default")
        for part in ("weight", "bias")
    }
    torch.save(model.state_dict(), tmp_path / "all.pt")  # as a merged checkpoint has it
    every = pretrained.locate(Model(target="a.B", weights=str(tmp_path / "all.pt")), model)
    assert every.keys() == {name for name, _ in model.named_parameters()}
    torch.save({"q.weight": torch.ones(4, 3)}, tmp_path / "part.pt")
    with pytest.raises(ConfigError, match="the files do not have"):
        pretrained.locate(Model(target="a.B", weights=str(tmp_path / "part.pt")), model)
    assert adapters.base_names(base()) == {} and adapters.adapter_names(base()) == frozenset()


@pytest.mark.parametrize("given", [{"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}, {"use_dora": True}])
def test_adapters_that_are_made_of_the_base_want_its_weights_before(tmp_path, given):
    model = adapted(**given)
    torch.save(base().state_dict(), tmp_path / "base.pt")
    with pytest.raises(ConfigError, match="from_pretrained") as error:
        pretrained.locate(Model(target="a.B", weights=str(tmp_path / "base.pt")), model)
    assert error.value.code == "MW307"
    torch.save(model.state_dict(), tmp_path / "all.pt")
    assert pretrained.locate(Model(target="a.B", weights=str(tmp_path / "all.pt")), model)


@pytest.mark.parametrize("given", [{}, {"bias": "lora_only"}, {"use_dora": True}])
def test_the_files_are_those_of_the_library(tmp_path, given):
    from safetensors.torch import load_file

    model = adapted(**given)
    model.save_pretrained(tmp_path)
    made = adapters.companions(model)
    saved, state = load_file(tmp_path / "adapter_model.safetensors"), model.state_dict()
    assert set(made.adapter.values()) == set(saved)
    assert all(torch.equal(state[name], saved[short]) for name, short in made.adapter.items())
    ours, theirs = (
        json.loads(text)
        for text in (made.texts["adapter_config.json"], (tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    )
    assert ours["inference_mode"] is True
    assert {name for name in theirs if ours[name] != theirs[name]} <= {"auto_mapping", "target_modules"}
    assert model.peft_config["default"].inference_mode is False  # training goes on
    assert not adapters.companions(base()).texts


def test_tensors_that_layers_share_are_saved_under_the_name_of_the_checkpoint():
    import peft

    model = peft.PeftModel(base(), peft.VeraConfig(r=2, target_modules=["q", "v"]))
    stored = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    made = adapters.companions(model).adapter
    assert set(made) <= stored
    assert {"base_model.vera_A", "base_model.vera_B"} <= set(made.values())
