"""What rows begin with alike is computed once: the same numbers and gradients, from fewer tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from configs.algorithm.advantages import TreeAdvantage
from configs.algorithm.algorithm import AlgorithmConfig
from engines.algorithms.advantages import ADVANTAGES
from engines.train.batching.mfu import CostModel
from engines.train.batching.packed_batch import PackedBatch, pack
from engines.train.batching.packing import (
    WHOLE,
    MiniBatch,
    plan_logprobs,
    plan_update,
    read_lengths,
)
from engines.train.batching.stored_plan import PlanRequest, read_plan, write_plan
from engines.train.batching.tree_training import in_order
from engines.train.contract import (
    ColumnsResult,
    LogprobRequest,
    TeachRequest,
    TrainSpec,
    UpdateResult,
)
from engines.train.fsdp_engine import FSDPEngine
from engines.train.memory_plan import Batch, largest_batch
from engines.train.model.sequence_parallel import ALONE
from engines.train.policy import Policy
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from storage.runs.weights import WeightsRef, stream
from tests.engines.algorithms.test_tree_advantages import grown
from tests.engines.train.conftest import Make
from tests.engines.train.naive_training import Sample
from tests.engines.train.train_ranks import (
    TEMPERATURE,
    Ranks,
    samples,
    spec,
    stored,
    update_of,
)

EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True)
WORDS = 12  # few, so that drawn rows begin alike
KL = AlgorithmConfig.model_validate({"kl": {"coefficient": 0.2}, "entropy": {"coefficient": 0.1}})


@dataclass(frozen=True)
class Drawn:
    """Rows in groups."""

    prompts: list[np.ndarray]
    responses: list[np.ndarray]
    groups: np.ndarray

    def stored(self, store: Store, key: str) -> BatchRef:
        columns: dict[str, object] = {
            "prompt_ids": self.prompts,
            "response_ids": self.responses,
            "group_id": self.groups,
        }
        return write_batch(store, key, columns)


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    """Ragged rows that branch off each other anywhere, some of them equal, some empty."""
    prompts, responses, groups = [], [], []
    words = st.lists(st.integers(0, 2), max_size=6)
    for group in range(draw(st.integers(1, 3))):
        prompt = [group, *draw(words)]
        found = [draw(words)]
        for _ in range(draw(st.integers(0, 6))):
            before = draw(st.sampled_from(found))
            found.append([*before[: draw(st.integers(0, len(before)))], *draw(words)])
        for response in found:
            split = draw(st.integers(0, len(response))) if draw(st.booleans()) else 0
            prompts.append(np.array(prompt + response[:split], np.int32))
            responses.append(np.array(response[split:], np.int32))
            groups.append(group)
    return Drawn(prompts, responses, np.array(groups, np.int64))


def beginnings(rows: Drawn, chosen: list[int] | None = None, apart: bool = False) -> set[tuple]:
    """Every distinct beginning of what is read of the rows; `apart`: of each group."""
    found = set()
    for row in range(len(rows.groups)) if chosen is None else chosen:
        if len(rows.responses[row]):
            tokens = [*rows.prompts[row].tolist(), *rows.responses[row].tolist()][:-1]
            group = int(rows.groups[row]) if apart else None
            found |= {(group, *tokens[: end + 1]) for end in range(len(tokens))}
    return found


def test_rows_in_the_order_of_their_tokens() -> None:
    rows = [np.array(row) for row in ([5, 6, 8], [5, 7], [5, 6], [300, 1], [5, 7])]
    assert in_order(rows) == ([2, 0, 1, 4, 3], [0, 2, 1, 2, 0])
    assert in_order([]) == ([], [])


def test_a_tree_is_packed_without_what_it_shares() -> None:
    prompts = [np.array([5, 6])] * 3
    responses = [np.array(row) for row in ([7, 8, 9], [7, 8, 4], [3])]
    packed = pack(prompts, responses, tree_training=True)
    # 5 and 6 are in three rows, 7 and 8 in two
    assert packed.tokens.tolist() == [5, 6, 7, 8]
    assert packed.positions.tolist() == [0, 1, 2, 3]
    assert packed.predictors.tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert packed.labels.tolist() == [7, 8, 9, 7, 8, 4, 3]
    assert (packed.whole, packed.squares, packed.predicted) == (10, 36, 5)
    assert [each.shape for each in packed.layout.copies] == [(3, 2), (2, 2)]
    assert packed.distinct is not None
    first, member = packed.distinct.first, packed.distinct.member
    for column in (packed.labels, packed.predictors):
        assert column[first][member].tolist() == column.tolist()


@EXAMPLES
@given(drawn())
def test_each_beginning_is_packed_once(rows: Drawn) -> None:
    packed = pack(rows.prompts, rows.responses, tree_training=True)
    used = [row for row in range(len(rows.groups)) if len(rows.responses[row])]
    assert packed.tokens.numel() == max(1, len(beginnings(rows)))
    layout, found = packed.layout, []
    for bucket in layout.buckets[:-1]:
        for first in range(
            bucket.start, bucket.start + bucket.sequences * bucket.length, bucket.length
        ):
            found.append(layout.expand[first : first + bucket.length])
    wanted = [np.concatenate([rows.prompts[r], rows.responses[r][:-1]]).tolist() for r in used]
    if wanted:
        # Padding is on the right, so a row is a beginning of what its slots hold.
        by_length = sorted(wanted, key=len, reverse=True)
        held = sorted((packed.tokens[slots].tolist() for slots in found), key=len, reverse=True)
        for row in by_length:
            assert any(slots[: len(row)] == row for slots in held)
        assert (
            sum(each.numel() for each in layout.copies) <= 2 * packed.whole + packed.tokens.numel()
        )
    slots = torch.bincount(layout.expand[layout.collapse], minlength=packed.tokens.numel())
    assert (slots == 1).all(), "one slot of each token counts"


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


POLICY = Policy(llama())


def numbers(packed: PackedBatch, **asked: object) -> list[torch.Tensor]:
    """What a policy gives for a micro-batch, then the gradients of a weighted sum of it."""
    found = POLICY(
        packed,
        ALONE,
        temperature=TEMPERATURE,
        chunk=64,
        dtype=torch.float64,
        entropy_gradient=True,
        **asked,
    )
    generator = torch.Generator().manual_seed(7)
    loss = sum(
        (each * torch.randn(each.shape, generator=generator, dtype=each.dtype)).sum()
        for each in found
        if each.requires_grad
    )
    if not isinstance(loss, torch.Tensor):
        return list(found)
    return [*found, *torch.autograd.grad(loss, list(POLICY.parameters()))]


@EXAMPLES
@given(drawn(), st.sampled_from(["plain", "squared", "words", "top"]))
def test_numbers_and_gradients_are_those_of_rows_alone(rows: Drawn, asked: str) -> None:
    """To float32's rounding, in which Llama's norms are: entropies and words of a teacher too."""
    once, alone = (pack(rows.prompts, rows.responses, tree_training=tree) for tree in (True, False))
    count = alone.labels.numel()
    more: dict[str, object] = {"squared": True} if asked == "squared" else {}
    if asked == "words":
        generator = torch.Generator().manual_seed(count)
        drawn_words = [torch.randperm(WORDS, generator=generator)[:3] for _ in range(count)]
        more["words"] = torch.stack(drawn_words) if count else torch.zeros(0, 3, dtype=torch.int64)
    if asked == "top":
        more["top"] = 3
    for ours, theirs in zip(numbers(once, **more), numbers(alone, **more), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def checked(rows: Drawn, mini: MiniBatch, budget: int) -> None:
    for rank in mini.ranks:
        for micro in rank:
            used = [row for row in micro if len(rows.responses[row])]
            whole = sum(len(rows.prompts[row]) + len(rows.responses[row]) - 1 for row in used)
            assert len(beginnings(rows, used, apart=True)) <= budget
            assert whole <= WHOLE * budget
            assert list(micro) == sorted(micro)


@EXAMPLES
@given(drawn(), st.integers(1, 3), st.integers(40, 60), st.integers(1, 2))
def test_plans_count_what_rows_share_once(
    rows: Drawn, world: int, budget: int, mini_batches: int
) -> None:
    store = Store("memory://tree-training")
    batch = rows.stored(store, "plan/batch.safetensors")
    lengths = read_lengths(store, batch, tree_training=True)
    plan = plan_update(lengths, world=world, budget=budget, mini_batches=mini_batches)
    assert sorted(row for mini in plan for row in mini.rows()) == list(range(len(rows.groups)))
    forward = plan_logprobs(lengths, world=world, budget=budget)
    in_turn = [row for rank in forward.ranks for row in sorted(r for micro in rank for r in micro)]
    assert in_turn == list(range(len(rows.groups)))
    for mini in (*plan, forward):
        checked(rows, mini, budget)
    limits = {"world": world, "budget": budget, "mini_batches": mini_batches}
    request = PlanRequest(batch=batch, **limits, cost=CostModel(), tree_training=True)
    written = write_plan(store, request, "plan/p.safetensors")
    assert read_plan(store, written) == plan_update(lengths, **limits, cost=CostModel())


def test_a_tree_that_fits_is_one_micro_batch(tmp_path: Path) -> None:
    """Six rows of 12 tokens that differ in their last word are 13 tokens of the budget, not 72."""
    responses = [np.array([*range(9), word, 1], np.int32) for word in range(6)]
    rows = Drawn([np.array([1, 2], np.int32)] * 6, responses, np.zeros(6, np.int64))
    store = Store(str(tmp_path))
    batch = rows.stored(store, "batch.safetensors")
    (mini,) = plan_update(read_lengths(store, batch, tree_training=True), world=1, budget=20)
    assert mini.ranks == ((tuple(range(6)),),)
    (mini,) = plan_update(read_lengths(store, batch), world=1, budget=20)
    assert len(mini.ranks[0]) == 6


def test_rows_of_a_micro_batch_are_bounded_whole_as_well(tmp_path: Path) -> None:
    """Equal rows are as many tokens as one, but attention works on each."""
    rows = Drawn(
        [np.arange(5, dtype=np.int32)] * 40, [np.arange(6, dtype=np.int32)] * 40, np.zeros(40, int)
    )
    store = Store(str(tmp_path))
    lengths = read_lengths(store, rows.stored(store, "batch.safetensors"), tree_training=True)
    (mini,) = plan_update(lengths, world=1, budget=10)
    assert [len(micro) for micro in mini.ranks[0]] == [8] * 5
    wide = largest_batch(10, 5, 6, samples=40, group=40, ranks=1, tree_training=True)
    assert wide == Batch(tokens=10, slots=81, responses=18, longest=10, several=True)


# --- the engine -----------------------------------------------------------------------------------


def tree_rows(seed: int, prefix_weight: str = "per_leaf") -> list[Sample]:
    """Leaves of trees with TreePO's advantages."""
    batch = grown(seed, leaves=6)
    settings = TreeAdvantage(prefix_weight=prefix_weight)
    found = ADVANTAGES["tree"](batch, **settings.arguments())
    mask = batch.mask if found.mask is None else found.mask
    paths = batch.paths
    assert paths is not None
    random = np.random.default_rng(seed)
    words: dict[tuple[int, int], np.ndarray] = {}
    prompts: dict[int, np.ndarray] = {}
    rows = []
    tokens, segments = batch.rows.offsets.tolist(), paths.rows.offsets.tolist()
    for row, (a, b) in enumerate(pairwise(tokens)):
        group, response = int(batch.groups[row]), []
        prompts.setdefault(group, random.integers(4, 90, random.integers(3, 9)))
        for segment in range(segments[row], segments[row + 1]):
            node, size = int(paths.nodes[segment]), int(paths.lengths[segment])
            response.append(words.setdefault((group, node), random.integers(4, 90, size)))
        rows.append(
            Sample(
                prompt=prompts[group],
                response=np.concatenate(response),
                mask=mask[a:b].numpy().astype(np.uint8),
                advantages=found.advantages[a:b].float().numpy(),
                ref=np.float32(random.normal(-4.5, 0.3, b - a)),
            )
        )
    return rows


def learnt(engine: FSDPEngine, batches: list[BatchRef]) -> tuple[list[UpdateResult], WeightsRef]:
    results = [engine.update(update_of(batch, KL, step)) for step, batch in enumerate(batches, 1)]
    return results, engine.export_weights(len(batches), "float32")


def assert_alike(
    folder: Path,
    one: tuple[list[UpdateResult], WeightsRef],
    two: tuple[list[UpdateResult], WeightsRef],
) -> None:
    store = Store(str(folder / "store"))
    alone = dict(stream(store, one[1]))
    for name, tensor in stream(store, two[1]):
        torch.testing.assert_close(tensor, alone[name], atol=2e-4, rtol=0, msg=name)
    for before, after in zip(one[0], two[0], strict=True):
        for name in ("loss", "grad_norm", "entropy", "response_tokens"):
            assert after.metrics[f"train/{name}"] == pytest.approx(
                before.metrics[f"train/{name}"], rel=1e-4, abs=1e-6
            ), name
        assert after.metrics["train/tokens"] < before.metrics["train/tokens"]
        assert after.metrics["train/tokens_saved"] > before.metrics["train/tokens_saved"]


@pytest.mark.parametrize("prefix_weight", ["per_leaf", "once"])
@pytest.mark.parametrize("train", [{}, {"gradient_checkpointing": 0.5, "mini_batches": 2}])
def test_an_update_learns_what_rows_alone_teach(
    make: Make, tmp_path: Path, prefix_weight: str, train: dict[str, object]
) -> None:
    batches = [stored(tmp_path, tree_rows(seed, prefix_weight), f"batch-{seed}") for seed in (3, 4)]
    if "mini_batches" in train:
        first = make(run="first")
        for number, batch in enumerate(batches):
            old = first.logprobs(
                LogprobRequest(
                    batch=batch,
                    column="old_logprobs",
                    out_key=f"run/o-{number}.safetensors",
                    temperature=TEMPERATURE,
                )
            )
            assert old.batch is not None
            batches[number] = batch.with_columns(old.batch)
    settings = {"micro_batch_tokens": 64, "max_grad_norm": 0.5, **train}
    found = [
        learnt(make(run=f"tree-{tree}", tree_training=tree, **settings), batches)
        for tree in (False, True)
    ]
    assert_alike(tmp_path, *found)


def test_tokens_chosen_over_a_mini_batch_are_the_same(make: Make, tmp_path: Path) -> None:
    """Their log-probs are of a forward pass of its own."""
    batch = stored(tmp_path, tree_rows(5))
    chosen = AlgorithmConfig.model_validate({"loss": {"kind": "kl_cov", "ratio": 0.2}})
    one, two = (
        make(run=f"tree-{tree}", tree_training=tree, micro_batch_tokens=64).update(
            update_of(batch, chosen, 1)
        )
        for tree in (False, True)
    )
    for name in ("loss", "grad_norm"):
        wanted = pytest.approx(one.metrics[f"train/{name}"], rel=1e-4, abs=1e-6)
        assert two.metrics[f"train/{name}"] == wanted, name


def column(folder: Path, parts: list[ColumnsResult], kind: str, name: str) -> np.ndarray:
    found = ColumnsResult.together(parts).batch
    assert found is not None
    return found.fetch_numpy(Store(str(folder / "store")), name)[0]


def test_log_probs_of_rows_are_the_same(make: Make, tmp_path: Path) -> None:
    batch = stored(tmp_path, [*tree_rows(6), *samples()])
    found = []
    for tree in (False, True):
        engine = make(run=f"tree-{tree}", tree_training=tree, micro_batch_tokens=64)
        key = f"run/{tree}"
        given = engine.logprobs(
            LogprobRequest(
                batch=batch,
                column="old_logprobs",
                out_key=f"{key}-l.safetensors",
                temperature=TEMPERATURE,
                squared=True,
            )
        )
        taught = make(run=f"tree-{tree}", tree_training=tree, role="teacher").teach(
            TeachRequest(
                batch=batch, out_key=f"{key}-t.safetensors", temperature=TEMPERATURE, top_k=3
            )
        )
        found.append(
            [
                column(tmp_path, [given], "logprobs", "old_logprobs"),
                column(tmp_path, [given], "logprobs", "sum_pi_squared"),
                column(tmp_path, [taught], "teach", "teacher_topk_ids"),
                column(tmp_path, [taught], "teach", "teacher_tail_logprobs"),
            ]
        )
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_an_update_made_again_is_equal_to_the_bit(make: Make, tmp_path: Path) -> None:
    batches = [stored(tmp_path, tree_rows(seed), f"batch-{seed}") for seed in (3, 4)]
    digests = set()
    for run in ("one", "two"):
        engine = make(run=run, tree_training=True, micro_batch_tokens=64)
        learnt(engine, batches)
        digests.add(engine.digest())
    assert len(digests) == 1


def together(
    rank: int, world: int, ports: list[int], base: TrainSpec, shared: int, batches: list[BatchRef]
) -> tuple[ColumnsResult, list[UpdateResult], WeightsRef]:
    """A log-prob pass and two updates on ranks of which `shared` have a micro-batch together."""
    train = base.train.model_copy(update={"sequence_parallel": shared, "tree_training": True})
    engine = FSDPEngine(base.model_copy(update={"train": train, "run": f"of-{world}-{shared}"}))
    engine.join(rank, world, "127.0.0.1", ports[shared - 1], 1, 60.0)
    given = engine.logprobs(
        LogprobRequest(
            batch=batches[0],
            column="ref_logprobs",
            out_key=f"run/{world}-{shared}.safetensors",
            temperature=TEMPERATURE,
        )
    )
    return (given, *learnt(engine, batches))


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("shared", [1, 2])
def test_two_ranks_learn_what_one_does_from_rows_alone(
    tmp_path: Path, join: Callable[[TrainSpec], FSDPEngine], pair: Ranks, shared: int
) -> None:
    base = spec(tmp_path, micro_batch_tokens=48, max_grad_norm=0.5)
    batches = [stored(tmp_path, tree_rows(seed), f"batch-{seed}") for seed in (3, 4)]
    engine = join(base.model_copy(update={"run": "alone"}))
    alone = engine.logprobs(
        LogprobRequest(
            batch=batches[0],
            column="ref_logprobs",
            out_key="run/alone.safetensors",
            temperature=TEMPERATURE,
        )
    )
    wanted = learnt(engine, batches)
    seen = pair.run(together, base, shared, batches)
    found = column(tmp_path, [part for part, *_ in seen], "logprobs", "ref_logprobs")
    np.testing.assert_allclose(
        found, column(tmp_path, [alone], "logprobs", "ref_logprobs"), atol=2e-5
    )
    assert_alike(tmp_path, wanted, seen[0][1:])
