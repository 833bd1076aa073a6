"""Loops of users, as entries of real ranks: a planned module is trained beside the eager one and compared with it."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from meshwright.models.gpt import GPT
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional

import meshwright
from runner.errors import ConfigError
from runner.report.comparison import ROUNDING, TOLERANCE, of_step

ROWS, LENGTH, TOKENS = 8, 8, 32


def next_token(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return GPT(TOKENS, LENGTH, 16, 2, 4).to(dtype)


class Fused(nn.Module):
    """A block whose queries, keys and values are one projection, as are gate and up: tokens -> logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.qkv, self.o_proj = nn.Embedding(TOKENS, 16), nn.Linear(16, 3 * 16), nn.Linear(16, 16)
        self.gate_up, self.down, self.head = nn.Linear(16, 2 * 32), nn.Linear(32, 16), nn.Linear(16, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        heads = (one.view(*x.shape, 4, 4).transpose(1, 2) for one in self.qkv(h).split(16, -1))
        h = h + self.o_proj(functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(h).chunk(2, -1)
        logits: Tensor = self.head(h + self.down(functional.silu(gate) * up))
        return logits


def fused(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return Fused().to(dtype)


class Interleaved(nn.Module):
    """A GPT-OSS of transformers, whose experts hold gate and up in turn: tokens -> logits."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GptOssConfig, GptOssForCausalLM

        config = GptOssConfig(
            vocab_size=TOKENS,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=16,
            pad_token_id=0,
            use_cache=False,
        )
        self.net = GptOssForCausalLM(config)

    def forward(self, x: Tensor) -> Tensor:
        with mock.patch("transformers.integrations.moe._can_use_grouped_mm", return_value=False):  # it has no fp64
            logits: Tensor = self.net(input_ids=x).logits
        return logits


def interleaved(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return Interleaved().to(dtype)


SECTIONS = {
    "qkv.matmul": [[2, 1, 1], [1, 2]],
    "o_proj.matmul": [[2, 1, 2], [2, 1]],
    "gate_up.matmul": [[2, 1, 1], [1, 2]],
    "down.matmul": [[2, 1, 2], [2, 1]],
}
"""Megatron's slices of fused weights."""
MODELS = {"gpt": gpt, "fused": fused, "interleaved": interleaved}


def tokens(seed: int = 0) -> tuple[Tensor, Tensor]:
    found = torch.randint(TOKENS, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return found[:, :-1], found[:, 1:]


@dataclass(frozen=True)
class Loop:
    """A loop of `steps`; `plan` are arguments of `meshwright.plan`, or `file` holds one. The device mesh has the shape
    `grid`; with `local` the ranks are given their slices of a batch. Every step adds up `backwards` gradients."""

    plan: dict[str, Any] = field(default_factory=dict)
    file: Path | None = None
    grid: tuple[int, ...] = (4,)
    local: bool = False
    backwards: int = 1
    steps: int = 2
    clip: float | None = None
    dtype: torch.dtype = torch.float64
    model: str = "gpt"


def compared(rank: Any, loop: Loop) -> dict[str, float]:
    """The largest relative differences from eager training: of the loss, of any gradient, of any weight at the end; and
    under "bytes" whether the busiest rank has sent other bytes than the plan says."""
    module = MODELS[loop.model](loop.dtype)
    eager = copy.deepcopy(module)
    device_mesh = init_device_mesh("cpu", loop.grid)
    if loop.file is None:
        plan = meshwright.plan(module, tokens(), loss=next_token, plan_cache=None, **loop.plan)
    else:
        plan = meshwright.load(loop.file, module, tokens(), loss=next_token)
    sharded = plan.apply(module, device_mesh)
    assert [name for name, _ in sharded.named_parameters()] == [name for name, _ in eager.named_parameters()]
    optimizer = plan.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, clip=loop.clip)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    reference = torch.optim.SGD(eager.parameters(), lr=0.1, momentum=0.9)
    slower = torch.optim.lr_scheduler.StepLR(reference, 1, gamma=0.5)
    worst = {"loss": 0.0, "gradient": 0.0, "weight": 0.0}
    sent, shown = sharded.execution.communicator.sent, Counter[str]()
    for step in range(loop.steps):
        for micro in range(loop.backwards):
            batch = tokens(10 * step + micro)
            given = sharded.local_batch(*batch) if loop.local else batch
            loss, expected = sharded(*given), next_token(eager(batch[0]), batch[1])
            (loss / loop.backwards).backward()
            (expected / loop.backwards).backward()
            worst["loss"] = max(worst["loss"], _relative(loss.detach(), expected.detach()))
        optimizer._reduce()
        before = Counter(sent)
        gradients = optimizer.gradients()
        shown += Counter(sent) - before  # those that are no DTensors are gathered to be shown
        ours = {"loss": float(loss), "gradients": {name: _all(gradient) for name, gradient in gradients.items()}}
        theirs = {"loss": float(expected), "gradients": {name: one.grad for name, one in eager.named_parameters()}}
        rounding = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}[loop.dtype]
        _, found = of_step(ours, theirs, TOLERANCE[rounding], ROUNDING[rounding])
        worst["gradient"] = max(worst["gradient"], *found.values())
        if loop.clip is not None:
            nn.utils.clip_grad_norm_(eager.parameters(), loop.clip)
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
        scheduler.step()
        slower.step()
    if loop.dtype is torch.float64 and loop.backwards == 1 and loop.clip is None:  # its loss is as long as predicted
        predicted = {kind: loop.steps * count for kind, count in plan.content["communication"].items()}
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, {kind: count - shown[kind] for kind, count in sent.items()})
        worst["bytes"] = float(predicted != {kind: max(one[kind] for one in every) for kind in every[0]})
    state = {name: _all(value) for name, value in sharded.state_dict().items()}
    assert state.keys() == eager.state_dict().keys()
    for name, value in eager.state_dict().items():
        worst["weight"] = max(worst["weight"], _relative(state[name], value))
    return worst


def uneven(rank: Any, _: None) -> tuple[dict[str, str], float]:
    """How a state dict holds ten rows that two axes slice into 3, 3, 3 and 1, and the largest difference of a gradient
    or of a weight that was loaded."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 4)).double()
    batch = torch.randn(8, 8).double(), torch.randn(8, 4).double()
    strategies = {"0": [[1, 1], [4, 1], [4]]}
    mesh = {"a": 2, "b": 2}
    plan = meshwright.plan(module, batch, loss=nn.MSELoss(), mesh=mesh, strategies=strategies, plan_cache=None)
    sharded = plan.apply(module)
    optimizer = plan.optimizer(torch.optim.SGD, lr=0.1)
    sharded(*batch).backward()
    nn.MSELoss()(module(batch[0]), batch[1]).backward()
    gradients = optimizer.gradients()
    worst = max(_relative(_all(gradients[name]), one.grad) for name, one in module.named_parameters())
    optimizer.zero_grad()
    doubled = {name: 2 * value for name, value in module.state_dict().items()}
    sharded.load_state_dict(doubled)
    state = sharded.state_dict()
    worst = max(worst, *(_relative(_all(state[name]), value) for name, value in doubled.items()))
    return {name: f"{tuple(one.shape)} {sharded.get_parameter(name).shape[0]}" for name, one in state.items()}, worst


def refused(rank: Any, _: None) -> list[str]:
    """The codes of what cannot be applied, and the number of process groups that it left behind."""
    two, four = (meshwright.plan(gpt(), tokens(), loss=next_token, mesh=ranks, plan_cache=None) for ranks in (2, 4))
    backwards = DeviceMesh("cpu", torch.arange(4).flip(0))
    wider = GPT(TOKENS, LENGTH, 32, 2, 4).double()
    groups = dist.distributed_c10d._world.pg_map
    known, codes = len(groups), []
    for call in (
        lambda: two.apply(gpt()),
        lambda: four.apply(gpt(), backwards),
        lambda: four.apply(wider),
        lambda: four.apply(gpt().to("meta")),
        lambda: four.optimizer(torch.optim.SGD),
    ):
        try:
            call()
        except meshwright.CodedError as error:
            codes.append(error.code)
    return [*codes, str(len(groups) - known)]


def _all(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _relative(value: Tensor, expected: Tensor) -> float:
    return float((value.double() - expected.double()).abs().max() / expected.double().abs().max())


def saved(rank: Any, given: tuple[Path, str]) -> float:
    """A checkpoint of torch, written under one plan and read under another: the largest difference of any weight."""
    folder, model = given
    made, strategies = MODELS[model], SECTIONS if model == "fused" else {}
    mesh = {"dp": 2, "tp": 2}
    first = meshwright.plan(made(), tokens(), loss=next_token, mesh=mesh, strategies=strategies, plan_cache=None)
    sharded = first.apply(made())
    dcp.save(sharded.state_dict(), checkpoint_id=folder)
    other = copy.deepcopy(made())
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    second = meshwright.plan(other, tokens(), loss=next_token, mesh=4, mode="data_parallel", plan_cache=None)
    again = second.apply(other)
    state = again.state_dict()
    dcp.load(state, checkpoint_id=folder)
    again.load_state_dict(state)
    again.load_state_dict(sharded.state_dict())  # DTensors of another layout
    again.load_state_dict(made().state_dict())  # unsharded tensors
    expected = made().state_dict()
    assert dist.get_world_size() == 4
    return max(float((_all(value) - expected[name]).abs().max()) for name, value in again.state_dict().items())


def striped(rank: Any, folder: Path) -> tuple[bool, str]:
    """Whether a DTensor in stripes is complete where it is gathered, and what a checkpoint of torch says of it."""
    value, mesh = torch.arange(24.0).view(24, 1), init_device_mesh("cpu", (4,))
    sliced = distribute_tensor(value, mesh, [_StridedShard(0, split_factor=3)], src_data_rank=None)
    complete = torch.equal(sliced.full_tensor(), value)
    try:
        dcp.save({"fused": sliced}, checkpoint_id=folder)
    except dcp.api.CheckpointException as error:
        return complete, str(error)
    return complete, ""


def travelled(rank: Any, given: tuple[Path, list[dict[str, Any]]]) -> float:
    """The largest relative difference of a weight from eager training, where every plan in turn trains one step and
    leaves weights and optimizer states to torch.distributed.checkpoint, from which the next goes on."""
    folder, plans = given
    eager = gpt(torch.float64)
    reference = torch.optim.AdamW(eager.parameters(), lr=0.01)
    for step, options in enumerate(plans):
        module = gpt(torch.float64)
        plan = meshwright.plan(module, tokens(), loss=next_token, plan_cache=None, **options)
        sharded = plan.apply(module)
        if step:
            weights = sharded.state_dict()
            dcp.load(weights, checkpoint_id=folder / f"weights-{step}")
            sharded.load_state_dict(weights)
        optimizer = plan.optimizer(torch.optim.AdamW, lr=0.01)
        if step:
            optimizer.init_state()
            states = {"optimizer": optimizer.state_dict()}
            dcp.load(states, checkpoint_id=folder / f"states-{step}")
            optimizer.load_state_dict(states["optimizer"])
        sharded(*tokens(step)).backward()
        next_token(eager(tokens(step)[0]), tokens(step)[1]).backward()
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
        dcp.save(sharded.state_dict(), checkpoint_id=folder / f"weights-{step + 1}")
        dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder / f"states-{step + 1}")
    state = {name: _all(value) for name, value in sharded.state_dict().items()}
    return max(_relative(state[name], value) for name, value in eager.state_dict().items())


def _regression() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 4)).double()
    return module, (torch.randn(8, 8).double(), torch.randn(8, 4).double())


def with_tools_of_torch(rank: Any, stage: int) -> tuple[float, list[str], int, bool]:
    """A module that torch.compile was given, and that torch's set_state_dict takes back by a step: the largest relative
    difference of a loss from eager training. Then what get_state_dict calls the parameters with states, how many of
    their steps share memory, and whether it finds the same states, zero, in an optimizer that has made no step."""
    module, batch = _regression()
    eager = copy.deepcopy(module)
    plan = meshwright.plan(module, batch, loss=nn.MSELoss(), mode="data_parallel", mesh=2, zero=stage, plan_cache=None)
    sharded = plan.apply(module)
    optimizer = plan.optimizer(torch.optim.AdamW, lr=0.1)
    reference = torch.optim.AdamW(eager.parameters(), lr=0.1)
    compiled, worst = torch.compile(sharded, backend="aot_eager"), 0.0
    pairs, kept = ((sharded, optimizer), (eager, reference)), []
    for step in range(6):
        if step == 2:
            kept = [copy.deepcopy(get_state_dict(*one)) for one in pairs]
            torch.save(sharded.state_dict(), file := BytesIO())
        if step == 4:
            for one, (weights, updates) in zip(pairs, kept, strict=True):
                set_state_dict(*one, model_state_dict=weights, optim_state_dict=updates)
            file.seek(0)
            assert all(map(torch.equal, map(_all, torch.load(file).values()), map(_all, sharded.state_dict().values())))
            sharded.load_state_dict(sharded.state_dict())  # the memory that is written
        loss, expected = compiled(*batch), nn.MSELoss()(eager(batch[0]), batch[1])
        worst = max(worst, _relative(loss.detach(), expected.detach()))
        for value, one in ((loss, optimizer), (expected, reference)):
            value.backward()
            one.step()
            one.zero_grad()
    states = get_state_dict(sharded, optimizer)[1]["state"]
    shared = len(states) - len({state["step"].data_ptr() for state in states.values()})
    fresh = get_state_dict(plan.apply(module), plan.optimizer(torch.optim.AdamW, lr=0.1))[1]
    moments = [state.pop(name) for state in fresh["state"].values() for name in ("exp_avg", "exp_avg_sq")]
    same = fresh["state"].keys() == states.keys() and all(not _all(one).any() for one in moments)
    return worst, sorted(states), shared, same and {group["lr"] for group in fresh["param_groups"]} == {0.1}


class Growing(torch.optim.SGD):
    """Multiplies its learning rate by a number that it keeps beside it, in every step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["growth"] = None

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["growth"] = 1.25 * (group["growth"] or 1)
            group["lr"] *= group["growth"]
        return super().step(closure)


def with_options_of_a_step(rank: Any, stage: int) -> tuple[float, list[dict[str, float]]]:
    """The largest relative difference of a loss from eager training with an optimizer that writes its options, and
    these at the end, of both."""
    module, batch = _regression()
    eager = copy.deepcopy(module)
    plan = meshwright.plan(module, batch, loss=nn.MSELoss(), mode="data_parallel", mesh=2, zero=stage, plan_cache=None)
    sharded, worst = plan.apply(module), 0.0
    pairs = (sharded, plan.optimizer(Growing, lr=0.05)), (eager, Growing(eager.parameters(), lr=0.05))
    for _ in range(4):
        loss, expected = sharded(*batch), nn.MSELoss()(eager(batch[0]), batch[1])
        worst = max(worst, _relative(loss.detach(), expected.detach()))
        for value, (_, optimizer) in zip((loss, expected), pairs, strict=True):
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
    return worst, [{name: one.param_groups[0][name] for name in ("lr", "growth")} for _, one in pairs]


def short_batches(rank: Any, _: None) -> str:
    """The code of the error for a batch with the rows of a slice after a global one; slices first are taken."""
    module, batch = _regression()
    plan = meshwright.plan(module, batch, loss=nn.MSELoss(), mode="data_parallel", mesh=2, plan_cache=None)
    sharded = plan.apply(module)
    sharded(*sharded.local_batch(*batch))
    sharded(*batch)
    try:
        sharded(*(one[:4] for one in batch))
    except ConfigError as error:
        return error.code
    return ""


def seeded_by_rank(rank: Any, _: None) -> list[list[str]]:
    """What is logged where all ranks make one module, and where each makes another."""
    found = []
    for seed in (0, rank.rank):
        lines: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record, lines=lines: lines.append(record.getMessage())  # type: ignore[method-assign]
        torch.manual_seed(seed)
        module, batch = nn.Linear(6, 4), (torch.zeros(8, 6), torch.zeros(8, 4))
        logging.getLogger("meshwright").addHandler(handler)
        meshwright.plan(module, batch, loss=nn.MSELoss(), mesh=2, plan_cache=None).apply(module)
        logging.getLogger("meshwright").removeHandler(handler)
        found.append(lines)
    return found


def written_by_others(rank: Any, _: None) -> dict[str, str]:
    """The codes of errors where something else than the optimizer of the plan changes weights or gradients, by case."""
    codes = {}

    def said(case: str, stage: int, act: Callable[[Any, Any, Tensor], None], *, own: bool = True) -> None:
        module, batch = _regression()
        module[2].bias.requires_grad_(False)
        module[1].register_parameter("unused", nn.Parameter(torch.ones(3)))
        options = {"mode": "data_parallel", "mesh": 2, "zero": stage, "plan_cache": None}
        plan = meshwright.plan(module, batch, loss=nn.MSELoss(), **options)
        sharded = plan.apply(module)
        optimizer = plan.optimizer(torch.optim.AdamW, lr=0.1) if own else torch.optim.SGD(sharded.parameters(), lr=0.1)
        sharded(*batch).backward()
        sharded.load_state_dict(module.state_dict())  # writes weights, too
        optimizer.zero_grad()
        codes[case] = ""
        try:
            act(sharded, optimizer, sharded(*batch))
            sharded(*batch)
        except meshwright.CodedError as error:
            codes[case] = error.code

    def other(sharded: Any, optimizer: Any, loss: Tensor) -> None:
        loss.backward()
        torch.optim.SGD([one for one in sharded.parameters() if one.grad is not None], lr=0.1).step()

    def forgotten(sharded: Any, optimizer: Any, loss: Tensor) -> None:
        other(sharded, optimizer, loss)
        sharded.zero_grad()

    def in_backward(sharded: Any, optimizer: Any, loss: Tensor) -> None:
        sharded.get_parameter("0.weight").register_post_accumulate_grad_hook(
            lambda one: torch.optim.SGD([one], lr=0.1).step()
        )
        loss.backward()

    def trained(sharded: Any, optimizer: Any, loss: Tensor) -> None:
        loss.backward()
        optimizer.step()

    def in_part(sharded: Any, optimizer: Any, loss: Tensor) -> None:
        loss.backward(inputs=[sharded.get_parameter("0.weight")])
        optimizer.step()

    def dropped(sharded: Any, optimizer: Any, loss: Tensor) -> None:
        loss.backward()
        sharded.get_parameter("0.weight").grad = None
        optimizer.step()

    def replaced(sharded: Any, optimizer: Any, loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        parameter = sharded.get_parameter("0.weight")
        parameter.data = torch.ones_like(parameter)

    def learns(sharded: Any, optimizer: Any, loss: Tensor) -> None:
        sharded.get_parameter("2.bias").requires_grad_(True)

    def added(sharded: Any, optimizer: Any, loss: Tensor) -> None:
        sharded.register_parameter("more", nn.Parameter(torch.ones(3)))

    def averaged(sharded: Any, optimizer: Any, loss: Tensor) -> None:
        nn.parallel.DistributedDataParallel(sharded)

    said("alone", 0, other, own=False)
    for act in (other, forgotten, in_backward, learns, added, averaged):
        said(act.__name__, 0, act)
    for stage in range(4):
        said(f"trained at {stage}", stage, trained)
    said("in_part", 2, in_part)
    said("dropped", 2, dropped)
    said("replaced", 3, replaced)
    return codes


class Classifier(nn.Module):
    """Points -> logits and features, other ones in evaluation than in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.factor = 1.0

    def forward(self, x: Tensor) -> dict[str, Any]:
        features = functional.dropout(self.norm(self.first(x)).relu() * self.factor, 0.5, self.training)
        return {"logits": self.last(features), "more": (features, "text")}


class Scaled(nn.Module):
    """A loss with a weight that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, output: dict[str, Any], target: Tensor) -> Tensor:
        return functional.cross_entropy(output["logits"] * self.scale, target)


def evaluated(rank: Any, given: tuple[int, str]) -> tuple[float, list[str], bool]:
    """The largest relative difference of a loss or an output in evaluation mode from one device, for batches of three
    numbers of rows between steps of training; the codes of refused batches; and whether training goes on."""
    stage, engine = given
    dtype = torch.float64 if engine == "native" or not stage else torch.float32
    torch.manual_seed(0)
    module, loss = Classifier().to(dtype), Scaled().to(dtype)
    x, y = torch.randn(8, 8, dtype=dtype), torch.randint(4, (8,))
    zero = {"stage": stage, "engine": engine} if stage else 0
    plan = meshwright.plan(module, (x, y), loss=loss, mesh={"dp": 2, "tp": 2}, zero=zero, plan_cache=None)
    sharded = plan.apply(module)
    optimizer = plan.optimizer(torch.optim.SGD, lr=0.1)
    eager, eager_loss, worst = copy.deepcopy(module).eval(), copy.deepcopy(loss).eval(), 0.0
    module.factor = 2.0 + rank.rank  # the program is that of the planned module
    for _ in range(3):
        sharded.train()
        sharded(x, y).backward()
        sharded.eval()  # which changes no gradient
        state = {name: _all(value) for name, value in sharded.state_dict().items()}
        eager_loss.load_state_dict({"scale": state.pop("loss.scale")})
        eager.load_state_dict(state)
        for rows in (8, 5, 1):
            with torch.inference_mode():
                expected = eager(x[:rows])
                expected_loss = eager_loss(expected, y[:rows])
                found, found_loss = sharded(x[:rows]), sharded(x[:rows], y[:rows])
            worst = max(worst, _relative(found["logits"], expected["logits"]))
            worst = max(worst, _relative(found["more"][0], expected["more"][0]))
            worst = max(worst, _relative(found_loss, expected_loss))
            assert found["more"][1] == "text" and not found_loss.requires_grad
        optimizer.step()
    codes = []
    for batch in ((x[rank.rank :][:1],), (), (x, y, y), (x,) if rank.rank else ("x",)):
        try:
            sharded(*batch)
        except meshwright.CodedError as error:
            codes.append(error.code)
    before = float(sharded.train()(x, y))
    return worst, codes, before > 0 and not torch.equal(_all(sharded.state_dict()["first.weight"]), module.first.weight)
