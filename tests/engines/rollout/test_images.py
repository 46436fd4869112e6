"""A policy that looks at images in the transformers engine: what it draws, and by which image."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.model import RandomModel, RandomVision
from configs.rollout import RolloutConfig
from engines.models import checkpoints
from engines.models.vla.openvla import OpenVLA, turn
from engines.rollout.contract import RolloutRequest, RolloutSpec, Sampling
from engines.rollout.hf_engine import HFEngine
from storage.batches.columns import EPISODE, Author, SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.runs.weights_writing import publish
from tests.contract.rollout.world import disturb

MODEL = RandomModel(seed=3, vision=RandomVision(actions=6))
TURN = Sampling(n=3, max_new_tokens=40, max_turn_tokens=2, seed=5)
PROMPTS = [[1, 9, 8], [1, 9, 8], [1, 30, 31, 32, 33]]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"file://{tmp_path}/store")


@pytest.fixture
def policy(tmp_path: Path) -> OpenVLA:
    made = checkpoints.load_for_training(checkpoints.materialize(MODEL, tmp_path / "models"))
    disturb(made)
    assert isinstance(made, OpenVLA)
    return made


@pytest.fixture
def engine(tmp_path: Path, store: Store, policy: OpenVLA) -> Iterator[HFEngine]:
    spec = RolloutSpec(
        model=MODEL,
        model_cache=str(tmp_path / "models"),
        rollout=RolloutConfig(engine="transformers", dtype="float32", seed=1),
        store_uri=store.uri,
        max_model_len=64,
    )
    files = checkpoints.companion_files(checkpoints.materialize(MODEL, tmp_path / "models"))
    made = HFEngine(spec)
    made.sync(publish(store, "run", 0, policy.state_dict().items(), files))
    yield made
    made.close()


def images(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 20, 28, 3), np.uint8)


def asked(store: Store, frames: np.ndarray | None = None) -> BatchRef:
    seen = {"frame": images(0, 3) if frames is None else frames}
    columns: dict[str, object] = {
        "prompt_ids": [np.array(one, np.int32) for one in PROMPTS],
        "group_id": np.arange(3),
        "prompt_row": np.arange(3),
        **seen,
    }
    return write_batch(store, "prompts.safetensors", columns)


def request(prompts: BatchRef, key: str = "a", begun: BatchRef | None = None) -> RolloutRequest:
    return RolloutRequest(
        prompts=prompts, sampling=TURN, out_key=f"{key}.safetensors", step=1, shard=0, begun=begun
    )


def answered(store: Store, ref: BatchRef, frames: np.ndarray) -> BatchRef:
    """Each row with the two tokens of an answer behind its turn, and another frame before it."""
    tokens = ref.fetch_list(store, "response_ids")
    logprobs = ref.fetch_list(store, "rollout_logprobs")
    count = len(ref)
    author = np.array([Author.POLICY] * 2 + [Author.ENVIRONMENT] * 2, np.uint8)
    nothing = {name: [""] * count for name in EPISODE}
    columns: dict[str, object] = {
        **nothing,
        "env_seconds": np.zeros(count),
        "turn_rewards": [np.zeros(1, np.float32)] * count,
        "response_ids": [np.array([*one, 7, 7], np.int32) for one in tokens],  # type: ignore[misc]
        "rollout_logprobs": [np.array([*one, 0, 0], np.float32) for one in logprobs],  # type: ignore[misc]
        "author": [author] * count,
        "finish_reason": ["unfinished"] * count,
        "status": np.full(count, SampleStatus.UNFINISHED, np.int64),
        "frame": frames,
    }
    return ref.with_columns(write_batch(store, "answers.safetensors", columns))


@torch.no_grad()
def expected(policy: OpenVLA, prompt: list[int], written: list[int], image: np.ndarray) -> list:
    """Log-probs of a turn's tokens by a plain forward pass."""
    seen = policy.see(torch.from_numpy(image)[None])
    read = turn(prompt, written, 0, policy.patches)
    likely = policy(torch.tensor([read]), seen).logits[0].log_softmax(-1)[-len(written) - 1 : -1]
    return likely.gather(1, torch.tensor(written)[:, None])[:, 0].tolist()


def test_it_draws_actions_by_the_frame_before_each_turn(
    engine: HFEngine, store: Store, policy: OpenVLA
) -> None:
    prompts = asked(store)
    first = engine.generate(request(prompts)).ref
    later = images(1, 9)
    second = engine.generate(request(prompts, "b", answered(store, first, later))).ref
    begin, stop = policy.config.action_tokens
    for row in range(9):
        prompt = PROMPTS[row // 3]
        tokens = np.asarray(second.fetch_list(store, "response_ids")[row]).tolist()
        logprobs = np.asarray(second.fetch_list(store, "rollout_logprobs")[row]).tolist()
        assert len(tokens) == 6 and tokens[2:4] == [7, 7]
        assert all(begin <= token < stop for token in tokens[:2] + tokens[4:])
        at_first = expected(policy, prompt, tokens[:2], images(0, 3)[row // 3])
        np.testing.assert_allclose(logprobs[:2], at_first, atol=1e-5)
        then = expected(policy, prompt, tokens[4:], later[row])
        np.testing.assert_allclose(logprobs[4:], then, atol=1e-5)
        another = expected(policy, prompt, tokens[4:], later[row - 1])
        assert np.abs(np.array(another) - logprobs[4:]).max() > 1e-3, "by another image it differs"
    np.testing.assert_array_equal(second.fetch_numpy(store, "frame")[0], later)


def test_a_row_is_the_same_whatever_is_beside_it(engine: HFEngine, store: Store) -> None:
    """Also where other rows, and so another number of images, are seen with it."""
    prompts = asked(store, images(4, 3))
    whole = engine.generate(request(prompts)).ref
    alone = engine.generate(request(prompts.take([2]), "b")).ref
    for name in ("response_ids", "rollout_logprobs"):
        ours = whole.rows(6, 9).fetch_numpy(store, name)[0]
        np.testing.assert_array_equal(ours, alone.fetch_numpy(store, name)[0])


def test_the_probe_is_shown_an_image(engine: HFEngine, policy: OpenVLA) -> None:
    first, _ = policy.config.action_tokens
    (found,) = engine.score([[1, 9, 8, 40, 41]], [3])
    written = [first + 40 % 6, first + 41 % 6]
    wanted = expected(policy, [1, 9, 8], written, policy.probe_image[0].numpy())
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_without_an_image_it_says_what_to_set(engine: HFEngine, store: Store) -> None:
    blind = dataclasses.replace(request(asked(store).drop(["frame"])))
    with pytest.raises(ValueError, match=r"the prompts have none. Set episodes.sees = frames"):
        engine.generate(blind)
