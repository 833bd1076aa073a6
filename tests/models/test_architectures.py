"""The shipped architectures: the sizes of the well-known models, names, and that each computes what it says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from models.ffn import FFN, FlatFFN
from models.gpt import GPT
from models.llama import GroupedAttention, Llama, Rotary, SwiGLU
from models.losses import NextTokenLoss, next_token_accuracy
from models.moe import MixtureOfExperts, MoE, Router
from models.resnet import Bottleneck, ResNet, resnet18, resnet50, resnet_digits
from models.transformer import Block, SelfAttention
from models.unet import UNet
from models.vit import ViT
from models.vocabulary import VocabularyFFN

IDS = torch.arange(32).view(2, 16) % 24


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(1)


def small_gpt() -> GPT:
    return GPT(24, 16, 32, 2, 4, dropout=0.1, attention_dropout=0.1)


def small_llama() -> Llama:
    return Llama(24, 16, 32, 2, 4, 2, 48)


def small_moe() -> MoE:
    return MoE(24, 16, 32, 2, 4, 48, experts=4)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: GPT(50257, 1024, 768, 12, 12), 124_439_808),
        (lambda: Llama(128256, 8192, 4096, 32, 32, 8, 14336), 8_030_261_248),
        (lambda: ViT(224, 16, 768, 12, 12, 1000), 86_567_656),
        (resnet18, 11_689_512),
        (resnet50, 25_557_032),
    ],
)
def test_sizes_of_the_well_known_models(make: Callable[[], nn.Module], expected: int) -> None:
    with torch.device("meta"):
        model = make()
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


@pytest.mark.parametrize(
    ("model", "given", "returned"),
    [
        (small_gpt(), IDS, (2, 16, 24)),
        (small_llama(), IDS, (2, 16, 24)),
        (VocabularyFFN(24, 8, 16), IDS, (2, 16, 24)),
        (ViT(12, 4, 32, 2, 4, 10, channels=1, dropout=0.1), torch.ones(2, 1, 12, 12), (2, 10)),
        (resnet_digits(), torch.ones(2, 1, 28, 28), (2, 10)),
        (UNet(2, 1, 4), torch.ones(2, 1, 16, 24), (2, 2, 16, 24)),
        (resnet_digits(4, bottleneck=True), torch.ones(2, 1, 28, 28), (2, 10)),
        (ResNet(Bottleneck, [1, 1], 7, width=4), torch.ones(2, 3, 32, 32), (2, 7)),
        (FlatFFN([784, 6, 1]), torch.ones(2, 1, 28, 28), (2, 1)),
        (Block(8, 2, dropout=0.1), torch.ones(2, 3, 8), (2, 3, 8)),
    ],
)
def test_shapes(model: nn.Module, given: Tensor, returned: tuple[int, ...]) -> None:
    assert model(given).shape == returned


@pytest.mark.parametrize("make", [small_gpt, small_llama, small_moe])
def test_no_token_sees_a_later_one(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    changed = IDS.clone()
    changed[:, 9] += 1
    before, after = (model(ids) for ids in (IDS, changed))
    if isinstance(before, tuple):
        before, after = before[0], after[0]
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("make", [small_gpt, small_llama, small_moe])
def test_every_parameter_learns_and_the_loss_falls(make: Callable[[], nn.Module]) -> None:
    model, loss = make(), NextTokenLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(12):
        value = loss(model(IDS), IDS.roll(-1, 1))
        optimizer.zero_grad()
        value.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < 0.7 * losses[0]


def test_the_output_layer_of_gpt_is_its_embedding() -> None:
    model = small_gpt()
    assert model.head.weight is model.tokens.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_dropout_of_gpt_only_in_training() -> None:
    model = small_gpt()
    assert not torch.equal(model(IDS), model(IDS))
    model.eval()
    assert torch.equal(model(IDS), model(IDS))


def attention_by_hand(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("causal", [True, False])
def test_self_attention_by_hand(causal: bool) -> None:
    attention, x = SelfAttention(8, 2, causal=causal), torch.randn(3, 5, 8)
    heads = []
    for head in range(2):
        rows = slice(4 * head, 4 * head + 4)
        q, k, v = (
            functional.linear(x, project.weight[rows], project.bias[rows])
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        heads.append(attention_by_hand(q, k, v, causal))
    torch.testing.assert_close(attention(x), attention.o_proj(torch.cat(heads, -1)))


def test_rotary_turns_pairs_of_columns_by_complex_numbers() -> None:
    rotary, x = Rotary(6, 10), torch.randn(2, 3, 7, 6)
    speeds = torch.tensor([10000.0 ** (-2 * i / 6) for i in range(3)])
    turn = torch.polar(torch.ones(7, 3), torch.arange(7.0)[:, None] * speeds)
    turned = torch.complex(x[..., :3], x[..., 3:]) * turn
    torch.testing.assert_close(rotary(x), torch.cat((turned.real, turned.imag), -1))


def test_rotary_products_depend_on_the_distance_alone() -> None:
    rotary, q, k = Rotary(8, 12), torch.randn(8), torch.randn(8)
    products = rotary(q.expand(1, 1, 12, 8)) @ rotary(k.expand(1, 1, 12, 8)).transpose(-1, -2)
    for distance in range(-11, 12):
        diagonal = products[0, 0].diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_grouped_heads_are_served_by_consecutive_heads() -> None:
    attention, x = GroupedAttention(16, 4, 2, 5), torch.randn(2, 5, 16)
    q = attention.rotary(attention.q_proj(x).view(2, 5, 4, 4).transpose(1, 2))
    k = attention.rotary(attention.k_proj(x).view(2, 5, 2, 4).transpose(1, 2)).repeat_interleave(2, 1)
    v = attention.v_proj(x).view(2, 5, 2, 4).transpose(1, 2).repeat_interleave(2, 1)
    seen = attention_by_hand(q, k, v, causal=True).transpose(1, 2).reshape(2, 5, 16)
    torch.testing.assert_close(attention(x), attention.o_proj(seen))


def test_swiglu_by_hand() -> None:
    part, x = SwiGLU(4, 6), torch.randn(3, 4)
    gate = x @ part.gate_proj.weight.T
    hidden = gate * torch.sigmoid(gate) * (x @ part.up_proj.weight.T)
    torch.testing.assert_close(part(x), hidden @ part.down_proj.weight.T)


def routed_by_hand(moe: MixtureOfExperts, x: Tensor) -> Tensor:
    """Token after token, no more than the capacity per expert."""
    router, out = moe.router, torch.zeros_like(x)
    for group in range(len(x)):
        scores = router.scores(x[group]).softmax(-1)
        best, chosen = scores.topk(router.choices)
        used = [0] * router.experts
        for token in range(x.shape[1]):
            for choice in range(router.choices):
                expert = int(chosen[token, choice])
                used[expert] += 1
                if used[expert] <= router.capacity:
                    hidden = functional.gelu(x[group, token] @ moe.experts.up_proj.weight[expert])
                    result = hidden @ moe.experts.down_proj.weight[expert]
                    out[group, token] += best[token, choice] / best[token].sum() * result
    return out


@pytest.mark.parametrize(("choices", "spare"), [(2, 1.0), (1, 0.5), (3, 4.0)])
def test_mixture_of_experts_token_by_token(choices: int, spare: float) -> None:
    moe = MixtureOfExperts(6, 8, tokens=12, experts=4, choices=choices, spare=spare)
    x = torch.randn(3, 12, 6)
    found, _ = moe(x)
    torch.testing.assert_close(found, routed_by_hand(moe, x))
    dropped = bool((found == 0).all(-1).any())
    assert dropped == (spare < 4), "the cases with few slots leave tokens out, the other does not"


def test_no_slot_is_given_twice_and_the_capacity_is_rounded_up() -> None:
    moe = MixtureOfExperts(6, 8, tokens=10, experts=4, choices=2, spare=1.25)
    assert moe.router.capacity == 7
    dispatch, combination, _ = moe.router(torch.randn(5, 10, 6))
    assert dispatch.shape == (5, 10, 4, 7)
    assert dispatch.sum(1).max() == 1, "one token per slot"
    assert (dispatch.sum((2, 3)) <= 2).all()
    assert torch.equal(combination != 0, dispatch != 0)


def test_slots_are_counted_exactly_in_bfloat16() -> None:
    router = Router(4, experts=1, choices=1, capacity=600).to(torch.bfloat16)
    dispatch, _, _ = router(torch.ones(1, 600, 4, dtype=torch.bfloat16))
    assert torch.equal(dispatch[0, :, 0], torch.eye(600, dtype=torch.bfloat16))


def test_the_load_is_one_for_even_use_and_higher_for_one_favourite() -> None:
    router = Router(4, experts=4, choices=1, capacity=4)
    with torch.no_grad():
        router.scores.weight.copy_(20 * torch.eye(4))
    even, favourite = torch.eye(4)[None], torch.eye(4)[:1].expand(4, 4)[None]
    torch.testing.assert_close(router(even)[2], torch.tensor(1.0))
    torch.testing.assert_close(router(favourite)[2], torch.tensor(4.0))


def test_the_state_of_a_resnet_has_the_usual_names() -> None:
    names = set(resnet50(10).state_dict())
    assert {"conv1.weight", "bn1.running_var", "layer1.0.downsample.0.weight", "layer4.2.conv3.weight"} <= names
    assert {"layer2.0.bn3.num_batches_tracked", "fc.weight", "fc.bias"} <= names
    assert "layer2.1.downsample.0.weight" not in names and not any("relu" in name for name in names)


def test_stages_of_a_resnet_halve_the_image() -> None:
    model, sizes = resnet18(10), []
    for stage in (model.maxpool, *(model.get_submodule(f"layer{i}") for i in range(1, 5))):
        stage.register_forward_hook(lambda module, args, out: sizes.append(tuple(out.shape[1:])))
    model(torch.ones(1, 3, 64, 64))
    assert sizes == [(64, 16, 16), (64, 16, 16), (128, 8, 8), (256, 4, 4), (512, 2, 2)]


def test_vit_classifies_the_class_token_of_patches_in_reading_order() -> None:
    model = ViT(8, 4, 16, 1, 2, 3, channels=2).eval()
    seen: list[Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    image = torch.randn(5, 2, 8, 8)
    scores = model(image)
    torch.testing.assert_close(scores, model.head(model.norm(model.layers[0](seen[0])[:, 0])))
    patch = image[:, :, 4:8, 0:4].flatten(1) @ model.patches.weight.flatten(1).T + model.patches.bias
    torch.testing.assert_close(seen[0][:, 3] - model.positions[:, 3], patch)
    torch.testing.assert_close(seen[0][:, 0], (model.class_token + model.positions[:, :1])[:, 0].expand(5, -1))


def test_flat_ffn_is_an_ffn_of_the_flat_image() -> None:
    flat, ffn, x = FlatFFN([12, 5, 1]), FFN([12, 5, 1]), torch.randn(2, 1, 3, 4)
    ffn.load_state_dict(flat.state_dict())
    torch.testing.assert_close(flat(x), ffn(x.flatten(1)))


def test_loss_and_accuracy_leave_padding_out() -> None:
    logits, labels = torch.randn(2, 6, 5), torch.randint(0, 5, (2, 6))
    labels[0, 4:] = labels[1, 1:] = -100
    kept = labels != -100
    torch.testing.assert_close(NextTokenLoss()(logits, labels), functional.cross_entropy(logits[kept], labels[kept]))
    assert next_token_accuracy(logits, labels) == (logits.argmax(-1) == labels)[kept].double().mean()
    smooth = functional.cross_entropy(logits[kept], labels[kept], label_smoothing=0.2)
    torch.testing.assert_close(NextTokenLoss(label_smoothing=0.2)(logits, labels), smooth)


def test_the_load_is_added_with_its_balance() -> None:
    logits, labels, load = torch.randn(2, 6, 5), torch.randint(0, 5, (2, 6)), torch.tensor(3.0)
    alone = NextTokenLoss(balance=0.5)(logits, labels)
    torch.testing.assert_close(NextTokenLoss(balance=0.5)((logits, load), labels), alone + 1.5)
    assert next_token_accuracy((logits, load), labels) == next_token_accuracy(logits, labels)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SelfAttention(10, 4), "not a multiple of heads = 4"),
        (lambda: GroupedAttention(16, 4, 3, 8), "heads of kv_heads = 3"),
        (lambda: Rotary(5, 8), "even number"),
        (lambda: ViT(28, 5, 8, 1, 2, 10), "not a multiple of patch = 5"),
        (lambda: MixtureOfExperts(4, 4, 4, experts=2, choices=3), "choices = 3 must be between 1 and experts = 2"),
        (lambda: small_gpt()(IDS.view(1, 32)), "32 tokens, but the model has 16 positions"),
        (lambda: small_llama()(IDS.view(1, 32)), "32 tokens, but argument length is 16"),
        (lambda: MixtureOfExperts(4, 4, 4, 2)(torch.ones(1, 5, 4)), "5 tokens, but the slots are counted for"),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
