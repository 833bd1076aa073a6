"""User code for tests: models, losses, datasets, a collate function and metrics, small enough to train in a test.

A separate module, because ranks import everything by its dotted name.
"""

from __future__ import annotations

import collections
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import get_worker_info

from models.vocabulary import VocabularyFFN
from strategies import collectives, sharding_rule

FEATURES, CLASSES = 12, 4


class Points:
    """Samples (x [12], class); as a dict {"x", "label"} with `keys`. The class is that of the largest of 4 sums."""

    def __init__(self, rows: int = 64, seed: int = 0, keys: bool = False) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.x = torch.randn(rows, FEATURES, generator=draw)
        self.y = self.x.unflatten(1, (CLASSES, -1)).sum(2).argmax(1)
        self.keys = keys

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        x, y = self.x[index], self.y[index]
        return {"x": x, "label": y} if self.keys else (x, y)


class Part(Points):
    """Points that numpy and torch have drawn from 64 while it was made."""

    def __init__(self, rows: int = 32) -> None:
        super().__init__()
        chosen = np.random.permutation(64)[torch.randperm(64)[:rows].numpy()]
        self.x, self.y = self.x[chosen], self.y[chosen]


class Permuted(nn.Module):
    """A classifier of features in an order that numpy and Python have drawn while it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.order = np.random.permutation(FEATURES).tolist()
        random.shuffle(self.order)
        self.dense = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.dense(x[:, self.order])
        return result


class InWorkers(Points):
    """Points of which only workers can read any but the first 16, which are read before the start."""

    def __getitem__(self, index: int) -> Any:
        if index >= 16 and get_worker_info() is None:
            raise PermissionError("workers alone may read this")
        return super().__getitem__(index)


class PartlyIgnored(Points):
    """Points of which ever more of 12 rows have a class that losses ignore: 0, 3, 6, 9, then all."""

    def __init__(self, rows: int = 64, seed: int = 0, ignored: bool = False, keys: bool = False) -> None:
        super().__init__(rows, seed, keys)
        index = torch.arange(rows)
        if ignored:
            self.y[index % 12 < 3 * (index // 12)] = -100


class Broken(Points):
    """Points of which the rows from `broken` on cannot be read."""

    def __init__(self, rows: int = 64, broken: int | None = None) -> None:
        super().__init__(rows)
        self.broken = rows if broken is None else broken

    def __getitem__(self, index: int) -> Any:
        if index >= self.broken:
            raise ValueError("broken")
        return super().__getitem__(index)


class Langevin(torch.optim.SGD):
    """Adds noise to every weight, as Langevin dynamics do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                weight += 1e-3 * torch.randn_like(weight)
        return loss


class Slowing(torch.optim.SGD):
    """Counts steps where `kind` says: in its groups, once it has made one ("group"), in a dict of every state ("dict"),
    in its state_dict ("beside"), in a state of no parameter ("named"), or in what no checkpoint holds ("deque")."""

    def __init__(self, params: Any, lr: float = 0.1, kind: str = "group") -> None:
        super().__init__(params, lr=lr)
        self.kind, self.steps = kind, 0
        if kind == "named":
            self.state["steps"] = 0

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | ({"steps": self.steps} if self.kind == "beside" else {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1 if self.kind == "group" else 1
            for weight in group["params"]:
                state = self.state[weight]
                if self.kind == "dict":
                    state.setdefault("steps", {"count": torch.zeros(())})["count"] += 1
                if self.kind == "deque":
                    state["steps"] = collections.deque([1])
                weight.sub_(weight.grad, alpha=group["lr"] / group["steps"])


class ScheduleFree(torch.optim.SGD):
    """Has other weights to evaluate than those that it trains."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


class Classifier(nn.Module):
    """x [rows, 12] -> [rows, 4]."""

    def __init__(self, dropout: float = 0.0, norm: bool = False, hidden: int = 16) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, hidden)
        self.norm = nn.BatchNorm1d(hidden) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.outer = nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.drop(functional.gelu(self.norm(self.inner(x)))))


class SizedClassifier(Classifier):
    """Scales what it returns by the number of rows, as a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor(float(len(x)))


class FrequencyScaled(VocabularyFFN):
    """Gradients of a row are divided by how often the batch names it."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.embedding.scale_grad_by_freq = True


class WeightedLoss(nn.CrossEntropyLoss):
    """Classes count 0.5, 1, 2 and 4."""

    def __init__(self, ignore_index: int) -> None:
        super().__init__(torch.tensor([0.5, 1.0, 2.0, 4.0]), ignore_index=ignore_index)


class MixedLoss(WeightedLoss):
    """Adds a term that counts by rows, and a mean over classes that all count by other weights, a constant."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        weights = torch.tensor([1.0, 3.0, 1.0, 2.0]).to(input)
        other = functional.cross_entropy(2 * input, target, weight=weights)
        return super().forward(input, target) + input.square().mean() + other


class WrittenOutLoss(nn.Module):
    """Means over the targets that count, without a word of them to torch's cross-entropy."""

    def __init__(self, ignore_index: int) -> None:
        super().__init__()
        self.ignored = ignore_index

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        losses, counted = functional.cross_entropy(input, target, reduction="none"), target != self.ignored
        return (losses * counted).sum() / counted.sum().clamp(min=1) + losses.square()[counted].mean()


class AddedLoss(WrittenOutLoss):
    """Sums over the targets that count, and over all rows."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        losses = functional.cross_entropy(input, target, ignore_index=self.ignored, reduction="sum")
        return losses - 0.5 * (1 + input - input.square()).sum()


class ByNumbersLoss(WrittenOutLoss):
    """Two means over numbers of Python, and one that is divided in place."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        losses, counted = functional.cross_entropy(input, target, reduction="none"), target != self.ignored
        first, number = target == 1, max(counted.sum().item(), 1)
        sizes = (input.square().sum(-1) * first).sum()
        sizes /= first.sum().clamp(min=1)
        squares = losses.square()[first].sum() / max(first.sum().item(), 1)
        return (losses * counted).sum() / number + 2 * squares + sizes


class UnusedLoss(WrittenOutLoss):
    """Computes a mean that it does not use before the others."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        used = super().forward(input, target)
        rows = [target == label for label in (1, 2)]
        _, second = ((input.square().mean(-1) * one).sum() / one.sum().clamp(min=1) for one in rows)
        return used + second


class NeighbourLoss(nn.Module):
    """Compares each row with one that its target names."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(input, input[target])


class JoinedLoss(WrittenOutLoss):
    """Means over selections of two masks, one behind the other."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        counted, first = target != self.ignored, target == 1
        scores, targets = torch.cat([input[counted], 2 * input[first]]), torch.cat([target[counted], target[first]])
        policy = torch.distributions.Categorical(logits=scores)
        beside = torch.cat([input[counted], input[counted].square()], -1).mean()
        teacher = (2 * input[counted]).detach().softmax(-1)
        distance = functional.kl_div(input[counted].log_softmax(-1), teacher, reduction="batchmean")
        return functional.cross_entropy(scores, targets) - policy.log_prob(targets).mean() + beside + distance


class SizedLoss(nn.CrossEntropyLoss):
    """Takes tensors of the number of rows, which are others in a batch of another size."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        rows, others = torch.tensor(float(len(input))), ~torch.eye(len(input), dtype=torch.bool)
        losses = functional.cross_entropy(input, target, reduction="none")
        return losses.sum() / rows + (input @ input.T)[others].mean()


class SquaredLoss(nn.CrossEntropyLoss):
    """The square of a mean, which is no sum over rows."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target).square()


@sharding_rule("b d -> b d")
class Doubled(torch.autograd.Function):
    """Returns its operand; gradients are doubled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@torch.library.custom_op("networks_of_tests::gelu", mutates_args=())
def softmax_of_columns(x: Tensor) -> Tensor:
    """No rule, and the name of an operator of torch that has one."""
    return x.softmax(0)


softmax_of_columns.register_fake(torch.empty_like)
softmax_of_columns.register_autograd(lambda ctx, gradient: gradient.clamp(-0.01, 0.01))


class OwnOperators(Classifier):
    """A classifier with an operator of an autograd function and one of a library."""

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(softmax_of_columns(Doubled.apply(self.inner(x))))


class Odd(Classifier):
    """A classifier with layers whose names have another meaning in modules, in code or in this project."""

    NAMES = ("self", "forward", "class", "step", "meta", "a.b", "it's", "_evaluation", "_replica_groups")

    def __init__(self) -> None:
        super().__init__()
        for name in self.NAMES:
            layer: Any = nn.Linear(FEATURES, FEATURES)
            layer._parameters["type"], layer.meta = nn.Parameter(torch.rand(FEATURES)), "the user's"
            self._modules[name] = layer

    def forward(self, x: Tensor) -> Tensor:
        for name in self.NAMES:
            layer: Any = self._modules[name]
            x = torch.tanh(layer(x) + layer._parameters["type"])
        return super().forward(x)


class Gate(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.rand(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate


class Scalars(Classifier):
    """A classifier with parameters of shape (), one next to a similar one of shape (12,), and a frozen one."""

    def __init__(self) -> None:
        super().__init__(hidden=15)
        self.gates = nn.Sequential(Gate(), Gate(FEATURES), Gate())
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.tensor(0.1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.gates(x) + self.shift) * self.temperature.exp()


class Scaled(nn.Module):
    """A classifier of points scaled by one trainable number, which alone makes up the first stage."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.scale, self.net = nn.Parameter(torch.tensor([0.5])), Classifier(hidden=hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * self.scale)


class Astray(Classifier):
    """Looks up rows that its table does not have."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.table = nn.Embedding(2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.table((x[:, 0].abs() * 1000).long())


class Vacant(Classifier):
    """Has a parameter and a buffer of no elements."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.prompt = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.prompt.sum()


class Renormed(Classifier):
    """A classifier with an operator that has no sharding rule."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.renorm(x, 2, 0, 1.0))


class Inverse(Classifier):
    """A classifier with an operator that torch supports in fp32 and fp64 alone."""

    def forward(self, x: Tensor) -> Tensor:
        scale: Tensor = torch.linalg.inv(torch.eye(CLASSES, dtype=x.dtype, device=x.device) * 2)
        return super().forward(x) @ scale


class Cancelling(Classifier):
    """Adds and subtracts a large number, so that fp32 loses half of the digits. Some kernels do not support fp64;
    with `single` this module does not either."""

    def __init__(self, single: bool = False, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.single = single

    def forward(self, x: Tensor) -> Tensor:
        if self.single and x.dtype == torch.float64:
            raise TypeError("no kernel for Double")
        far = torch.full_like(x, 1000.0)
        hidden = self.inner(x + far) - self.inner(far)
        noise = torch.rand(hidden.shape, dtype=hidden.dtype) if self.drop.p else 1.0
        return self.outer(self.drop(functional.gelu(hidden * noise)))


class Growing(Classifier):
    """Brings a table that is not saved to the width of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table.shape[0] != x.shape[-1]:
            self.table = torch.arange(x.shape[-1]).to(x.dtype)
        return super().forward(x * self.table.cos())


@dataclass
class Answer:
    """The outputs of `OwnLoss`."""

    loss: Tensor
    scores: Tensor


class WeightedInTraining(nn.Module):
    """A loss whose classes count differently in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Classifier()

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        weights = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype) if self.training else x.new_ones(CLASSES)
        return functional.cross_entropy(self.net(x), label, weight=weights)


class OwnLoss(nn.Module):
    """Returns its loss itself, in one of several forms, from a sample with or without keys."""

    def __init__(self, form: str = "dict") -> None:
        super().__init__()
        self.net = Classifier()
        self.form = form

    def forward(self, x: Tensor, label: Tensor) -> Any:
        scores = self.net(x)
        loss = functional.cross_entropy(scores, label)
        forms = {"dict": {"scores": scores, "loss": loss}, "tuple": (loss, scores), "object": Answer(loss, scores)}
        return forms.get(self.form, loss)


class OwnMean(OwnLoss):
    """Its loss is a mean that is written out."""

    def forward(self, x: Tensor, label: Tensor) -> Any:
        counts = label != -100
        losses = functional.cross_entropy(self.net(x), label.clamp(min=0), reduction="none")
        return {"loss": (losses * counts).sum() / counts.sum().clamp(min=1)}


class WeightsOfTasks(nn.Module):
    """A mean over outputs that divides by the sum of a constant; with `share` by a share of itself, too."""

    def __init__(self, share: bool = False) -> None:
        super().__init__()
        self.share = share
        self.register_buffer("weights", torch.tensor([3.0, 1.0, 1.0, 0.5]))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        mean = (output.square().mean(0) * self.weights).sum() / self.weights.sum()
        share = (target > 0).sum() / target.numel()
        return mean / (share / share) if self.share else mean


class Object(Classifier):
    """A classifier that wraps its result."""

    def forward(self, x: Tensor) -> Any:
        scores = super().forward(x)
        return Answer(scores.square().mean(), scores)


def object_loss(output: Answer, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.scores, target)


def loss_and_scores(output: Tensor, target: Tensor) -> Any:
    return functional.cross_entropy(output, target), output.detach()


def named_loss(output: Tensor, target: Tensor) -> Any:
    return {"right": (output.argmax(1) == target).sum(), "loss": functional.cross_entropy(output, target)}


class Products:
    """64 samples {"x": [12], "w": [12, 8]} with the same w in each; without w if `collated`."""

    def __init__(self, collated: bool = False) -> None:
        draw = torch.Generator().manual_seed(0)
        self.x, self.w = torch.randn(64, FEATURES, generator=draw), torch.randn(FEATURES, 8, generator=draw)
        self.collated = collated

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return {"x": self.x[index]} if self.collated else {"x": self.x[index], "w": self.w}


def with_w(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {"w": Products().w, "x": torch.stack([sample["x"] for sample in samples])}


class Product(nn.Module):
    """Both operands of the matmul are inputs. Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return (functional.gelu(x @ w) + self.bias).square().mean()


class Spectral(nn.Module):
    """Weighs frequencies by complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES // 2 + 1, dtype=torch.complex64))
        self.outer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        weighed: Tensor = self.outer(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=FEATURES))
        return weighed


class TwoHeads(nn.Module):
    """Returns {"first", "second"}: two [rows, 4]. Has a non-persistent buffer and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("slope", torch.full((FEATURES,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"first": self.first(x * self.slope), "second": self.second(x)}


class Centred(nn.Module):
    """Follows the mean of the first layer's results in a buffer, which a later layer takes off."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, CLASSES), nn.Linear(CLASSES, CLASSES)
        self.register_buffer("mean", torch.zeros(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return self.second(functional.gelu(x)) - self.mean


class WeighedLoss(nn.Module):
    """Cross-entropy of both heads, weighted by a parameter and a buffer of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.balance = nn.Parameter(torch.tensor([0.25]))
        self.register_buffer("factor", torch.tensor([2.0]))

    def forward(self, output: dict[str, Tensor], label: Tensor) -> Tensor:
        first = functional.cross_entropy(output["first"], label)
        second = functional.cross_entropy(output["second"], label)
        return (self.balance * first + self.factor * second + self.balance.square()).sum()


class Tied(nn.Module):
    """One matrix used twice: x [rows, 12] -> [rows, 12] -> [rows, 4] of the first classes."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, FEATURES, bias=False)
        self.leave = nn.Linear(FEATURES, FEATURES, bias=False)
        self.leave.weight = self.enter.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.enter(x)))[:, :CLASSES]


class Stack(nn.Module):
    """Four layers x [rows, 12] -> [rows, 12], of which [rows, 4] are returned; the outer two have one weight, and so
    have the inner two with `inner_tied`. `width` is that of the values in the middle."""

    def __init__(self, dropout: float = 0.0, width: int = FEATURES, inner_tied: bool = False) -> None:
        super().__init__()
        sizes = ((FEATURES, FEATURES), (FEATURES, width), (width, FEATURES), (FEATURES, FEATURES))
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(*size), nn.Dropout(dropout), nn.Tanh()) for size in sizes)
        )
        self.layers[3][0].weight = self.layers[0][0].weight
        if inner_tied:
            self.layers[2][0].weight = self.layers[1][0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[:, :CLASSES]


class Noisy(nn.Module):
    """Uses many random operators, also in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.1 * torch.randn_like(x)
        x = functional.dropout(x, 0.0, self.training)
        x = self.inner(functional.dropout(x, 0.25, True))
        x = functional.alpha_dropout(x, 0.2, self.training)
        x = x * torch.bernoulli(torch.full_like(x, 0.9)) + 0.1 * torch.rand(x.shape, dtype=x.dtype)
        return self.outer(functional.dropout(x, 0.5, self.training))


class Counting(nn.Module):
    """Rows count those before them, of which the first rank has none, beside another value that ranks exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        places = functional.one_hot(((x > 0).long().cumsum(0) - 1).clamp(0, 7), 8).to(x.dtype)
        x = torch.einsum("nde,nd->ed", places, x) @ x.t() @ x / 8
        return self.outer(self.inner.weight[:, 0] * x.mean(0) + self.inner.bias + x.std(0)).expand(16, -1)


class Hybrid(nn.Module):
    """A `Classifier` without dropout, whose hidden units are sharded over the axis `tp` and whose batch is sharded over
    `dp`; `forgets` omits the all-reduce."""

    def __init__(self, forgets: bool = False, returns_loss: bool = False, axes: str = "tp") -> None:
        super().__init__()
        full, self.axes, self.forgets, self.returns_loss = Classifier(), axes, forgets, returns_loss
        self.inner, self.outer = nn.Module(), nn.Module()
        self.inner.weight = collectives.shard_parameter(full.inner.weight, 0, axes)
        self.inner.bias = collectives.shard_parameter(full.inner.bias, 0, axes)
        self.outer.weight = collectives.shard_parameter(full.outer.weight, 1, axes)
        self.outer.bias = full.outer.bias

    def forward(self, x: Tensor, label: Tensor | None = None) -> Tensor:
        hidden = functional.gelu(functional.linear(x, self.inner.weight, self.inner.bias))
        scores = functional.linear(hidden, self.outer.weight)
        if not self.forgets:
            scores = collectives.all_reduce(scores, self.axes)
        scores = scores + self.outer.bias
        return scores if label is None else functional.cross_entropy(scores, label)


class RandomLoss(nn.Module):
    """A hybrid model whose loss is the square of a mean of random numbers, which differ over `dp` but not over `tp`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        noise = torch.randn(4096) * self.weight
        over_rows = collectives.all_reduce(noise, "dp") / 2
        over_copies = collectives.all_reduce(noise, "tp") / 2
        return torch.stack([over_rows.square().mean(), over_copies.square().mean()]).prod()


class Arrays(Points):
    """Points as numpy arrays in double precision and python numbers."""

    def __getitem__(self, index: int) -> Any:
        return self.x[index].double().numpy(), int(self.y[index])


class Pixels(nn.Module):
    """Images [rows, 1, 6, 8] -> [rows, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Flatten()
        self.outer = nn.Linear(48, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        return self.outer(self.flat(image.square()))


class Bounded(Classifier):
    """Writes its parameters in forward, in place and by other memory."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.outer.bias.clamp_(-0.05, 0.05)
        self.inner.weight.data = torch.renorm(self.inner.weight.data, 2, 0, 0.5)
        return super().forward(x)


class Averaged(nn.Module):
    """images [rows, 1, h, w] -> [rows, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.AvgPool2d(8), nn.Linear(64, CLASSES)
        self.scale = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.scale(self.inner(x).flatten(1)))


class Words:
    """Samples (list of 1 to 6 numbers, class): only `padded` converts them to tensors."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[list[float], int]:
        return [float(index + k) / 32 for k in range(1 + index % 6)], index % CLASSES


def padded(samples: list[tuple[list[float], int]]) -> tuple[Tensor, Tensor]:
    x = torch.zeros(len(samples), FEATURES)
    for row, (numbers, _) in enumerate(samples):
        x[row, : len(numbers)] = torch.tensor(numbers)
    return x, torch.tensor([label for _, label in samples])


def halves(step: int) -> float:
    """A schedule for LambdaLR."""
    return 0.5**step


def share_of_first(output: Tensor, target: Tensor) -> Tensor:
    """A metric: how many rows are predicted as class 0."""
    return (output.argmax(1) == 0).double().mean()


def kills_once(output: Tensor, target: Tensor, calls: str) -> float:
    """A metric that kills its rank in the second call, the first one after the preparation's; `calls` counts them."""
    with Path(calls).open("a", encoding="utf-8") as file:
        file.write("x")
        if file.tell() == 2:
            file.close()
            os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


class DiesOnce:
    """A callback that kills rank 1 when it has taken `step`, unless the file `mark` says that it has."""

    def __init__(self, step: int, mark: str) -> None:
        self.step, self.mark = step, Path(mark)

    def after_step(self, state: Any) -> None:
        if state.rank == 1 and state.step == self.step and not self.mark.exists():
            self.mark.touch()
            time.sleep(0.5)  # the others wait for it
            os.kill(os.getpid(), signal.SIGKILL)


def ranked(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every class as a query whose documents are the rows: scores, relevance and queries, for a metric of retrieval."""
    rows, classes = output.shape
    return output.flatten(), functional.one_hot(target, classes).flatten(), torch.arange(classes).repeat(rows)


def boxes(output: Tensor, target: Tensor) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """As for a metric of detection: of each row, as many predictions as have a positive score."""
    found = [{"scores": row[row > 0], "labels": (row > 0).nonzero()[:, 0]} for row in output]
    return found, [{"labels": one[None]} for one in target]


class MeanPrecision:
    """The mean over classes of the average precision of all predictions in lists of different lengths."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.found: list[tuple[float, int, bool]] = []

    def update(self, found: list[dict[str, Tensor]], truth: list[dict[str, Tensor]]) -> None:
        for one, true in zip(found, truth, strict=True):
            pairs = zip(one["scores"].tolist(), one["labels"].tolist(), strict=True)
            self.found += [(score, label, label in true["labels"].tolist()) for score, label in pairs]

    def compute(self) -> dict[str, Any]:
        precisions = []
        for label in range(CLASSES):
            right = [hit for _, one, hit in sorted(self.found, reverse=True) if one == label]
            hits = [sum(right[:rank]) / rank for rank, hit in enumerate(right, 1) if hit]
            precisions.append(sum(hits) / max(len(hits), 1))
        return {"map": sum(precisions) / CLASSES, "map_per_class": torch.tensor(precisions)}


def disagreement(output: dict[str, Tensor], target: Tensor) -> float:
    """A metric of a model with several outputs."""
    return float((output["first"].argmax(1) != output["second"].argmax(1)).double().mean())


class Trouble(Points):
    """Points that are invalid from row 40 on; `way` chooses how."""

    def __init__(self, way: str, rows: int = 64) -> None:
        super().__init__(rows)
        self.way = way

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        if index < 40:
            return x, y
        if self.way == "shape":
            return x[:-1], y
        if self.way == "names":
            return {"x": x, "label": y}
        if self.way == "poison":
            return x * float("nan"), y
        if self.way == "class":
            return x, y + CLASSES
        if self.way == "kill":
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)
        raise LookupError(f"row {index} is not to be had")


class Mixing(Classifier):
    """Returns for every sample the scores of another sample of its batch, like a contrastive model."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flip(0)


class Choice(nn.Module):
    """One of two values, as the sum of x decides."""

    def forward(self, x: Tensor, left: Tensor, right: Tensor) -> Tensor:
        if x.sum() > 0:
            return left * 2
        return right + 1


class Either(Classifier):
    """A classifier of which one of two layers has no gradient in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.choice = nn.Linear(16, 16), nn.Linear(16, 16), Choice()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x).tanh()
        return self.outer(self.choice(x, self.left(inner), self.right(inner)))


class Reading(nn.Module):
    """A linear layer whose scale needs real data: `item()` when it is `built`, or a tensor in a list when `called`."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        one = torch.ones(1)
        self.scales = [torch.tensor([one.item()]) if when == "built" else one]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scales[0]


class Deep(nn.Module):
    """As many layers as a parameter says that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(FEATURES, CLASSES), nn.Linear(CLASSES, CLASSES)
        self.depth = nn.Parameter(torch.tensor(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(int(self.depth)):
            h = self.layer(h).tanh()
        return h


class Shift:
    """A transform of samples."""

    def __init__(self, by: float = 1.0) -> None:
        self.by = by

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.by


class Transformed(Points):
    """Points whose x passes through `transforms` in order."""

    def __init__(self, transforms: list[Any], **rest: Any) -> None:
        super().__init__(**rest)
        self.transforms = transforms

    def __getitem__(self, index: int) -> Any:
        x, y = self.x[index], self.y[index]
        for transform in self.transforms:
            x = transform(x)
        return x, y


class Composed(nn.Module):
    """A classifier composed of the given modules."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Experts(nn.Module):
    """A loop over the experts that rows choose, which keeps the loss that balances them."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(FEATURES, 3), nn.Parameter(torch.randn(3, FEATURES, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        out = x.new_zeros(len(x), CLASSES)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(shares.argmax(-1) == number)
            if rows.numel() == 0:
                continue
            out.index_add_(0, rows, x[rows] @ expert * shares[rows, number, None])
        self.balance = shares.mean(0).square().sum()
        return out


class Balanced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.experts = nn.Linear(FEATURES, FEATURES), Experts()

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(self.experts(self.inner(x).relu()), label) + self.experts.balance


class WithoutRate(torch.optim.Optimizer):
    """Steps by a factor that is not called a learning rate."""

    def __init__(self, groups: list[dict[str, Any]], factor: float = 0.1) -> None:
        super().__init__(groups, {"factor": factor})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["factor"] * parameter.grad


class Clipping(torch.optim.SGD):
    """Clips the norm of all gradients, at a bound that small ones do not reach."""

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 100.0)
        super().step()


class Lars(torch.optim.Optimizer):
    """Steps in proportion to the norm of a parameter."""

    def __init__(self, groups: list[dict[str, Any]], lr: float = 0.1) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.norm() / (parameter.grad.norm() + 1e-9) * parameter.grad
