"""Vision: transformers, convolutional networks, a masked autoencoder; image and text; audio."""

from __future__ import annotations

from typing import Any

import torch

from tests.matrix.zoo.architecture import (
    BATCH,
    HEADS,
    LAYERS,
    VOCABULARY,
    WIDTH,
    Architecture,
    Batch,
    HuggingFace,
    classes,
    pictures,
    tokens,
)
from tests.matrix.zoo.language import BART_WORDS, COMMON, SPECIAL

PATCHES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 128,
    "image_size": 32,
    "patch_size": 8,
}


def classifier(name: str, prefix: str, size: int = 32, **settings: Any) -> Architecture:
    """A classifier of images into 10 classes."""
    given = {"num_labels": 10, "problem_type": "single_label_classification", **settings}
    build = HuggingFace(
        f"{prefix}ForImageClassification",
        f"{prefix}Config",
        given,
        lambda: {"pixel_values": pictures(size), "labels": classes()},
    )
    return Architecture(name, "vision", build)


def _text_and_picture() -> Batch:
    text = tokens()
    text[:, -1] = 2  # the end token, whose state represents the text
    return {"input_ids": text, "pixel_values": pictures()}


VISION = (
    classifier("vit", "ViT", **PATCHES),
    classifier(
        "swin", "Swin", image_size=32, patch_size=2, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4
    ),
    classifier("convnext", "ConvNext", hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1]),
    classifier(
        "resnet",
        "ResNet",
        size=64,
        embedding_size=16,
        hidden_sizes=[16, 32, 48, 64],
        depths=[1, 1, 1, 1],
        layer_type="bottleneck",
    ),
    classifier("mobilenet_v2", "MobileNetV2", size=64, depth_multiplier=0.25),
    classifier(
        "segformer",
        "Segformer",
        size=64,
        depths=[1, 1, 1, 1],
        hidden_sizes=[16, 32, 48, 64],
        num_attention_heads=[1, 2, 3, 4],
        decoder_hidden_size=32,
    ),
    Architecture(
        "vit_mae",
        "vision",
        HuggingFace(
            "ViTMAEForPreTraining",
            "ViTMAEConfig",
            {
                **PATCHES,
                "decoder_hidden_size": 32,
                "decoder_num_hidden_layers": 1,
                "decoder_num_attention_heads": 2,
                "decoder_intermediate_size": 64,
            },
            lambda: {"pixel_values": pictures(), "noise": torch.rand(BATCH, 16)},
        ),
    ),
    Architecture(
        "clip",
        "text and pictures",
        HuggingFace(
            "CLIPModel",
            "CLIPConfig",
            {"projection_dim": 32},
            _text_and_picture,
            nested={"text_config": COMMON, "vision_config": PATCHES},
            fixed={"return_loss": True},
        ),
    ),
)

WAVES = {
    "pad_token_id": SPECIAL["pad_token_id"],
    "vocab_size": 32,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 128,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "ctc_zero_infinity": True,
    "num_labels": 5,
    "classifier_proj_size": 32,
}
"""A network on raw audio, convolutions before a transformer."""


def heard() -> Batch:
    return {"input_values": torch.randn(BATCH, 1600), "labels": classes(5)}


SOUND = (
    Architecture(
        "whisper",
        "sound",
        HuggingFace(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            {
                **{name: value for name, value in BART_WORDS.items() if name != "max_position_embeddings"},
                "vocab_size": VOCABULARY,
                "num_mel_bins": 16,
                "max_source_positions": 16,
                "max_target_positions": 32,
                "decoder_start_token_id": 1,
                "suppress_tokens": None,
                "begin_suppress_tokens": None,
            },
            lambda: {"input_features": torch.randn(BATCH, 16, 32), "labels": tokens()},
        ),
    ),
    Architecture(
        "wav2vec2",
        "sound",
        HuggingFace(
            "Wav2Vec2ForSequenceClassification",
            "Wav2Vec2Config",
            WAVES,
            heard,
        ),
    ),
)
