"""Architectures beyond the matrix, with the same requirements."""

from __future__ import annotations

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
    pictures,
    tokens,
)
from tests.matrix.zoo.language import BART_WORDS, COMMON, GROUPED, SPECIAL, causal, language, masked, own_words
from tests.matrix.zoo.names import named
from tests.matrix.zoo.vision import PATCHES, WAVES, classifier, heard

PICTURE = VOCABULARY - 1
"""The placeholder token of an image patch."""


def _picture_in_text() -> Batch:
    text = tokens(vocabulary=PICTURE)
    places = torch.full((BATCH, 16), PICTURE)
    labels = torch.cat([torch.full_like(places, -100), text], 1)
    return {"input_ids": torch.cat([places, text], 1), "pixel_values": pictures(), "labels": labels}


FURTHER: tuple[Architecture, ...] = (
    own_words(
        "gpt_neo",
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            **SPECIAL,
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
            "max_position_embeddings": 64,
        },
        "causal language model",
    ),
    causal("falcon", "Falcon", intermediate_size=None, max_position_embeddings=None),
    causal("stablelm", "StableLm", **GROUPED),
    causal("phi", "Phi"),
    causal("olmo2", "Olmo2", **GROUPED),
    causal("granite", "Granite", **GROUPED),
    causal("qwen3", "Qwen3", head_dim=16, **GROUPED),
    causal(
        "qwen3_moe", "Qwen3Moe", head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, **GROUPED
    ),
    language(
        "causal language model",
        "gemma3_text",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        head_dim=16,
        sliding_window=8,
        **GROUPED,
    ),
    masked("roberta", "Roberta"),
    masked("electra", "Electra", embedding_size=32),
    masked("mpnet", "MPNet"),
    own_words(
        "pegasus",
        "PegasusForConditionalGeneration",
        "PegasusConfig",
        {**BART_WORDS, "decoder_start_token_id": 0},
        "sequence to sequence",
    ),
    classifier("deit", "DeiT", **PATCHES),
    classifier("dinov2", "Dinov2", **{k: v for k, v in PATCHES.items() if k != "intermediate_size"}),
    classifier("beit", "Beit", **PATCHES),
    classifier(
        "regnet",
        "RegNet",
        size=32,
        embedding_size=16,
        hidden_sizes=[16, 32, 48, 64],
        depths=[1, 1, 1, 1],
        groups_width=16,
    ),
    classifier(
        "efficientnet",
        "EfficientNet",
        size=32,
        image_size=32,
        hidden_dim=320,
        width_coefficient=0.25,
        depth_coefficient=0.25,
    ),
    classifier("poolformer", "PoolFormer", size=64, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1]),
    masked("deberta", "Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=16),
    masked("deberta_v2", "DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8),
    classifier(
        "swinv2", "Swinv2", image_size=32, patch_size=2, embed_dim=32, depths=[1, 1], num_heads=[2, 4], window_size=4
    ),
    Architecture(
        "llava",
        "text and pictures",
        HuggingFace(
            "LlavaForConditionalGeneration",
            "LlavaConfig",
            {"image_token_index": PICTURE, "vision_feature_layer": -1},
            _picture_in_text,
            nested={
                "text_config": {**COMMON, "model_type": "llama"},
                "vision_config": {**PATCHES, "model_type": "clip_vision_model"},
            },
        ),
    ),
    Architecture("names", "names that mean something else", named),
    Architecture("hubert", "sound", HuggingFace("HubertForSequenceClassification", "HubertConfig", WAVES, heard)),
)
