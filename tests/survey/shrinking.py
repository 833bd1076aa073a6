"""Small configs of transformers from the default ones of their classes, by rules on the names of their fields.

Widths are divided by one power of two, so that what divides or adds up in the default config still does: heads times
their size, towers and the projections between them, expansions. Layers, experts, words and pictures are few. A class
that does not train with the first `Scale` is tried with the next.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import count
from typing import Any

LENGTH, WORDS = 12, 96
"""Of a sequence of tokens, and of the vocabulary."""
RESERVED = 24
"""Special tokens have the last ids, which no batch draws."""
HEAD = 4
"""A head keeps at least this size."""
BY_NAME: tuple[tuple[str, int], ...] = (
    (r"(num_|n_|moe_|_)?(routed_|local_|moe_)?(num_)?experts?$|(zero_)?expert_num$", 4),
    (r"num_experts_per_(tok|token)$|moe_k$|(moe|router|experts?)_top_?k$|top_k_experts$|moe_topk$|n_group$", 2),
    (r"topk_group$|first_k_dense_replace$|num_(nextn_predict|mtp|dense)_layers$|n_dense_layers$", 1),
    (r"(.*_)?vocab(_size)?(s|_per_layer_input)?$", WORDS),
    (r"(.*_)?chunk_size$", LENGTH // 2 + 2),
    (r"(max_source|max_audio).*positions$", 64),
    (r"(max_)?(2d_)?(max_)?position_embeddings$|n_positions$|max_target_positions$", 512),
    (r"num_queries$|num_query_tokens$|num_object_queries$|num_latents$|.*n_latents$|num_denoising$", 16),
    (r"train_num_points$|num_negatives$", 16),
    (r"attention_window$|upsample_groups$", 4),
)
"""Names of fields and what their values are lowered to, if they are larger."""
LAYERS = re.compile(
    r"(num_|n_|.*_)?(layers?|blocks?|depths?|hidden_groups|block_repeats)$|stage_numb_of_layers$|depth$"
)
WIDTH = re.compile(
    r".*(hidden|embed|intermediate|dim|dims|width|rank|ffn|channels?|features|units|filters)(_size|_sizes|_dim|_dims|s)?$"
    r"|d_(model|ff|kv|inner|embed|v|k)$|n_embd$|n_inner$|.*(proj|projection|memory|state|embedding|output|head)_sizes?$"
    r"|conv_dim$|lru_width$|(coordinate|shape)_size$|.*_channels_?(size)?$|.*_inplanes$|query_pre_attn_scalar$|.*moe_.*_size$|.*_ff$"
)
FIXED = re.compile(
    r".*(patch|kernel|window|vocab|crop|chunk|position|frames|mel|codebook|stride|ratio|num_labels|max_|tokens?_|length"
    r"|quantiz|input_channels|output_stride|feature_level).*|num_channels(_out)?$|in_chans$|type_.*|.*_layers?$"
    r"|d_(state|conv)$|.*(token|_mult|_factor|_heads|_groups)$|feature_size$|input_(size|dim)$|.*pool_shape$|num_.*"
    r"|embedding_dim_per_.*"
)
"""Fields that `WIDTH` would match and that are none."""
COMMON = frozenset("id2label label2id architectures transformers_version dtype chunk_size_feed_forward".split())
"""Fields of all configs that say nothing about sizes."""
DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
UNSET = {
    "pad_token_id": 0,
    "vocab_size": WORDS,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_key_value_heads": "num_attention_heads",
    "head_dim": 8,
}
"""Fields without which a class cannot be built, or its classifiers cannot recognise padding, and their values."""
NECKS = ("neck_hidden_sizes", "pool_scales", "decoder_in_channels")
"""Lists with an entry for each stage of a backbone that is read."""
WIDTHS = "hidden_size hidden_sizes d_model n_embd embed_dim dim hidden_dim emb_dim encoder_hidden_dim".split()
HEADS = re.compile(r"(.*_)?(heads?|n_head_kv)$")
HEAD_SIZE = re.compile(r"(.*_)?head_dim$|d_kv$|kv_channels$|attention_(head_size|dim)$|mamba_headdim$|.*head_size$")
TOKEN = re.compile(
    r".*(token|image|video|audio|start|end|mask|eos|bos|pad|sep|cls).*_(id|ids|index)$|.*token_(id|index)s?$"
)
PICTURE = re.compile(r"(.*_)?(image|img|input_image|crop)_size$|train_size$")


@dataclass(frozen=True)
class Scale:
    """One try: most `layers`; whether heads become fewer rather than smaller, and keep an even size (rotary
    embeddings); whether pictures are small, and whether lists with an entry for each layer are truncated or left to the
    config to derive; whether widths are divided at all."""

    layers: int = 2
    fewer: bool = False
    even: bool = False
    pictures: bool = True
    lists: bool = True
    narrow: bool = True


SCALES = (
    Scale(),
    Scale(even=True),
    Scale(fewer=True),
    Scale(lists=False),
    Scale(pictures=False),
    Scale(layers=4, even=True),
    Scale(layers=4, even=True, pictures=False, lists=False),
    Scale(layers=10**6, even=True, pictures=False),
    Scale(narrow=False),
    Scale(layers=4, narrow=False, pictures=False),
)


def shrunk(config_class: type, scale: Scale, own: Mapping[str, Any]) -> Any:
    """A small config of this class, with `own` values by the dotted paths of fields. Raises whatever the class raises
    for values that do not go together."""
    default = config_class()
    divisor = min(_divisors(default, scale), default=16) if scale.narrow else 1
    return _rebuilt(default, divisor, scale, count(1), own)


def _values(config: Any) -> dict[str, Any]:
    names = (field.name for field in fields(config) if field.init and field.name not in COMMON)
    return {name: value for name in names if (value := vars(config).get(name)) is not None}


def _is_config(value: object) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "model_type")


def _divisors(config: Any, scale: Scale) -> Iterator[int]:
    """The largest power of two that each size of heads, or their number, in `config` and the configs in it may be
    divided by."""
    values = _values(config)
    counts = {v for name, value in values.items() if HEADS.match(name) for v in _integers(value) if v > 1}
    if scale.fewer:
        yield from (next(k for k in (16, 8, 4, 2, 1) if number % k == 0) for number in counts)
    else:
        yield from (_divisor(size, scale.even) for size in _head_sizes(values, counts) if size >= HEAD)
        for section in _sections(values.get("rope_parameters")):
            yield next(k for k in (16, 8, 4, 2, 1) if all(part % k == 0 for part in section))
    for value in values.values():
        if _is_config(value):
            yield from _divisors(value, scale)


def _head_sizes(values: dict[str, Any], counts: set[int]) -> set[int]:
    sizes = {v for name, value in values.items() if HEAD_SIZE.match(name) for v in _integers(value)}
    widths = [width for name in WIDTHS for width in _integers(values.get(name))]
    return sizes or {width // heads for width in widths for heads in counts if width % heads == 0}


def _divisor(size: int, even: bool) -> int:
    fits = (k for k in (16, 8, 4, 2) if size % k == 0 and size // k >= HEAD and not (even and size // k % 2))
    return next(fits, 1)


def _sections(rotary: Any) -> Iterator[list[int]]:
    for key, value in rotary.items() if isinstance(rotary, dict) else ():
        if key == "mrope_section" and value:
            yield list(value)
        elif isinstance(value, dict):
            yield from _sections(value)


def _integers(value: Any) -> list[int]:
    values = value if isinstance(value, (list, tuple)) else (value,)
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]


def _rebuilt(config: Any, divisor: int, scale: Scale, special: Iterator[int], own: Mapping[str, Any]) -> Any:
    declared = {field.name: field.default for field in fields(config)}
    values, usual = _values(config), _values(type(config)())
    given: dict[str, Any] = {}
    for name, small in UNSET.items():
        if name in declared and name not in values:
            values[name] = given[name] = values.get(small, 0) if isinstance(small, str) else small
    depth = next((values[name] for name in DEPTHS if name in values), None)
    chosen = _representatives(values, depth, scale.layers) if isinstance(depth, int) else []
    for name, value in values.items():
        if _is_config(value):
            inner = {key.removeprefix(f"{name}."): one for key, one in own.items() if key.startswith(f"{name}.")}
            given[name] = _rebuilt(value, divisor, scale, special, inner)
            if name == "backbone_config" and hasattr(value, "out_indices"):
                _give(given[name], max(len(values.get(key) or ()) for key in NECKS))
            continue
        derived = value == usual.get(name) and (
            declared[name] is None or isinstance(declared[name], str) > isinstance(value, str)
        )
        if isinstance(value, (list, tuple)) and len(value) == depth > len(chosen):
            small, derived = [value[index] for index in chosen], not scale.lists
        elif isinstance(value, (list, tuple)) and name.endswith(("indices", "indexes")):
            small = type(value)(_spread(_integers(value), scale.layers))
        else:
            small = _small(name, value, divisor, scale, special)
        if small != declared[name] and (not derived or name == "rope_parameters"):
            given[name] = small
    return type(config)(**given | {key: one for key, one in own.items() if "." not in key})


def _give(backbone: Any, count: int) -> None:
    """Let a backbone return its last `count` stages, where a neck takes so many; a default one returns its last."""
    if len(backbone.out_indices) < count:
        backbone.out_indices = list(range(len(backbone.stage_names)))[-count:]


def _spread(indices: list[int], layers: int) -> list[int]:
    """As many indices of fewer layers, the last one included."""
    if max(indices, default=0) < layers:
        return indices
    count = min(len(indices), layers)
    return [(place + 1) * layers // count - 1 for place in range(count)]


def _representatives(values: dict[str, Any], depth: int, most: int) -> list[int]:
    """Indices of layers of different kinds: at most `most` of `depth`, in order."""
    lists = [value for value in values.values() if isinstance(value, (list, tuple)) and len(value) == depth]
    kinds = list(zip(*lists, strict=True)) if lists else []
    first = list({str(kind): index for index, kind in reversed(list(enumerate(kinds)))}.values())
    others = [index for index in range(depth) if index not in first]
    return sorted([*sorted(first), *others][: min(most, depth)])


def _small(name: str, value: Any, divisor: int, scale: Scale, special: Iterator[int]) -> Any:
    if name == "rope_parameters":
        return value if scale.fewer else _rotary(value, divisor)
    if isinstance(value, (list, tuple)):
        return type(value)(_small(name, each, divisor, scale, special) for each in value)
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if TOKEN.match(name):
        return WORDS - 1 - next(special) % RESERVED if value >= WORDS - RESERVED else value
    for pattern, most in BY_NAME:
        if re.match(pattern, name):
            return min(value, most)
    if LAYERS.match(name):
        return min(value, scale.layers)
    if PICTURE.match(name):
        return min(value, 64) if scale.pictures else value
    if HEADS.match(name):
        return max(value // divisor, 1) if scale.fewer else value
    if HEAD_SIZE.match(name):
        return value if scale.fewer else max(value // divisor, HEAD)
    if WIDTH.match(name) and not FIXED.match(name):
        return _narrow(value, divisor) if value >= 32 else value
    return value


def _narrow(width: int, divisor: int) -> int:
    """A fraction of a width; one that is not a whole number becomes a multiple of 8 (grouped products ask for 4)."""
    return max(width // divisor if width % divisor == 0 else width // divisor // 8 * 8, 2 * HEAD)


def _rotary(value: Any, divisor: int) -> Any:
    if not isinstance(value, dict):
        return value
    halves = {"mrope_section": lambda parts: parts and [part // divisor for part in parts]}
    return {key: halves.get(key, lambda inner: _rotary(inner, divisor))(inner) for key, inner in value.items()}
