"""The train engine on one rank, against the naive update of naive_training.py."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.algorithm.algorithm import AlgorithmConfig
from configs.train import TrainConfig
from engines.models.checkpoints import materialize
from engines.train.contract import ColumnsResult, LogprobRequest
from engines.train.fsdp_engine import FSDPEngine
from engines.train.optimizer import learning_rate
from engines.train.policy import Policy
from storage.batches.refs import BatchRef
from storage.objects.errors import ObjectDamaged
from storage.objects.store import Store
from storage.runs.run_store import RunStore
from storage.runs.snapshots import snapshots
from storage.runs.weights import WeightsRef, stream
from tests.engines.train import naive_training as naive
from tests.engines.train.conftest import Make
from tests.engines.train.train_ranks import (
    MODEL,
    TEMPERATURE,
    samples,
    stored,
    update_of,
)

PLAIN = AlgorithmConfig()
KL = AlgorithmConfig.model_validate({"kl": {"coefficient": 0.3}})
INTERPOLATED = AlgorithmConfig.model_validate({"proximal": "loglinear"})


def update(
    engine: FSDPEngine, batch: BatchRef, step: int = 1, algorithm: AlgorithmConfig = PLAIN
) -> dict[str, float]:
    result = engine.update(update_of(batch, algorithm, step))
    return dict(result.metrics)


def weights(tmp_path: Path, ref: WeightsRef) -> dict[str, torch.Tensor]:
    return dict(stream(Store(str(tmp_path / "store")), ref))


def naive_model(tmp_path: Path) -> torch.nn.Module:
    return naive.load(str(materialize(MODEL, tmp_path / "models")))


def assert_same_weights(
    got: dict[str, torch.Tensor], model: torch.nn.Module, tolerance: float
) -> None:
    """Adam divides a gradient by its own size: where it is all but 0, the last bits of the CPU's sums
    decide, so one weight in a thousand may be ten times as far off."""
    wanted = model.state_dict()
    assert set(got) == set(wanted)
    for name, tensor in wanted.items():
        gap = (got[name] - tensor).abs()
        far = (gap > tolerance).float().mean()
        assert (gap.max() <= 10 * tolerance, far <= 1e-3) == (True, True), f"{name}: {gap.max()}"


def with_logprobs(rows: list[naive.Sample], seed: int) -> list[naive.Sample]:
    """Rows with old and reference log-probs that differ from the policy's."""
    random = np.random.default_rng(seed)
    return [
        replace(
            row,
            old=np.float32(random.normal(-4.5, 0.3, len(row.response))),
            ref=np.float32(random.normal(-4.5, 0.3, len(row.response))),
        )
        for row in rows
    ]


def test_logprobs_equal_the_naive_ones(make: Make, tmp_path: Path) -> None:
    rows = samples()
    engine = make(micro_batch_tokens=64)
    result = ColumnsResult.together(
        [
            engine.logprobs(
                LogprobRequest(
                    batch=stored(tmp_path, rows),
                    column="old_logprobs",
                    out_key="run/l.safetensors",
                    temperature=TEMPERATURE,
                )
            )
        ],
    )
    assert result.batch is not None and result.batch.names == ("old_logprobs",)
    values, offsets = result.batch.fetch_numpy(Store(str(tmp_path / "store")), "old_logprobs")
    with torch.no_grad():
        wanted = naive.logprobs(naive_model(tmp_path), rows, TEMPERATURE)
    assert offsets.tolist() == np.cumsum([0, *map(len, wanted)]).tolist()
    np.testing.assert_allclose(values, torch.cat(wanted).numpy(), atol=2e-5)


def test_score_is_at_temperature_one(make: Make, tmp_path: Path) -> None:
    rows = [row for row in samples() if len(row.response)]
    got = make().score(
        [[*row.prompt.tolist(), *row.response.tolist()] for row in rows],
        [len(row.prompt) for row in rows],
    )
    with torch.no_grad():
        wanted = naive.logprobs(naive_model(tmp_path), rows, 1.0)
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=2e-5)


@pytest.mark.parametrize(
    ("algorithm", "kl", "columns"), [(PLAIN, 0.0, False), (KL, 0.3, True)], ids=["grpo", "kl"]
)
@pytest.mark.parametrize("budget", [4096, 60], ids=["one-micro-batch", "many"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_updates_equal_the_naive_ones(
    make: Make,
    tmp_path: Path,
    algorithm: AlgorithmConfig,
    kl: float,
    columns: bool,
    budget: int,
    checkpointing: bool,
) -> None:
    if checkpointing and budget != 60:
        pytest.skip("one of both is enough")
    engine = make(
        micro_batch_tokens=budget,
        gradient_checkpointing=checkpointing,
        weight_decay=0.1,
        max_grad_norm=0.5,
    )
    model = naive_model(tmp_path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    for step in (1, 2):
        rows = samples(step)
        rows = with_logprobs(rows, step) if columns else rows
        metrics = update(engine, stored(tmp_path, rows, f"batch-{step}"), step, algorithm)
        loss, norm = naive.grpo_step(
            model, optimizer, rows, temperature=TEMPERATURE, max_grad_norm=0.5, kl=kl
        )
        assert metrics["train/loss"] == pytest.approx(loss, abs=2e-6)
        assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert norm > 0.5, "the bound on the gradient must be at work"
    got = weights(tmp_path, engine.export_weights(2, "float32"))
    # Adam divides by the gradient's size, which makes much of little where that is near 0.
    assert_same_weights(got, model, tolerance=2e-4)


def test_mini_batches_and_epochs_equal_the_naive_loop(make: Make, tmp_path: Path) -> None:
    rows = with_logprobs(samples(3), 3)
    engine = make(mini_batches=2, epochs=2, micro_batch_tokens=60)
    metrics = update(engine, stored(tmp_path, rows))
    model = naive_model(tmp_path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0)
    losses = []
    for half in (rows[:6], rows[6:], rows[:6], rows[6:]):
        loss, _ = naive.grpo_step(
            model, optimizer, half, temperature=TEMPERATURE, max_grad_norm=1.0
        )
        losses.append(loss)
    assert metrics["train/optimizer_steps"] == 4
    assert metrics["train/loss"] == pytest.approx(np.mean(losses), abs=1e-4)
    assert_same_weights(weights(tmp_path, engine.export_weights(1, "float32")), model, 2e-4)


def test_a_batch_without_rows_changes_neither_weights_nor_optimizer(
    make: Make, tmp_path: Path
) -> None:
    """With it in between, another update comes to the same, moments and all."""
    rows = stored(tmp_path, samples())
    engine = make(warmup_steps=3)
    update(engine, rows)
    before = engine.export_weights(1, "float32")
    metrics = update(engine, rows.take([]), step=2)
    assert metrics == {"train/optimizer_steps": 0.0, "train/skipped_steps": 0.0}
    assert engine.export_weights(2, "float32").digest == before.digest
    rate = update(engine, rows, step=3)["train/learning_rate"]
    after = engine.export_weights(3, "float32")
    other = make(warmup_steps=3)
    update(other, rows)
    assert update(other, rows, step=2)["train/learning_rate"] == rate
    assert other.export_weights(4, "float32").digest == after.digest != before.digest


def test_several_steps_on_a_batch_need_old_logprobs(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs the columns old_logprobs"):
        update(make(epochs=2), stored(tmp_path, samples()))


def test_an_interpolated_proximal_policy_needs_no_pass_before(make: Make, tmp_path: Path) -> None:
    """Two optimizer steps on samples of several versions, without old_logprobs: as the naive loop."""
    random = np.random.default_rng(5)
    rows = [
        replace(
            row,
            rollout=np.float32(random.normal(-4.5, 0.3, len(row.response))),
            staleness=random.integers(0, 4, len(row.response)).astype(np.int32),
        )
        for row in samples(5)
    ]
    engine = make(mini_batches=2, micro_batch_tokens=60)
    metrics = update(engine, stored(tmp_path, rows), algorithm=INTERPOLATED)
    model = naive_model(tmp_path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0)
    losses = [
        naive.grpo_step(model, optimizer, half, temperature=TEMPERATURE, max_grad_norm=1.0)[0]
        for half in (rows[:6], rows[6:])
    ]
    assert metrics["train/loss"] == pytest.approx(np.mean(losses), abs=1e-4)
    assert 0 < metrics["train/rollout_effective_sample_size"] < 1
    assert_same_weights(weights(tmp_path, engine.export_weights(1, "float32")), model, 2e-4)


def test_an_interpolated_proximal_policy_needs_the_tokens_staleness(
    make: Make, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="needs the columns rollout_logprobs, staleness"):
        update(make(epochs=2), stored(tmp_path, samples()), algorithm=INTERPOLATED)


def test_the_same_inputs_give_the_same_bits(make: Make, tmp_path: Path) -> None:
    batch = stored(tmp_path, samples())
    digests = set()
    for _ in range(2):
        engine = make(micro_batch_tokens=60, compute_dtype="bfloat16")
        for step in (1, 2):
            update(engine, batch, step)
        digests.add(engine.digest())
    assert len(digests) == 1


def test_bfloat16_stays_near_float32(make: Make, tmp_path: Path) -> None:
    rows = samples()
    batch = stored(tmp_path, rows)
    found = {}
    for dtype in ("float32", "bfloat16"):
        engine = make(compute_dtype=dtype)
        found[dtype] = update(engine, batch)
        moved = weights(tmp_path, engine.export_weights(len(found), "float32"))
        assert all(tensor.dtype == torch.float32 for tensor in moved.values())
    norms = [found[dtype]["train/grad_norm"] for dtype in found]
    assert norms[1] == pytest.approx(norms[0], rel=0.02)
    entropies = [found[dtype]["train/entropy"] for dtype in found]
    assert entropies[1] == pytest.approx(entropies[0], abs=0.01)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_changes_nothing(make: Make, tmp_path: Path, bad: float) -> None:
    rows = samples()
    rows[4] = replace(rows[4], advantages=np.full_like(rows[4].advantages, bad))
    engine = make(micro_batch_tokens=60)
    before = engine.digest()
    metrics = update(engine, stored(tmp_path, rows))
    assert metrics["train/skipped_steps"] == 1
    assert engine.digest() == before
    assert update(engine, stored(tmp_path, samples(), "good"), 2)["train/skipped_steps"] == 0
    assert engine.digest() != before


def test_a_restored_snapshot_goes_on_to_the_same_bits(make: Make, tmp_path: Path) -> None:
    batches = [stored(tmp_path, samples(seed), f"batch-{seed}") for seed in range(4)]
    first = make(warmup_steps=2, schedule="cosine")
    for step in (1, 2):
        update(first, batches[step], step)
    first.save_state(2)
    saved = first.digest()
    files = RunStore(Store(str(tmp_path / "store")), "run")
    assert snapshots(files) == [2]
    rates = [update(first, batches[3], 3)["train/learning_rate"]]

    second = make(warmup_steps=2, schedule="cosine")
    assert second.version == 0
    second.load_state(2)
    assert second.version == 2 and second.digest() == saved
    rates.append(update(second, batches[3], 3)["train/learning_rate"])
    assert second.digest() == first.digest() and rates[0] == rates[1]

    key = next(k for k in files.store.list("run/state/000002") if k.endswith(".safetensors"))
    data = bytearray(files.store.read(key))
    data[-3] ^= 1
    files.store.write(key, bytes(data))
    with pytest.raises(ObjectDamaged, match="damaged"):
        second.load_state(2)


def test_an_exported_version_is_a_plain_checkpoint(make: Make, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    engine = make()
    rows = [row for row in samples() if len(row.response)]
    update(engine, stored(tmp_path, rows))
    ref = engine.export_weights(version=1, dtype="float32")
    engine.settle_weights(version=1, dtype="float32")
    assert "lm_head.weight" in weights(tmp_path, ref)
    folder = str(tmp_path / "store" / ref.key)
    with torch.no_grad():
        wanted = naive.logprobs(naive.load(folder), rows, 1.0)
    got = engine.score(
        [[*row.prompt.tolist(), *row.response.tolist()] for row in rows],
        [len(row.prompt) for row in rows],
    )
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=2e-5)
    assert AutoTokenizer.from_pretrained(folder).decode([70]) != ""
    half = weights(tmp_path, engine.export_weights(version=2, dtype="bfloat16"))
    whole = weights(tmp_path, ref)
    assert all(torch.equal(half[name], whole[name].bfloat16()) for name in whole)
    assert engine.export_weights(version=1, dtype="float32") == ref


def test_a_reference_is_frozen(make: Make, tmp_path: Path) -> None:
    engine = make(role="ref")
    batch = stored(tmp_path, samples())
    part = engine.logprobs(
        LogprobRequest(
            batch=batch,
            column="ref_logprobs",
            out_key="run/ref.safetensors",
            temperature=TEMPERATURE,
        )
    )
    assert part.batch is not None and part.batch.names == ("ref_logprobs",)
    with pytest.raises(ValueError, match="role ref is frozen"):
        update(engine, batch)
    with pytest.raises(ValueError, match="no trainer state"):
        engine.save_state(1)


def test_joining_again_gives_version_0_back(make: Make, tmp_path: Path) -> None:
    engine = make()
    fresh = engine.digest()
    update(engine, stored(tmp_path, samples()))
    assert engine.version == 1 and engine.digest() != fresh
    engine.join(rank=0, world=1, host="127.0.0.1", port=0, generation=2, timeout=60.0)
    assert engine.version == 0 and engine.digest() == fresh


def test_learning_rates() -> None:
    warm = TrainConfig(learning_rate=1.0, warmup_steps=4)
    assert [learning_rate(warm, step, None) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    linear = TrainConfig(learning_rate=1.0, warmup_steps=2, schedule="linear")
    assert [learning_rate(linear, step, 6) for step in range(2, 8)] == [1, 0.75, 0.5, 0.25, 0, 0]
    cosine = TrainConfig(learning_rate=1.0, schedule="cosine")
    assert learning_rate(cosine, 2, 4) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="number of optimizer steps"):
        learning_rate(cosine, 0, None)


def test_real_weights_give_transformers_own_log_probs(make: Make, tmp_path: Path) -> None:
    engine, plain = make(), make()
    assert engine.mismatch() is None
    assert engine.digest() == plain.digest()
    rows = stored(tmp_path, samples())
    for one in (engine, plain):
        update(one, rows)
    assert engine.digest() == plain.digest()  # the look has changed nothing


def test_weights_that_the_engine_computes_otherwise_are_told(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    own = Policy.own_logits
    monkeypatch.setattr(Policy, "own_logits", lambda policy, tokens: own(policy, tokens) / 8)
    said = engine.mismatch()
    assert said is not None
    assert "differ from transformers' own" in said
