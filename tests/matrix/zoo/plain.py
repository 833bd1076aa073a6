"""Plain torch: a UNet with cross attention and a diffusion transformer, torch's own transformer, an LSTM."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.matrix.zoo.architecture import (
    BATCH,
    HEADS,
    VOCABULARY,
    WIDTH,
    Architecture,
    Example,
    classes,
    pictures,
    tokens,
)


class Residual(nn.Module):
    """Two convolutions with group norms; x [b, c, h, w] and the embedded time [b, t]."""

    def __init__(self, into: int, out: int, time: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, into), nn.Conv2d(into, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.norm2, self.dropout = nn.GroupNorm(8, out), nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(into, out, 1) if into != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.conv2(self.dropout(F.silu(self.norm2(h)))) + self.skip(x)


class PictureAttention(nn.Module):
    """Self attention over the pixels of an image, cross attention to a context [b, n, context], a gated network."""

    def __init__(self, channels: int, context: int, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv = nn.GroupNorm(8, channels), nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)
        self.norm2 = nn.LayerNorm(channels)
        self.cross = nn.MultiheadAttention(channels, heads, kdim=context, vdim=context, batch_first=True)
        self.norm3 = nn.LayerNorm(channels)
        self.up, self.down = nn.Linear(channels, 8 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        b, c, h, w = x.shape
        points = self.norm1(x).flatten(2).transpose(1, 2)
        q, k, v = (
            part.view(b, -1, self.heads, c // self.heads).transpose(1, 2) for part in self.qkv(points).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, -1, c)
        y = x.flatten(2).transpose(1, 2) + self.out(attended)
        y = y + self.cross(self.norm2(y), context, context, need_weights=False)[0]
        value, gate = self.up(self.norm3(y)).chunk(2, -1)
        y = y + self.down(value * F.gelu(gate))
        return y.transpose(1, 2).reshape(b, c, h, w)


class UNet(nn.Module):
    """Predicts the noise in a noisy image; the loss is its mean squared error."""

    def __init__(self, dropout: float, channels: int = 32, context: int = 32) -> None:
        super().__init__()
        time, self.channels = 4 * channels, channels
        self.time = nn.Sequential(nn.Linear(channels, time), nn.SiLU(), nn.Linear(time, time))
        self.begin = nn.Conv2d(3, channels, 3, padding=1)
        self.down1 = Residual(channels, channels, time, dropout)
        self.shrink = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.down2 = Residual(channels, 2 * channels, time, dropout)
        self.down_attention = PictureAttention(2 * channels, context)
        self.middle = Residual(2 * channels, 2 * channels, time, dropout)
        self.up2 = Residual(4 * channels, 2 * channels, time, dropout)
        self.up_attention = PictureAttention(2 * channels, context)
        self.grow = nn.Conv2d(2 * channels, channels, 3, padding=1)
        self.up1 = Residual(2 * channels, channels, time, dropout)
        self.norm, self.end = nn.GroupNorm(8, channels), nn.Conv2d(channels, 3, 3, padding=1)
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0))

    def forward(self, picture: Tensor, noise: Tensor, step: Tensor, context: Tensor) -> Tensor:
        kept = self.kept[step][:, None, None, None]
        x = kept.sqrt() * picture + (1 - kept).sqrt() * noise
        half = self.channels // 2
        angles = step[:, None].float() * torch.exp(-torch.arange(half, device=x.device) * 9.2 / half)[None]
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype))
        first = self.begin(x)
        second = self.down1(first, time)
        low = self.down_attention(self.down2(self.shrink(second), time), context)
        up = self.up_attention(self.up2(torch.cat([self.middle(low, time), low], 1), time), context)
        up = self.grow(F.interpolate(up, scale_factor=2.0, mode="nearest"))
        up = self.up1(torch.cat([up, second], 1), time)
        return F.mse_loss(self.end(F.silu(self.norm(up))), noise)


class DiffusionBlock(nn.Module):
    """A transformer block whose norms are shifted and scaled by the class embedding."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.modulation = heads, nn.Linear(width, 6 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Dropout(dropout), nn.Linear(4 * width, width)
        )

    def forward(self, z: Tensor, condition: Tensor) -> Tensor:
        b, n, width = z.shape
        scale1, shift1, gate1, scale2, shift2, gate2 = self.modulation(condition)[:, None].chunk(6, -1)
        h = F.layer_norm(z, (width,)) * (1 + scale1) + shift1
        q, k, v = self.qkv(h).reshape(b, n, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        z = z + gate1 * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return z + gate2 * self.network(F.layer_norm(z, (width,)) * (1 + scale2) + shift2)


class DiffusionTransformer(nn.Module):
    """Images [b, 3, 16, 16] as 16 patches, back to images by einsum."""

    def __init__(self, dropout: float, width: int = WIDTH) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.positions = nn.Parameter(torch.randn(1, 16, width) * 0.02)
        self.label = nn.Embedding(10, width)
        self.blocks = nn.ModuleList([DiffusionBlock(width, HEADS, dropout) for _ in range(2)])
        self.out = nn.Linear(width, 48)

    def forward(self, x: Tensor, y: Tensor, target: Tensor) -> Tensor:
        z = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        condition = F.silu(self.label(y))
        for block in self.blocks:
            z = block(z, condition)
        pieces = self.out(z).view(z.shape[0], 4, 4, 3, 4, 4)
        picture = torch.einsum("nhwcpq->nchpwq", pieces).reshape(target.shape)
        return F.mse_loss(picture, target)


class TorchTransformer(nn.Module):
    """torch's own encoder and decoder, with a causal mask given as a tensor."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 2, 2, 128, dropout=dropout, batch_first=True)
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.out.weight.dtype)
        states = self.transformer(self.table(source), self.table(target), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.out(states).flatten(0, 1), labels.flatten())


class RecurrentModel(nn.Module):
    """Two layers of LSTM over tokens."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=dropout, batch_first=True)
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.lstm(self.table(x))[0]).transpose(1, 2), labels)


def _unet(dropout: float) -> Example:
    batch = {
        "picture": pictures(16),
        "noise": pictures(16),
        "step": torch.randint(0, 1000, (BATCH,)),
        "context": torch.randn(BATCH, 8, 32),
    }
    return UNet(dropout), batch


def _diffusion(dropout: float) -> Example:
    return DiffusionTransformer(dropout), {"x": pictures(16), "y": classes(), "target": pictures(16)}


def _transformer(dropout: float) -> Example:
    return TorchTransformer(dropout), {"source": tokens(), "target": tokens(), "labels": tokens()}


def _recurrent(dropout: float) -> Example:
    return RecurrentModel(dropout), {"x": tokens(), "labels": tokens()}


PLAIN = (
    Architecture("unet", "plain torch", _unet),
    Architecture("dit", "plain torch", _diffusion),
    Architecture("nn_transformer", "plain torch", _transformer),
    Architecture("lstm", "plain torch", _recurrent),
)
