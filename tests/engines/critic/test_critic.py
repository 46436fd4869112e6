"""The critic against one written plainly, and its state: the same to the bit after a restore."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from configs.algorithm.algorithm import AlgorithmConfig
from engines.critic.engine import CriticRank
from engines.models.checkpoints import materialize
from engines.train.contract import ColumnsResult, UpdateResult
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from tests.engines.critic.conftest import Make
from tests.engines.train import naive_training as naive
from tests.engines.train.batching.test_forest import alone, batch_of, forests, laid_out
from tests.engines.train.batching.test_tree_training import tree_rows
from tests.engines.train.train_ranks import (
    MODEL,
    Ranks,
    samples,
    spec,
    stored,
    update_of,
)
from tests.ports import free_ports

PPO = AlgorithmConfig.model_validate({"advantage": {"kind": "gae"}})


class NaiveCritic(nn.Module):
    """A decoder with a value head, one row at a time."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self.decoder = naive.load(directory).get_decoder()
        self.head = nn.Linear(64, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def values(self, row: naive.Sample) -> Tensor:
        ids = torch.from_numpy(np.concatenate([row.prompt, row.response]))[None]
        hidden = self.decoder(input_ids=ids).last_hidden_state[0]
        return self.head(hidden[len(row.prompt) - 1 : -1]).squeeze(-1)


def with_targets(folder: Path, rows: list[naive.Sample], seed: int, name: str) -> BatchRef:
    """The rows with returns, and values that the critic is held near to."""
    random = np.random.default_rng(seed)
    columns = {
        column: [np.float32(random.normal(0.3, 0.5, len(row.response))) for row in rows]
        for column in ("returns", "values")
    }
    key = f"run/{name}-targets.safetensors"
    return stored(folder, rows, name).with_columns(
        write_batch(Store(str(folder / "store")), key, columns)
    )


def update(engine: CriticRank, batch: BatchRef, step: int = 1) -> UpdateResult:
    return engine.update(update_of(batch, PPO, step))


def values_of(engine: CriticRank, batch: BatchRef, key: str, folder: Path) -> np.ndarray:
    whole = ColumnsResult.together([engine.values(batch, f"run/{key}.safetensors")])
    assert whole.batch is not None and whole.batch.names == ("values",)
    return whole.batch.fetch_numpy(Store(str(folder / "store")), "values")[0]


@pytest.mark.parametrize("budget", [4096, 60], ids=["one-micro-batch", "many"])
def test_updates_equal_the_naive_ones(make: Make, tmp_path: Path, budget: int) -> None:
    engine = make(micro_batch_tokens=budget, max_grad_norm=0.5)
    plain = NaiveCritic(str(materialize(MODEL, tmp_path / "models")))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0)
    store = Store(str(tmp_path / "store"))
    batch = with_targets(tmp_path, samples(0), 0, "first")
    assert not values_of(engine, batch, "at-first", tmp_path).any()
    for step in (1, 2):
        rows = samples(step)
        batch = with_targets(tmp_path, rows, step, f"batch-{step}")
        metrics = update(engine, batch, step).metrics
        returns, offsets = batch.fetch_numpy(store, "returns")
        old, _ = batch.fetch_numpy(store, "values")
        assert offsets is not None
        total, count = torch.zeros(()), 0
        for number, row in enumerate(rows):
            if not len(row.response):
                continue
            span = slice(offsets[number], offsets[number + 1])
            target, before = torch.tensor(returns[span]), torch.tensor(old[span])
            value, mask = plain.values(row), torch.from_numpy(row.mask).bool()
            held = before + (value - before).clamp(-0.2, 0.2)
            worse = torch.maximum((value - target) ** 2, (held - target) ** 2)
            total, count = total + 0.5 * worse[mask].sum(), count + int(mask.sum())
        loss = total / count
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert metrics["train/loss"] == pytest.approx(loss.item(), abs=2e-6)
        assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    rows = samples(7)
    got = values_of(engine, stored(tmp_path, rows, "last"), "at-last", tmp_path)
    with torch.no_grad():
        want = torch.cat([plain.values(row) for row in rows if len(row.response)])
    assert float(want.abs().max()) > 1e-3
    np.testing.assert_allclose(got, want.numpy(), atol=2e-4)


def test_a_restored_critic_goes_on_to_the_same_bits(make: Make, tmp_path: Path) -> None:
    batches = [with_targets(tmp_path, samples(seed), seed, f"batch-{seed}") for seed in range(4)]
    first = make(warmup_steps=2)
    for step in (1, 2):
        update(first, batches[step], step)
    first.save_state(2)
    saved = first.digest()
    update(first, batches[3], 3)
    store = Store(str(tmp_path / "store"))
    assert store.list("run/critic/000002") and not store.list("run/state")

    second = make(warmup_steps=2)
    second.load_state(2)
    assert second.version == 2 and second.digest() == saved
    update(second, batches[3], 3)
    assert second.digest() == first.digest()
    replayed = make(warmup_steps=2)  # from the start, as where there is no snapshot
    for step in (1, 2, 3):
        update(replayed, batches[step], step)
    assert replayed.digest() == first.digest()


def test_a_critic_is_no_policy(make: Make, tmp_path: Path) -> None:
    engine = make()
    with pytest.raises(ValueError, match="needs the columns returns, values"):
        update(engine, stored(tmp_path, samples()))
    with pytest.raises(ValueError, match="no version to publish"):
        engine.export_weights(1, "float32")
    with pytest.raises(ValueError, match="A critic has no log-probs"):
        engine.score([[5, 6, 7, 8, 9]], [2])
    assert engine.mismatch() is None


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank did."""

    results: list[UpdateResult]
    digests: list[str]  # saved, gone on, restored, gone on again
    part: BatchRef | None  # its rows' values


def scenario(
    rank: int, world: int, ports: list[int], folder: Path, batches: list[BatchRef]
) -> Seen:
    """Updates, a snapshot, and a restore on fresh weights."""
    engine = CriticRank(
        spec(folder, run=f"of-{world}", role="critic", micro_batch_tokens=64, mini_batches=2)
    )
    engine.join(rank, world, "127.0.0.1", ports[0], 1, 60.0)
    results = [update(engine, batches[0], 1)]
    engine.save_state(1)
    digests = [engine.digest()]
    results.append(update(engine, batches[1], 2))
    digests.append(engine.digest())
    engine.join(rank, world, "127.0.0.1", ports[1], 2, 60.0)
    engine.load_state(1)
    digests.append(engine.digest())
    update(engine, batches[1], 2)
    digests.append(engine.digest())
    part = engine.values(batches[0], f"of-{world}/values.safetensors").batch
    return Seen(results=results, digests=digests, part=part)


def test_two_ranks_learn_what_one_does(tmp_path: Path) -> None:
    """A value head of one row leaves the second rank without any of it."""
    batches = [
        with_targets(tmp_path, samples(seed, groups=5), seed, f"batch-{seed}") for seed in (0, 1)
    ]
    pair = Ranks(2)
    try:
        first, second = pair.run(scenario, tmp_path, batches)
    finally:
        pair.close()
    alone = scenario(0, 1, free_ports(2), tmp_path, batches)
    assert first.digests == second.digests
    for seen in (alone, first):
        saved, on, restored, on_again = seen.digests
        assert (restored, on_again) == (saved, on) and saved != on
    for one, two in zip(alone.results, first.results, strict=True):
        for name in ("loss", "grad_norm", "value_error", "value_clip_share"):
            assert two.metrics[f"train/{name}"] == pytest.approx(
                one.metrics[f"train/{name}"], rel=1e-4, abs=1e-6
            ), name
    store = Store(str(tmp_path / "store"))
    assert first.part is not None and second.part is not None and alone.part is not None
    together = BatchRef.concat([first.part, second.part]).fetch_numpy(store, "values")[0]
    np.testing.assert_allclose(together, alone.part.fetch_numpy(store, "values")[0], atol=2e-4)


def test_weights_in_bfloat16_are_trained_as_those_in_float32(make: Make, tmp_path: Path) -> None:
    batch = with_targets(tmp_path, samples(), 0, "targets")
    digests = []
    for weights, masters in (
        ("float32", "float32"),
        ("bfloat16", "float32"),
        ("bfloat16", "remainder"),
    ):
        critic = make(
            run=f"{weights}-{masters}",
            compute_dtype="bfloat16",
            micro_batch_tokens=64,
            weights_dtype=weights,
            master_weights=masters,
        )
        update(critic, batch)
        digests.append(critic.digest())
    assert len(set(digests)) == 1


def test_values_of_forests_are_those_of_each_path(make: Make, tmp_path: Path) -> None:
    rows = forests(2, 8)
    critic = make(micro_batch_tokens=64)
    by_hand = NaiveCritic(str(materialize(MODEL, tmp_path / "models")))
    torch.manual_seed(2)
    with torch.no_grad():
        local = critic._critic.value.weight.to_local()
        local.copy_(torch.randn(local.shape))
        by_hand.head.weight.copy_(local)
        found = [by_hand.values(path).numpy() for path in alone(rows)]
    ours = values_of(critic, batch_of(tmp_path, rows), "forests", tmp_path)
    wanted = np.concatenate(laid_out(rows, found))
    known = ~np.isnan(wanted)
    assert not known.all()
    np.testing.assert_allclose(ours[known], wanted[known], atol=2e-5)


def test_values_of_rows_that_share_a_beginning_are_the_same(make: Make, tmp_path: Path) -> None:
    batch = stored(tmp_path, [*tree_rows(6), *samples()])
    found = []
    for tree in (False, True):
        critic = make(run=f"tree-{tree}", tree_training=tree)
        torch.manual_seed(2)
        with torch.no_grad():
            local = critic._critic.value.weight.to_local()
            local.copy_(torch.randn(local.shape))
        found.append(values_of(critic, batch, f"tree-{tree}", tmp_path))
    np.testing.assert_allclose(found[0], found[1], atol=2e-5)
