"""Experts spread over ranks: two and four ranks learn what one does, and store the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from benchmarks.families import make
from configs.algorithm.algorithm import AlgorithmConfig
from configs.model import PretrainedModel
from configs.train import TrainConfig
from engines.critic.engine import CriticRank
from engines.models.checkpoints import load_for_training
from engines.models.routers import count_experts, find_experts
from engines.train.fsdp_engine import FSDPEngine
from engines.train.model import expert_parallel
from engines.train.model.expert_parallel import check_experts, spread_experts
from engines.train.model.fsdp import gather, layers
from engines.train.snapshots import DeferredTensor
from storage.batches.refs import BatchRef
from tests.engines.critic.test_critic import update, with_targets
from tests.engines.train.conftest import Join
from tests.engines.train.model.test_routers import MIXTURES
from tests.engines.train.train_ranks import Ranks, engine_of, samples, spec, stored, update_of
from tests.ports import free_ports

# Stacked without more; with biases, and gates from elsewhere; beside shared experts. The last has all
# tokens go to the first two experts of four.
FAMILIES = ("Qwen3-MoE", "gpt-oss", "DeepSeek V3")
CROWDED = "crowded"
OF_RANKS = {
    2: ({"expert_parallel": 2}, {"expert_parallel": 2, "gradient_checkpointing": True}),
    4: ({"expert_parallel": 4}, {"expert_parallel": 2, "replicas": 2}),
}
ROUTERS = ("router/aux_loss", "router/entropy", "router/busiest_share", "router/idle_experts")
TOKENS = ([5, 6, 7, 8, 9], [4, 5, 6])


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What a rank has seen of two updates, an optimizer step of several micro-batches each."""

    began: str  # the digest of version 0
    digest: str  # of version 2
    logprobs: list[list[float]]  # by version 0
    loss: float  # of the first update
    routers: dict[str, float]  # metrics of the first update
    norms: list[float]
    gradients: dict[str, np.ndarray]  # of the first update, in proportion
    weights: dict[str, np.ndarray]  # of version 2
    replayed: str  # the digest after going back to the snapshot between the updates
    resumed: list[float]  # norms of the second update under other settings, from that snapshot
    reread: bool  # whether the snapshot was the same to the bit under other settings


def engine_in(folder: Path, family: str, run: str, **train: Any) -> FSDPEngine:
    settings = {"micro_batch_tokens": 64, "learning_rate": 1e-3, **train}
    return engine_of(folder / family, folder, run=run, **settings)


def learn(
    rank: int,
    world: int,
    ports: list[int],
    folder: Path,
    batches: list[BatchRef],
    family: str,
    train: dict[str, Any],
    then: dict[str, Any] | None = None,
) -> Learned:
    """then: settings under which the run goes on from the snapshot between the updates."""
    run = f"{family}-{world}-{ports[0]}".replace(" ", "-")
    engine = engine_in(folder, family, run, **train)
    engine.join(rank, world, "127.0.0.1", ports[0], 1, 60.0)

    def whole(engine: FSDPEngine) -> dict[str, np.ndarray]:
        state = {
            name: one.values() if isinstance(one, DeferredTensor) else one
            for name, one in engine._state().items()
        }
        parts = {name: gather(one, None, 0, dist.group.WORLD) for name, one in state.items()}
        return {name: one.numpy().copy() for name, one in parts.items() if one is not None}

    def make_step(engine: FSDPEngine, step: int) -> dict[str, float]:
        request = update_of(batches[step - 1], AlgorithmConfig(), step)
        return engine.update(request).metrics

    began, logprobs = engine.digest(), engine.score([list(one) for one in TOKENS], [2, 1])
    first = make_step(engine, 1)
    engine.save_state(1)
    state = whole(engine)
    stored_state = engine.digest()
    engine.offload()
    engine.onload()
    second = make_step(engine, 2)
    weights, digest = whole(engine), engine.digest()
    engine.load_state(1)
    make_step(engine, 2)
    replayed = engine.digest()
    engine.close()
    resumed, reread = [], True
    if then is not None:
        other = engine_in(folder, family, run, **then)
        other.join(rank, world, "127.0.0.1", ports[1], 2, 60.0)
        other.load_state(1)
        reread = other.digest() == stored_state
        resumed.append(make_step(other, 2)["train/grad_norm"])
        other.close()
    return Learned(
        began=began,
        digest=digest,
        logprobs=logprobs,
        loss=first["train/loss"],
        routers={name: first[name] for name in ROUTERS if name in first},
        norms=[first["train/grad_norm"], second["train/grad_norm"]],
        gradients={name: one for name, one in state.items() if name.startswith("exp_avg.")},
        weights={name: one for name, one in weights.items() if name.startswith("model.")},
        replayed=replayed,
        resumed=resumed,
        reread=reread,
    )


def check(found: Learned, alone: Learned) -> None:
    """To what float32 has: sums of few products are made in another order."""
    assert found.began == alone.began
    for mine, others in zip(found.logprobs, alone.logprobs, strict=True):
        assert mine == pytest.approx(others, abs=1e-5)
    assert found.loss == pytest.approx(alone.loss, abs=1e-6)
    assert found.routers == pytest.approx(alone.routers, rel=1e-6)
    assert found.norms == pytest.approx(alone.norms, rel=1e-5)
    assert found.gradients.keys() == alone.gradients.keys()
    for name, gradient in alone.gradients.items():
        most = np.abs(gradient).max()
        assert np.abs(found.gradients[name] - gradient).max() <= 1e-5 * most, name
    for name, weight in alone.weights.items():
        # Adam takes a whole step for any gradient: where it is all but 0, sums' last bits decide.
        gap = np.abs(found.weights[name] - weight)
        assert (gap.max() <= 4e-3, (gap > 1e-5).mean() <= 0.01) == (True, True), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("experts")
    for family in FAMILIES:
        make(family, made / family)
    make("gpt-oss", made / CROWDED)
    file = made / CROWDED / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith("router.bias"):
            tensors[name] = torch.tensor([50.0, 50.0, -50.0, -50.0]).to(tensors[name])
    save_file(tensors, file, metadata={"format": "pt"})
    return made


@pytest.fixture(scope="module")
def batches(folder: Path) -> list[BatchRef]:
    return [stored(folder, samples(seed), f"batch-{seed}") for seed in range(2)]


@pytest.fixture(scope="module")
def alone(folder: Path, batches: list[BatchRef]) -> Callable[[str], Learned]:
    """What one rank learns, by the family."""
    return cache(lambda family: learn(0, 1, free_ports(4), folder, batches, family, {}))


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


QUICK = [(CROWDED, 2)]


@pytest.mark.parametrize(
    ("family", "world"),
    [
        pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow)
        for one in product([*FAMILIES, CROWDED], [2, 4])
    ],
)
def test_ranks_with_some_experts_each_learn_what_one_with_all_does(
    family: str,
    world: int,
    folder: Path,
    batches: list[BatchRef],
    alone: Callable[[str], Learned],
    request: pytest.FixtureRequest,
) -> None:
    ranks: Ranks = request.getfixturevalue({2: "pair", 4: "four"}[world])
    wanted = alone(family)
    if family == CROWDED:
        assert wanted.routers["router/idle_experts"] == 0.5
    for train in OF_RANKS[world]:
        first, *others = ranks.run(learn, folder, batches, family, train)
        check(first, wanted)
        assert first.replayed == first.digest
        assert {one.digest for one in others} == {first.digest}


@pytest.mark.slow
def test_ranks_that_share_samples_have_experts_spread_too(
    folder: Path, batches: list[BatchRef], four: Ranks, alone: Callable[[str], Learned]
) -> None:
    """Whose routers are not looked into."""
    train = {"sequence_parallel": 2, "expert_parallel": 4}
    first, *_ = four.run(learn, folder, batches, "Qwen3-MoE", train)
    check(replace(first, routers=alone("Qwen3-MoE").routers), alone("Qwen3-MoE"))


def test_a_snapshot_does_not_depend_on_where_experts_are(
    folder: Path, batches: list[BatchRef], pair: Ranks
) -> None:
    spread: dict[str, Any] = {"expert_parallel": 2}
    for train, then in ((spread, {}), ({}, spread)):
        found, _ = pair.run(learn, folder, batches, "DeepSeek V3", train, then)
        assert found.reread
        assert found.resumed == pytest.approx(found.norms[1:], rel=1e-5)


# To the bit, where only what is held changes.
SAME = {
    "not resharded": {"reshard_after_forward": False},
    "moments on the host": {"optimizer_device": "host"},
    "off-loaded": {"activation_offload": True, "gradient_checkpointing": 0.5},
    "selective": {"gradient_checkpointing": True, "recompute": "selective"},
    "deterministic": {"deterministic": True},
}


@pytest.mark.slow
def test_what_changes_what_is_held_changes_no_bit(
    folder: Path, batches: list[BatchRef], pair: Ranks
) -> None:
    def digest(**train: Any) -> str:
        found, _ = pair.run(learn, folder, batches, "Qwen3-MoE", {"expert_parallel": 2, **train})
        return str(found.digest)

    plain = digest()
    assert {name: digest(**train) for name, train in SAME.items()} == dict.fromkeys(SAME, plain)
    rounded = digest(compute_dtype="bfloat16")
    halves: dict[str, Any] = {"compute_dtype": "bfloat16", "weights_dtype": "bfloat16"}
    assert digest(**halves) == rounded != plain
    assert digest(**halves, master_weights="remainder") == rounded


@pytest.mark.slow
def test_products_in_bfloat16_are_as_near_as_without(
    folder: Path, batches: list[BatchRef], pair: Ranks
) -> None:
    train: dict[str, Any] = {"compute_dtype": "bfloat16", "reduce_gradients": "optimizer_step"}
    (whole, _), (spread, _) = (
        pair.run(learn, folder, batches, "Qwen3-MoE", {**train, "expert_parallel": size})
        for size in (1, 2)
    )
    assert spread.norms == pytest.approx(whole.norms, rel=0.01)
    for name, gradient in whole.gradients.items():
        most = np.abs(gradient).max()
        assert np.abs(spread.gradients[name] - gradient).mean() <= 0.01 * most, name


def sent(
    rank: int, world: int, ports: list[int], folder: Path, batch: BatchRef, train: dict[str, Any]
) -> tuple[int, int, int, int]:
    """Numbers in all-gathers, in rows exchanged, in all weights and in those of experts."""
    engine = engine_in(folder, "Qwen3-MoE", f"sent-{ports[0]}", **train)
    engine.join(rank, world, "127.0.0.1", ports[0], 1, 60.0)
    gather_all, exchanged = dist.all_gather_single, expert_parallel._exchanged
    gathered, rows = [], []

    def count_gathered(output: torch.Tensor, *others: Any, **named: Any) -> Any:
        gathered.append(output.numel())
        return gather_all(output, *others, **named)

    def count_rows(given: torch.Tensor, *others: Any) -> torch.Tensor:
        rows.append(given.numel())
        return exchanged(given, *others)

    with (
        mock.patch.object(dist, "all_gather_single", count_gathered),
        mock.patch.object(expert_parallel, "_exchanged", count_rows),
    ):
        engine.update(update_of(batch, AlgorithmConfig(), 1))
    weights = dict(engine._loaded().named_parameters())
    experts = sum(one.numel() for name, one in weights.items() if ".experts." in name)
    whole = sum(one.numel() for one in weights.values())
    engine.close()
    return sum(gathered), sum(rows), whole, experts


def test_tokens_travel_and_experts_do_not(
    folder: Path, batches: list[BatchRef], pair: Ranks
) -> None:
    train = {"micro_batch_tokens": 4096}
    (before, none, whole, experts), _ = pair.run(sent, folder, batches[0], train)
    (after, rows, *_), _ = pair.run(sent, folder, batches[0], {**train, "expert_parallel": 2})
    assert none == 0 < rows
    assert before - after == 2 * experts  # one micro-batch, forward and backward
    assert before > whole + experts


def test_experts_are_gathered_apart_and_take_gates_as_routers_gave_them(
    folder: Path, batches: list[BatchRef]
) -> None:
    engine = engine_in(folder, "DeepSeek V3", "apart", compute_dtype="bfloat16")
    engine.join(0, 1, "127.0.0.1", 0, 1, 60.0)
    *_, layer = layers(engine._loaded())
    (experts,) = find_experts(layer)
    assert isinstance(experts, FSDPModule)
    apart = {id(one) for one in experts._get_fsdp_state()._fsdp_param_group.fsdp_params}
    beside = {id(one) for one in layer._get_fsdp_state()._fsdp_param_group.fsdp_params}
    assert len(apart) == len(list(experts.parameters())) and not apart & beside
    given: set[tuple[torch.dtype, torch.dtype]] = set()
    experts.register_forward_pre_hook(lambda _, all: given.add((all[0].dtype, all[2].dtype)))
    engine.update(update_of(batches[0], AlgorithmConfig(), 1))
    assert given == {(torch.bfloat16, torch.float32)}
    engine.close()


def learn_as(
    rank: int, world: int, ports: list[int], folder: Path, batch: BatchRef, train: dict[str, Any]
) -> tuple[float, ...]:
    """The mean log-prob by the frozen reference, and norms of the critic's gradients."""
    files = {"model": PretrainedModel(path=str(folder / "gpt-oss")), "version_names": "files"}
    run = f"roles-{world}-{ports[0]}"
    ref, critic = (
        kind(spec(folder, run=run, role=role, **train).model_copy(update=files))
        for kind, role in ((FSDPEngine, "ref"), (CriticRank, "critic"))
    )
    ref.join(rank, world, "127.0.0.1", ports[0], 1, 60.0)
    (scores,) = ref.score([list(range(4, 20))], [2])
    ref.close()
    critic.join(rank, world, "127.0.0.1", ports[1], 2, 60.0)
    norms = [update(critic, batch, step).metrics["train/grad_norm"] for step in (1, 2)]
    critic.close()
    return sum(scores) / len(scores), *norms


def test_a_reference_and_a_critic_have_experts_spread_too(folder: Path, pair: Ranks) -> None:
    batch = with_targets(folder, samples(3), 3, "of-critic")
    gathered, spread = (
        pair.run(learn_as, folder, batch, {"expert_parallel": size})[0] for size in (1, 2)
    )
    assert spread == pytest.approx(gathered, rel=1e-5)
    assert min(gathered[1:]) > 0


def hung(
    rank: int, world: int, ports: list[int], folder: Path, batch: BatchRef, replicas: int
) -> float:
    """Seconds after which an update ends in which the second rank stays out of an exchange."""
    train: dict[str, Any] = {"expert_parallel": 2, "replicas": replicas, "deadline": 4.0}
    engine = engine_in(folder, "Qwen3-MoE", f"hung-{ports[0]}", **train)
    engine.join(rank, world, "127.0.0.1", ports[0], 1, 60.0)
    exchanged, calls = expert_parallel._exchanged, []

    def late(*given: Any) -> torch.Tensor:
        calls.append(given)
        if rank == 1 and len(calls) == 3:
            time.sleep(8)
            raise RuntimeError("this rank stays out")
        return exchanged(*given)

    began = time.monotonic()
    with (
        mock.patch.object(expert_parallel, "_exchanged", late),
        pytest.raises(RuntimeError, match=r"this rank stays out|[Tt]imed out|closed"),
    ):
        engine.update(update_of(batch, AlgorithmConfig(), 1))
    return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_rank_that_stays_out_of_an_exchange_is_not_waited_for_beyond_the_deadline(
    replicas: int, folder: Path, batches: list[BatchRef]
) -> None:
    ranks = Ranks(2 * replicas)
    waited, *_ = ranks.run(hung, folder, batches[0], replicas)
    ranks.close()
    assert 3 < waited < 8


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_of_a_family_are_seen_and_called_so(
    family: str, tmp_path: Path, join: Join
) -> None:
    """The lone rank of a group exchanges with itself."""
    model = load_for_training(make(family, tmp_path / "model"))
    tokens = torch.randint(4, 90, (2, 9))
    blocks = [module for name, module in model.named_modules() if name.endswith(".experts")]
    assert list(find_experts(model)) == blocks != []
    before = model(input_ids=tokens, use_cache=False).logits
    join(spec(tmp_path))  # which makes the group
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    for one in blocks:
        assert count_experts(one) == 4
        spread_experts(one, mesh, torch.float32)
    after = model(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", ["eager", "grouped_mm"])
def test_experts_to_which_no_token_goes_have_gradients(
    how: str, folder: Path, join: Join, tmp_path: Path
) -> None:
    """Of zeros, so that each rank's optimizer does the same with their moments."""
    model = load_for_training(folder / "Qwen3-MoE")
    model.set_experts_implementation(how)
    experts = find_experts(model)[0]
    join(spec(tmp_path))
    spread_experts(experts, DeviceMesh.from_group(dist.group.WORLD, "cpu"), torch.float32)
    states, gates = torch.zeros(0, 64, requires_grad=True), torch.zeros(0, 2)
    experts(states, torch.zeros(0, 2, dtype=torch.int64), gates).sum().backward()
    for weight in experts.parameters():
        assert weight.grad is not None and not weight.grad.full_tensor().any()


def refused(
    rank: int, world: int, ports: list[int], folder: Path, family: str, train: dict[str, Any]
) -> str:
    engine = engine_in(folder, family, "refused", **train)
    with pytest.raises(ValueError, match="expert_parallel") as caught:
        engine.join(rank, world, "127.0.0.1", ports[0], 1, 60.0)
    engine.close()
    return str(caught.value)


def test_what_does_not_fit_is_refused(folder: Path, pair: Ranks, tmp_path: Path) -> None:
    make("Qwen3", folder / "Qwen3")
    for family, train, words in (
        (
            "Qwen3-MoE",
            {"expert_parallel": 4},
            "workers / train.replicas = 2. Set it to 2, or to 1.",
        ),
        ("Qwen3", {"expert_parallel": 2}, "and this model has none. Set it to 1."),
    ):
        (said,) = set(pair.run(refused, folder, family, train))
        assert words in said
    with pytest.raises(ValueError, match=r"Set train\.expert_parallel = 1"):
        TrainConfig(engine="elastic", expert_parallel=2)
    six = torch.nn.Linear(1, 6)
    with pytest.raises(ValueError, match=r"= 4 does not divide the 6 experts .* role ref"):
        check_experts((six,), 4, 4, "ref")
