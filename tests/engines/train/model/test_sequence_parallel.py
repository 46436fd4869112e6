"""Sequence parallelism on four ranks over Gloo: what ranks that share sequences learn and say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from configs.algorithm.algorithm import AlgorithmConfig
from configs.model import PretrainedModel, RandomModel
from engines.models.checkpoints import materialize
from engines.train.contract import ColumnsResult, LogprobRequest, TrainSpec, UpdateResult
from engines.train.fsdp_engine import FSDPEngine
from engines.train.model.sequence_parallel import SequenceGroup
from storage.batches.refs import BatchRef
from storage.objects.store import Store
from storage.runs.weights import WeightsRef, stream
from tests.engines.train.test_fsdp_ranks import with_logprobs
from tests.engines.train.test_sampling_mask import with_masks
from tests.engines.train.train_ranks import (
    TEMPERATURE,
    Ranks,
    samples,
    spec,
    stored,
    update_of,
)
from tests.ports import free_ports

PLAIN = AlgorithmConfig.model_validate(
    {"kl": {"coefficient": 0.2}, "entropy": {"coefficient": 0.1}}
)
CHOSEN = AlgorithmConfig.model_validate({"loss": {"kind": "kl_cov", "ratio": 0.2}})
HEADS = 4


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank did."""

    logprobs: ColumnsResult
    updates: list[UpdateResult]
    weights: WeightsRef
    score: list[list[float]]
    masked: ColumnsResult  # log-probs among some words


def grouped_model(folder: Path) -> PretrainedModel:
    """A Llama of four heads that share one key head."""
    directory = materialize(
        RandomModel(layers=2, hidden_size=64, heads=2, seed=5), folder / "drawn"
    )
    config = LlamaConfig.from_pretrained(directory)
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = HEADS, 1, 16
    torch.manual_seed(3)
    LlamaForCausalLM(config).save_pretrained(directory)
    return PretrainedModel(path=str(directory))


def scenario(
    rank: int,
    world: int,
    ports: list[int],
    base: TrainSpec,
    shared: int,
    batch: BatchRef,
    masked: BatchRef,
) -> Seen:
    """Log-prob passes, and updates by two recipes."""
    train = base.train.model_copy(update={"sequence_parallel": shared})
    of = base.model_copy(update={"train": train, "run": f"of-{world}-{shared}"})
    engine = FSDPEngine(of)
    engine.join(rank, world, "127.0.0.1", ports[0], 1, 60.0)
    logprobs, among = (
        engine.logprobs(
            LogprobRequest(
                batch=rows,
                column="ref_logprobs",
                out_key=f"{name}-{shared}.safetensors",
                temperature=TEMPERATURE,
                squared=True,
            )
        )
        for name, rows in (("ref", batch), ("masked", masked))
    )
    updates = [
        engine.update(update_of(batch, algorithm, step))
        for step, algorithm in enumerate((PLAIN, CHOSEN), 1)
    ]
    return Seen(
        logprobs=logprobs,
        updates=updates,
        weights=engine.export_weights(2, "float32"),
        score=engine.score([[5, 6, 7, 8, 9]], [2]),
        masked=among,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sequence")


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def seen(folder: Path, four: Ranks) -> dict[int, list[Seen]]:
    """The scenario on one rank, and on four of which two or all share sequences."""
    base = spec(
        folder, micro_batch_tokens=64, max_grad_norm=0.5, gradient_checkpointing=True
    ).model_copy(update={"model": grouped_model(folder)})
    rows = samples(1, groups=5)
    batch = stored(folder, with_logprobs(rows, 1))
    masked = with_masks(folder, batch, rows)
    found = {1: [scenario(0, 1, free_ports(4), base, 1, batch, masked)]}
    for shared in (2, 4):
        found[shared] = four.run(scenario, base, shared, batch, masked)
    return found


@pytest.mark.parametrize("shared", [2, 4])
def test_ranks_that_share_sequences_learn_what_one_rank_does(
    seen: dict[int, list[Seen]], folder: Path, shared: int
) -> None:
    store = Store(str(folder / "store"))
    alone = dict(stream(store, seen[1][0].weights))
    for name, tensor in stream(store, seen[shared][0].weights):
        torch.testing.assert_close(tensor, alone[name], atol=2e-4, rtol=0, msg=name)
    for one, two in zip(seen[1][0].updates, seen[shared][0].updates, strict=True):
        assert one.metrics.keys() == two.metrics.keys()
        for name in ("loss", "grad_norm", "entropy", "response_tokens"):
            assert two.metrics[f"train/{name}"] == pytest.approx(
                one.metrics[f"train/{name}"], rel=1e-4, abs=1e-6
            ), name


@pytest.mark.parametrize("shared", [2, 4])
def test_columns_are_written_once_and_in_order(
    seen: dict[int, list[Seen]], folder: Path, shared: int
) -> None:
    store = Store(str(folder / "store"))
    check_columns(
        store,
        "ref_logprobs",
        *([part.logprobs for part in seen[size]] for size in (1, shared)),
    )
    check_columns(
        store,
        "ref_logprobs",
        *([part.masked for part in seen[size]] for size in (1, shared)),
    )
    whole, among = (
        ColumnsResult.together(results).batch
        for results in ([one.logprobs for one in seen[1]], [one.masked for one in seen[1]])
    )
    assert whole is not None and among is not None
    values = [one.fetch_numpy(store, "ref_logprobs")[0] for one in (whole, among)]
    assert (values[1] > values[0] + 1e-3).any(), "among fewer words each is likelier"


def check_columns(
    store: Store, column: str, alone: list[ColumnsResult], shared: list[ColumnsResult]
) -> None:
    """What one rank has written, and several together, is the same."""
    one, many = ColumnsResult.together(alone), ColumnsResult.together(shared)
    assert one.batch is not None and many.batch is not None
    values, offsets = one.batch.fetch_numpy(store, column)
    found, edges = many.batch.fetch_numpy(store, column)
    np.testing.assert_allclose(found, values, atol=1e-5)
    assert edges.tolist() == offsets.tolist()
    assert many.metrics == pytest.approx(one.metrics, rel=1e-5)


def test_every_rank_scores_alike(seen: dict[int, list[Seen]]) -> None:
    for shared in (2, 4):
        for rank in seen[shared]:
            np.testing.assert_allclose(rank.score[0], seen[1][0].score[0], atol=1e-3)


def refused(rank: int, world: int, ports: list[int], base: TrainSpec) -> str:
    engine = FSDPEngine(base)
    with pytest.raises(ValueError, match="sequence_parallel") as caught:
        engine.join(rank, world, "127.0.0.1", ports[0], 1, 60.0)
    return str(caught.value)


def test_a_number_that_does_not_fit_is_refused(folder: Path, four: Ranks) -> None:
    base = spec(folder, sequence_parallel=3)
    (said,) = set(four.run(refused, base))
    assert said == (
        "train.sequence_parallel = 3 does not divide the 4 train workers. "
        "Set it to a divisor of their number."
    )
    (said,) = set(four.run(refused, spec(folder, sequence_parallel=4)))  # the model has two heads
    assert "does not divide the model's 2 attention heads" in said


def test_tokens_are_dealt_out_evenly() -> None:
    group = SequenceGroup(group=None, rank=1, size=3, replica=0, replicas=1)
    tokens = torch.arange(10, 17)
    assert group.own(tokens).tolist() == [11, 14, 10]  # the last is no token of this rank's
    assert replace(group, rank=0).own(tokens).tolist() == [10, 13, 16]
    places, rows = group.places_held(torch.tensor([1, 2, 4, 4, 6]))
    assert (places.tolist(), rows.tolist()) == ([0, 2, 3], [0, 1, 1])
