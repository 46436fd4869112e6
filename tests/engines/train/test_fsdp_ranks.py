"""The train engine on two ranks over Gloo: the same results as on one, and how ranks meet."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.algorithm.algorithm import AlgorithmConfig
from configs.model import RandomModel
from engines.models.checkpoints import materialize
from engines.train.contract import ColumnsResult, LogprobRequest, UpdateResult
from engines.train.fsdp_engine import FSDPEngine
from engines.train.model.rendezvous import RendezvousFailed, meet
from storage.batches.refs import BatchRef
from storage.objects.store import Store
from storage.runs.weights import WeightsRef, stream
from tests.engines.train.naive_training import Sample
from tests.engines.train.train_ranks import (
    TEMPERATURE,
    Ranks,
    samples,
    spec,
    stored,
    update_of,
)
from tests.ports import free_ports

KL = AlgorithmConfig.model_validate({"kl": {"coefficient": 0.2}})


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank did."""

    logprobs: ColumnsResult
    updates: list[UpdateResult]
    weights: WeightsRef
    digests: list[str]  # fresh, saved, gone on, fresh again, restored, gone on again
    scores: list[list[float]]
    skipped: UpdateResult
    lonely: UpdateResult  # of a batch with fewer rows than ranks


def scenario(
    rank: int, world: int, ports: list[int], folder: Path, batches: list[BatchRef], bad: BatchRef
) -> Seen:
    """Everything that ranks do in a run, in one process each."""
    engine = FSDPEngine(
        spec(folder, run=f"of-{world}", micro_batch_tokens=64, max_grad_norm=0.5, mini_batches=2)
    )
    reference = FSDPEngine(spec(folder, run=f"of-{world}", role="ref", micro_batch_tokens=64))

    def join(generation: int) -> None:
        engine.join(rank, world, "127.0.0.1", ports[generation], generation, 60.0)

    def update(batch: BatchRef, step: int, to: FSDPEngine = engine) -> UpdateResult:
        return to.update(update_of(batch, KL, step))

    join(1)
    reference.join(rank, world, "127.0.0.1", ports[0], 1, 60.0)
    digests = [engine.digest()]
    logprobs = reference.logprobs(
        LogprobRequest(
            batch=batches[0],
            column="ref_logprobs",
            out_key="ref.safetensors",
            temperature=TEMPERATURE,
        )
    )
    updates = [update(batch, step) for step, batch in enumerate(batches[:2], 1)]
    scores = engine.score([[5, 6, 7, 8, 9]], [2])
    weights = engine.export_weights(2, "float32")
    engine.save_state(2)
    digests.append(engine.digest())
    update(batches[2], 3)
    digests.append(engine.digest())
    join(2)
    digests.append(engine.digest())
    engine.load_state(2)
    digests.append(engine.digest())
    update(batches[2], 3)
    digests.append(engine.digest())
    skipped = update(bad, 4)
    one = FSDPEngine(spec(folder, micro_batch_tokens=64))
    one.join(rank, world, "127.0.0.1", ports[3], 1, 60.0)
    lonely = update(batches[0].rows(0, 1), 1, one)
    return Seen(
        logprobs=logprobs,
        updates=updates,
        weights=weights,
        digests=digests,
        scores=scores,
        skipped=skipped,
        lonely=lonely,
    )


def with_logprobs(rows: list[Sample], seed: int) -> list[Sample]:
    random = np.random.default_rng(seed)
    return [
        replace(
            row,
            old=np.float32(random.normal(-4.5, 0.3, len(row.response))),
            ref=np.float32(random.normal(-4.5, 0.3, len(row.response))),
        )
        for row in rows
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def seen(folder: Path, pair: Ranks) -> dict[int, list[Seen]]:
    """The scenario on one rank and on two."""
    batches = []
    for seed in range(3):
        rows = with_logprobs(samples(seed, groups=5), seed)
        batches.append(stored(folder, rows, f"batch-{seed}"))
    rows = with_logprobs(samples(9), 9)
    rows[-1] = replace(rows[-1], advantages=np.full_like(rows[-1].advantages, math.nan))
    bad = stored(folder, rows, "bad")
    return {
        1: [scenario(0, 1, free_ports(4), folder, batches, bad)],
        2: pair.run(scenario, folder, batches, bad),
    }


def test_two_ranks_learn_what_one_does(seen: dict[int, list[Seen]], folder: Path) -> None:
    store = Store(str(folder / "store"))
    alone = dict(stream(store, seen[1][0].weights))
    together = dict(stream(store, seen[2][0].weights))
    assert alone.keys() == together.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, atol=2e-4, rtol=0, msg=name)
    for one, two in zip(seen[1][0].updates, seen[2][0].updates, strict=True):
        assert one.metrics.keys() == two.metrics.keys()
        for name in ("loss", "grad_norm", "entropy", "kl_ref", "clip_share", "response_tokens"):
            assert two.metrics[f"train/{name}"] == pytest.approx(
                one.metrics[f"train/{name}"], rel=1e-4, abs=1e-6
            ), name


def test_ranks_agree(seen: dict[int, list[Seen]]) -> None:
    first, second = seen[2]
    assert first.digests == second.digests and first.scores == second.scores
    assert first.weights == second.weights
    for one, two in zip(first.updates, second.updates, strict=True):
        shared = {n: v for n, v in one.metrics.items() if "second" not in n}
        assert shared == {n: two.metrics[n] for n in shared}
    np.testing.assert_allclose(first.scores[0], seen[1][0].scores[0], atol=1e-3)


def test_log_probs_come_back_in_the_order_of_the_batch(
    seen: dict[int, list[Seen]], folder: Path
) -> None:
    store = Store(str(folder / "store"))
    found = {}
    for world, parts in seen.items():
        whole = ColumnsResult.together([part.logprobs for part in parts])
        assert whole.batch is not None
        found[world] = whole.batch.fetch_numpy(store, "ref_logprobs")
    np.testing.assert_allclose(found[2][0], found[1][0], atol=1e-5)
    assert found[1][1].tolist() == found[2][1].tolist()


@pytest.mark.parametrize("world", [1, 2])
def test_state_comes_back_to_the_bit(seen: dict[int, list[Seen]], world: int) -> None:
    fresh, saved, on, again, restored, on_again = seen[world][0].digests
    assert (again, restored, on_again) == (fresh, saved, on)
    assert len({fresh, saved, on}) == 3


def test_fresh_weights_have_one_digest_whatever_the_ranks(seen: dict[int, list[Seen]]) -> None:
    assert seen[1][0].digests[0] == seen[2][0].digests[0]


def test_one_ranks_bad_row_makes_all_skip(seen: dict[int, list[Seen]]) -> None:
    assert [rank.skipped.metrics["train/skipped_steps"] for rank in seen[2]] == [1, 1]


def test_a_rank_without_rows_takes_part(seen: dict[int, list[Seen]]) -> None:
    one, two = seen[1][0].lonely, seen[2][0].lonely
    assert two.metrics["train/loss"] == pytest.approx(one.metrics["train/loss"], abs=1e-6)
    assert two.metrics["train/grad_norm"] == pytest.approx(one.metrics["train/grad_norm"], rel=1e-4)


def test_a_snapshot_of_two_ranks_is_read_by_one(seen: dict[int, list[Seen]], folder: Path) -> None:
    engine = FSDPEngine(spec(folder, run="of-2"))
    engine.join(rank=0, world=1, host="127.0.0.1", port=0, generation=1, timeout=60.0)
    engine.load_state(2)
    assert engine.digest() == seen[2][0].digests[1]
    engine.close()


def lonely_rank(rank: int, world: int, ports: list[int]) -> str:
    """Wait for a peer that never comes."""
    if rank:
        return ""
    with pytest.raises(RendezvousFailed) as caught:
        meet(0, 2, "127.0.0.1", ports[0], torch.device("cpu"), timeout=1.0, call_timeout=5.0)
    return str(caught.value)


def test_a_rank_that_waits_alone_is_told_where_it_is_stuck(pair: Ranks) -> None:
    text, _ = pair.run(lonely_rank)
    assert "phase store" in text and "rank 0 of 2 at 127.0.0.1" in text


def drawn_by_last(rank: int, world: int, ports: list[int], folder: Path) -> list[str]:
    """Meet; the last rank then draws a model that nobody has drawn before."""
    meet(rank, world, "127.0.0.1", ports[0], torch.device("cpu"), timeout=60.0, call_timeout=60.0)
    if rank < world - 1:
        return []
    made = materialize(RandomModel(layers=1, hidden_size=32, seed=77), folder / "models")
    return sorted(path.name for path in made.iterdir())


def test_a_model_is_whole_whichever_rank_makes_it(pair: Ranks, folder: Path) -> None:
    *_, files = pair.run(drawn_by_last, folder)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)


def lost_peer(rank: int, world: int, ports: list[int], folder: Path) -> list[str]:
    """Meet; rank 1 then forgets the group, as a restarted worker would; meet again."""
    import torch.distributed as dist

    from engines.train.model import rendezvous

    engine = FSDPEngine(spec(folder))
    engine.join(rank, world, "127.0.0.1", ports[0], 1, 60.0)
    first = engine.digest()
    if rank == 1:
        dist.destroy_process_group()
        rendezvous._identity = None
    engine.join(rank, world, "127.0.0.1", ports[1], 2, 60.0)
    return [first, engine.digest()]


def test_a_group_with_a_restarted_rank_is_made_anew(pair: Ranks, folder: Path) -> None:
    first, second = pair.run(lost_peer, folder)
    assert len({*first, *second}) == 1


def test_tokens_by_the_second_are_told_for_a_device_too(seen: dict[int, list[Seen]]) -> None:
    for world, ranks in seen.items():
        metrics = ranks[0].updates[0].metrics
        by_device = metrics["train/tokens_per_second_per_device"]
        assert by_device * world == pytest.approx(metrics["train/tokens_per_second"])
