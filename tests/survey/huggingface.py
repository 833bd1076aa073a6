"""Small random models of transformers from the default configs of their classes, and batches for them.

Sizes of a config are known by their names; what does not go together with these makes the class one that the survey
cannot build, which it counts apart.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.matrix.zoo.architecture import Batch, Example, set_dropout

BATCH, LENGTH, WIDTH, WORDS = 4, 12, 32, 96
SIZES = {
    **dict.fromkeys(
        "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers "
        "num_decoder_layers depth num_hidden_groups".split(),
        2,
    ),
    **dict.fromkeys(
        "hidden_size d_model n_embd dim embed_dim d_embed emb_dim embedding_size model_dim word_embed_proj_dim".split(),
        WIDTH,
    ),
    **dict.fromkeys(
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads".split(), 4
    ),
    **dict.fromkeys("num_key_value_heads".split(), 2),
    **dict.fromkeys(
        "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner d_inner".split(), 2 * WIDTH
    ),
    **dict.fromkeys("moe_intermediate_size shared_expert_intermediate_size projection_dim".split(), WIDTH),
    **dict.fromkeys("head_dim d_kv".split(), WIDTH // 4),
    **dict.fromkeys("num_experts num_local_experts n_routed_experts".split(), 4),
    **dict.fromkeys("num_experts_per_tok".split(), 2),
    **dict.fromkeys("vocab_size vocab_size_per_layer_input text_vocab_size".split(), WORDS),
    **dict.fromkeys("num_labels".split(), 4),
}
"""Attributes of configs and their values."""
TASKS = (
    "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_MASKED_LM",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION",
    "MODEL_FOR_TOKEN_CLASSIFICATION",
    "MODEL_FOR_QUESTION_ANSWERING",
    "MODEL_FOR_MULTIPLE_CHOICE",
    "MODEL_FOR_NEXT_SENTENCE_PREDICTION",
    "MODEL_FOR_IMAGE_CLASSIFICATION",
    "MODEL_FOR_MASKED_IMAGE_MODELING",
    "MODEL_FOR_SEMANTIC_SEGMENTATION",
    "MODEL_FOR_DEPTH_ESTIMATION",
    "MODEL_FOR_AUDIO_CLASSIFICATION",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ",
    "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
    "MODEL_FOR_TIME_SERIES_PREDICTION",
    "MODEL_FOR_PRETRAINING",
    "MODEL",
)


def names() -> list[str]:
    """The model classes of the auto classes, one of each type of model first."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for task in TASKS:
        for kind, classes in getattr(modeling_auto, f"{task}_MAPPING_NAMES", {}).items():
            for name in (classes,) if isinstance(classes, str) else classes:
                found.setdefault(name, kind)
    seen: set[str] = set()
    first = [name for name, kind in found.items() if not (kind in seen or seen.add(kind))]  # type: ignore[func-returns-value]
    return [*first, *(name for name in found if name not in set(first))]


def build(name: str, dropout: float) -> Example:
    """The model of this class with its loss, and a batch."""
    import transformers

    chosen = getattr(transformers, name)
    config = chosen.config_class()
    shrink(config)
    set_dropout(config, dropout)
    if getattr(chosen, "_supports_sdpa", False):
        config._attn_implementation = "sdpa"
    model = chosen(config)
    return Trained(model), batch_of(model, config)


def shrink(config: Any) -> None:
    """Give every size that is known by name a small value, in a config and in those inside of it."""
    for key, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            shrink(value)
        elif key == "head_dim" and hasattr(config, "qk_rope_head_dim"):
            continue  # follows from other sizes
        elif key in SIZES and isinstance(value, int) and not isinstance(value, bool) and value > SIZES[key]:
            setattr(config, key, SIZES[key])
        elif key == "layer_types" and isinstance(value, list):
            config.layer_types = [*dict.fromkeys(value)][:2] * (3 - len({*value[:2]}))
            config.layer_types = config.layer_types[:2]
        elif key.endswith("token_id") and isinstance(value, int) and value >= WORDS:
            setattr(config, key, WORDS - 1)


class Trained(nn.Module):
    """A model with its own loss, or else the mean of the squares of what it returns first."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, **batch: Tensor) -> Tensor:
        return loss_of(self.inner(**batch))


def loss_of(output: Any) -> Tensor:
    """The loss that a model returns, or of the floating-point tensors that it returns first."""
    if isinstance(output, Mapping) and isinstance(loss := output.get("loss"), Tensor):
        return loss.mean()
    values = [output] if isinstance(output, Tensor) else output.values() if isinstance(output, Mapping) else output
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.square().mean()
    raise TypeError(f"{type(output).__name__} holds no tensor to train")


def _size(config: Any, *keys: str, default: int) -> int:
    for owner in (config, *(getattr(config, part, None) for part in ("vision_config", "audio_config", "text_config"))):
        for key in keys:
            value = getattr(owner, key, None)
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
                value = value[-1]
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return default


def batch_of(model: Any, config: Any) -> Batch:
    """A batch of what the forward of `model` needs, by the names of its arguments."""
    parameters = inspect.signature(model.forward).parameters
    main, name = model.main_input_name, type(model).__name__
    words = min(WORDS, _size(config, "vocab_size", default=WORDS))
    many = name.endswith("MultipleChoice")
    ids = lambda: torch.randint(3, words, (BATCH, 2, LENGTH) if many else (BATCH, LENGTH))  # noqa: E731
    picture = _size(config, "image_size", "img_size", default=64)
    channels = _size(config, "num_channels", "in_channels", "in_chans", default=3)
    known = {
        "input_ids": ids,
        "decoder_input_ids": ids,
        "pixel_values": lambda: torch.randn(BATCH, channels, picture, picture),
        "input_values": lambda: torch.randn(BATCH, 4000),
        "input_features": lambda: torch.randn(BATCH, _size(config, "num_mel_bins", default=80), _frames(config)),
        "bbox": lambda: torch.randint(0, 100, (BATCH, LENGTH, 4)).sort(-1).values,
        "past_values": lambda: torch.randn(BATCH, _size(config, "context_length", default=32)),
    }
    needed = {
        key for key, one in parameters.items() if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    }
    wanted = [main, *(key for key in parameters if key in needed and key != main)]
    wanted += [key for key in ("input_ids", "pixel_values") if key in parameters and "CLIP" in name.upper()]
    labels = _labels(name, ids)
    if not labels and "decoder_input_ids" in parameters:
        wanted.append("decoder_input_ids")
    batch = {key: known[key]() for key in dict.fromkeys(wanted) if key in known or key in needed}
    return batch | {key: value for key, value in labels.items() if key in parameters}


def _frames(config: Any) -> int:
    return 2 * _size(config, "max_source_positions", default=64)


def _labels(name: str, ids: Any) -> Batch:
    if name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForTokenClassification")):
        labels = ids()
        return {"labels": labels % 2 if name.endswith("ForTokenClassification") else labels}
    if name.endswith("ForConditionalGeneration"):
        return {"labels": ids()}
    if name.endswith(("ForSequenceClassification", "ForImageClassification", "ForMultipleChoice")):
        return {"labels": torch.randint(0, 2, (BATCH,))}
    if name.endswith("ForQuestionAnswering"):
        return {key: torch.randint(0, LENGTH, (BATCH,)) for key in ("start_positions", "end_positions")}
    return {}
