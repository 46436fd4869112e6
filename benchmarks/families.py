"""Small random checkpoints of model families, of sizes that vLLM's kernels for a CPU take.

Windows, caps and limits of rotary positions are within samples of 48 tokens. A family is a line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from engines.models.checkpoints import character_tokenizer, save
from engines.train.self_test.twin import WORDS, build

Sizes = dict[str, Any]

IDS: Sizes = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BASE: Sizes = {
    **IDS,
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
HEADS: Sizes = {**BASE, "num_key_value_heads": 1, "head_dim": 32}
OLD: Sizes = {**IDS, "vocab_size": WORDS, "n_layer": 3, "n_head": 2}
WINDOW: Sizes = {"sliding_window": 16}
EVERY_OTHER: Sizes = {"layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS: Sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LOCAL_EXPERTS: Sizes = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED: Sizes = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: Sizes = {
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
DELTA: Sizes = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
MAMBA: Sizes = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
PER_LAYER: Sizes = {"vocab_size_per_layer_input": WORDS, "hidden_size_per_layer_input": 16}
GEMMA: Sizes = {**HEADS, **WINDOW, "query_pre_attn_scalar": 32}
GRANITE: Sizes = {
    "logits_scaling": 4.0,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
}
LONGROPE: Sizes = {
    "sliding_window": None,
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 32,
        "factor": 8.0,
        "short_factor": [1.0] * 16,
        "long_factor": [4.0] * 16,
    },
}

# By name: transformers' class of the config, and what it is made of.
FAMILIES: dict[str, tuple[str, Sizes]] = {
    # Dense.
    "Llama": ("LlamaConfig", HEADS),
    "Qwen2": ("Qwen2Config", {**BASE, "tie_word_embeddings": True}),
    "Qwen3": ("Qwen3Config", {**HEADS, "tie_word_embeddings": True}),
    "Mistral": ("MistralConfig", {**HEADS, **WINDOW}),
    "Ministral 3": ("Ministral3Config", {**HEADS, "sliding_window": None}),
    "Gemma": ("GemmaConfig", HEADS),
    "Gemma 2": ("Gemma2Config", GEMMA),
    "Gemma 3": ("Gemma3TextConfig", {**GEMMA, **EVERY_OTHER}),
    "Gemma 3n": (
        "Gemma3nTextConfig",
        {
            **HEADS,
            **PER_LAYER,
            "num_hidden_layers": 5,
            "intermediate_size": [96] * 5,
            "altup_num_inputs": 4,
            "laurel_rank": 8,
            "num_kv_shared_layers": 0,
            "sliding_window": 256,
            "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
            "activation_sparsity_pattern": [0.0] * 5,
        },
    ),
    "Gemma 4": (
        "Gemma4TextConfig",
        {
            **HEADS,
            **WINDOW,
            **EVERY_OTHER,
            **PER_LAYER,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "VaultGemma": ("VaultGemmaConfig", {**GEMMA, **EVERY_OTHER}),
    "Phi 1 and 2": ("PhiConfig", BASE),
    "Phi 3": ("Phi3Config", {**BASE, **WINDOW}),
    "Phi 4 longrope": ("Phi3Config", {**BASE, **LONGROPE}),
    "OLMo": ("OlmoConfig", {**BASE, "clip_qkv": 8.0}),
    "OLMo 2": ("Olmo2Config", BASE),
    "OLMo 3": ("Olmo3Config", {**BASE, **WINDOW}),
    "SmolLM3": (
        "SmolLM3Config",
        {**BASE, "no_rope_layer_interval": 2, "use_sliding_window": False},
    ),
    "Granite": ("GraniteConfig", {**BASE, **GRANITE}),
    "Cohere": ("CohereConfig", {**BASE, "logit_scale": 0.25}),
    "Cohere 2": ("Cohere2Config", {**HEADS, **WINDOW, "logit_scale": 0.25}),
    "Seed-OSS": ("SeedOssConfig", HEADS),
    "ERNIE 4.5": ("Ernie4_5Config", {**HEADS, "use_bias": False}),
    "Hunyuan": ("HunYuanDenseV1Config", HEADS),
    "GLM 4": ("Glm4Config", {**HEADS, "attention_bias": True, "partial_rotary_factor": 0.5}),
    "EXAONE 4": ("Exaone4Config", {**HEADS, **WINDOW, **EVERY_OTHER}),
    "Apertus": ("ApertusConfig", BASE),
    "NanoChat": ("NanoChatConfig", BASE),
    "Arcee": ("ArceeConfig", HEADS),
    "Helium": ("HeliumConfig", HEADS),
    "Nemotron": ("NemotronConfig", HEADS),
    "StarCoder 2": ("Starcoder2Config", {**BASE, **WINDOW}),
    "StableLM": ("StableLmConfig", BASE),
    "OPT": (
        "OPTConfig",
        {
            **{name: BASE[name] for name in (*IDS, "vocab_size", "hidden_size")},
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "ffn_dim": 128,
            "max_position_embeddings": 256,
            "word_embed_proj_dim": 64,
        },
    ),
    "GPT-2": ("GPT2Config", {**OLD, "n_embd": 64, "n_positions": 256}),
    "GPT-BigCode": ("GPTBigCodeConfig", {**OLD, "n_embd": 64, "n_positions": 256}),
    "GPT-J": ("GPTJConfig", {**OLD, "n_embd": 64, "n_positions": 256, "rotary_dim": 16}),
    "GPT-NeoX": ("GPTNeoXConfig", {n: v for n, v in BASE.items() if n != "num_key_value_heads"}),
    "BLOOM": ("BloomConfig", {**OLD, "hidden_size": 64}),
    "Falcon": (
        "FalconConfig",
        {
            **IDS,
            "vocab_size": WORDS,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "new_decoder_architecture": True,
            "alibi": False,
        },
    ),
    # With layers that carry a state from token to token.
    "Qwen3.5": ("Qwen3_5TextConfig", {**HEADS, **DELTA}),
    "LFM2": (
        "Lfm2Config",
        {
            **BASE,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "block_ff_dim": 96,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "Falcon-H1": (
        "FalconH1Config",
        {**HEADS, **MAMBA, "mamba_d_ssm": 128, "num_hidden_layers": 2},
    ),
    "Bamba": ("BambaConfig", {**BASE, **MAMBA, "attn_layer_indices": [1], "num_hidden_layers": 3}),
    "Granite 4": (
        "GraniteMoeHybridConfig",
        {
            **BASE,
            **MAMBA,
            **GRANITE,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "shared_intermediate_size": 96,
            "position_embedding_type": "nope",
        },
    ),
    "Mamba 2": (
        "Mamba2Config",
        {
            **IDS,
            "vocab_size": WORDS,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "state_size": 16,
            "num_heads": 4,
            "head_dim": 32,
            "n_groups": 1,
            "chunk_size": 16,
        },
    ),
    # Mixtures of experts.
    "Mixtral": ("MixtralConfig", {**BASE, **LOCAL_EXPERTS, "sliding_window": None}),
    "Qwen2-MoE": ("Qwen2MoeConfig", {**BASE, **EXPERTS, "shared_expert_intermediate_size": 64}),
    "Qwen3-MoE": ("Qwen3MoeConfig", {**HEADS, **EXPERTS, "norm_topk_prob": True}),
    "Qwen3-Next": (
        "Qwen3NextConfig",
        {**HEADS, **EXPERTS, **DELTA, "shared_expert_intermediate_size": 64},
    ),
    "Qwen3.5-MoE": (
        "Qwen3_5MoeTextConfig",
        {**HEADS, **EXPERTS, **DELTA, "shared_expert_intermediate_size": 64},
    ),
    "OLMoE": ("OlmoeConfig", {**BASE, "num_experts": 4, "num_experts_per_tok": 2}),
    "GraniteMoE": ("GraniteMoeConfig", {**BASE, **GRANITE, **LOCAL_EXPERTS}),
    "ERNIE 4.5 MoE": (
        "Ernie4_5_MoeConfig",
        {
            **BASE,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 64,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
        },
    ),
    "gpt-oss": ("GptOssConfig", {**HEADS, **LOCAL_EXPERTS, **WINDOW}),
    "MiniMax": (
        "MiniMaxConfig",
        {
            **HEADS,
            **LOCAL_EXPERTS,
            "block_size": 16,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "DeepSeek V2": ("DeepseekV2Config", {**BASE, **ROUTED, **LATENT, "topk_method": "greedy"}),
    "DeepSeek V3": ("DeepseekV3Config", {**BASE, **ROUTED, **LATENT}),
    "GLM 4 MoE": ("Glm4MoeConfig", {**HEADS, **ROUTED, "use_qk_norm": True}),
}


def make(family: str, folder: Path) -> Path:
    """A checkpoint of a family of FAMILIES, with the character tokenizer; the folder."""
    kind, sizes = FAMILIES[family]
    config = getattr(transformers, kind)(**sizes)
    save(build(config), folder)
    character_tokenizer().save_pretrained(folder)
    return folder
