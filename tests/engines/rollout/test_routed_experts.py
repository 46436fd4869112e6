"""The transformers engine says to which experts each token went."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.families import make
from engines.models.checkpoints import load_for_training
from engines.models.routed_experts import as_ids, extended
from engines.models.routers import chosen_experts
from engines.rollout.contract import Sampling
from engines.rollout.hf_caches import decoding_of
from engines.rollout.hf_decoding import Decoding, Reader, Row
from engines.rollout.samples import NOTHING, Completion

SAMPLING = Sampling(n=1, max_new_tokens=12, ignore_eos=True, routed_experts=True)
PROMPTS = [[40, 41, 42], [50], [40, 41, 42], [45, 46, 47, 48, 49, 50, 51]]


def _load(folder: Path) -> PreTrainedModel:
    return load_for_training(folder).eval().requires_grad_(False)


def _row(prompt: list[int], seed: int, begun: Completion, sampling: Sampling = SAMPLING) -> Row:
    reader = Reader(
        tokenizer=None,  # type: ignore[arg-type]  # nothing is stopped by its text
        ends=frozenset(),
        max_model_len=64,
        device=torch.device("cpu"),
    )
    return Row(prompt, seed, sampling, reader, begun)


def _step(decoding: object, rows: list[Row], steps: int = 100) -> None:
    while steps and (going := [row for row in rows if not row.ended]):
        decoding.step(going, 0)  # type: ignore[attr-defined]
        steps -= 1


def _by_hand(model: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    """[T, L, k] by hooks on a plain forward pass: where the experts' blocks are sent tokens."""
    seen: list[torch.Tensor] = []
    blocks = [one for name, one in model.named_modules() if name.endswith(".experts")]
    hooks = [
        block.register_forward_pre_hook(
            lambda _, args: seen.append(next(one for one in args if one.dtype == torch.int64))
        )
        for block in blocks
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack([one.view(len(tokens), -1) for one in seen], 1).numpy()


@pytest.mark.parametrize(
    "family", ["Mixtral", "Qwen3-MoE", "Qwen3-Next", "gpt-oss", "DeepSeek V3", "GLM 4 MoE"]
)
def test_they_are_those_of_a_plain_forward_pass(family: str, tmp_path: Path) -> None:
    folder = make(family, tmp_path / "model")
    model, plain = _load(folder), _load(folder)
    experts = chosen_experts(model)
    nothing = replace(NOTHING, routed_experts=experts.of_no_token)
    rows = [_row(prompt, number, nothing) for number, prompt in enumerate(PROMPTS)]
    other = _row([60, 61], 9, NOTHING, replace(SAMPLING, routed_experts=False))
    decoding = decoding_of(model, experts)

    _step(decoding, [*rows, other], 5)
    decoding.forget(rows[:1])  # its tokens are computed again, and taken once
    _step(decoding, [*rows, other])

    assert other.completion().routed_experts is None
    for row in rows:
        done = row.completion()
        assert done.routed_experts is not None
        whole = [*row.prompt, *done.tokens]
        assert len(done.routed_experts) == len(whole) - 1
        expected = np.sort(_by_hand(plain, whole[:-1]), 2)
        np.testing.assert_array_equal(np.sort(done.routed_experts, 2), expected)


def test_what_goes_on_keeps_the_experts_that_it_was_sampled_with(tmp_path: Path) -> None:
    """An environment's tokens, which no engine had read, get theirs then."""
    model = _load(make("Mixtral", tmp_path / "model"))
    experts = chosen_experts(model)
    decoding = decoding_of(model, experts)
    assert isinstance(decoding, Decoding)
    first = _row([40, 41, 42], 1, replace(NOTHING, routed_experts=experts.of_no_token))
    _step(decoding, [first], 6)
    begun = first.completion()
    assert begun.routed_experts is not None
    planted = (begun.routed_experts + 1) % 4  # as if another version had sampled them
    begun = replace(
        begun,
        tokens=[*begun.tokens, 50, 51],
        logprobs=[*begun.logprobs, 0.0, 0.0],
        routed_experts=extended(planted, len(planted) + 2),
    )

    second = _row([40, 41, 42], 2, begun)
    _step(decoding, [second])

    done = second.completion().routed_experts
    assert done is not None
    read = 3 + len(begun.tokens)
    np.testing.assert_array_equal(done[: read - 3], planted)
    own = _by_hand(_load(tmp_path / "model"), [*second.prompt, *second.tokens[:-1]])
    np.testing.assert_array_equal(np.sort(done[read - 3 :], 2), np.sort(own[read - 3 :], 2))
    assert as_ids(done).min() >= 0
