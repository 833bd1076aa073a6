"""Losses over what boolean masks select, within a forward, on random slicings and for masks that select nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from strategies.capture import Objective, capture
from strategies.core.errors import StrategyError
from strategies.core.program import LoweringOptions
from strategies.lowering.lowering import lower
from strategies.runtime.simulate import Simulation
from tests.strategies.simulated_model import TOLERANCE, Model

Loss = Callable[[Any, Tensor, Tensor, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """x [8, 4, 6], labels [8, 4] of which some are -100, y like x, and `chosen` [8, 4], to a loss."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.inner, self.head, self.loss = nn.Linear(6, 6), nn.Linear(6, 5), loss
        self.heat = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
        return self.loss(self, self.inner(x), labels, y, chosen)


def batch(empty: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(0)
    labels, chosen = torch.randint(0, 5, (8, 4)), torch.rand(8, 4) < 0.5
    labels[torch.rand(8, 4) < 0.4] = -100
    if empty:
        labels[:], chosen[:] = -100, False
    return {"x": torch.randn(8, 4, 6), "labels": labels, "y": torch.randn(8, 4, 6), "chosen": chosen}


def classes(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    """The same mask, computed twice; a head on the rows alone; weights of classes."""
    known, weight = labels != -100, torch.arange(1.0, 6, dtype=h.dtype)
    scores = net.head(h[chosen].relu()).reshape(-1, 5)
    each = F.cross_entropy(net.head(h)[known], labels[known], reduction="none", label_smoothing=0.1)
    return (
        F.cross_entropy(net.head(h)[labels != -100], labels[labels != -100])
        + F.cross_entropy(scores, labels.clamp(min=0)[chosen].view(-1), weight, ignore_index=0)
        + (each * each.detach()).sum() / known.sum().clamp(min=1)
        - scores.log_softmax(-1).gather(1, labels[chosen].clamp(min=0)[:, None]).squeeze(1).mean()
    )


def elements(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    error = (h - y)[chosen]
    return (
        (error**2).mean()
        + (error[:, :3] / net.heat).abs().sum(-1).mean()
        + F.mse_loss(h[chosen], y[chosen])
        + F.binary_cross_entropy_with_logits(h[chosen], (y > 0).to(h.dtype)[chosen], reduction="sum")
        + F.binary_cross_entropy_with_logits(
            h[chosen], (y > 0).to(h.dtype)[chosen], pos_weight=net.heat.detach() + y[0, 0]
        )
        + torch.masked_select((h - y).square(), y > 0).mean()
        + F.kl_div(h[chosen].log_softmax(-1), y[chosen].softmax(-1), reduction="batchmean")
    )


def means(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    losses = (h - y).square().mean(-1)
    return losses[chosen].sum() / chosen.sum() + losses[chosen].mean() * losses[chosen].sum() / losses[chosen].shape[0]


def infinite(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    """Of unselected elements, logarithms and their gradients, of parameters too."""
    h = h.relu()
    part = h[h > 0]
    return (part.log() * net.heat).mean() + (net.heat / part).mean() + part.rsqrt().sum()


def places(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    """By where masks are true instead of by the masks."""
    where, (row, column), first = chosen.nonzero(), torch.where(labels != -100), chosen[:, 0].nonzero().squeeze(1)
    return (
        F.cross_entropy(net.head(h)[row, column], labels[(labels != -100).nonzero(as_tuple=True)])
        + F.l1_loss(h[where[:, 0], where[:, 1]], y[chosen])
        + F.mse_loss(h.index_select(0, first), y[first])
        + h.reshape(-1, 6)[torch.nonzero(chosen.view(-1)).flatten()].square().sum() / len(h)
    )


def opposite(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    """Losses that compare how many elements are selected of both, within a branch too."""
    outside = F.l1_loss(h[~chosen], y[~chosen])
    return outside + F.mse_loss(h[chosen], y[chosen]) if chosen.sum() > 0 else outside


def boxes(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    """The overlap of selected boxes, by corners that are put together of coordinates; targets without gradients."""
    with torch.no_grad():
        weight, found = y[..., 4][chosen].sigmoid(), y[chosen]
    centre, size = h[chosen][:, :4].chunk(2, -1)
    corners = torch.cat([centre - size.exp(), centre + size.exp()], -1)
    left, top, right, bottom = found[:, :4].cumsum(-1).unbind(-1)
    others = torch.stack([left, top, right, bottom], -1)
    inner = torch.min(corners[:, 2:], others[:, 2:]) - torch.max(corners[:, :2], others[:, :2])
    area = (corners[:, 2:] - corners[:, :2]).prod(-1) + (others[:, 2:] - others[:, :2]).prod(-1)
    angle = torch.atan2(corners[:, 0], others[:, 1]) + torch.hypot(corners[:, 2], others[:, 3])
    return ((inner.prod(1).relu() + 1) / (area.abs() + 1) * weight).mean() + angle.sum()


def ordered(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    """Selected rows that are sorted, their largest elements, and deviations of rows."""
    part, other = h[chosen], y[chosen]
    values, index = part.max(-1)
    normal = (part - part.mean(-1, keepdim=True)) / part.std(-1, keepdim=True)
    turned = torch.linalg.cross(part[:, :3], other.flip(-1)[:, :3])
    return (
        (values * other.gather(1, index[:, None]).squeeze(1)).sum()
        + (part.topk(2)[0] * other.sort(descending=True).values[:, :2]).mean()
        + (normal**3 * (other > 0).any(-1, keepdim=True)).mean()
        + (part.median(1).values + turned.norm(dim=-1) + torch.linalg.vector_norm(part, dim=1)).mean()
    )


def asked(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    known = labels != -100
    return F.cross_entropy(net.head(h)[known], labels[known]) if known.any() else net.head(h).sum() * 0


def extremes(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    """The largest of a selection, and where they are in it; deviations, of equal ones too."""
    part = h[chosen]
    values, index = part.max(0)
    hard = h[..., 0][chosen].topk(3)[0]
    constant = (0 * h + net.heat)[chosen].std() + part.std(0).sum() + part[:, 0].var(unbiased=False)
    where = (index.to(h.dtype) * values).sum() + part.amin(1).mean()
    return part.max() - part.min() + hard.mean() + constant + where + (part > 9).any() + (part < 9).all()


def counted(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    """What depends on how many are selected; an index of more than a mask."""
    error, wrong = (h - y)[chosen, :3].abs(), h[chosen, 0]
    loss = net.head(h).sum() * 0
    if len(wrong) == 0:
        return loss
    if error.numel() > 6 or wrong.shape[0] < 2:
        loss = loss + error.sum() / max(1, wrong.numel()) + (1 / len(wrong)) * wrong.sum()
    return loss + h.mean()


def rows(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    """Each sample's own length, negative ones from the end, and the places behind it."""
    counts = chosen.sum(1).clamp(min=1)
    pooled = torch.stack([one[:count].mean(0) for one, count in zip(h, counts, strict=True)])
    other = [
        h[i, counts[i] - 2 :].sum() + F.cross_entropy(net.head(h[i, :n]), labels[i, :n]) for i, n in enumerate(counts)
    ]
    return pooled.square().sum() + sum(other) + h[0, : -counts[0]].sum() + h[1, counts[0] - 1 : counts[1], 2:].sum()


def bins(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    """A spline within an interval, as neural spline flows have it: edges of bins are written in place."""
    inside, out = y.abs() <= 1, y.clone()
    edges = F.pad(h[..., None].expand(*h.shape, 4).cumsum(-1)[inside, :].softmax(-1).cumsum(-1), (1, 0))
    edges = 2 * edges - 1
    edges[..., 0] = -1.0
    edges[..., -1] = edges[..., -1].detach() * 0 + 1
    edges[..., -1] += 1e-6
    bin_of = (y[inside][..., None] >= edges).sum(-1) - 1
    widths = edges[..., 1:] - edges[..., :-1]
    out[inside] = y[inside] * widths.gather(-1, bin_of[..., None])[..., 0]
    return out.square().mean() + widths.log().mean()


def products(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    """Of rows with a matrix that they share, with one another, and over what is selected."""
    part, other, weight = h[chosen], y[chosen], net.head.weight
    outer = torch.bmm(part.unflatten(-1, (2, 3)), other.view(-1, 3, 2))
    centred = part - h.mean((0, 1))[None]
    return (
        (part @ weight.t()).exp().mean()
        + (part @ weight[0]).square().sum()
        + torch.einsum("nd,kd->nk", part, weight).tanh().sum()
        + torch.einsum("nd,ne->de", part, other).exp().mean()
        + outer.square().mean()
        + torch.cdist(part, weight).mean()
        + centred.square().mean()
    )


def merged(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    """Rows one behind the other, and what is computed over all of them."""
    flat, part = h[chosen].view(-1), h[chosen]
    return (
        (flat * y[chosen].flatten()).mean()
        + F.mse_loss(part[:, :1].view(-1), y[chosen][:, 1])
        + part.view(-1, 2, 3).reshape(-1, 3).exp().sum(0).square().sum()
        + flat.logsumexp(0)
        + (part.logsumexp(-1) * part.softmax(0).sum(-1)).sum()
        + part.logsumexp(0).sum()
        + part.log_softmax(0).mean()
        + part.norm()
        + torch.linalg.norm(part, dim=0).sum()
        + (F.normalize(part, dim=0) * F.normalize(y[chosen])).sum()
        + (part / 4).prod(0).sum()
    )


def pairs(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    """Losses of several rows; none of the selection where it is empty."""
    part, other, none = h[chosen], y[chosen], net.head(h).sum() * 0
    if not part.numel():
        return none
    sign = torch.ones_like(part[:, 0])
    return (
        none
        + F.gaussian_nll_loss(part, other, part.square() + 1)
        + F.margin_ranking_loss(part[:, 0], part[:, 1], sign, reduction="sum")
        + F.cosine_embedding_loss(part, other, sign - 2 * (other[:, 0] > 0))
        + F.triplet_margin_loss(part, other, part.flip(-1))
        + F.multilabel_soft_margin_loss(part, (other > 0).to(part.dtype))
        + F.pairwise_distance(part, other).mean()
        + F.cosine_similarity(part, other).sum()
    )


LOSSES = [bins, classes, elements, means, infinite, places, opposite, asked, extremes, counted, rows, boxes, ordered]


def unpadded(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    """Layers of the selected rows, which are put back."""
    out = h.clone()
    out[chosen] = net.inner(h[chosen]).tanh() + y[chosen]
    return out.square().mean()


def looked_up(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    """Rows of tables, and one element of every row, by selected numbers; a policy's distribution."""
    part, numbers = h[chosen], labels.clamp(min=0)[chosen]
    scores = net.head(part)
    policy = Categorical(logits=scores)
    return (
        (part - net.inner.weight[numbers]).square().mean()
        - scores.log_softmax(-1)[torch.arange(len(numbers)), numbers].mean()
        - (policy.log_prob(numbers) * y[chosen].mean(-1)).sum()
        + policy.entropy().mean()
    )


def expanded(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    part, column = h[chosen], y[chosen][:, :1]
    return (
        (part * column.expand(-1, 6)).square().mean()
        + (part * column.expand_as(part)).sum()
        + (part * column.expand(len(part), 6)).mean()
        + (part * column.repeat(1, 6)).square().sum()
        + (part - part.new_full((6,), 0.5)).abs().mean()
    )


def made_for_them(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    """Tensors of one number with as many rows as are selected, such as the classes of a contrastive loss."""
    part = h[chosen]
    scores = torch.cat([(part * y[chosen]).sum(-1, keepdim=True), part @ net.inner.weight], 1)
    return (
        F.cross_entropy(scores, torch.zeros(len(part), dtype=torch.long))
        + (part - part.new_full((part.shape[0], 6), 0.5)).square().mean()
        + (part * torch.full(part.shape, 2.0, dtype=h.dtype)).sum()
        + F.binary_cross_entropy_with_logits(part[:, 0], part.new_ones(part.shape[0]))
    )


def joined(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    """Selections of two masks and all rows of a tensor, one behind the other."""
    scores, classes = torch.cat([net.head(h[chosen]), net.head(y[~chosen])]), labels.clamp(min=0)
    first, second = net.head(h[chosen])[:, 0], net.head(y[labels > 2])[:, 1]
    truth = torch.cat((torch.ones_like(first), torch.zeros_like(second)))
    return (
        F.cross_entropy(scores, torch.cat([classes[chosen], classes[~chosen]]))
        + F.binary_cross_entropy_with_logits(torch.cat((first, second)), truth)
        + torch.cat([h[chosen], net.inner.weight]).square().mean()
        + F.mse_loss(torch.cat([h[chosen], y[chosen]]), torch.cat([y[chosen], h[chosen]]))
        + F.cross_entropy(net.head(torch.cat([h[chosen], y[chosen]])), torch.cat([classes[chosen]] * 2))
    )


def placed(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    """Rows of another tensor in place of the selected ones, two of each sequence, as of pictures among tokens."""
    here, out = chosen.long().argsort(-1) < 2, h.clone()
    out[here] = out[here] * 0.0 + net.inner(y[:, :2]).reshape(-1, 6)
    return net.head(out).square().mean()


def augmented(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    """Assignments that compute in place, of what is selected and of a view of it."""
    out = h.clone()
    out[chosen] += net.inner.bias
    out[chosen] *= y[chosen]
    out[chosen] /= net.heat
    part = h[chosen] * 1.0
    part -= y[chosen]
    part[:, :2] *= net.inner.bias[:2]
    return out.square().mean() + part.square().sum()


LOSSES += [augmented, products, merged, pairs, unpadded, looked_up, expanded, made_for_them, joined, placed]


@pytest.mark.few(4)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda one: one.__name__)
def test_a_loss(loss: Loss, draw: Any) -> None:
    assert compared(loss, batch(), draw).isfinite()


@pytest.mark.few(1)
@pytest.mark.parametrize("loss", [classes, elements, boxes, asked, counted, pairs], ids=lambda one: one.__name__)
def test_a_mask_that_selects_nothing(loss: Loss, draw: Any) -> None:
    assert compared(loss, batch(empty=True), draw).isnan() == (loss not in (asked, counted, pairs))


@pytest.mark.parametrize("columns", [1, 3])
def test_rows_of_another_number_than_selected(columns: int, draw: Any) -> None:
    """These are refused in each step, as torch refuses them; they would be written to wrong places otherwise."""

    def some(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
        out = h.clone()
        out[chosen] = out[chosen] * 0.0 + net.inner(y[:, :2]).reshape(-1, 6)
        return out.square().mean()

    places = torch.arange(4).expand(8, 4)
    model = Model(Net(some), None, batch() | {"chosen": places < 2})
    program = lower(model.graph, model.random_plan(draw, 0), LoweringOptions())
    assert Simulation(program, model.values).run()[0][0].isfinite()
    with pytest.raises(RuntimeError, match="shape mismatch"):
        Simulation(program, model.values | {"chosen": places < columns}).run()


def compared(loss: Loss, given: dict[str, Tensor], draw: Any) -> Tensor:
    """The loss, which equals eager's on a random plan, and so does every gradient, NaN included."""
    model = Model(Net(loss), None, given)
    simulation = Simulation(lower(model.graph, model.random_plan(draw, 0), LoweringOptions()), model.values)
    (losses,) = simulation.run()
    simulation.backward(losses)
    close = {"rtol": TOLERANCE, "atol": TOLERANCE, "equal_nan": True}
    for found in losses:
        torch.testing.assert_close(found, model.loss, **close)
    for name, gradient in simulation.gradients().items():
        torch.testing.assert_close(gradient, model.gradients[name], **close)
    return model.loss


def written(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    scores, labels = net.head(h)[labels != -100], labels.clone()
    labels.clamp_(min=0)
    return F.cross_entropy(scores, labels[labels != -100])


def other(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    return (h[chosen] * y[labels == -100]).mean()


def dropped(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    return F.dropout(h[chosen]).mean()


def mixed(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    part = h[chosen]
    return (part @ part.T).mean()


def in_place(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    return F.relu(h[chosen], inplace=True).mean()


def seen_before(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    """A view of rows, read after they were written."""
    part = h[chosen] * 2
    first = part[:, :1]
    part[:, 0] = 1.0
    return (first * part).mean()


def elsewhere(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    """Places that a mask of another shape has."""
    return h.view(-1, 6)[chosen[:, 0].nonzero().squeeze(1)].mean()


def turned(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    """The reversed order of selected rows."""
    return (h[chosen].flip(1, 0) * y[chosen]).mean()


def divided(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    """Remainders of integers, whose unselected elements are 0."""
    return (h[chosen][:, 0] * labels[chosen].remainder(labels.abs()[chosen] + 1)).mean()


def in_another_order(net: Any, h: Tensor, labels: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    """Numbers of packed rows that are not sorted by length."""
    lengths = torch.ones_like(labels).sum(1) - chosen[:, 0].long()
    data = pack_padded_sequence(h, lengths.cpu(), batch_first=True, enforce_sorted=False).data
    return (data.max(0).indices * data.amax(0)).sum()


REFUSED = [in_another_order, written, other, dropped, mixed, in_place, seen_before, elsewhere, turned, divided]


@pytest.mark.parametrize("loss", REFUSED, ids=lambda one: one.__name__)
def test_refused(loss: Loss) -> None:
    given = batch()
    with pytest.raises(StrategyError, match="shape depends on values") as caught:
        capture(Objective(Net(loss), None, tuple(given), ()), tuple(given.values()), training=True)
    assert caught.value.code == "MW902"
