"""Models whose samples stand in rows of their own: two ranks over Gloo learn what one does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from configs.algorithm.algorithm import AlgorithmConfig
from configs.model import PretrainedModel
from engines.models.checkpoints import character_tokenizer, save
from engines.train.fsdp_engine import FSDPEngine
from engines.train.self_test.twin import build
from storage.batches.refs import BatchRef
from storage.objects.store import Store
from storage.runs.weights import WeightsRef, stream
from tests.engines.models.families import config_of
from tests.engines.train.train_ranks import Ranks, samples, spec, stored, update_of
from tests.ports import free_ports

GRPO = AlgorithmConfig()
# A state from token to token, attention by the model's own code, sinks and experts, no attention.
FAMILIES = ("qwen3.5", "falcon", "gpt oss", "mamba2")


def trained(
    rank: int, world: int, ports: list[int], folder: Path, batch: BatchRef
) -> dict[str, tuple[WeightsRef, float]]:
    """By family: the version after two updates, and the second one's norm of gradients."""
    found = {}
    for number, family in enumerate(FAMILIES):
        settings = spec(
            folder, run=f"{number}-of-{world}", micro_batch_tokens=128, learning_rate=1e-3
        )
        model = PretrainedModel(path=str(folder / family))
        engine = FSDPEngine(settings.model_copy(update={"model": model}))
        engine.join(rank, world, "127.0.0.1", ports[number], 1, 60.0)
        for step in (1, 2):
            norm = engine.update(update_of(batch, GRPO, step)).metrics["train/grad_norm"]
        found[family] = engine.export_weights(2, "float32"), norm
        engine.close()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        torch.manual_seed(0)
        save(build(config_of(family)), made / family)
        character_tokenizer().save_pretrained(made / family)
    return made


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.slow
def test_two_ranks_learn_what_one_does(folder: Path, pair: Ranks) -> None:
    store, batch = Store(str(folder / "store")), stored(folder, samples())
    alone = trained(0, 1, free_ports(4), folder, batch)
    together, other = pair.run(trained, folder, batch)

    assert together == other
    for family in FAMILIES:
        (one, norm), (two, norm_of_two) = alone[family], together[family]
        assert norm_of_two == pytest.approx(norm, rel=1e-4)
        begun = dict(stream(store, one))
        for name, tensor in stream(store, two):
            # Adam takes a whole step for any gradient: where it is all but 0, sums' last bits decide.
            gap = (tensor - begun[name]).abs()
            far = (gap > 1e-5).float().mean()
            assert (gap.max() <= 4e-3, far <= 0.02) == (True, True), f"{family}: {name}"
