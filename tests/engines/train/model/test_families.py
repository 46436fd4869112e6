"""Families of models: packed samples have the log-probs and gradients that each has alone by transformers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engines.models.attention import LONG
from engines.train.activations import checkpoint_layers
from engines.train.batching.packed_batch import PLAIN, RowNeeds, pack, row_needs
from engines.train.model.attention import Bucket
from engines.train.model.sequence_parallel import ALONE
from engines.train.policy import Policy
from engines.train.self_test.comparison import (
    Samples,
    differences,
    own_logprobs,
    packed_logprobs,
)
from engines.train.self_test.twin import build, samples
from tests.engines.models.families import KINDS, config_of

pytestmark = pytest.mark.usefixtures("one_thread")

CLOSE = 2e-5  # nats, and of gradients the share of the largest one


@pytest.mark.parametrize("family", KINDS)
def test_packed_is_alone(family: str) -> None:
    seen = differences(build(config_of(family)), samples(), CLOSE)

    assert seen.largest <= CLOSE
    assert seen.gradients <= CLOSE


@pytest.mark.parametrize(
    ("family", "needs"),
    [
        ("mistral window", PLAIN),
        ("gemma2", RowNeeds(dense=True)),
        ("gpt oss", RowNeeds(dense=True)),
        ("phi3 longrope", RowNeeds(rope_limit=32)),
        ("qwen3.5", RowNeeds(dense=True)),
        ("lfm2", RowNeeds(dense=True)),
        ("falcon", RowNeeds(dense=True, whole=True)),
        ("mamba2", RowNeeds(dense=True, whole=True)),
        ("nemotron", RowNeeds(dense=True, whole=True)),  # its layers hand nothing on
    ],
)
def test_what_a_family_needs_is_seen_in_its_code(family: str, needs: RowNeeds) -> None:
    assert row_needs(build(config_of(family))) == needs


@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        *((name, "all") for name in ("gemma2", "qwen3.5", "lfm2", "phi3 longrope", "falcon")),
        *((name, "selective") for name in ("gemma2", "qwen3.5", "lfm2", "phi3 longrope")),
    ],
)
def test_what_is_computed_again_is_the_same(family: str, recompute: str) -> None:
    model = build(config_of(family))
    once, again = (Policy(copy.deepcopy(model)).train() for _ in range(2))
    checkpoint_layers(again.model, 1.0, recompute)  # type: ignore[arg-type]

    first, second = (_gradients(policy, samples()) for policy in (once, again))

    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("family", ["gemma3", "qwen3.5", "phi3 longrope", "bloom"])
def test_what_samples_begin_with_alike_is_shared_where_it_may_be(family: str) -> None:
    """Tree training: two responses that begin with the same tokens."""
    model = build(config_of(family))
    (prompt, response), *_ = samples()
    branch = torch.cat([response[:8], response[:5].flip(0)])
    some = [(prompt, response), (prompt, branch), *samples()[2:]]
    own = own_logprobs(copy.deepcopy(model).eval(), some)
    policy = Policy(model)
    prompts, responses = ([each.numpy() for each in part] for part in zip(*some, strict=True))

    packed = pack(prompts, responses, tree_training=True, needs=policy.needs)
    logprobs, *_ = policy(packed, ALONE, temperature=1.0, chunk=1024, dtype=torch.float32)

    assert packed.tokens.numel() < packed.whole
    assert float((logprobs - torch.cat(own)).detach().abs().max()) <= CLOSE


def test_longrope_shares_no_prompt_between_short_and_long_sequences() -> None:
    prompt = torch.arange(40, 49).numpy()
    long, short, also = (torch.arange(50, 50 + n).numpy() for n in (30, 8, 9))

    packed = pack([prompt] * 3, [long, short, also], needs=RowNeeds(rope_limit=32))

    assert packed.tokens.numel() == 2 * len(prompt) + 29 + 7 + 8
    assert int((packed.positions >= LONG).sum()) == len(prompt) + 29
    assert int(packed.tokens.max()) < 2**40
    assert sorted(packed.tokens.tolist()).count(40) == 2


def test_whole_rows_are_one_batch_on_any_rank() -> None:
    """Ranks of FSDP make as many passes each, whatever the lengths of their rows are."""
    needs = RowNeeds(dense=True, whole=True)
    rows = [torch.arange(40, 40 + n).numpy() for n in (3, 30, 9)]

    alike = pack(rows, [row[:2] for row in rows], needs=needs)
    nothing = pack([], [], needs=needs)

    assert alike.layout.buckets == (
        Bucket(start=0, sequences=3, length=31),
        Bucket(start=93, sequences=1, length=1),
    )
    assert len(nothing.layout.buckets) == 2


def test_a_rank_without_rows_computes_as_others_do() -> None:
    for family in ("qwen3.5", "falcon", "gemma2", "phi3 longrope"):
        policy = Policy(build(config_of(family)))
        packed = pack([], [], needs=policy.needs)

        logprobs, *_ = policy(packed, ALONE, temperature=1.0, chunk=1024, dtype=torch.float32)

        assert logprobs.shape == (0,)


def test_nothing_is_dropped_in_training() -> None:
    for family in ("seed oss", "stablelm", "gptj"):
        policy = Policy(build(config_of(family))).train()

        first, second = (_flat(policy, samples()) for _ in range(2))

        assert torch.equal(first, second)


def _flat(policy: Policy, some: Samples) -> Tensor:
    with torch.no_grad():
        return torch.cat(packed_logprobs(policy, some))


def _gradients(policy: Policy, some: Samples) -> dict[str, Tensor]:
    model: PreTrainedModel = policy.model
    flat = torch.cat(packed_logprobs(policy, some))
    (flat * torch.linspace(-1, 1, len(flat))).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
