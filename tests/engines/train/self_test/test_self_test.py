"""The self-test of models: a small one of the same kind, by the train engine and by transformers."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from transformers import AutoConfig, PretrainedConfig

from engines.train.model import recurrent
from engines.train.self_test.child import verdict
from engines.train.self_test.comparison import TOLERANCE
from engines.train.self_test.twin import LONGEST, build, shrunken
from engines.train.self_test.verdict import Verdict, self_test


def saved(folder: Path, config: PretrainedConfig) -> Path:
    config.save_pretrained(folder)
    return folder


def family(name: str, **values: object) -> PretrainedConfig:
    """With the sizes that transformers has for it, often those of a real model."""
    return AutoConfig.for_model(name, **values)


LATENT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
}
EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
EXACT = [
    family("deepseek_v3", **LATENT, **EXPERTS, v_head_dim=32),
    family("minicpm3", **LATENT, v_head_dim=64, bos_token_id=1, eos_token_id=2),
    family("llama"),
    family("gemma2", attn_logit_softcapping=None),
    family("granite", logits_scaling=8.0),
    family("cohere"),
    family("phi", attention_dropout=0.0, resid_pdrop=0.0),
    family("opt", dropout=0.1),
    family("lfm2", full_attn_idxs=[2]),
    family("falcon", new_decoder_architecture=True),
    family("mistral", sliding_window=100),
    family("falcon_h1", mamba_d_ssm=1536, mamba_n_heads=24, mamba_d_head=64, num_attention_heads=8),
    family("mixtral", num_local_experts=4, router_jitter_noise=0.2),
]


def test_layers_that_change_products_in_place_are_seen(tmp_path: Path) -> None:
    """train.recompute = selective would give other gradients, and say nothing."""
    falcon = verdict(
        saved(tmp_path / "falcon", family("falcon", new_decoder_architecture=True)), 64
    )
    llama = verdict(saved(tmp_path / "llama", family("llama")), 64)
    assert falcon.selective > TOLERANCE
    assert llama.selective == 0.0
    assert falcon.together is not None
    assert "FalconAttention" in falcon.together
    assert llama.together is None


@pytest.mark.parametrize("config", EXACT, ids=lambda config: config.model_type)
def test_models_of_other_heads_are_exact(tmp_path: Path, config: PretrainedConfig) -> None:
    found = verdict(saved(tmp_path, config), longest=512)
    assert (found.refused, found.untested) == (None, None)
    assert found.largest is not None
    assert found.largest <= TOLERANCE


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            family("llama4_text", num_local_experts=2, intermediate_size_mlp=48),
            "does not say which part of it is the decoder",
        ),
    ],
    ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else "",
)
def test_what_differs_is_refused_with_its_cause(
    tmp_path: Path, config: PretrainedConfig, says: str
) -> None:
    found = verdict(saved(tmp_path, config), longest=512)
    assert found.refused is not None
    assert re.search(says, found.refused), found.refused


def test_a_model_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobodys"}')
    found = verdict(tmp_path, longest=64)
    assert found.refused is not None
    assert "transformers cannot build it" in found.refused
    assert "nobodys" in found.refused


def test_what_cannot_be_in_bfloat16_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MiniMax multiplies float32 buffers by its weights, unless these are made bfloat16 too."""
    directory = saved(tmp_path, family("minimax", num_hidden_layers=2))
    assert verdict(directory, 64).unrounded is None
    monkeypatch.setattr(recurrent, "_buffers_in", lambda *given: nullcontext())
    said = verdict(directory, 64).unrounded
    assert said is not None
    assert "dtype" in said


def test_a_twin_is_small_and_has_each_kind_of_layer() -> None:
    big = family("gemma3_text", sliding_window=1024)
    small = shrunken(big, longest=700)
    assert set(small.layer_types) == set(big.layer_types)
    assert small.sliding_window >= LONGEST  # as samples of 700 tokens are within it
    assert shrunken(big, longest=4096).sliding_window < LONGEST
    assert sum(weight.numel() for weight in build(small).parameters()) < 30e6


@pytest.mark.slow
def test_verdicts_are_kept_in_a_folder_of_the_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = saved(
        tmp_path / "model",
        family(
            "llama",
            hidden_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=2,
        ),
    )
    with self_test(model, 64) as wait:
        first = wait()
    assert first.largest is not None
    folder = tmp_path / "cache" / "refrain" / "self-tests"
    assert folder.stat().st_mode & 0o077 == 0
    (file,) = folder.iterdir()
    file.write_text(Verdict(refused="kept").to_json())
    with self_test(model, 64) as wait:
        assert wait() == Verdict(refused="kept")
    folder.chmod(0o707)  # others may have written what is in it
    with self_test(model, 64) as wait:
        assert wait() == first


def test_a_child_that_breaks_off_is_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.executable", "/bin/false")
    model = saved(tmp_path / "model", family("llama"))
    with self_test(model, 64) as wait:
        found = wait()
    assert found.untested is not None
    assert "broke off" in found.untested
    assert not list((tmp_path / "cache").rglob("*.json"))


# What transformers' classes of causal models have for sizes; as many kinds of models as there are.
FAMILIES = (
    *("qwen2", "qwen3", "mistral", "ministral3", "olmo2", "olmo3", "smollm3", "glm4"),
    *("gemma3_text", "gemma3n_text", "gemma4_text", "ernie4_5", "hunyuan_v1_dense"),
    *("cohere2", "granitemoe", "nanochat", "starcoder2", "exaone4", "apertus"),
    *("qwen3_moe", "glm4_moe", "mixtral", "olmoe", "afmoe", "arcee"),
    *("helium", "gpt2", "gpt_neox", "flex_olmo", "gemma2", "seed_oss", "gpt_oss"),
    *("qwen3_next", "qwen3_5_text", "minimax", "nemotron_h", "bamba", "falcon_h1", "lfm2"),
    *("falcon", "bloom", "gptj", "codegen", "mpt", "stablelm", "nemotron", "mamba2"),
    "deepseek_v32",
)


# Without which transformers cannot build a model of its own defaults.
ABSENT = {"hunyuan_v1_dense": {"head_dim": 128}, "nemotron": {"num_key_value_heads": 8}}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_is_silently_wrong(tmp_path: Path, name: str) -> None:
    found = verdict(saved(tmp_path, family(name, **ABSENT.get(name, {}))), longest=128)
    assert (found.refused, found.untested) == (None, None)


@pytest.mark.slow
def test_a_threshold_that_rounding_crosses_is_no_difference(tmp_path: Path) -> None:
    """Gemma 3n keeps the largest twentieth of a layer's numbers: gradients jump where they change."""
    found = verdict(saved(tmp_path, family("gemma3n_text")), longest=8192)
    assert (found.refused, found.untested) == (None, None)
