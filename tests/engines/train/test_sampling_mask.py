"""Tokens that were drawn from some words: log-probs, loss and gradient among these alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from configs.algorithm.algorithm import AlgorithmConfig
from engines.models.checkpoints import materialize
from engines.train.contract import LogprobRequest
from storage.batches.refs import BatchRef
from storage.batches.sampling_mask import SamplingMask, mask_columns
from storage.batches.writing import write_batch
from storage.objects.store import Store
from tests.engines.train import naive_training as naive
from tests.engines.train.conftest import Make
from tests.engines.train.train_ranks import MODEL, TEMPERATURE, samples, stored, update_of

ROWS = samples(seed=3)


def masks_of(rows: list[naive.Sample]) -> list[SamplingMask]:
    """Each token's own word and some others; all words of what others wrote."""
    random = np.random.default_rng(7)
    return [
        SamplingMask.of(
            [
                np.union1d(random.choice(90, random.integers(1, 20), replace=False), [token])
                if written
                else np.zeros(0, np.int64)
                for token, written in zip(row.response, row.mask, strict=True)
            ]
        )
        for row in rows
    ]


MASKS = masks_of(ROWS)


def with_masks(folder: Path, batch: BatchRef, rows: list[naive.Sample]) -> BatchRef:
    """The rows with masks, always the same of the same rows."""
    columns = mask_columns(masks_of(rows), [len(row.response) for row in rows])
    return batch.with_columns(
        write_batch(Store(str(folder / "store")), "run/masks.safetensors", columns)
    )


def by_hand(folder: Path) -> list[np.ndarray]:
    """Log-probs of each row's tokens by plain transformers, row by row."""
    model = naive.load(str(materialize(MODEL, folder / "models")))
    found = []
    for row, mask in zip(ROWS, MASKS, strict=True):
        ids = torch.from_numpy(np.concatenate([row.prompt, row.response]))[None]
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(row.prompt) - 1 : -1] / TEMPERATURE
        place, own = 0, []
        for number, (token, count) in enumerate(zip(row.response, mask.counts, strict=True)):
            words = mask.words[place : place + count]
            place += count
            among = logits[number] if not count else logits[number, words]
            own.append(float(logits[number, token] - among.logsumexp(0)))
        found.append(np.array(own, np.float32))
    return found


@pytest.mark.parametrize("tree_training", [False, True])
@pytest.mark.parametrize("role", ["actor", "ref"])
def test_logprobs_are_among_the_words(
    make: Make, tmp_path: Path, role: str, tree_training: bool
) -> None:
    engine = make(role=role, tree_training=tree_training)
    batch = with_masks(tmp_path, stored(tmp_path, ROWS), ROWS)
    column = "old_logprobs" if role == "actor" else "ref_logprobs"
    request = LogprobRequest(
        batch=batch, column=column, out_key="run/logprobs.safetensors", temperature=TEMPERATURE
    )
    result = engine.logprobs(request)
    assert result.batch is not None
    got = result.batch.fetch_list(Store(str(tmp_path / "store")), column)
    for ours, theirs in zip(got, by_hand(tmp_path), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-6)


def test_an_update_is_among_the_words(make: Make, tmp_path: Path) -> None:
    """With rollout log-probs of the same words nothing is left out, and the mismatch is none."""
    engine = make()
    batch = with_masks(tmp_path, stored(tmp_path, ROWS), ROWS)
    sampled: dict[str, object] = {"rollout_logprobs": by_hand(tmp_path)}
    batch = batch.with_columns(
        write_batch(Store(str(tmp_path / "store")), "run/sampled.safetensors", sampled)
    )
    algorithm = AlgorithmConfig.model_validate(
        {"ratio_against": "rollout_logprobs", "loss": {"kind": "clipped"}}
    )
    metrics = engine.update(update_of(batch, algorithm, 1)).metrics
    assert metrics["train/rollout_mismatch"] < 1e-5
    assert metrics["train/entropy"] < np.log(21)


def test_a_token_outside_its_words_is_refused(make: Make, tmp_path: Path) -> None:
    engine = make()
    batch = stored(tmp_path, ROWS)
    columns = mask_columns(
        [SamplingMask.of([np.array([95])] * len(row.response)) for row in ROWS],
        [len(row.response) for row in ROWS],
    )
    written = write_batch(Store(str(tmp_path / "store")), "run/bad.safetensors", columns)
    with pytest.raises(ValueError, match="not among the words that they were drawn from"):
        engine.update(update_of(batch.with_columns(written), AlgorithmConfig(), 1))
