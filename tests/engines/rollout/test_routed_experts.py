"""The transformers engine says to which experts each token went."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.families import make
from configs.model import PretrainedModel
from configs.rollout import RolloutConfig
from engines.models.checkpoints import companion_files, load_for_training
from engines.models.routed_experts import as_ids, extended
from engines.models.routers import chosen_experts
from engines.rollout.contract import RolloutRequest, RolloutResult, RolloutSpec, Sampling
from engines.rollout.hf_caches import decoding_of
from engines.rollout.hf_decoding import Decoding, Row
from engines.rollout.hf_engine import HFEngine
from engines.rollout.samples import NOTHING, Completion
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.runs.weights_writing import publish
from tests.contract.rollout.world import begun, disturb
from tests.engines.rollout.rows import row_of

SAMPLING = Sampling(n=1, max_new_tokens=12, ignore_eos=True, routed_experts=True)
PROMPTS = [[40, 41, 42], [50], [40, 41, 42], [45, 46, 47, 48, 49, 50, 51]]


def _load(folder: Path) -> PreTrainedModel:
    return load_for_training(folder).eval().requires_grad_(False)


def _row(prompt: list[int], seed: int, begun: Completion, sampling: Sampling = SAMPLING) -> Row:
    return row_of(prompt, seed, sampling, begun)


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


class Running:
    """An engine of a small Mixtral, and its versions 0 and 1."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(f"file://{folder}/store")
        directory = make("Mixtral", folder / "model")
        self.policies = [_load(directory) for _ in range(2)]
        disturb(self.policies[1])
        files = companion_files(directory)
        self.weights = [
            publish(self.store, "run", version, policy.state_dict().items(), files)
            for version, policy in enumerate(self.policies)
        ]
        self.engine = HFEngine(
            RolloutSpec(
                model=PretrainedModel(path=str(directory)),
                rollout=RolloutConfig(engine="transformers", dtype="float32"),
                store_uri=self.store.uri,
                routed_experts=True,
                max_model_len=200,
            )
        )
        self.engine.sync(self.weights[0])

    def request(self, out_key: str, sampling: Sampling) -> RolloutRequest:
        prompts = write_batch(
            self.store,
            "prompts.safetensors",
            {
                "prompt_ids": [np.arange(40, 46), np.arange(50, 53)],
                "group_id": np.arange(2),
                "prompt_row": np.arange(2),
            },
        )
        return RolloutRequest(prompts=prompts, sampling=sampling, out_key=out_key, step=1, shard=0)

    def experts(self, ref: BatchRef) -> list[tuple[list[int], list[int], np.ndarray, np.ndarray]]:
        """Of each row: prompt, response, and the experts of both."""
        names = ("prompt_ids", "response_ids", "prompt_routed_experts", "routed_experts")
        columns = [ref.fetch_list(self.store, name) for name in names]
        return [
            (prompt.tolist(), response.tolist(), first, then)  # type: ignore[attr-defined]
            for prompt, response, first, then in zip(*columns, strict=True)
        ]

    def expected(self, version: int, tokens: list[int]) -> np.ndarray:
        return np.sort(_by_hand(self.policies[version], tokens), 2)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    made = Running(tmp_path)
    yield made
    made.engine.close()


def test_a_shard_has_them_of_each_prompt_once(running: Running) -> None:
    sampling = Sampling(n=3, max_new_tokens=9, seed=3, ignore_eos=True, routed_experts=True)
    ref = running.engine.generate(running.request("a", sampling)).ref
    for prompt, response, first, then in running.experts(ref):
        assert (first.dtype, first.shape[1:]) == (np.uint8, (4, 2))
        assert (len(first), len(then)) == (len(prompt) - 1, len(response))
        whole = np.sort(np.concatenate([first, then]), 2)
        np.testing.assert_array_equal(whole, running.expected(0, [*prompt, *response[:-1]]))
    column = ref.column("prompt_routed_experts")
    assert column.index.array().tolist() == [0, 0, 0, 3, 3, 3]
    plain = replace(sampling, routed_experts=False)
    other = running.engine.generate(running.request("b", plain)).ref
    assert "routed_experts" not in other.names
    assert [list(one) for one in other.fetch_list(running.store, "response_ids")] == [
        list(one) for one in ref.fetch_list(running.store, "response_ids")
    ]


def test_a_shard_that_goes_on_under_another_version_keeps_the_first_ones(
    running: Running,
) -> None:
    sampling = Sampling(n=2, max_new_tokens=150, seed=3, ignore_eos=True, routed_experts=True)
    request = running.request("a", sampling)
    with ThreadPoolExecutor() as threads:
        shard = begun(running.engine, threads, request)
        running.engine.cut([request.out_key])
        part: RolloutResult = shard.result(60)
    running.engine.sync(running.weights[1])
    whole = running.engine.generate(replace(request, begun=part.ref, out_key="b"))
    for (prompt, before, _, _), (_, response, first, then) in zip(
        running.experts(part.ref), running.experts(whole.ref), strict=True
    ):
        assert response[: len(before)] == before
        routed = np.sort(np.concatenate([first, then]), 2)
        split = len(prompt) + len(before) - 1 if before else 0
        tokens = [*prompt, *response[:-1]]
        np.testing.assert_array_equal(routed[:split], running.expected(0, tokens)[:split])
        np.testing.assert_array_equal(routed[split:], running.expected(1, tokens)[split:])
