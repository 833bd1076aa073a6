"""Batches for a model of transformers, by the names of its forward's arguments; which of them a model needs is found by
trying."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.matrix.zoo.architecture import Batch
from tests.survey.shrinking import LENGTH, RESERVED, WORDS

BATCH, SAMPLES = 4, 4000
PARTS = ("vision_config", "audio_config", "text_config", "encoder", "encoder_config", "backbone_config", "decoder")


def batches(model: Any, config: Any) -> Iterator[Batch]:
    """Batches that may suit `model`, the most telling first: with labels, without, with further inputs."""
    parameters = inspect.signature(model.forward).parameters
    known = _known(type(model).__name__, config)
    main = model.main_input_name
    required = [
        key for key, one in parameters.items() if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    base = [*([main] if isinstance(main, str) else main), *required]
    if type(model).__name__.startswith(MASKED):
        known["attention_mask"] = lambda: torch.ones(BATCH, LENGTH, dtype=torch.long)
        base.append("attention_mask")
    if type(model).__name__.startswith(DECODER_MASKED):
        known["decoder_attention_mask"] = lambda: torch.ones(BATCH, LENGTH, dtype=torch.long)
        base.append("decoder_attention_mask")
    base = [key for key in dict.fromkeys(base) if key in parameters]
    boxes = ["bbox"] if "bbox" in parameters else []
    words, pictures = ([key] if key in parameters else [] for key in ("input_ids", "pixel_values"))
    labels = _labels(type(model).__name__, known["input_ids"])
    labels = {key: make for key, make in labels.items() if key in parameters}
    decoder = ["decoder_input_ids"] if "decoder_input_ids" in parameters else []
    seen: set[tuple[str, ...]] = set()
    for more, labelled in (
        (boxes, True),
        (decoder, False),
        (words + pictures, True),
        ([], False),
        (words + pictures + decoder, False),
        ([key for key in parameters if key in known], False),
    ):
        names = [*dict.fromkeys([*base, *more])]
        made = {key: known[key] for key in names if key in known} | (labels if labelled else {})
        made |= {key: known["input_ids"] for key in required if key.endswith("_input_ids")}
        if made and tuple(made) not in seen:
            seen.add(tuple(made))
            yield {key: make() for key, make in made.items()}


def _size(config: Any, *keys: str, default: int) -> int:
    for owner in (config, *(getattr(config, part, None) for part in PARTS)):
        for key in keys:
            value = getattr(owner, key, None)
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
                value = value[-1]
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return default


def _known(name: str, config: Any) -> dict[str, Callable[[], Tensor]]:
    words = min(WORDS, _size(config, "vocab_size", default=WORDS))
    last = max(words - RESERVED, words // 2)
    shape = (BATCH, 2, LENGTH) if name.endswith("MultipleChoice") else (BATCH, LENGTH)
    ids = lambda: torch.randint(3, last, shape)  # noqa: E731
    picture = _size(config, "image_size", "img_size", "input_image_size", default=64)
    channels = _size(config, "num_channels", "in_channels", "in_chans", default=3)
    width = _size(config, "hidden_size", "d_model", "n_embd", "embed_dim", default=32)
    frames, mels = (
        2 * _size(config, "max_source_positions", default=32),
        _size(
            config,
            "feature_projection_input_dim",
            "num_mel_bins",
            "feature_size",
            "input_feat_per_channel",
            "mel_dim",
            default=80,
        ),
    )
    video = _size(config, "num_frames", "frames_per_clip", default=8)
    patch = _size(config, "patch_embed_hidden_size", default=768)
    spectrogram = isinstance(getattr(config, "num_mel_bins", None), int) and hasattr(config, "max_length")
    turned = name.startswith(TIME_LAST)
    return {
        "input_ids": ids,
        "decoder_input_ids": ids,
        "pixel_values": lambda: torch.randn(
            *((BATCH, video) if name.startswith(VIDEOS) else (BATCH,)), channels, picture, picture
        ),
        "pixel_values_videos": lambda: torch.randn(BATCH, video, channels, picture, picture),
        "input_values": lambda: torch.randn(BATCH, *((config.max_length, mels) if spectrogram else (SAMPLES,))),
        "flattened_patches": lambda: torch.cat([torch.ones(BATCH, LENGTH, 2), torch.randn(BATCH, LENGTH, patch)], -1),
        "input_features": lambda: torch.randn(*((BATCH, mels, frames) if turned else (BATCH, frames, mels))),
        "bbox": lambda: torch.randint(0, 100, (*shape, 4)).sort(-1).values,
        "past_values": lambda: torch.randn(BATCH, _size(config, "context_length", default=32)),
        "inputs_embeds": lambda: torch.randn(BATCH, LENGTH, width),
        "hidden_states": lambda: torch.randn(BATCH, LENGTH, width),
    }


MASKED = ("SwitchTransformers", "LongT5")
"""Models that make a mask where there is none, but not for an exporter."""
DECODER_MASKED = ("FSMT",)
"""Models that decide by the values of a batch whether to make one."""
TIME_LAST = ("Whisper", "Qwen2Audio", "Voxtral", "Moonshine")
VIDEOS = ("Timesformer", "TimeSformer", "VideoMAE", "Vivit", "XCLIP")


def _labels(name: str, ids: Callable[[], Tensor]) -> dict[str, Callable[[], Tensor]]:
    if name.endswith("ForTokenClassification"):
        return {"labels": lambda: ids() % 2}
    if name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")):
        return {"labels": ids}
    if name.endswith(("ForSequenceClassification", "ForImageClassification", "ForMultipleChoice")):
        return {"labels": lambda: torch.randint(0, 2, (BATCH,))}
    if name.endswith("ForQuestionAnswering"):
        return dict.fromkeys(("start_positions", "end_positions"), lambda: torch.randint(0, LENGTH, (BATCH,)))
    return {}
