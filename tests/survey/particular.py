"""What rules on names do not say of single types of model: fields of their configs, further entries of a batch, and
literals, which forward takes in every step (the sizes of pictures, where all have the same)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from tests.survey.shrinking import LENGTH

BATCH = 4


@dataclass(frozen=True)
class Particular:
    """`config` are fields by their dotted path, `inputs` and `literals` arguments of forward, from the config."""

    config: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Callable[[Any], Tensor]] = field(default_factory=dict)
    literals: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)


def particular(name: str) -> Particular:
    """The entries for the class `name`, by all patterns that fit."""
    fitting = [one for pattern, one in PARTICULARS if any(fnmatchcase(name, glob) for glob in pattern.split())]
    return Particular(
        {key: value for one in fitting for key, value in one.config.items()},
        {key: value for one in fitting for key, value in one.inputs.items()},
        {key: value for one in fitting for key, value in one.literals.items()},
    )


def _normal(*shape: int) -> Callable[[Any], Tensor]:
    return lambda _: torch.randn(BATCH, *shape)


def _rotary(*section: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section)}


def _series(config: Any, *more: int) -> Tensor:
    """Of the past that models of time series look at."""
    return torch.randn(BATCH, config.context_length + max(config.lags_sequence), *more)


def _words(_: Any) -> Tensor:
    return torch.randint(3, 48, (BATCH, LENGTH))


def _ones(_: Any) -> Tensor:
    return torch.ones(BATCH, LENGTH, dtype=torch.long)


BOTH = {"full_attention": _rotary(2, 1, 1), "sliding_attention": _rotary(2, 1, 1)}
HIERA = {
    "image_size": [64, 64],
    "hidden_size": 8,
    "embed_dim_per_stage": [8, 16, 32, 64],
    "num_attention_heads_per_stage": [1, 2, 4, 8],
    "blocks_per_stage": [1, 1, 2, 1],
    "global_attention_blocks": [3],
}
EFFICIENT = {
    "in_channels": (32, 16, 24, 40, 80, 112, 192),
    "out_channels": (16, 24, 40, 80, 112, 192, 320),
    "width_coefficient": 0.5,
    "depth_coefficient": 0.5,
    "hidden_dim": 640,
    "initializer_range": 0.2,
}
PARTICULARS: tuple[tuple[str, Particular], ...] = (
    (
        "DecisionTransformer*",
        Particular(
            inputs={
                "states": lambda config: torch.randn(BATCH, LENGTH, config.state_dim),
                "actions": lambda config: torch.randn(BATCH, LENGTH, config.act_dim),
                "rewards": _normal(LENGTH, 1),
                "returns_to_go": _normal(LENGTH, 1),
                "timesteps": lambda _: torch.arange(LENGTH).repeat(BATCH, 1),
                "attention_mask": lambda _: torch.ones(BATCH, LENGTH),
            }
        ),
    ),
    ("GlmImageModel", Particular(config={"text_config.rope_parameters": _rotary(2, 1, 1)})),
    ("GlmImageTextModel", Particular(config={"rope_parameters": _rotary(2, 1, 1)})),
    ("MuseSparkAudioModel", Particular(inputs={"input_values": _normal(4032)})),
    (
        "OneFormer*",
        Particular(inputs={"task_inputs": lambda config: torch.randint(0, 48, (BATCH, config.task_seq_len))}),
    ),
    (
        "Lxmert*",
        Particular(
            inputs={
                "visual_feats": lambda config: torch.randn(BATCH, 4, config.visual_feat_dim),
                "visual_pos": lambda config: torch.rand(BATCH, 4, config.visual_pos_dim),
            }
        ),
    ),
    (
        "VisualBert*",
        Particular(inputs={"visual_embeds": lambda config: torch.randn(BATCH, 4, config.visual_embedding_dim)}),
    ),
    (
        "InstructBlip*",
        Particular(
            inputs={
                "input_ids": _words,
                "qformer_input_ids": _words,
                "attention_mask": _ones,
                "qformer_attention_mask": _ones,
            }
        ),
    ),
    ("Blip2ForImageTextRetrieval", Particular(config={"qformer_config.use_qformer_text_input": True})),
    (
        "Blip2QFormerModel InstructBlipQFormerModel",
        Particular(
            inputs={
                "query_embeds": lambda config: torch.randn(BATCH, 8, config.hidden_size),
                "encoder_hidden_states": lambda config: torch.randn(BATCH, LENGTH, config.encoder_hidden_size),
            }
        ),
    ),
    ("AyaVision*", Particular(config={"vision_config.num_attention_heads": 12})),
    ("EfficientNet*", Particular(config=EFFICIENT)),
    ("Align*", Particular(config={f"vision_config.{key}": value for key, value in EFFICIENT.items()})),
    ("Janus*", Particular(config={"vq_config.base_channels": 32})),
    ("Chameleon*", Particular(config={"vq_config.base_channels": 32, "vocabulary_map": {"<image>": 90}})),
    (
        "Reformer*",
        Particular(
            config={
                "axial_pos_embds": False,
                "local_attn_chunk_length": 4,
                "lsh_attn_chunk_length": 4,
                "num_buckets": 2,
                "hash_seed": 0,
            }
        ),
    ),
    ("Dbrx*", Particular(config={"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0})),
    ("InstructBlipForConditionalGeneration", Particular(config={"image_token_index": 90})),
    ("InstructBlipVideoForConditionalGeneration", Particular(config={"video_token_index": 90})),
    ("ShieldGemma2*", Particular(config={"yes_token_index": 5, "no_token_index": 6})),
    ("Molmo2For*", Particular(inputs={"mm_token_type_ids": lambda _: torch.zeros(BATCH, LENGTH, dtype=torch.long)})),
    ("CHMv2*", Particular(config={"backbone_config.return_class_token": True})),
    (
        "FunAsrNanoEncoder",
        Particular(inputs={"input_features": lambda config: torch.randn(BATCH, 64, config.input_size)}),
    ),
    (
        "EdgeTamModel",
        Particular(
            config={
                "vision_config.backbone_channel_list": [1024, 512, 256, 64],
                "vision_config.backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
            }
        ),
    ),
    ("EdgeTamVisionModel", Particular(config={"backbone_channel_list": [1024, 512, 256, 64]})),
    ("FastVlm*", Particular(config={"vision_config.architecture": "fastvit_t8", "vision_config.hidden_size": 768})),
    (
        "Gemma4AudioModel",
        Particular(
            inputs={"input_features": lambda config: torch.randn(BATCH, 64, config.subsampling_conv_channels[0])}
        ),
    ),
    (
        "PerceptionLM*",
        Particular(
            config={
                "vision_config.architecture": "vit_tiny_patch16_224",
                "vision_config.model_args": {"embed_dim": 192, "depth": 2},
            }
        ),
    ),
    ("Lfm2Moe*", Particular(config={"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2})),
    ("Xmod*", Particular(config={"default_language": "en_XX"})),
    (
        "ZambaModel ZambaFor*",
        Particular(
            config={
                "num_hidden_layers": 4,
                "attn_layer_period": 2,
                "attn_layer_offset": 1,
                "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            }
        ),
    ),
    ("MoonshineStreaming*", Particular(config={"num_key_value_heads": 8})),
    (
        "Siglip2ForImageClassification Siglip2VisionModel",
        Particular(
            inputs={"pixel_values": _normal(16, 768)},
            literals={
                "spatial_shapes": lambda _: [[4, 4]] * BATCH,
                "pixel_attention_mask": lambda _: [[1] * 16] * BATCH,
            },
        ),
    ),
    (
        "CohereCompassForConditionalGeneration CohereCompassModel",
        Particular(
            config={
                "text_config.rope_parameters": {
                    "full_attention": _rotary(2, 1, 1),
                    "sliding_attention": _rotary(2, 1, 1),
                }
            }
        ),
    ),
    (
        "CohereCompassTextModel CohereCompassForCausalLM",
        Particular(config={"rope_parameters": BOTH}),
    ),
    ("HunYuanVLFor*", Particular(config={"text_config.rope_parameters": _rotary(1, 1, 1, 1)})),
    ("HunYuanVLTextModel", Particular(config={"rope_parameters": _rotary(1, 1, 1, 1)})),
    ("Granite4Vision*", Particular(config={"deepstack_layer_map": [[-2, 0]], "downsample_rate": "1/2"})),
    ("Molmo2For*", Particular(config={"adapter_config.vision_feature_layer": [-1, -2]})),
    (
        "Sapiens2ForSemanticSegmentation",
        Particular(config={"head_config": {"upsample_out_channels": [16], "conv_out_channels": [16]}}),
    ),
    ("DeepseekOcr2*", Particular(config={"text_config.mlp_layer_types": ["dense", "sparse"]})),
    ("Ernie4_5_VLMoe*", Particular(config={"text_config.rope_parameters": _rotary(1, 1, 2)})),
    (
        "DiffusionGemma*",
        Particular(
            config={
                "text_config.num_experts": 4,
                "text_config.top_k_experts": 2,
                "text_config.moe_intermediate_size": 16,
                "canvas_length": LENGTH,
            }
        ),
    ),
    ("Glm4v* Glm46V*", Particular(config={"text_config.rope_parameters": _rotary(2, 1, 1)})),
    ("Glm4vTextModel Glm4vMoeTextModel", Particular(config={"rope_parameters": _rotary(2, 1, 1)})),
    ("Glm4vMoeTextModel", Particular(config={"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2})),
    (
        "Glm4vMoeFor*",
        Particular(
            config={
                "text_config.hidden_size": 64,
                "text_config.num_attention_heads": 4,
                "text_config.num_key_value_heads": 2,
                "vision_config.out_hidden_size": 64,
            }
        ),
    ),
    ("Qwen2_5Omni*", Particular(config={"text_config.rope_parameters": _rotary(2, 1, 1)})),
    (
        "IdeficsForVisionText2Text",
        Particular(
            inputs={
                "pixel_values": lambda config: torch.randn(BATCH, 1, 3, *[config.vision_config.image_size] * 2),
                "image_attention_mask": lambda _: torch.ones(BATCH, LENGTH, 1, dtype=torch.long),
            }
        ),
    ),
    (
        "Kosmos2ForConditionalGeneration",
        Particular(
            config={"latent_query_num": 4},
            literals={"image_embeds_position_mask": lambda _: [[0, 1, 1, 1, 1] + [0] * (LENGTH - 5)] * BATCH},
        ),
    ),
    (
        "SpeechEncoderDecoderModel",
        Particular(
            inputs={
                "input_values": _normal(4000),
                "decoder_input_ids": lambda _: torch.randint(3, 48, (BATCH, LENGTH)),
            }
        ),
    ),
    ("Step3p7*", Particular(config={"text_config.sliding_window": 8})),
    (
        "Udop*",
        Particular(
            config={"decoder_start_token_id": 0},
            inputs={"bbox": lambda _: torch.rand(BATCH, LENGTH, 4).sort(-1).values},
        ),
    ),
    (
        "ClapModel",
        Particular(
            inputs={
                "input_features": _normal(1, 1024, 64),
                "is_longer": lambda _: torch.zeros(BATCH, 1, dtype=torch.bool),
            }
        ),
    ),
    (
        "TimeSeriesTransformer* Informer* Autoformer*",
        Particular(
            config={"prediction_length": 8, "context_length": 16, "num_time_features": 2},
            inputs={
                "past_values": _series,
                "past_time_features": lambda config: _series(config, 2),
                "past_observed_mask": lambda config: torch.ones_like(_series(config)),
                "future_values": _normal(8),
                "future_time_features": _normal(8, 2),
            },
        ),
    ),
    (
        "PatchTST* PatchTSMixer*",
        Particular(
            config={"num_input_channels": 3},
            inputs={"past_values": lambda config: torch.randn(BATCH, config.context_length, 3)},
        ),
    ),
    (
        "Sam2VisionModel",
        Particular(
            config={f"backbone_config.{key}": value for key, value in HIERA.items()}
            | {"backbone_channel_list": [64, 32, 16, 8]}
        ),
    ),
    ("Sam2HieraDetModel", Particular(config=HIERA)),
    ("Swin2SR*", Particular(config={"image_size": 16, "depths": [2, 2], "num_heads": [2, 2]})),
    ("Mgpstr*", Particular(inputs={"pixel_values": lambda config: torch.randn(BATCH, 3, *config.image_size)})),
    ("PPOCR*Rec*", Particular(inputs={"pixel_values": _normal(3, 48, 96)})),
    ("LightGlue* EfficientLoFTR* SuperGlue*", Particular(inputs={"pixel_values": _normal(2, 3, 64, 64)})),
)
