"""The exported program on real ranks, beside the eager module; as `loops`, an entry of ranks."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from loops import next_token, tokens
from torch import nn
from torch.distributed.tensor import DTensor

from runner.report.comparison import ROUNDING, TOLERANCE, of_step


def imported(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("exported", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exported(rank: Any, given: tuple[Path, nn.Module]) -> dict[str, float]:
    """The largest relative differences of two steps: of the loss and of any gradient."""
    file, module = given
    program = imported(file)
    eager = copy.deepcopy(module)
    mesh = program.make_mesh("cpu")
    program.parallelize(module, mesh)
    pair = [torch.optim.AdamW(one.parameters(), lr=0.01, eps=1e-3) for one in (module, eager)]
    worst = {"loss": 0.0, "gradient": 0.0}
    for step in range(2):
        x, y = tokens(step)
        with program.running(mesh):
            loss = next_token(module(*program.sliced([x], mesh)), *program.sliced([y], mesh, first=1))
            loss.backward()
        expected = next_token(eager(x), y)
        expected.backward()
        gradients = {name: one.grad.full_tensor() for name, one in module.named_parameters()}
        ours = {"loss": float(loss.detach().full_tensor()), "gradients": gradients}
        theirs = {
            "loss": float(expected.detach()),
            "gradients": {name: one.grad for name, one in eager.named_parameters()},
        }
        gap, found = of_step(ours, theirs, TOLERANCE["fp32"], ROUNDING["fp32"])
        worst["loss"] = max(worst["loss"], gap)
        worst["gradient"] = max(worst["gradient"], *found.values())
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
    return worst


def transformed(rank: Any, given: tuple[Path, Path]) -> dict[str, float]:
    """The same of a model that transformers itself loads with an exported config, of the rank's rows."""
    import transformers

    folder, file = given
    content = json.loads(file.read_text(encoding="utf-8"))
    eager = transformers.AutoModelForCausalLM.from_pretrained(folder, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, use_cache=False, distributed_config=content)
    x, _ = tokens()
    copies = content["dp_replicate_size"] * content["fsdp_size"]
    own = x.chunk(copies)[dist.get_rank() // content["tp_size"]]
    loss = model(input_ids=own, labels=own).loss
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    expected = eager(input_ids=x, labels=x).loss
    expected.backward()
    sliced = {name: one.grad for name, one in model.named_parameters()}
    gradients = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in sliced.items()}
    ours = {"loss": float(mean) / dist.get_world_size(), "gradients": gradients}
    theirs = {
        "loss": float(expected.detach()),
        "gradients": {name: one.grad for name, one in eager.named_parameters()},
    }
    gap, found = of_step(ours, theirs, TOLERANCE["fp32"], ROUNDING["fp32"])
    assert any(isinstance(one, DTensor) for one in sliced.values())
    return {"loss": gap, "gradient": max(found.values())}


def sped(rank: Any, given: tuple[Path, Path]) -> dict[str, float]:
    """The largest relative differences of the losses of three steps with DeepSpeed, by an exported config."""
    import deepspeed
    import transformers

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    folder, file = given
    content = json.loads(file.read_text(encoding="utf-8"))
    model, eager = (transformers.AutoModelForCausalLM.from_pretrained(folder, use_cache=False) for _ in range(2))
    options = {"optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}}
    engine, *_ = deepspeed.initialize(model=model, config=content | options)
    optimizer, worst = torch.optim.Adam(eager.parameters(), lr=0.01), 0.0
    for step in range(3):
        x, _ = tokens(step)
        loss, expected = (one(input_ids=x, labels=x).loss for one in (engine, eager))
        worst = max(worst, float(abs(loss - expected).detach() / expected.detach()))
        engine.backward(loss)
        engine.step()
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
    shapes = {tuple(one.shape) for name, one in engine.module.named_parameters() if "q_proj" in name}
    assert shapes == {(8, 16)}
    return {"loss": worst}
