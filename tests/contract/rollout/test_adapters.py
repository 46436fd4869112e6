"""Policy versions that are adapters, on both rollout engines: merged or not, attested, refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from transformers import PreTrainedModel

from engines.failures import WeightMismatch
from engines.models import checkpoints
from engines.models.adapters import factor_names, stream_whole
from engines.rollout.engine import RolloutEngine
from storage.objects.errors import ObjectDamaged
from storage.runs.weights import Adapter, BaseVersion, WeightsRef, open_manifest
from storage.runs.weights_writing import publish
from tests.contract.rollout.world import LONG, World, begun

# vLLM is started once for the other tests of the contract; here that would be once more.
BESIDE = pytest.param("vllm-adapter", marks=[pytest.mark.vllm, pytest.mark.slow])
KINDS = [
    "transformers",
    pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow]),
    BESIDE,
]
RUN = "adapters"
RANK, ALPHA = 3, 6.0
ADAPTED = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
PROMPT, RESPONSE = (4, 9, 14, 19, 24), (30, 8, 77, 12, 5, 61)


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Adapters on version 0 of the world's model, each with the model that it should be."""

    base: WeightsRef
    weights: list[WeightsRef]
    policies: list[PreTrainedModel]


def factors(world: World, seed: int, rank: int = RANK) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in world.policies[0].state_dict().items():
        if name.removesuffix(".weight").endswith(ADAPTED):
            a, b = factor_names(name)
            found[a] = 0.3 * torch.randn(rank, weight.shape[1], generator=noise)
            found[b] = 0.3 * torch.randn(weight.shape[0], rank, generator=noise)
    return found


def publish_adapter(
    world: World,
    version: int,
    tensors: dict[str, torch.Tensor],
    base: WeightsRef,
    run: str = RUN,
    alpha: float = ALPHA,
    rank: int = RANK,
) -> WeightsRef:
    adapter = Adapter(rank=rank, alpha=alpha)
    below = BaseVersion(key=base.key, digest=base.digest)
    return publish(world.store, run, version, tensors.items(), {}, base=below, adapter=adapter)


@pytest.fixture(scope="module")
def versions(world: World) -> Versions:
    base, weights, policies = world.weights[0], [], []
    for version, seed in enumerate((21, 22), 1):
        tensors = factors(world, seed)
        weights.append(publish_adapter(world, version, tensors, base))
        policy = checkpoints.load_for_training(world.directory)
        with torch.no_grad():
            for name, weight in policy.state_dict().items():
                a, b = factor_names(name)
                if a in tensors:
                    weight += ALPHA / RANK * tensors[b] @ tensors[a]
        policies.append(policy)
    return Versions(base=base, weights=weights, policies=policies)


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest, built: Callable[[str], RolloutEngine]) -> RolloutEngine:
    return built(request.param)


@torch.no_grad()
def expected(
    policy: PreTrainedModel,
    prompt: Sequence[int] = PROMPT,
    response: Sequence[int] = RESPONSE,
) -> list[float]:
    logits = policy(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


def scores(engine: RolloutEngine) -> list[float]:
    (found,) = engine.score([[*PROMPT, *RESPONSE]], [len(PROMPT)])
    return found


def test_each_adapter_is_merged_into_its_base(
    engine: RolloutEngine, versions: Versions, world: World
) -> None:
    """Also the second, from whose weights the first must be gone, and the base after them."""
    for ref, policy in zip(versions.weights, versions.policies, strict=True):
        report = engine.sync(ref)
        assert (report.version, report.digest) == (ref.version, ref.digest)
        assert scores(engine) == pytest.approx(expected(policy), abs=1e-4)
    engine.sync(versions.base)
    assert scores(engine) == pytest.approx(expected(world.policies[0]), abs=1e-4)
    engine.sync(versions.weights[0])
    assert scores(engine) == pytest.approx(expected(versions.policies[0]), abs=1e-4)


def test_the_next_adapter_needs_only_what_it_changes(
    built: Callable[[str], RolloutEngine], versions: Versions, world: World
) -> None:
    """transformers' engine holds the rest of the base already; all of it after another version."""
    engine = built("transformers")
    engine.sync(world.weights[1])
    first, second = (engine.sync(ref) for ref in versions.weights)
    changed = len(factors(world, 0))
    assert first.tensors == len(world.policies[0].state_dict()) + changed
    assert second.tensors == changed + changed // 2
    assert second.nbytes < first.nbytes
    engine.sync(world.weights[1])
    assert engine.sync(versions.weights[0]).tensors == first.tensors


@pytest.mark.vllm
@pytest.mark.slow
def test_beside_its_base_the_next_adapter_is_all_that_is_read(
    built: Callable[[str], RolloutEngine], versions: Versions, world: World
) -> None:
    """Also after one was refused; the base is read again after another version of all weights."""
    engine = built("vllm-adapter")
    engine.sync(world.weights[1])
    first, second = (engine.sync(ref) for ref in versions.weights)
    changed = len(factors(world, 0))
    assert first.tensors == len(world.policies[0].state_dict()) + changed
    assert (second.tensors, second.nbytes) == (changed, versions.weights[1].nbytes)
    engine.sync(world.weights[1])
    assert engine.sync(versions.weights[0]).tensors == first.tensors


@pytest.mark.vllm
@pytest.mark.slow
def test_another_runs_adapter_of_a_higher_rank_is_merged(
    built: Callable[[str], RolloutEngine], versions: Versions, world: World
) -> None:
    """An opponent's may be such; vLLM has room for those of the run's own."""
    engine = built("vllm-adapter")
    rank = 9
    ref = publish_adapter(
        world, 1, factors(world, 26, rank), versions.base, "wide", alpha=rank / 4, rank=rank
    )
    assert engine.sync(ref).digest == ref.digest
    policy = checkpoints.load_for_training(world.directory)
    policy.load_state_dict(dict(stream_whole(world.store, ref)), strict=False)
    assert scores(engine) == pytest.approx(expected(policy), abs=1e-4)


@pytest.mark.vllm
@pytest.mark.slow
def test_answers_in_progress_go_on_under_the_next_adapter(
    built: Callable[[str], RolloutEngine],
    versions: Versions,
    world: World,
    threads: ThreadPoolExecutor,
) -> None:
    """Each token's log-prob is that of the version which its span names."""
    engine = built("vllm-adapter")
    first, second = versions.weights
    engine.sync(first)
    shard = begun(engine, threads, world.request(world.prompts(), LONG))
    engine.sync(second, mode="recompute")
    result = shard.result(60)
    for prompt, response, logprobs, spans in zip(
        world.column(result, "prompt_ids"),
        world.column(result, "response_ids"),
        world.column(result, "rollout_logprobs"),
        world.column(result, "weight_spans"),
        strict=True,
    ):
        (old, _, change), (new, again, _) = spans[:3], spans[3:]
        assert (old, new, change) == (1, 2, again)
        for policy, part in zip(
            versions.policies, (slice(change), slice(change, None)), strict=True
        ):
            wanted = expected(policy, prompt, response)[part]
            assert logprobs[part] == pytest.approx(wanted, abs=1e-3)


def test_a_damaged_factor_is_refused(
    engine: RolloutEngine, versions: Versions, world: World
) -> None:
    run = f"damaged-{engine.status().name}"
    ref = publish_adapter(world, 7, factors(world, 23), versions.base, run)
    name, entry = next(iter(open_manifest(world.store, ref).tensors.items()))
    key = f"{ref.key}/{entry.file}"
    data = bytearray(world.store.read(key))
    data[entry.start + 3] ^= 4
    world.store.write(key, bytes(data))
    with pytest.raises(ObjectDamaged, match=name):
        engine.sync(ref)
    assert engine.version is None
    engine.sync(versions.weights[0])
    assert scores(engine) == pytest.approx(expected(versions.policies[0]), abs=1e-4)


def test_factors_that_do_not_fit_the_base_are_refused_before_they_are_loaded(
    engine: RolloutEngine, versions: Versions, world: World
) -> None:
    engine.sync(versions.weights[0])
    for number, change in enumerate((_wider, _without_b, _of_no_weight), 8):
        tensors = factors(world, 24)
        wrong = change(tensors)
        ref = publish_adapter(world, number, tensors, versions.base)
        with pytest.raises(WeightMismatch, match=wrong):
            engine.sync(ref)
        assert engine.version == versions.weights[0].version


def _wider(tensors: dict[str, torch.Tensor]) -> str:
    name = next(iter(tensors))
    tensors[name] = torch.zeros(RANK, 65)
    return name


def _without_b(tensors: dict[str, torch.Tensor]) -> str:
    name = next(name for name in tensors if ".lora_B." in name)
    del tensors[name]
    return name


def _of_no_weight(tensors: dict[str, torch.Tensor]) -> str:
    for name in factor_names("model.layers.9.self_attn.q_proj.weight"):
        tensors[name] = torch.zeros(RANK, 64)
    return "layers.9"


def test_the_digest_is_of_factors_scale_and_base(versions: Versions, world: World) -> None:
    ref, tensors = versions.weights[0], factors(world, 21)
    same = publish_adapter(world, 1, tensors, versions.base, "same")
    other_base = publish_adapter(world, 1, tensors, world.weights[1], "other-base")
    scaled = publish_adapter(world, 1, tensors, versions.base, "scaled", 2 * ALPHA)
    assert same.digest == ref.digest
    assert len({ref.digest, other_base.digest, scaled.digest, versions.base.digest}) == 4


def test_merged_tensors_are_rounded_once(world: World) -> None:
    """To the base's number format, from sums in float32."""
    state = {name: each.bfloat16() for name, each in world.policies[0].state_dict().items()}
    base = publish(world.store, "rounded", 0, state.items(), {})
    tensors = factors(world, 25)
    ref = publish_adapter(world, 1, tensors, base, "rounded")
    for name, tensor in stream_whole(world.store, ref):
        a, b = factor_names(name)
        wanted = state[name]
        if a in tensors:
            wanted = (wanted.float() + ALPHA / RANK * (tensors[b] @ tensors[a])).bfloat16()
        assert torch.equal(tensor, wanted), name
