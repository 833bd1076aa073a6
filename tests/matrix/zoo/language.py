"""Language models: causal, masked, and from sequence to sequence."""

from __future__ import annotations

from typing import Any

from tests.matrix.zoo.architecture import (
    HEADS,
    LAYERS,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Architecture,
    Batch,
    HuggingFace,
    tokens,
)

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
COMMON = {
    **SPECIAL,
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
GROUPED = {"num_key_value_heads": 2}
GPT_WORDS = {**SPECIAL, "vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}


def _labelled() -> Batch:
    return {"input_ids": tokens(LENGTH), "labels": tokens(LENGTH)}


def language(family: str, name: str, model: str, config: str, **settings: Any) -> Architecture:
    """An architecture whose settings are the common ones, changed or (with None) left out."""
    given = {key: value for key, value in {**COMMON, **settings}.items() if value is not None}
    return Architecture(name, family, HuggingFace(model, config, given, _labelled))


def causal(name: str, prefix: str, **settings: Any) -> Architecture:
    return language("causal language model", name, f"{prefix}ForCausalLM", f"{prefix}Config", **settings)


def masked(name: str, prefix: str, **settings: Any) -> Architecture:
    return language("masked language model", name, f"{prefix}ForMaskedLM", f"{prefix}Config", **settings)


def own_words(name: str, model: str, config: str, settings: dict[str, Any], family: str) -> Architecture:
    """An architecture whose config has other names."""
    return Architecture(name, family, HuggingFace(model, config, settings, _labelled))


CAUSAL = (
    own_words("gpt2", "GPT2LMHeadModel", "GPT2Config", {**GPT_WORDS, "n_positions": 64}, "causal language model"),
    causal("gpt_neox", "GPTNeoX"),
    causal("llama", "Llama", **GROUPED),
    causal("mistral", "Mistral", sliding_window=8, **GROUPED),
    causal("mixtral", "Mixtral", num_local_experts=4, output_router_logits=True, **GROUPED),
    causal("qwen2", "Qwen2", **GROUPED),
    causal("gemma2", "Gemma2", head_dim=16, sliding_window=8, **GROUPED),
    causal("phi3", "Phi3", **GROUPED),
    causal("opt", "OPT", ffn_dim=128, word_embed_proj_dim=WIDTH, intermediate_size=None),
    causal(
        "bloom",
        "Bloom",
        n_layer=LAYERS,
        n_head=HEADS,
        num_hidden_layers=None,
        num_attention_heads=None,
        intermediate_size=None,
        max_position_embeddings=None,
    ),
    causal(
        "mamba", "Mamba", state_size=8, num_attention_heads=None, intermediate_size=None, max_position_embeddings=None
    ),
    causal(
        "deepseek_v3",
        "DeepseekV3",
        num_hidden_layers=3,
        num_key_value_heads=HEADS,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        moe_intermediate_size=32,
    ),
)

MASKED = (
    masked("bert", "Bert"),
    own_words(
        "distilbert",
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {
            **SPECIAL,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 64,
            "dim": WIDTH,
            "n_layers": LAYERS,
            "n_heads": HEADS,
            "hidden_dim": 128,
        },
        "masked language model",
    ),
    masked("albert", "Albert", embedding_size=32),
    masked("modernbert", "ModernBert", local_attention=8, global_attn_every_n_layers=2),
)

BART_WORDS = {
    **SPECIAL,
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 64,
}
SEQUENCES = (
    own_words(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "pad_token_id": 0,
            "eos_token_id": 2,
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "decoder_start_token_id": 0,
        },
        "sequence to sequence",
    ),
    own_words(
        "bart",
        "BartForConditionalGeneration",
        "BartConfig",
        {**BART_WORDS, "decoder_start_token_id": 2},
        "sequence to sequence",
    ),
)

LANGUAGE = (*CAUSAL, *MASKED, *SEQUENCES)
