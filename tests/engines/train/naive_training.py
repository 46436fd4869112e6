"""The update as one would first write it: plain transformers, padding, autograd, AdamW.

What the packed, sharded engine must agree with. Nothing here is shared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One row."""

    prompt: np.ndarray
    response: np.ndarray
    mask: np.ndarray
    advantages: np.ndarray
    old: np.ndarray | None = None
    ref: np.ndarray | None = None
    rollout: np.ndarray | None = None
    staleness: np.ndarray | None = None


def load(directory: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )


def logprobs(model: PreTrainedModel, samples: Sequence[Sample], temperature: float) -> list[Tensor]:
    """Log-probs of each row's response tokens, from one padded batch."""
    width = max(len(s.prompt) + len(s.response) for s in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    attention = torch.zeros(len(samples), width, dtype=torch.long)
    for row, sample in enumerate(samples):
        tokens = np.concatenate([sample.prompt, sample.response])
        ids[row, : len(tokens)] = torch.from_numpy(tokens)
        attention[row, : len(tokens)] = 1
    logits = model(input_ids=ids, attention_mask=attention).logits / temperature
    table = logits.float().log_softmax(-1)
    found = []
    for row, sample in enumerate(samples):
        first, count = len(sample.prompt) - 1, len(sample.response)
        picked = table[row, first : first + count]
        found.append(picked.gather(-1, torch.from_numpy(sample.response)[:, None]).squeeze(-1))
    return found


def grpo_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Sample],
    *,
    temperature: float,
    max_grad_norm: float,
    clip: tuple[float, float] = (0.2, 0.28),
    dual_clip: float = 3.0,
    kl: float = 0.0,
) -> tuple[float, float]:
    """One optimizer step of the clipped loss with a k3 penalty, mean over tokens: loss, norm."""
    total, count = torch.zeros(()), 0
    for sample, new in zip(samples, logprobs(model, samples, temperature), strict=True):
        mask = torch.from_numpy(sample.mask).bool()
        advantage = torch.from_numpy(sample.advantages)
        old = new.detach() if sample.old is None else torch.from_numpy(sample.old)
        if sample.rollout is not None and sample.staleness is not None:
            stale = torch.from_numpy(sample.staleness).float()
            old = (torch.from_numpy(sample.rollout) + stale * new.detach()) / (1 + stale)
        ratio = (new - old).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip[0], 1 + clip[1]) * advantage)
        loss = torch.where(advantage < 0, loss.clamp(max=-dual_clip * advantage), loss)
        if kl:
            assert sample.ref is not None
            back = torch.from_numpy(sample.ref) - new
            loss = loss + kl * (back.exp() - 1 - back)
        total = total + loss[mask].sum()
        count += int(mask.sum())
    mean = total / count
    mean.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return float(mean.detach()), float(norm)
