"""One device with the random numbers of `train.random=exact` computes what the captured program computes on ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from runner.training.eager import Eager
from runner.training.reference import ExactRandom
from strategies.capture import Objective, capture
from strategies.core.program import LoweringOptions
from strategies.core.request import Request
from strategies.lowering.lowering import lower
from strategies.planner.planner import make_plan
from strategies.runtime.simulate import Simulation

KEY = 7


class Attention(nn.Module):
    """Scaled dot-product attention, with or without its built-in dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unsqueeze(1)
        return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=self.dropout).squeeze(1)


class Heads(nn.Module):
    def __init__(self, dropout: float, weights: bool) -> None:
        super().__init__()
        self.attention, self.weights = nn.MultiheadAttention(4, 2, dropout=dropout, batch_first=True), weights

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.weights)[0]


class Recurrent(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.cells = nn.GRU(4, 4, 2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0]


class Noise(nn.Module):
    """Uses in-place random operators and random functions that are composed of others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.empty_like(x).uniform_(-1, 1) + torch.randn_like(x)
        pooled, _ = functional.fractional_max_pool2d(x, (1, 2), output_size=(2, 2), return_indices=True)
        pooled = functional.fractional_max_pool3d(x[None], (2, 1, 2), output_size=(2, 1, 2)).mean() + pooled.mean()
        low = torch.svd_lowrank(self.weight, 1, niter=0)[1].sum()  # a parameter: torch switches modes off within
        return functional.dropout1d(x + noise, 0.3) + functional.gumbel_softmax(x, dim=-1) + pooled + low


class Fresh(nn.Module):
    """Makes a layer at every forward (as BigBird does for short sequences) and takes its initial weights, or not."""

    def __init__(self, taken: bool) -> None:
        super().__init__()
        self.taken = taken

    def forward(self, x: Tensor) -> Tensor:
        fresh = nn.Linear(4, 4, dtype=x.dtype)
        return x + fresh(x).detach() if self.taken else x


def mask(shape: Sequence[int], probability: float, lengths: Tensor | None = None) -> np.ndarray:
    """One place in some rows, by their length: the calls of numpy depend on values, as in SpecAugment."""
    drawn = np.zeros(tuple(shape), dtype=bool)
    for row, length in enumerate([shape[1]] * shape[0] if lengths is None else lengths.tolist()):
        if np.random.rand() < probability and length:
            drawn[row, np.random.choice(length)] = True
    return drawn


def shuffled(count: int, *, also: bool) -> dict[str, Tensor | None]:
    return {"order": torch.tensor(random.sample(range(count), count)), "also": torch.tensor(mask((2, count), 0.5))}


class Masked(nn.Module):
    """Draws twice with numpy, once by the values of its input, and between with Python and with torch."""

    def __init__(self) -> None:
        super().__init__()
        self.fill = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[mask(x.shape[:2], 0.7)] = self.fill
        x = functional.dropout(x, 0.2)
        drawn = shuffled(4, also=True)
        x = x[..., drawn["order"]] * (1 + drawn["also"].to(x.dtype))
        lengths = (x.detach() > 0).sum(-1).clamp(max=2).amin(-1)
        return x.masked_fill(torch.from_numpy(mask(x.shape[:2], 0.7, lengths)).unsqueeze(-1), 0.5)


class NeverSkipped(nn.Module):
    """Layers that are skipped with probability 0, as in MusicGen, are no random operators."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            if random.uniform(0, 1) < 0.0 or 0 > np.random.random():
                continue
            x = functional.dropout(x, 0.2)
        return x


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "numpy and Python": Masked,
    "skipped with probability 0": NeverSkipped,
    "attention": lambda: Attention(0.0),
    "attention with dropout": lambda: Attention(0.4),
    "heads": lambda: Heads(0.4, weights=False),
    "heads without dropout": lambda: Heads(0.0, weights=True),
    "heads that give their weights": lambda: Heads(0.4, weights=True),
    "encoder": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True),
    "recurrent": lambda: Recurrent(0.0),
    "recurrent with dropout": lambda: Recurrent(0.5),
    "noise": Noise,
    "fresh layer": lambda: Fresh(taken=True),
    "fresh layer that is left out": lambda: Fresh(taken=False),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", LAYERS)
def test_one_device_draws_what_ranks_draw(name: str) -> None:
    """A dropout after the layer shows whether both have counted the same random operators in the layer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Unflatten(1, (2, 4)), LAYERS[name](), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8, 4))
    step = Objective(net, nn.MSELoss(), ("0", "1"), ("1",)).double()
    batch = torch.randn(8, 8).double(), torch.randn(8, 4).double()
    captured = capture(step, batch, training=True)
    program = lower(captured.graph, make_plan(captured.graph, Request("semi_auto", 4)), LoweringOptions(exact=True))
    losses, *_ = Simulation(program, {**captured.tensors, "0": batch[0], "1": batch[1]}).run(KEY)
    functions = functional.dropout, functional.scaled_dot_product_attention
    with ExactRandom(KEY):
        expected = step(*batch)
    assert all(loss.item() == pytest.approx(expected.item(), rel=1e-10) for loss in losses)
    assert (functional.dropout, functional.scaled_dot_product_attention) == functions


def test_fp64_can_draw_the_numbers_of_fp32() -> None:
    def random_numbers(x: Tensor, single: bool) -> list[Tensor]:
        with ExactRandom(KEY, single=single):
            turned = torch.empty(4, 3, dtype=x.dtype).T
            return [
                torch.rand(3, dtype=x.dtype),
                torch.rand(3),
                torch.randn_like(x),
                torch.bernoulli(torch.full_like(x, 0.5)),
                torch.empty_like(x).uniform_(),
                turned.normal_(),
                functional.alpha_dropout(x, 0.5),
                functional.dropout(x, 0.5),
            ]

    x = torch.ones(3, 4)
    single, double = random_numbers(x, single=False), random_numbers(x.double(), single=True)
    assert [tensor.dtype for tensor in double] == [torch.float32 if i == 1 else torch.float64 for i in range(8)]
    assert all(torch.allclose(a.double(), b.double(), rtol=1e-6) for a, b in zip(single, double, strict=True))
    assert not torch.allclose(single[4].double(), random_numbers(x.double(), single=False)[4])


@pytest.mark.filterwarnings(
    "ignore:None of the inputs"
)  # of a checkpoint in another one, whose forward has no gradients
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_draws_the_same_numbers(reentrant: bool) -> None:
    torch.manual_seed(0)
    unflat, flat = nn.Unflatten(1, (2, 4)), nn.Flatten()
    layers = [nn.Sequential(nn.Linear(8, 8), unflat, Masked(), flat, nn.Dropout(0.5)) for _ in range(2)]

    def noisy(x: Tensor) -> Tensor:
        return checkpoint(layers[1], layers[0](x) * torch.rand(8), use_reentrant=reentrant)

    def gradient(again: bool) -> Tensor:
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        with ExactRandom(KEY):
            y = functional.dropout(x)
            y = checkpoint(noisy, y, use_reentrant=reentrant) if again else layers[1](layers[0](y) * torch.rand(8))
            y = functional.dropout(y)
        y.square().sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(again=True), gradient(again=False))


class Counting(nn.Module):
    """Replaces a buffer of its own and one of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)
        for module in (self, self.inner):
            module.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for module in (self, self.inner):
            module.steps = module.steps + 1
        return self.inner(x).mean()


def test_tensors_of_a_module_are_those_that_its_forward_leaves() -> None:
    module = Eager(Objective(Counting(), None, ("x",), ()))
    tensors = module.tensors()
    for step in (1, 2):
        module(torch.ones(2, 4), key=KEY)
        assert (tensors["steps"], tensors["inner.steps"]) == (step, step)
