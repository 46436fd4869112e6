"""Small configs of model families, with windows, caps and limits that samples of 48 tokens reach."""

from __future__ import annotations

import transformers
from transformers import PretrainedConfig

from engines.train.self_test.twin import WORDS

LAYERS = 4
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
HEADS = {**SIZES, "head_dim": 16}
WINDOW = {"sliding_window": 12}
EVERY_OTHER = {"layer_types": ["sliding_attention", "full_attention"] * 2}
HYBRID = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_d_ssm": 64,
    "mamba_chunk_size": 8,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
    "factor": 4.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}
PER_LAYER = {"vocab_size_per_layer_input": WORDS, "hidden_size_per_layer_input": 8}

# By name: the class of the config, and what it is made of.
KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "mistral window": ("MistralConfig", {**HEADS, **WINDOW}),
    "qwen2 window": (
        "Qwen2Config",
        {**SIZES, **WINDOW, "use_sliding_window": True, "max_window_layers": 2},
    ),
    "gemma2": (
        "Gemma2Config",
        {**HEADS, **WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": ("Gemma3TextConfig", {**HEADS, **WINDOW, **EVERY_OTHER, "query_pre_attn_scalar": 16}),
    "gemma4": (
        "Gemma4TextConfig",
        {
            **HEADS,
            **WINDOW,
            **EVERY_OTHER,
            **PER_LAYER,
            "global_head_dim": 16,
            "num_global_key_value_heads": 2,
            "num_kv_shared_layers": 0,
        },
    ),
    "olmo3": ("Olmo3Config", {**SIZES, **WINDOW}),
    "cohere2": ("Cohere2Config", {**HEADS, **WINDOW, "logit_scale": 0.25}),
    "seed oss": ("SeedOssConfig", {**HEADS, "attention_dropout": 0.3, "residual_dropout": 0.2}),
    "gpt oss": (
        "GptOssConfig",
        {**HEADS, **WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "phi3 longrope": (
        "Phi3Config",
        {
            **SIZES,
            "sliding_window": None,
            "original_max_position_embeddings": 32,
            "rope_parameters": LONGROPE,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {**SIZES, "layer_types": ["conv", "conv", "full_attention", "conv"], "block_ff_dim": 48},
    ),
    "qwen3.5": ("Qwen3_5TextConfig", {**HEADS, **DELTA, **HYBRID}),
    "qwen3 next": (
        "Qwen3NextConfig",
        {
            **HEADS,
            **DELTA,
            **HYBRID,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "falcon h1": ("FalconH1Config", {**HEADS, **MAMBA, "num_hidden_layers": 2}),
    "bamba": (
        "BambaConfig",
        {**SIZES, **MAMBA, "attn_layer_indices": [1], "num_hidden_layers": 3},
    ),
    "falcon": (
        "FalconConfig",
        {
            **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")},
            "num_attention_heads": 4,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "alibi": False,
        },
    ),
    "gptj": (
        "GPTJConfig",
        {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8},
    ),
    "codegen": (
        "CodeGenConfig",
        {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    ),
    "bloom": ("BloomConfig", {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "mamba2": (
        "Mamba2Config",
        {
            "vocab_size": WORDS,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 16,
            "num_heads": 4,
            "head_dim": 16,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    "nemotron": ("NemotronConfig", {**HEADS}),
    "stablelm": ("StableLmConfig", {**SIZES, "hidden_dropout": 0.2}),
}


def config_of(family: str) -> PretrainedConfig:
    """A small config of a family of KINDS."""
    name, values = KINDS[family]
    made: PretrainedConfig = getattr(transformers, name)(**values)
    return made
