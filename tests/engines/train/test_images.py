"""Training a policy that looks at images: against plain forward passes, turn by turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from configs.algorithm.algorithm import AlgorithmConfig
from configs.model import RandomModel, RandomVision
from configs.rollout import RolloutConfig
from configs.train import TrainConfig
from engines.models import checkpoints
from engines.models.vla.openvla import OpenVLA, turn
from engines.rollout.contract import RolloutSpec
from engines.rollout.hf_engine import HFEngine
from engines.train.batching.image_turns import SeenRow, pack_turns
from engines.train.batching.micro_batch import read_micro_batch
from engines.train.batching.packing import read_lengths
from engines.train.contract import ColumnsResult, LogprobRequest, TrainSpec, UpdateResult
from engines.train.fsdp_engine import FSDPEngine
from storage.batches.columns import Author
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from tests.engines.train.conftest import Join
from tests.engines.train.train_ranks import Ranks, update_of

MODEL = RandomModel(seed=5, vision=RandomVision(actions=6))
ACTIONS = (101, 107)  # the first, and the one after the last
PATCHES = 16
TEMPERATURE = 0.7
PLAIN = AlgorithmConfig()


@dataclass(frozen=True, kw_only=True)
class Row:
    """An episode."""

    prompt: list[int]
    turns: list[list[int]]  # action tokens
    frames: np.ndarray  # [turns, 20, 24, 3]
    advantage: float
    unused: int = 0  # tokens at its end that nothing acted on

    @property
    def response(self) -> list[int]:
        """The turns, with an answer of two tokens between them."""
        found = [token for one in self.turns for token in [*one, 7, 8]]
        return found[:-2]

    @property
    def authors(self) -> np.ndarray:
        who = [
            x for one in self.turns for x in [Author.POLICY] * len(one) + [Author.ENVIRONMENT] * 2
        ]
        return np.array(who[:-2], np.uint8)

    @property
    def turn_ids(self) -> np.ndarray:
        found = [n for n, one in enumerate(self.turns) for _ in range(len(one) + 2)]
        return np.array(found[:-2], np.int64)

    @property
    def mask(self) -> np.ndarray:
        found = (self.authors == Author.POLICY).astype(np.uint8)
        found[len(found) - self.unused :] = 0
        return found


def episodes(seed: int = 0, groups: int = 3, per_group: int = 3) -> list[Row]:
    """Groups that share a prompt and the first frame; turns of two tokens."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(groups):
        prompt = [1, *random.integers(4, 90, random.integers(2, 6)).tolist()]
        first = random.integers(0, 256, (1, 20, 24, 3), np.uint8)
        for _ in range(per_group):
            count = int(random.integers(1, 4))
            later = random.integers(0, 256, (count - 1, 20, 24, 3), np.uint8)
            found.append(
                Row(
                    prompt=prompt,
                    turns=random.integers(*ACTIONS, (count, 2)).tolist(),
                    frames=np.concatenate([first, later]),
                    advantage=float(random.normal()),
                    unused=int(random.integers(0, 2)),
                )
            )
    return found


def stored(folder: Path, rows: list[Row], name: str = "batch") -> BatchRef:
    store = Store(str(folder / "store"))
    columns: dict[str, object] = {
        "prompt_ids": [np.array(row.prompt, np.int32) for row in rows],
        "response_ids": [np.array(row.response, np.int32) for row in rows],
        "response_mask": [row.mask for row in rows],
        "author": [row.authors for row in rows],
        "turn_ids": [row.turn_ids for row in rows],
        "advantages": [np.full(len(row.response), row.advantage, np.float32) for row in rows],
        "group_id": np.array([hash(tuple(row.prompt)) % 1000 for row in rows]),
    }
    frames = np.concatenate([row.frames for row in rows])
    ends = np.cumsum([len(row.frames) for row in rows])
    seen = write_batch(store, f"run/{name}-frames.safetensors", {"frame": frames})
    by_turn = seen.grouped(
        [range(end - len(r.frames), end) for r, end in zip(rows, ends, strict=True)]
    )
    return write_batch(store, f"run/{name}.safetensors", columns).with_columns(by_turn)


def spec(folder: Path, **train: object) -> TrainSpec:
    settings = {"learning_rate": 1e-2, "compute_dtype": "float32", "micro_batch_tokens": 4096}
    return TrainSpec(
        model=MODEL,
        model_cache=str(folder / "models"),
        train=TrainConfig.model_validate({**settings, **train}),
        role="actor",
        store_uri=str(folder / "store"),
        run="run",
        total_steps=8,
    )


@pytest.fixture
def policy(tmp_path: Path) -> OpenVLA:
    made = checkpoints.load_for_training(checkpoints.materialize(MODEL, tmp_path / "models"))
    assert isinstance(made, OpenVLA) and made.config.action_tokens == ACTIONS
    return made


def naive(policy: OpenVLA, row: Row, temperature: float = TEMPERATURE) -> Tensor:
    """Log-probs of the action tokens of a row, from a plain forward pass for each turn."""
    found = []
    for written, frame in zip(row.turns, row.frames, strict=True):
        seen = policy.see(torch.from_numpy(frame)[None])
        read = torch.tensor([turn(row.prompt, written, 0, PATCHES)])
        logits = policy(read, seen).logits[0, -len(written) - 1 : -1] / temperature
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(written)[:, None])[:, 0])
    return torch.cat(found)


def test_logprobs_are_those_of_each_turn_alone(join: Join, policy: OpenVLA, tmp_path: Path) -> None:
    rows = episodes()
    for name, budget in (("whole", 4096), ("parts", 80)):
        engine = join(spec(tmp_path, micro_batch_tokens=budget))
        made = engine.logprobs(
            LogprobRequest(
                batch=stored(tmp_path, rows),
                column="old_logprobs",
                out_key=f"{name}.safetensors",
                temperature=TEMPERATURE,
            )
        )
        assert made.batch is not None
        found = made.batch.fetch_list(Store(str(tmp_path / "store")), "old_logprobs")
        for row, ours in zip(rows, found, strict=True):
            with torch.no_grad():
                wanted = naive(policy, row).numpy()
            mine = np.asarray(ours)[row.authors == Author.POLICY]
            np.testing.assert_allclose(mine, wanted, atol=2e-5)
            assert np.isfinite(np.asarray(ours)).all(), (
                "those of others count nowhere, and are finite"
            )


def test_the_gradient_is_that_of_each_turn_alone(
    join: Join, policy: OpenVLA, tmp_path: Path
) -> None:
    """In one micro-batch and in several, with towers' layers computed anew and not."""
    rows = episodes()
    count = sum(int(row.mask.sum()) for row in rows)
    for row in rows:
        kept = torch.from_numpy(row.mask[row.authors == Author.POLICY]).bool()
        (-row.advantage * naive(policy, row)[kept].sum() / count).backward()
    wanted = {name: one.grad for name, one in policy.named_parameters()}
    batch = stored(tmp_path, rows)
    for settings in ({}, {"micro_batch_tokens": 80}, {"gradient_checkpointing": True}):
        engine = join(spec(tmp_path, **settings))
        request = update_of(batch, PLAIN, 1)
        updater = engine._begun(request)
        (mini,) = updater.optimizer_steps(request)
        assert (len(mini.ranks[0]) > 1) == ("micro_batch_tokens" in settings)
        updater.gradient(batch, mini.ranks[0], updater.normaliser(request, mini))
        for name, one in engine._loaded().model.named_parameters():
            theirs = wanted[name]
            assert one.grad is not None and theirs is not None, name
            ours = one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-3, msg=name)


def test_what_turns_share_is_packed_once() -> None:
    frames = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 4, 4, 3), np.uint8))
    rows = [
        SeenRow(
            prompt=np.array([1, 4]),
            response=np.array([7, 8, 5, 9]),
            turns=np.array([0, 0, -1, 1]),
            frames=frames[:2],
        ),
        SeenRow(
            prompt=np.array([1, 4]),
            response=np.array([6]),
            turns=np.array([0]),
            frames=frames[[0]],
        ),
        SeenRow(
            prompt=np.array([1, 4]),
            response=np.zeros(0, int),
            turns=np.zeros(0, int),
            frames=frames[:0],
        ),
    ]
    packed = pack_turns(rows, 2)
    assert packed.images is not None and torch.equal(packed.images, frames[:2])
    assert packed.tokens.tolist() == [1, -1, -2, 4, 1, -3, -4, 4, 7]
    assert packed.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert packed.predictors.tolist() == [3, 8, 0, 7, 3], "the environment's token has no meaning"
    assert packed.labels.tolist() == [7, 8, 0, 9, 6]
    assert packed.rows.lengths.tolist() == [4, 1, 0]
    assert (packed.whole, packed.squares) == (5 + 4 + 4, 25 + 16 + 16)


def test_plans_know_what_turns_read(tmp_path: Path) -> None:
    rows = episodes()
    batch = stored(tmp_path, rows)
    store = Store(str(tmp_path / "store"))
    known = read_lengths(store, batch, patches=PATCHES)
    assert known.squares is not None
    for place, row in enumerate(rows):
        sizes = [len(row.prompt) + PATCHES + len(one) - 1 for one in row.turns]
        assert known.prompts[place] + known.responses[place] - 1 == sum(sizes)
        assert known.squares[place] == sum(size**2 for size in sizes)
    micro = read_micro_batch(
        store, batch, range(len(rows)), (), torch.device("cpu"), patches=PATCHES
    )
    assert micro.packed.whole == int((known.prompts + known.responses - 1).sum())


def test_what_is_published_is_what_is_sampled_from(
    join: Join, policy: OpenVLA, tmp_path: Path
) -> None:
    """After an update: towers and all; and the log-probs of the two engines on a probe agree."""
    engine = join(spec(tmp_path))
    engine.update(update_of(stored(tmp_path, episodes()), PLAIN, 1))
    weights = engine.export_weights(1, "float32")
    assert weights.digest == engine.digest("float32")
    rollout = HFEngine(
        RolloutSpec(
            model=MODEL,
            model_cache=str(tmp_path / "models"),
            rollout=RolloutConfig(engine="transformers", dtype="float32"),
            store_uri=str(tmp_path / "store"),
            max_model_len=64,
        )
    )
    rollout.sync(weights)
    held = rollout._model.state_dict()
    trained = {
        name for name, one in policy.state_dict().items() if not torch.equal(one, held[name])
    }
    assert "vision_backbone.fused_featurizer.blocks.0.attn.qkv.weight" in trained
    assert "vision_backbone.featurizer.pos_embed" in trained and "projector.fc1.bias" in trained
    asked = [[1, 9, 8, 40, 41], [1, 20, 21, 22, 23, 24]]
    theirs, ours = rollout.score(asked, [3, 3]), engine.score(asked, [3, 3])
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5)
    rollout.close()


def both(rank: int, world: int, ports: list[int], folder: Path, batch: BatchRef) -> tuple:
    """Log-probs and an update on one of some ranks, the last of which has fewer rows."""
    engine = FSDPEngine(spec(folder, micro_batch_tokens=80))
    engine.join(rank, world, "127.0.0.1", ports[0], 1, 60.0)
    logprobs = engine.logprobs(
        LogprobRequest(
            batch=batch,
            column="old_logprobs",
            out_key=f"of-{world}.safetensors",
            temperature=TEMPERATURE,
        )
    )
    update = engine.update(update_of(batch, PLAIN, 1))
    lonely = engine.update(update_of(batch.rows(0, 1), PLAIN, 2))
    weights = engine.export_weights(world, "float32", whole=True)
    return logprobs, update, lonely, weights


@pytest.fixture
def pair() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.slow
def test_two_ranks_do_what_one_does(join: Join, pair: Ranks, tmp_path: Path) -> None:
    """Also where a rank has no row: it takes part in gathering the towers all the same."""
    batch = stored(tmp_path, episodes())
    store = Store(str(tmp_path / "store"))
    engine = join(spec(tmp_path, micro_batch_tokens=80))
    alone = engine.logprobs(
        LogprobRequest(
            batch=batch, column="old_logprobs", out_key="of-1.safetensors", temperature=TEMPERATURE
        )
    )
    updates = [engine.update(update_of(batch, PLAIN, 1))]
    updates.append(engine.update(update_of(batch.rows(0, 1), PLAIN, 2)))
    found = pair.run(both, tmp_path, batch)
    theirs = ColumnsResult.together([one[0] for one in found])
    assert (
        isinstance(theirs, ColumnsResult) and theirs.batch is not None and alone.batch is not None
    )
    np.testing.assert_allclose(
        theirs.batch.fetch_numpy(store, "old_logprobs")[0],
        alone.batch.fetch_numpy(store, "old_logprobs")[0],
        atol=1e-5,
    )
    for mine, place in zip(updates, (1, 2), strict=True):
        other = found[0][place]
        assert isinstance(other, UpdateResult)
        for name in ("train/loss", "train/grad_norm"):
            assert mine.metrics[name] == pytest.approx(other.metrics[name], rel=1e-3, abs=1e-6)
    assert found[0][3].digest == found[1][3].digest
