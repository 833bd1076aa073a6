"""Batches for a model of transformers, by the names of its forward's arguments; which of them a model needs is found by
trying."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.matrix.zoo.architecture import Batch
from tests.survey.particular import BATCH, particular
from tests.survey.shrinking import LENGTH, RESERVED, WORDS

SAMPLES = 4000
GRID = 4
"""Patches of a picture along each side."""
PARTS = ("vision_config", "audio_config", "text_config", "encoder", "encoder_config", "backbone_config", "decoder")


def batches(model: Any, config: Any) -> Iterator[Batch]:
    """Batches that may suit `model`, the most telling first: with labels, without, with further inputs."""
    parameters, required = _arguments(model)
    name = type(model).__name__
    own = particular(name).inputs
    known = _known(name, config) | {key: partial(make, config) for key, make in own.items()}
    if "grid_thw" in required:
        known |= _patches(config)
    main = model.main_input_name
    base = [*([main] if isinstance(main, str) else main), *required, *own]
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
            yield (batch := {key: make() for key, make in made.items()})
            if "input_values" in batch and batch["input_values"].dim() == 2:  # some take channels of sound
                yield batch | {"input_values": batch["input_values"].unsqueeze(1)}
            if "grid_thw" in required and "pixel_values" in batch:  # and some patches that are pictures
                patch = _size(config, "patch_size", default=14)
                yield batch | {"pixel_values": batch["pixel_values"].view(len(batch["pixel_values"]), -1, patch, patch)}


def literals(model: Any, config: Any) -> dict[str, Any]:
    """Tensors of integers that `model` takes in every step: sizes of pictures, where all have the same."""
    _, required = _arguments(model)
    merge = _size(config, "spatial_merge_size", "merge_size", default=1)
    sizes = {"grid_thw": [[1, GRID, GRID]] * BATCH, "merge_sizes": [merge] * BATCH}
    own = particular(type(model).__name__).literals
    return {key: one for key, one in sizes.items() if key in required} | {key: one(config) for key, one in own.items()}


def _arguments(model: Any) -> tuple[Mapping[str, inspect.Parameter], list[str]]:
    """The parameters of a forward, and the names of those that it needs."""
    parameters = inspect.signature(model.forward).parameters
    needed = (one for one in parameters.values() if one.default is one.empty)
    return parameters, [one.name for one in needed if one.kind is one.POSITIONAL_OR_KEYWORD]


def _patches(config: Any) -> dict[str, Callable[[], Tensor]]:
    """Pictures cut into patches, one below another."""
    patch = _size(config, "patch_size", default=14)
    depth = patch**2 * _size(config, "temporal_patch_size", default=1)
    width = depth * _size(config, "in_channels", "num_channels", "in_chans", default=3)
    make = lambda: torch.randn(BATCH * GRID**2, width)  # noqa: E731
    return {"pixel_values": make, "hidden_states": make}


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
        "input_features_mask": lambda: torch.ones(BATCH, frames, dtype=torch.long),
        "bbox": lambda: torch.randint(0, 100, (*shape, 4)).sort(-1).values,
        "past_values": lambda: torch.randn(BATCH, _size(config, "context_length", default=32)),
        "inputs_embeds": lambda: torch.randn(BATCH, LENGTH, width),
        "hidden_states": lambda: torch.randn(BATCH, LENGTH, width),
    }


MASKED = ("SwitchTransformers", "LongT5", "Udop")
"""Models that make a mask where there is none, but not for an exporter."""
DECODER_MASKED = ("FSMT",)
"""Models that decide by the values of a batch whether to make one."""
TIME_LAST = ("Whisper", "Qwen2Audio", "Voxtral", "Moonshine", "AudioFlamingo3", "MusicFlamingo", "MossTranscribe")
VIDEOS = ("Timesformer", "TimeSformer", "VideoMAE", "Vivit", "XCLIP", "Tvp", "VideoPrism", "InstructBlipVideo")


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
