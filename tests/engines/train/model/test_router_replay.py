"""Routers that take the experts with which tokens were sampled, beside routers written by hand."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from benchmarks.families import make
from configs.algorithm.algorithm import AlgorithmConfig
from engines.models.checkpoints import load_for_training
from engines.models.routed_experts import extended
from engines.models.routers import find_routers
from engines.train.activations import checkpoint_layers
from engines.train.batching.packed_batch import pack
from engines.train.contract import UpdateResult
from engines.train.fsdp_engine import FSDPEngine
from engines.train.model.sequence_parallel import ALONE
from engines.train.policy import OWN, Policy
from engines.train.self_test.comparison import own_logprobs
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from tests.engines.train.naive_training import Sample
from tests.engines.train.train_ranks import Ranks, engine_of, spec, stored, update_of
from tests.ports import free_ports

pytestmark = pytest.mark.usefixtures("one_thread")

EXPERTS, TOP_K = 4, 2  # of the families' small models
CLOSE = 2e-5  # nats, and of gradients the share of the largest one


# --- routers by hand: from the models' papers, for experts that are given --------------------------


def _mixtral(router: nn.Module, states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over the logits of the chosen experts (arXiv:2401.04088, section 2.1)."""
    logits = linear(states, router.get_parameter("weight"))
    return logits, logits.gather(1, ids).softmax(1), ids


def _qwen3(router: nn.Module, states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities among all, and those of the chosen ones divided by their sum."""
    logits = linear(states, router.get_parameter("weight"))
    chosen = logits.softmax(1).gather(1, ids)
    return logits, chosen / chosen.sum(1, keepdim=True), ids


def _gpt_oss(router: nn.Module, states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over the logits of the chosen experts, which have a bias."""
    logits = linear(states, router.get_parameter("weight"), router.get_parameter("bias"))
    return logits, logits.gather(1, ids).softmax(1), ids


def _deepseek_v3(
    scale: float, router: nn.Module, states: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sigmoids divided by the sum of the chosen ones (arXiv:2412.19437, equations 13 to 15)."""
    logits = linear(states.float(), router.get_parameter("weight").float())
    chosen = logits.sigmoid().gather(1, ids)
    return logits, scale * chosen / chosen.sum(1, keepdim=True), ids


BY_HAND: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "Mixtral": _mixtral,
    "Qwen3-MoE": _qwen3,
    "gpt-oss": _gpt_oss,
    "DeepSeek V3": _deepseek_v3,
}


def _planted(tokens: int, layers: int, seed: int) -> np.ndarray:
    """[tokens, L, k] of experts drawn at random, no token with one twice."""
    random = np.random.default_rng(seed)
    drawn = random.random((tokens, layers, EXPERTS)).argsort(2)[..., :TOP_K]
    return drawn.astype(np.uint8)


def _rows() -> list[tuple[np.ndarray, np.ndarray]]:
    """A prompt with two responses, and another one."""
    random = np.random.default_rng(3)
    first, second = (random.integers(4, 90, length) for length in (7, 4))
    return [(p, random.integers(4, 90, n)) for p, n in ((first, 9), (first, 5), (second, 6))]


@pytest.mark.parametrize("family", BY_HAND)
@pytest.mark.parametrize("again", [False, True])
def test_planted_experts_compute_as_routers_by_hand(
    family: str, again: bool, tmp_path: Path
) -> None:
    """Log-probs and gradients; also where layers are computed again in the backward pass."""
    model = load_for_training(make(family, tmp_path / "model"))
    plain = copy.deepcopy(model).eval()
    rows = _rows()
    layers = len(find_routers(model))
    prompts = {7: _planted(6, layers, 1), 4: _planted(3, layers, 2)}  # but for the last token
    experts = [
        np.concatenate([prompts[len(p)], _planted(len(r), layers, 10 + number)])
        for number, (p, r) in enumerate(rows)
    ]
    experts[1][: len(rows[0][0])] = experts[0][: len(rows[0][0])]  # one routing of a shared prompt
    policy = Policy(model).train()
    policy.replay_routing()
    if again:
        checkpoint_layers(policy.model, 1.0, "all")

    packed = pack(*zip(*rows, strict=True), needs=policy.needs, experts=experts)
    logprobs, *_ = policy(packed, ALONE, temperature=1.0, chunk=1024, dtype=torch.float32)
    logprobs.square().sum().backward()

    by_hand = BY_HAND[family]
    if family == "DeepSeek V3":
        by_hand = partial(by_hand, plain.config.routed_scaling_factor)
    routers = find_routers(plain)
    own = []
    for (prompt, response), chosen in zip(rows, experts, strict=True):
        fed = len(prompt) + len(response) - 1
        for number, router in enumerate(routers):
            ids = torch.from_numpy(chosen[:fed, number]).long()

            def routed(
                states: Tensor, *_: object, module: nn.Module = router.module, ids: Tensor = ids
            ) -> tuple[Tensor, Tensor, Tensor]:
                return by_hand(module, states.view(-1, states.shape[-1]), ids)

            router.module.forward = routed
        tokens = torch.from_numpy(np.concatenate([prompt, response]))[None]
        table = plain(input_ids=tokens[:, :-1], use_cache=False).logits[0].log_softmax(-1)
        picked = table[len(prompt) - 1 :].gather(1, tokens[0, len(prompt) :, None])
        own.append(picked[:, 0])
    torch.cat(own).square().sum().backward()

    assert float((logprobs - torch.cat(own)).detach().abs().max()) <= CLOSE
    gradients = {name: one.grad for name, one in plain.named_parameters() if one.grad is not None}
    ours = {n: one.grad for n, one in policy.model.named_parameters() if one.grad is not None}
    assert gradients.keys() == ours.keys()
    largest = max(float(one.abs().max()) for one in gradients.values())
    for name, one in gradients.items():
        assert float((ours[name] - one).abs().max()) <= CLOSE * largest, name


def test_where_nothing_is_known_routers_choose_for_themselves(tmp_path: Path) -> None:
    model = load_for_training(make("Qwen3-Next", tmp_path / "model"))
    own = own_logprobs(
        copy.deepcopy(model).eval(),
        [(torch.from_numpy(p), torch.from_numpy(r)) for p, r in _rows()],
    )
    policy = Policy(model)
    policy.replay_routing()
    layers = policy.replay.layers if policy.replay else 0
    unknown = [extended(_planted(0, layers, 0), len(p) + len(r) - 1) for p, r in _rows()]
    for experts in (None, unknown):
        packed = pack(*zip(*_rows(), strict=True), needs=policy.needs, experts=experts)
        logprobs, *_ = policy(packed, ALONE, temperature=1.0, chunk=1024, dtype=torch.float32)
        assert float((logprobs - torch.cat(own)).detach().abs().max()) <= CLOSE


def test_what_was_told_of_a_micro_batch_is_not_told_of_others(tmp_path: Path) -> None:
    model = load_for_training(make("Mixtral", tmp_path / "model"))
    tokens = torch.randint(4, 90, (2, 9))
    with torch.no_grad():
        plain = copy.deepcopy(model)(input_ids=tokens, use_cache=False).logits
    policy = Policy(model)
    policy.replay_routing()
    experts = [_planted(len(p) + len(r) - 1, 4, 1) for p, r in _rows()]
    packed = pack(*zip(*_rows(), strict=True), needs=policy.needs, experts=experts)
    with torch.no_grad():
        policy(packed, ALONE, temperature=1.0, chunk=1024, dtype=torch.float32)
        model.set_attn_implementation(OWN)
        torch.testing.assert_close(policy.own_logits(tokens), plain)


def test_rows_that_a_model_takes_whole_have_their_own_experts(tmp_path: Path) -> None:
    """Different prompts, and equally long rows: as many places as tokens, in another order."""
    random = np.random.default_rng(4)
    rows = [(random.integers(4, 90, 5), random.integers(4, 90, 6)) for _ in range(3)]
    experts = [_planted(10, 4, number) for number in range(3)]
    model = load_for_training(make("Mixtral", tmp_path / "model"))
    policy = Policy(model)
    policy.replay_routing()
    seen = []
    for whole in (False, True):
        if whole:
            policy.needs = replace(policy.needs, dense=True, whole=True)
            model.set_attn_implementation(OWN)
        packed = pack(*zip(*rows, strict=True), needs=policy.needs, experts=experts)
        with torch.no_grad():
            logprobs, *_ = policy(packed, ALONE, temperature=1.0, chunk=64, dtype=torch.float32)
        seen.append(logprobs)
    assert float((seen[0] - seen[1]).abs().max()) <= CLOSE


def test_a_router_that_leaves_told_experts_without_a_gate_is_refused(tmp_path: Path) -> None:
    """DeepSeek V2 sets the scores of all but some groups to 0, and takes gates of these."""
    folder = make("DeepSeek V2", tmp_path / "model")
    Policy(load_for_training(folder)).replay_routing()
    words = json.loads((folder / "config.json").read_text())
    words |= {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
    (folder / "config.json").write_text(json.dumps(words))
    with pytest.raises(ValueError, match="no routers of a form that is known"):
        Policy(load_for_training(folder)).replay_routing()


def test_of_tokens_that_rows_share_who_knows_them_counts() -> None:
    prompt, response = np.arange(4), np.arange(10, 13)
    known = _planted(6, 2, 5)
    rows = [extended(known[:0], 6), known, _planted(6, 2, 6)]

    packed = pack([prompt] * 3, [response, response + 1, response + 2], experts=rows)

    assert packed.routed_experts is not None
    np.testing.assert_array_equal(packed.routed_experts[:4].numpy(), known[:4])
    own = packed.routed_experts[4:].view(3, 2, 2, TOP_K)
    assert bool((own[0] == -1).all())
    np.testing.assert_array_equal(own[1].numpy(), known[4:])
    np.testing.assert_array_equal(own[2].numpy(), rows[2][4:])


# --- an engine's update ---------------------------------------------------------------------------


def _samples(count: int = 4) -> list[Sample]:
    random = np.random.default_rng(1)
    return [
        Sample(
            prompt=random.integers(4, 90, before),
            response=random.integers(4, 90, after),
            mask=np.ones(after, dtype=np.uint8),
            advantages=np.full(after, 0.5, dtype=np.float32),
            rollout=np.full(after, -4.0, dtype=np.float32),
        )
        for before, after in random.integers(3, 12, (count, 2))
    ]


def _own_choice(directory: Path, rows: list[Sample]) -> list[np.ndarray]:
    """[P + R - 1, L, k] of each row, by transformers' model."""
    model = load_for_training(directory)
    chosen: list[Tensor] = []
    for router in find_routers(model):
        router.module.register_forward_hook(lambda _, args, found: chosen.append(found[-1]))
    own = []
    for row in rows:
        chosen.clear()
        with torch.no_grad():
            model(input_ids=torch.tensor([[*row.prompt, *row.response[:-1]]]), use_cache=False)
        own.append(torch.stack(chosen, 1).numpy().astype(np.uint8))
    return own


def _with_experts(
    folder: Path, rows: list[Sample], experts: list[np.ndarray], name: str = "batch"
) -> BatchRef:
    pairs = list(zip(rows, experts, strict=True))
    columns: dict[str, object] = {
        "prompt_routed_experts": [own[: len(row.prompt) - 1] for row, own in pairs],
        "routed_experts": [own[len(row.prompt) - 1 :] for row, own in pairs],
    }
    store = Store(str(folder / "store"))
    more = write_batch(store, f"run/{name}-experts.safetensors", columns)
    return stored(folder, rows, name).with_columns(more)


def _updated(
    rank: int,
    world: int,
    _: list[int],
    ports: list[int],
    directory: Path,
    folder: Path,
    experts: list[np.ndarray],
    train: dict[str, Any],
) -> tuple[UpdateResult, str]:
    engine = engine_of(directory, folder, router_replay=True, **train)
    engine.join(rank, world, "127.0.0.1", ports[0], 1, 60.0)
    batch = _with_experts(folder, _samples(len(experts)), experts, f"batch-{rank}-of-{world}")
    result = engine.update(update_of(batch, AlgorithmConfig(), 1))
    digest = engine.digest()
    engine.close()
    return result, digest


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("Mixtral", tmp_path_factory.mktemp("mixtral") / "model")


def test_the_mismatch_is_what_was_planted(mixtral: Path, tmp_path: Path) -> None:
    own = _own_choice(mixtral, _samples())
    alike, _ = _updated(0, 1, [], [0], mixtral, tmp_path / "a", own, {})
    assert alike.metrics["router/mismatch"] == 0
    same = alike.metrics["train/rollout_mismatch"]
    assert alike.metrics["train/rollout_mismatch_own_routing"] == pytest.approx(same, rel=1e-5)

    # One expert of two is another one, in the first layer of every row's last token: later layers
    # and tokens choose by what it became, but their own choice is not looked at beside it.
    planted = [one.copy() for one in own]
    for one in planted:
        spare = next(e for e in range(EXPERTS) if e not in one[-1, 0])
        one[-1, 0, 0] = spare
    other, _ = _updated(0, 1, [], [0], mixtral, tmp_path / "b", planted, {})
    tokens, layers = sum(map(len, own)), own[0].shape[1]
    least = len(own) * 0.5 / (tokens * layers)
    assert least <= other.metrics["router/mismatch"] <= least * (1 + 2 * (layers - 1))
    assert other.metrics["train/rollout_mismatch"] != same
    assert other.metrics["train/rollout_mismatch_own_routing"] == pytest.approx(same, rel=1e-5)


@pytest.mark.parametrize(
    "family",
    [
        "Qwen3-Next",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("Mixtral", "DeepSeek V3")),
    ],
)
def test_ranks_replay_what_one_does(family: str, tmp_path: Path) -> None:
    """Also a rank that has fewer micro-batches than another, and computes a token of none."""
    directory = make(family, tmp_path / "model")
    rows = _samples(3)
    layers = len(find_routers(load_for_training(directory)))
    experts = [_planted(len(one.prompt) + len(one.response) - 1, layers, 7) for one in rows]
    train = {"micro_batch_tokens": 64, "gradient_checkpointing": 1.0}
    one, _ = _updated(0, 1, [], [0], directory, tmp_path, experts, {"micro_batch_tokens": 64})
    ranks = Ranks(2)
    try:
        parts = ranks.run(_updated, free_ports(1), directory, tmp_path, experts, train)
    finally:
        ranks.close()
    (first, digest), (_, other) = parts
    assert digest == other
    for name in ("router/mismatch", "train/loss", "train/grad_norm", "train/rollout_mismatch"):
        assert first.metrics[name] == pytest.approx(one.metrics[name], rel=1e-4), name
    assert first.metrics["router/mismatch"] > 0.2


def test_samples_without_their_experts_are_refused(mixtral: Path, tmp_path: Path) -> None:
    engine = engine_of(mixtral, tmp_path, router_replay=True)
    engine.join(0, 1, "127.0.0.1", 0, 1, 60.0)
    with pytest.raises(ValueError, match="samples do not have the experts that they were sampled"):
        engine.update(update_of(stored(tmp_path, _samples()), AlgorithmConfig(), 1))


def test_a_model_without_routers_refuses_replay(tmp_path: Path) -> None:
    engine = FSDPEngine(spec(tmp_path, router_replay=True))
    with pytest.raises(ValueError, match=r"router_replay = true .* has no routers of a form"):
        engine.join(0, 1, "127.0.0.1", 0, 1, 60.0)
