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
from loops import LENGTH, ROWS, TOKENS, fused, gpt, tokens
from meshwright.models.llama import Llama
from meshwright.models.moe import MoE
from meshwright.models.vit import ViT
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional

from runner.export.dry_run import Counting
from runner.report.comparison import ROUNDING, TOLERANCE, of_step


def imported(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("exported", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Weighed(nn.Module):
    """Experts in one parameter, whose results are added up behind the module's last product."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / 4)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        hidden = functional.silu(torch.einsum("nd,edf->enf", rows, self.up))
        each = torch.einsum("enf,efd->end", hidden, self.down)
        return torch.einsum("end,ne->nd", each, self.router(rows).softmax(-1)).reshape(x.shape)


class DenseExperts(nn.Module):
    """Every expert computes on every row, those of a list and those of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head, self.router = nn.Embedding(TOKENS, 16), nn.Linear(16, TOKENS), nn.Linear(16, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.norm, self.weighed = nn.LayerNorm(16), Weighed(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        gates = self.router(h).softmax(-1)
        h = h + sum(gates[..., number : number + 1] * expert(h) for number, expert in enumerate(self.experts))
        return self.head(h + self.weighed(self.norm(h)))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """Tokens to logits, by one table."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.inner, self.head = nn.Embedding(TOKENS, 16), nn.Linear(16, 16), nn.Linear(16, TOKENS)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.tokens(x)).tanh())  # type: ignore[no-any-return]


class Shared(Tied):
    """The table has one more name, that of a module which is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(TOKENS, 16)
        self._modules = {"shared": self._modules.pop("shared"), **self._modules}
        self.tokens.weight = self.head.weight = self.shared.weight


def built(model: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A small model in fp32, and its batches (input, classes or numbers) of two steps. Some targets of the first rows
    are ignored, so that ranks count other numbers of them."""
    batches = [(x, y.clone()) for x, y in map(tokens, range(2))]
    for _, y in batches:
        y[:3, 2:] = -100
    torch.manual_seed(0)
    if model == "regression":
        ffn = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        return ffn, [(torch.randn(ROWS, 16), torch.randn(ROWS, 16)) for _ in range(2)]
    if model == "rows":
        return AcrossRows(), [(torch.randn(ROWS, 8), torch.randn(ROWS, ROWS)) for _ in range(2)]
    if model == "llama":
        return Llama(TOKENS, LENGTH, 16, 2, 4, 2, 32), batches
    if model == "bert":
        return Bert(), batches
    if model == "moe":
        return Experts(), batches
    if model == "dense":
        return DenseExperts(), batches
    if model == "fused":
        return fused(torch.float32), batches
    if model == "gpt2":
        return Gpt2(), batches
    if model == "pictures":
        return pictures(), [(torch.randn(ROWS, 4, 8, 8), torch.arange(ROWS)) for _ in range(2)]
    if model == "recurrent":
        return Recurrent(), batches
    if model == "bags":
        bags = nn.Sequential(nn.EmbeddingBag(TOKENS, 16, padding_idx=0), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4))
        return bags, [(x, x[:, 0] % 4) for x, _ in batches]
    if model == "grouped":
        return Grouped(), batches
    if model == "mixed":
        return Mixed(), batches
    if model == "attention":
        return Attention(), batches
    if model == "reductions":
        return Reductions(), batches
    if model == "repeated":
        return Repeated(), batches
    if model == "written":
        return Written(), batches
    if model == "weighed":
        net = nn.Sequential(nn.Embedding(TOKENS, 16), nn.Tanh(), nn.Linear(16, TOKENS), nn.LogSoftmax(-1))
        return net, batches
    if model in ("shared", "tied"):
        return Shared() if model == "shared" else Tied(), batches
    if model in EXPERTS:
        return Logits(model), batches
    if model == "vit":
        shape = (ROWS, 3, 8, 8)
        return ViT(8, 4, 16, 2, 4, TOKENS), [(torch.randn(shape), torch.arange(ROWS)) for _ in range(2)]
    return gpt(torch.float32), batches


class AcrossRows(nn.Module):
    """[rows, 8] -> [rows, rows]: the statistics, the mean and the products of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16)  # a bias would learn from rounding

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.linear(x)).relu()
        h = h - h.mean(0, keepdim=True)
        return h @ h.T


class Bert(nn.Module):
    """transformers' BERT: input_ids -> logits."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(
            vocab_size=TOKENS,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=32,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.bert = BertForMaskedLM(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.bert(input_ids=input_ids).logits
        return logits


class Gpt2(nn.Module):
    """transformers' GPT-2, whose queries, keys and values are one weight [inputs, outputs]: input_ids -> logits."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"vocab_size": TOKENS, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 4}
        dropped = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        self.net = GPT2LMHeadModel(GPT2Config(**sizes, **dropped, bos_token_id=0, eos_token_id=0, use_cache=False))

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.net(input_ids=input_ids).logits
        return logits


class Reductions(nn.Module):
    """Norms, deviations and running sums along features, which are slices: tokens -> logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.head = nn.Embedding(TOKENS, 16), nn.Linear(16, 32), nn.Linear(32, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.table(x))
        norm = torch.linalg.vector_norm(h, 3, dim=-1, keepdim=True)
        h = h * norm / (1 + norm.square()) / h.std(-1, keepdim=True)
        h = h.cumsum(-1) + torch.cumprod(h, dim=-1) + h.logcumsumexp(-1) * h.quantile(0.4, -1, keepdim=True)
        logits: Tensor = self.head(h)
        return logits


class Repeated(nn.Module):
    """Counts tokens, which ranks have slices of, and repeats features, which are slices: tokens -> logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.head = nn.Embedding(TOKENS, 16), nn.Linear(16, 32), nn.Linear(32, TOKENS)
        self.register_buffer("times", torch.tensor([1] * 30 + [0, 2]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.table(x)) / torch.bincount(x.flatten(), minlength=TOKENS)[x][..., None]
        logits: Tensor = self.head(torch.repeat_interleave(h, self.times, dim=-1))
        return logits


class Written(nn.Module):
    """Writes in place to features, which are slices: tokens -> logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.head = nn.Embedding(TOKENS, 16), nn.Linear(16, 32), nn.Linear(32, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.table(x)).sigmoid() + 0.5
        h[..., 0] = 0.5
        h[..., 8:24] *= 1.5
        h[h > 2.0] = 0.1
        shifted = torch.zeros_like(h)
        shifted[..., 1:] = h[..., :-1].cos()
        scans = (h / 2).cumprod_(-1) + (h / 8).cumsum_(-1)
        logits: Tensor = self.head(shifted + scans + (h / 2).tril_())
        return logits


class Grouped(nn.Module):
    """One weight for queries, and for half as many keys and values: tokens -> logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.qkv, self.head = nn.Embedding(TOKENS, 16), nn.Linear(16, 32), nn.Linear(16, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.table(x)).split([16, 8, 8], -1)
        logits: Tensor = self.head(query * torch.cat([key, value], -1).sigmoid())
        return logits


class Mixed(nn.Module):
    """Norms in fp64 between layers in fp32, and a table that is the head: tokens -> logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.up = (
            nn.Embedding(TOKENS, 16),
            nn.LayerNorm(16, dtype=torch.float64),
            nn.Linear(16, 16),
        )
        self.head = nn.Linear(16, TOKENS, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.full((16,), 0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.table(x).double()) * self.scale
        logits: Tensor = self.head(self.up(h.float()).tanh())
        return logits


class Attention(nn.Module):
    """Attention of torch, which reads the weights of its last layer without calling it, a number, a spectral norm, and
    layers in a list that are no modules to call: tokens -> logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.attention = nn.Embedding(TOKENS, 16), nn.MultiheadAttention(16, 4, batch_first=True)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.parts = nn.ModuleList([nn.ModuleDict({"linear": nn.Linear(16, 16)})])
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(16, TOKENS))

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        h = h + self.scale * self.attention(h, h, h, need_weights=False)[0]
        logits: Tensor = self.head(h + self.parts[0]["linear"](h))  # type: ignore[index]
        return logits


def pictures() -> nn.Module:
    """Convolutions, in groups and transposed: [rows, 4, 8, 8] -> [rows, 8]."""
    up = nn.ConvTranspose2d(8, 4, 2, stride=2, bias=False)
    middle = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.GroupNorm(2, 8), nn.ReLU6(), up, nn.AvgPool2d(2)
    return nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), *middle, nn.Conv2d(4, 8, 4), nn.Flatten())


class Recurrent(nn.Module):
    """Operators that DTensor (torch 2.13) does not know, an LSTM and a bilinear form: tokens -> logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cells, self.pairs = nn.Embedding(TOKENS, 8), nn.LSTM(8, 12), nn.Bilinear(12, 8, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        logits: Tensor = self.pairs(self.cells(h)[0], h)
        return logits


class Logits(nn.Module):
    """A mixture of experts of transformers: input_ids -> logits."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.net = routed(family)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.net(input_ids=input_ids).logits
        return logits


class Experts(nn.Module):
    """A mixture of four experts, without its load: input_ids -> logits."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(TOKENS, LENGTH, 16, 2, 4, 32, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.moe(input_ids)[0]
        return logits


SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "use_cache": False,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": {"num_local_experts": 4},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 16,
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 32},
}
"""Small models by family, besides `SMALL`."""


def routed(family: str) -> nn.Module:
    torch.manual_seed(0)
    import transformers

    config = transformers.AutoConfig.for_model(family, **SMALL | EXPERTS[family])
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        return functional.mse_loss(output, targets)
    return functional.cross_entropy(output.flatten(0, -2), targets.flatten())


def weighed(output: Tensor, targets: Tensor) -> Tensor:
    """Losses whose means are over weights, and a slice of which may count none."""
    numbers, classes = output.flatten(0, -2), targets.flatten()
    weights = torch.linspace(0.1, 2.0, TOKENS)
    chosen = functional.one_hot(classes.clamp(min=0), TOKENS).float()
    every = functional.binary_cross_entropy(numbers.exp(), chosen, weights.expand_as(chosen))
    smooth = functional.cross_entropy(numbers, classes, weights, label_smoothing=0.1)
    simple = functional.nll_loss(numbers, classes) + functional.nll_loss(numbers, classes, None, True)  # size_average
    return simple + functional.nll_loss(numbers, classes, weights) + smooth + every


class TorchsCount(CommDebugMode):
    """What torch counts, without its tracker of modules, which raises an IndexError for a Llama on one device too."""

    def __enter__(self) -> TorchsCount:
        super().__enter__()  # type: ignore[no-untyped-call]
        self.advanced_module_tracker.__exit__()  # type: ignore[no-untyped-call]
        return self


def exported(rank: Any, given: tuple[Path, str]) -> dict[str, float]:
    """The largest relative differences of two steps: of the loss and of any gradient; and the bytes sent in one."""
    file, model = given
    program = imported(file)
    module, batches = built(model)
    eager = copy.deepcopy(module)
    mesh = program.make_mesh("cpu")
    program.parallelize(module, mesh)
    module.load_state_dict(module.state_dict())
    loss_at = weighed if model == "weighed" else loss_of
    pair = [torch.optim.AdamW(one.parameters(), lr=0.01, eps=1e-3) for one in (module, eager)]
    worst = {"loss": 0.0, "gradient": 0.0}
    for x, y in batches:
        with program.running(mesh), TorchsCount() as torchs, Counting(mesh) as sent:
            loss = loss_at(module(*program.sliced([x], mesh)), *program.sliced([y], mesh, first=1))
            loss.backward()
        expected = loss_at(eager(x), y)
        expected.backward()
        own = float(loss.detach().full_tensor())  # type: ignore[operator]
        worst = _worse(worst, (own, module), (float(expected.detach()), eager))
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
    module.load_state_dict(module.state_dict())
    assert torchs.get_total_counts() == len(sent.calls), (torchs.get_comm_counts(), sent.calls)  # none is missed
    trained = {
        name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in module.state_dict().items()
    }
    other = [name for name, one in eager.state_dict().items() if not torch.allclose(trained[name], one, atol=1e-5)]
    assert not other, other
    stored = sum(one.to_local().nbytes for one in module.parameters() if isinstance(one, DTensor))
    return worst | {"bytes": sum(call.bytes for call in sent.calls), "stored": stored}


def styled(rank: Any, given: tuple[Path, str]) -> dict[str, float]:
    """The same of a file for `parallelize_module`, of the rank's rows, with the means of their losses."""
    file, model = given
    program = imported(file)
    module, batches = built(model)
    eager = copy.deepcopy(module)
    mesh = program.make_mesh("cpu")
    program.parallelize(module, mesh)
    pair = [torch.optim.AdamW(one.parameters(), lr=0.01, eps=1e-3, foreach=False) for one in (module, eager)]
    worst = {"loss": 0.0, "gradient": 0.0}
    for batch in ([x, y.clamp(min=0)] for x, y in batches):  # as many targets on all ranks
        x, y = program.own_rows(batch, mesh)
        loss, expected = loss_of(module(x), y), loss_of(eager(batch[0]), batch[1])
        loss.backward()
        expected.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        own = float(mean) / dist.get_world_size()
        worst = _worse(worst, (own, module), (float(expected.detach()), eager))
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
    return worst


def _worse(worst: dict[str, float], *sides: tuple[float, nn.Module]) -> dict[str, float]:
    """`worst`, or the relative differences between the loss and gradients of a module and of eager's."""
    made = []
    for loss, module in sides:
        found = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
        gradients = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in found.items()}
        made.append({"loss": loss, "gradients": gradients})
    gap, each = of_step(*made, TOLERANCE["fp32"], ROUNDING["fp32"])
    return {"loss": max(worst["loss"], gap), "gradient": max(worst["gradient"], *each.values())}


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
    by_expert = [one for name, one in sliced.items() if ".experts." in name] if "ep_plan" in content else []
    for one in by_expert:
        assert isinstance(one, DTensor)
        assert len(one.to_local()) * content["ep_size"] * content["fsdp_size"] == len(one)
    return {"loss": gap, "gradient": max(found.values())}


def sped(rank: Any, given: tuple[Path, Path]) -> dict[str, float]:
    """The largest relative differences of the losses of three steps with DeepSpeed, by an exported config."""
    import deepspeed
    import transformers

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    folder, file = given
    content = json.loads(file.read_text(encoding="utf-8"))
    model, eager = (transformers.AutoModelForCausalLM.from_pretrained(folder, use_cache=False) for _ in range(2))
    options = {"optimizer": {"type": "SGD", "params": {"lr": 0.02}}}
    engine, *_ = deepspeed.initialize(model=model, config=content | options)
    optimizer, worst = torch.optim.SGD(eager.parameters(), lr=0.02), 0.0
    for step in range(3):
        x, _ = tokens(step)
        loss, expected = (9 * one(input_ids=x, labels=x).loss for one in (engine, eager))  # its gradient is above 1
        worst = max(worst, float(abs(loss - expected).detach() / expected.detach()))
        engine.backward(loss)
        engine.step()
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
    shapes = {tuple(one.shape) for name, one in engine.module.named_parameters() if "q_proj" in name}
    assert shapes in ({(8, 16)}, set())  # or queries, keys and values are one weight
    return {"loss": worst}
