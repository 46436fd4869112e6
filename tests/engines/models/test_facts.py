"""What is read from config.json alone beside transformers' config classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoConfig

from benchmarks.families import FAMILIES, HEADS, make
from configs.model import PretrainedModel
from engines.models.attention import mixers
from engines.models.checkpoints import build_empty
from engines.models.facts import LIKE_LLAMA, UNSAID, ModelFacts, model_facts
from engines.train.batching.packed_batch import row_needs

# What published files of these say, and no more: the rest are defaults of transformers' class.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma-3-12b": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_attention_heads": 16,
            "num_hidden_layers": 48,
            "num_key_value_heads": 8,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"model_type": "siglip_vision_model"},
    },
    "qwen3.5-4b": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {
            "model_type": "qwen3_5_text",
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
        "vision_config": {"model_type": "qwen3_5"},
    },
}


def facts_of(folder: Path, config: dict[str, Any]) -> ModelFacts:
    (folder / "config.json").write_text(json.dumps(config))
    found = model_facts(PretrainedModel(path=str(folder)))
    assert found is not None
    return found


def assert_as_transformers_has_it(folder: Path, config: dict[str, Any]) -> None:
    found = facts_of(folder, config)
    text = AutoConfig.from_pretrained(folder).get_text_config().to_dict()
    heads = text["num_attention_heads"]
    size = text.get("head_dim") or text["hidden_size"] // heads
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    assert (found.heads, found.head_size) == (heads, size)
    assert (found.layers, found.rows) == (text["num_hidden_layers"], text["vocab_size"])
    assert found.window == window
    assert found.kv_heads == (text.get("num_key_value_heads") or heads)
    if found.shape is not None:
        assert found.shape.tied == text["tie_word_embeddings"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_of_published_files(name: str, tmp_path: Path) -> None:
    assert_as_transformers_has_it(tmp_path, PUBLISHED[name])


@pytest.mark.parametrize("kind", UNSAID)
def test_what_config_json_leaves_out(kind: str, tmp_path: Path) -> None:
    """Only the sizes that every published file has are said."""
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    said = {name: HEADS[name] for name in sizes}
    if "num_key_value_heads" not in UNSAID[kind]:
        said["num_key_value_heads"] = 2
    if "vocab_size" not in UNSAID[kind]:
        said["vocab_size"] = 1000
    assert_as_transformers_has_it(tmp_path, {"model_type": kind, **said})


# Sizes of these are called otherwise, or their keys are of another width than their heads.
OTHERWISE = {
    *("GPT-2", "GPT-BigCode", "GPT-J", "BLOOM", "Falcon"),
    *("Mamba 2", "DeepSeek V2", "DeepSeek V3"),
}


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - OTHERWISE))
def test_of_a_file_that_says_all(family: str, tmp_path: Path) -> None:
    kind, sizes = FAMILIES[family]
    config = getattr(transformers, kind)(**sizes)
    assert_as_transformers_has_it(tmp_path, json.loads(config.to_json_string(use_diff=False)))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_counted_right_or_not_at_all(family: str, tmp_path: Path) -> None:
    found = model_facts(PretrainedModel(path=str(make(family, tmp_path / "model"))))
    assert found is not None
    assert (found.shape is not None) == (found.kind in LIKE_LLAMA and found.window is None)
    if found.shape is None:
        return
    model = build_empty(tmp_path / "model")
    count = sum(weight.numel() for weight in model.parameters())
    assert found.shape.parameters == pytest.approx(count, rel=0.006)  # biases, norms of queries
    assert not row_needs(model).whole and not mixers(model).recurrent


def test_a_width_for_each_layer_is_in_no_shape(tmp_path: Path) -> None:
    same = {"model_type": "llama", **HEADS}
    found = facts_of(tmp_path, same)
    assert found.shape is not None and found.shape.intermediate == 96
    assert facts_of(tmp_path, {**same, "intermediate_size": [96, 96, 96, 128]}).shape is None
