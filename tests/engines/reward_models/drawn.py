"""Tiny random reward models."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from configs.model import RandomModel
from engines.models.checkpoints import load_tokenizer, materialize


def draw_reward_model(folder: Path, seed: int = 0, labels: int = 1, pad: bool = True) -> Path:
    """A two-layer Llama with a head for `labels` numbers, and the character tokenizer."""
    base = materialize(RandomModel(), folder / "base")
    tokenizer = load_tokenizer(base)
    facts = json.loads((base / "config.json").read_text())
    config = LlamaConfig(**{k: v for k, v in facts.items() if k not in ("architectures", "dtype")})
    config.num_labels = labels
    config.pad_token_id = tokenizer.pad_token_id if pad else None
    target = folder / f"reward-{seed}-{labels}-{pad}"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForSequenceClassification(config).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target
