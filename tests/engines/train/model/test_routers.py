"""Routers of mixtures: seen in every family, balanced by transformers' own loss, counted over ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2MoeConfig,
    JetMoeConfig,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from benchmarks.families import make
from configs.algorithm.algorithm import AlgorithmConfig
from engines.models.checkpoints import load_for_training
from engines.models.routers import Router, find_routers
from engines.train.contract import UpdateResult
from engines.train.fsdp_engine import FSDPEngine
from engines.train.model.routers import (
    Routing,
    aux_loss,
    compute_in_float32,
    load_metrics,
    move_biases,
    watched,
)
from engines.train.policy import Policy
from tests.engines.train.naive_training import Sample
from tests.engines.train.train_ranks import Ranks, engine_of, samples, spec, stored, update_of
from tests.ports import free_ports

MIXTURES = [
    *("Mixtral", "Qwen2-MoE", "Qwen3-MoE", "Qwen3-Next", "OLMoE", "GraniteMoE", "gpt-oss"),
    *("ERNIE 4.5 MoE", "DeepSeek V2", "DeepSeek V3", "GLM 4 MoE"),
]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer, whose routers transformers balances as the mean of the layers."""
    folder = tmp_path_factory.mktemp("mixtral")
    torch.manual_seed(3)
    config = MixtralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        num_local_experts=6,
        initializer_range=0.3,
    )
    MixtralForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", MIXTURES)
def test_the_routers_of_a_family_are_seen(family: str, tmp_path: Path) -> None:
    model = load_for_training(make(family, tmp_path / "model"))
    routers = find_routers(model)
    tokens = torch.randint(4, 90, (2, 9))

    with watched(routers) as seen, torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)

    blocks = [name for name, _ in model.named_modules() if name.endswith(".experts")]
    assert len(routers) == len(blocks) == len(seen.logits) == len(seen.chosen) > 0
    for logits, chosen in zip(seen.logits, seen.chosen, strict=True):
        assert (logits.shape, chosen.shape) == ((18, 4), (18, 2))
        if family != "ERNIE 4.5 MoE":  # whose choice a bias moves
            assert torch.equal(chosen.sort(1).values, logits.topk(2).indices.sort(1).values)
    sigmoid = family in ("DeepSeek V3", "GLM 4 MoE")
    assert {router.sigmoid for router in routers} == {sigmoid}


@pytest.mark.parametrize("family", MIXTURES)
def test_routers_multiply_in_float32(family: str, tmp_path: Path) -> None:
    """By weights and states that are rounded; experts get the number formats that they got before."""
    model = load_for_training(make(family, tmp_path / "model"), "bfloat16")
    routers = find_routers(model)
    given = torch.randn(18, 64, dtype=torch.bfloat16)
    before = [router.module(given) for router in routers]

    compute_in_float32(routers, 64, torch.bfloat16)

    for router, was in zip(routers, before, strict=True):
        found = router.module(given)
        weight, bias = router.module.get_parameter("weight"), getattr(router.module, "bias", None)
        wanted = given.double() @ weight.double().T
        wanted = wanted if bias is None else wanted + bias.double()
        logits = found[router.index]
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.double(), wanted, rtol=1e-5, atol=1e-6)
        formats = [[one.dtype for one in each] for each in (found, was)]
        for each in formats:
            del each[router.index]
        assert formats[0] == formats[1]
    with torch.no_grad():
        model(input_ids=torch.randint(4, 90, (2, 9)), use_cache=False)


def test_an_update_with_routers_in_float32_chooses_otherwise(mixtral: Path, tmp_path: Path) -> None:
    rows = _distinct(advantage=0.5)
    rounded, exact = (
        _alone(mixtral, tmp_path, rows, compute_dtype="bfloat16", router_dtype=dtype).metrics
        for dtype in ("compute", "float32")
    )
    assert exact["router/entropy"] != rounded["router/entropy"]
    assert exact["router/entropy"] == pytest.approx(rounded["router/entropy"], rel=0.01)
    assert exact["train/loss"] == pytest.approx(rounded["train/loss"], abs=1e-3)


def test_routers_of_forms_that_are_not_known_are_left_alone() -> None:
    """JetMoE's attention chooses experts too; DeepSeek V4's scores are of a third function."""
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1}
    jet = JetMoeConfig(**sizes, num_local_experts=2, num_key_value_heads=2, kv_channels=8)
    cohere = Cohere2MoeConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    with torch.device("meta"):
        assert find_routers(AutoModelForCausalLM.from_config(jet)) == ()
        softmax = find_routers(AutoModelForCausalLM.from_config(cohere))
    assert [router.sigmoid for router in softmax] == [False] * len(softmax)


def _router(sigmoid: bool = False) -> Router:
    return Router(module=torch.nn.Identity(), layer=0, index=0, top_k=2, sigmoid=sigmoid)


def test_the_loss_of_a_layer_is_transformers_own() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 6, requires_grad=True)
    chosen = logits.detach().topk(2).indices

    ours = aux_loss([_router()], Routing(logits=[logits], chosen=[chosen]))

    theirs = load_balancing_loss_func((logits,), num_experts=6, top_k=2)
    torch.testing.assert_close(ours, theirs)
    (mine,), (other,) = (torch.autograd.grad(one, logits) for one in (ours, theirs))
    torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_an_even_load_is_worth_the_experts_of_a_token(sigmoid: bool) -> None:
    chosen = torch.tensor([[0, 1], [2, 3]] * 8)
    even, crowded = torch.zeros(16, 4), torch.tensor([[4.0, 4.0, -4.0, -4.0]] * 16)
    router = _router(sigmoid)
    assert float(aux_loss([router], Routing(logits=[even], chosen=[chosen]))) == pytest.approx(2)
    crowd = Routing(logits=[crowded], chosen=[torch.tensor([[0, 1]] * 16)])
    assert float(aux_loss([router], crowd)) == pytest.approx(4, rel=0.02)


def test_metrics_of_a_load() -> None:
    found = load_metrics(torch.tensor([[5.0, 5, 5, 5], [12, 4, 4, 0]]))
    assert found == pytest.approx({"router/busiest_share": 0.6, "router/idle_experts": 0.125})


def _updated(
    rank: int,
    world: int,
    _: list[int],
    ports: list[int],
    directory: Path,
    folder: Path,
    rows: list[Sample],
    train: dict[str, Any],
) -> tuple[UpdateResult, str]:
    engine = engine_of(directory, folder, **train)
    engine.join(rank, world, "127.0.0.1", ports[0], 1, 60.0)
    batch = stored(folder, rows, f"batch-{rank}")
    result = engine.update(update_of(batch, AlgorithmConfig(), 1))
    digest = engine.digest()
    engine.close()
    return result, digest


def _alone(directory: Path, folder: Path, rows: list[Sample], **train: Any) -> UpdateResult:
    return _updated(0, 1, [], [0], directory, folder, rows, train)[0]


def _distinct(advantage: float) -> list[Sample]:
    """Samples that share no prompt, so that each token is computed once by anybody."""
    random = np.random.default_rng(1)
    lengths = random.integers(3, 12, (6, 2))
    return [
        Sample(
            prompt=random.integers(4, 90, before),
            response=random.integers(4, 90, after),
            mask=np.ones(after, dtype=np.uint8),
            advantages=np.full(after, advantage, dtype=np.float32),
        )
        for before, after in lengths
    ]


@pytest.mark.parametrize("train", [{}, {"gradient_checkpointing": 1.0}])
def test_the_gradient_of_an_update_is_that_of_transformers_loss(
    mixtral: Path, tmp_path: Path, train: dict[str, Any]
) -> None:
    rows = _distinct(advantage=0.0)

    found = _alone(mixtral, tmp_path, rows, router_aux_loss_coef=0.01, **train).metrics

    model = load_for_training(mixtral)
    fed = [torch.tensor([*row.prompt, *row.response[:-1]]) for row in rows]
    tokens = torch.nn.utils.rnn.pad_sequence(fed, batch_first=True)
    there = torch.nn.utils.rnn.pad_sequence([torch.ones(len(x)) for x in fed], batch_first=True)
    logits = model(
        input_ids=tokens, attention_mask=there, use_cache=False, output_router_logits=True
    ).router_logits
    loss = load_balancing_loss_func(logits, num_experts=6, top_k=2, attention_mask=there)
    (0.01 * loss).backward()
    norm = torch.nn.utils.get_total_norm(
        [each.grad for each in model.parameters() if each.grad is not None]
    )
    assert found["router/aux_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert found["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    probabilities = torch.cat(logits).softmax(1)[there.flatten().bool()]
    entropy = torch.special.entr(probabilities).sum(1).mean().item()
    assert found["router/entropy"] == pytest.approx(entropy, rel=1e-5)
    chosen = torch.cat(logits)[there.flatten().bool()].topk(2).indices
    counts = torch.bincount(chosen.flatten(), minlength=6)
    assert found["router/busiest_share"] == pytest.approx(float(counts.max() / counts.sum()))
    assert found["router/idle_experts"] == float((counts == 0).double().mean())


def test_without_a_coefficient_the_update_is_as_before(mixtral: Path, tmp_path: Path) -> None:
    """What is watched changes no gradient."""
    rows = _distinct(advantage=0.5)
    found = _alone(mixtral, tmp_path, rows)
    balanced = _alone(mixtral, tmp_path, rows, router_aux_loss_coef=0.01)
    names = ("router/aux_loss", "router/busiest_share", "train/policy_loss")
    assert [found.metrics[one] for one in names] == [balanced.metrics[one] for one in names]
    assert found.metrics["train/grad_norm"] != balanced.metrics["train/grad_norm"]


def test_ranks_see_together_what_one_sees(mixtral: Path, tmp_path: Path) -> None:
    """Also a rank that has fewer micro-batches than another, and computes a token of none."""
    rows = _distinct(advantage=0.5)[:3]  # a prompt that is shared counts once on each rank
    one = _alone(mixtral, tmp_path, rows, router_aux_loss_coef=0.01, micro_batch_tokens=64)
    ranks = Ranks(2)
    train = {"router_aux_loss_coef": 0.01, "micro_batch_tokens": 64}
    try:
        parts = ranks.run(_updated, free_ports(1), mixtral, tmp_path, rows, train)
    finally:
        ranks.close()
    (first, digest), (second, other) = parts
    assert (digest, first.metrics["router/entropy"]) == (other, second.metrics["router/entropy"])
    for name in ("router/entropy", "router/busiest_share", "router/idle_experts"):
        assert first.metrics[name] == pytest.approx(one.metrics[name], rel=1e-5), name


RATE = 0.03


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("DeepSeek V3", tmp_path_factory.mktemp("deepseek") / "model")


def _biases(engine: FSDPEngine) -> list[torch.Tensor]:
    policy = engine._policy
    assert isinstance(policy, Policy)
    return [bias.clone() for bias in policy.router_biases().values()]


def _own_loads(directory: Path, biases: list[torch.Tensor], rows: list[Sample]) -> torch.Tensor:
    """Choices of transformers' model with these biases, sequence by sequence."""
    model = load_for_training(directory)
    routers = find_routers(model)
    for router, bias in zip(routers, biases, strict=True):
        model.get_buffer(router.bias).copy_(bias)
    chosen: list[list[torch.Tensor]] = [[] for _ in routers]
    for row in rows:
        with watched(routers) as seen, torch.no_grad():
            model(input_ids=torch.tensor([[*row.prompt, *row.response[:-1]]]), use_cache=False)
        for layer, found in zip(chosen, seen.chosen, strict=True):
            layer.append(found.flatten())
    return torch.stack([torch.bincount(torch.cat(layer), minlength=4) for layer in chosen])


def test_an_optimizer_step_moves_biases_towards_an_even_load(
    deepseek: Path, tmp_path: Path
) -> None:
    rows = _distinct(advantage=0.0)
    engine = engine_of(deepseek, tmp_path, router_bias_update_rate=RATE, micro_batch_tokens=64)
    engine.join(0, 1, "127.0.0.1", 0, 1, 60.0)
    batch = stored(tmp_path, rows)
    for step in (1, 2):
        before = _biases(engine)
        load = _own_loads(deepseek, before, rows).double()
        engine.update(update_of(batch, AlgorithmConfig(), step))
        wanted = RATE * (load.mean(1, keepdim=True) - load).sign()
        for bias, old, change in zip(_biases(engine), before, wanted, strict=True):
            torch.testing.assert_close(bias - old, change.float(), rtol=0, atol=1e-6)
        assert bool((wanted > 0).any() and (wanted < 0).any())


def test_a_snapshot_and_a_version_have_moved_biases(deepseek: Path, tmp_path: Path) -> None:
    settings = {"router_bias_update_rate": RATE}
    engine = engine_of(deepseek, tmp_path, **settings)
    engine.join(0, 1, "127.0.0.1", 0, 1, 60.0)
    batch = stored(tmp_path, _distinct(advantage=0.5))
    engine.update(update_of(batch, AlgorithmConfig(), 1))
    engine.save_state(1)
    engine.update(update_of(batch, AlgorithmConfig(), 2))
    moved = _biases(engine)
    weights = engine.settle_weights(2, "bfloat16")

    again = engine_of(deepseek, tmp_path, **settings)
    again.join(0, 1, "127.0.0.1", 0, 1, 60.0)
    assert not any(bias.any() for bias in _biases(again))
    again.load_state(1)
    again.update(update_of(batch, AlgorithmConfig(), 2))
    assert again.digest() == engine.digest()

    again.load_weights(weights, 2)
    assert all(map(torch.equal, _biases(again), moved))


def test_biases_move_alike_on_all_ranks(deepseek: Path, tmp_path: Path) -> None:
    rows = _distinct(advantage=0.0)[:3]
    train = {"router_bias_update_rate": RATE, "micro_batch_tokens": 64}
    one = _updated(0, 1, [], [0], deepseek, tmp_path, rows, train)[1]
    ranks = Ranks(2)
    try:
        parts = ranks.run(_updated, free_ports(1), deepseek, tmp_path, rows, train)
    finally:
        ranks.close()
    assert {digest for _, digest in parts} == {one}


def test_a_bias_that_is_held_twice_is_moved_once() -> None:
    master, rounded = torch.zeros(1, 4), torch.zeros(1, 4, dtype=torch.bfloat16)
    move_biases([(master, rounded)], torch.tensor([[4.0, 0, 2, 2]]), 0.001)
    assert master.tolist() == [pytest.approx([-0.001, 0.001, 0, 0])]
    assert torch.equal(rounded, master.bfloat16())


def test_a_model_without_biases_refuses_their_rate(mixtral: Path, tmp_path: Path) -> None:
    engine = engine_of(mixtral, tmp_path, router_bias_update_rate=RATE)
    with pytest.raises(ValueError, match=r"router_bias_update_rate = 0\.03 .* this model has not"):
        engine.join(0, 1, "127.0.0.1", 0, 1, 60.0)


def test_a_model_without_routers_refuses_the_coefficient(tmp_path: Path) -> None:
    engine = FSDPEngine(spec(tmp_path, router_aux_loss_coef=0.1))
    with pytest.raises(
        ValueError, match=r"router_aux_loss_coef = 0\.1 .* has no routers of a form"
    ):
        engine.join(0, 1, "127.0.0.1", 0, 1, 60.0)


def test_a_dense_models_update_says_nothing_of_routers(tmp_path: Path) -> None:
    engine = FSDPEngine(spec(tmp_path))
    engine.join(0, 1, "127.0.0.1", 0, 1, 60.0)
    found = engine.update(update_of(stored(tmp_path, samples()), AlgorithmConfig(), 1)).metrics
    assert not [name for name in found if name.startswith("router/")]
