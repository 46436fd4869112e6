"""Rows that are forests of requests: each token once, along its own path, as transformers has it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.algorithm.algorithm import AlgorithmConfig
from engines.models.checkpoints import materialize
from engines.train.batching.mfu import CostModel
from engines.train.batching.packed_batch import Sequences, pack
from engines.train.batching.packing import (
    WHOLE,
    plan_logprobs,
    plan_update,
    read_lengths,
)
from engines.train.batching.stored_plan import PlanRequest, read_plan, write_plan
from engines.train.contract import ColumnsResult, LogprobRequest, TeachRequest, TrainSpec
from engines.train.fsdp_engine import FSDPEngine
from engines.train.model.sequence_parallel import ALONE
from engines.train.policy import Policy
from engines.train.self_test.comparison import own_logprobs
from engines.train.self_test.twin import build
from storage.batches.forest import Forest
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.store import Store
from tests.engines.models.families import config_of
from tests.engines.train import naive_training as naive
from tests.engines.train.conftest import Make
from tests.engines.train.naive_training import Sample
from tests.engines.train.test_sampling_mask import masks_of, with_masks
from tests.engines.train.train_ranks import (
    MODEL,
    TEMPERATURE,
    Ranks,
    samples,
    spec,
    stored,
    update_of,
)
from tests.storage.batches.test_forest import grown

pytestmark = pytest.mark.usefixtures("one_thread")

CLOSE = 2e-5  # nats
GRADIENTS = 1e-4  # the share of the largest one
KL = AlgorithmConfig.model_validate({"kl": {"coefficient": 0.2}})


@dataclass(frozen=True, kw_only=True)
class Row:
    """A sample and its forest."""

    sample: Sample
    forest: Forest

    def alone(self) -> list[tuple[Sample, np.ndarray]]:
        """Each path as a sample by itself, and the row's response tokens that it has after its first.

        A token's mask is 1 in the first path that has it, and 0 in the others.
        """
        row, forest = self.sample, self.forest
        laid, found, seen = np.concatenate([row.prompt, row.response]), [], set()
        for path in forest.paths():
            if len(path) < 2:
                continue
            own = path[1:] - forest.prompt
            first = [at >= 0 and at not in seen for at in own.tolist()]
            seen |= set(own.tolist())
            at = own.clip(min=0)

            sample = Sample(
                prompt=laid[path[:1]],
                response=laid[path[1:]],
                mask=row.mask[at] * np.array(first, np.uint8),
                advantages=row.advantages[at],
                ref=None if row.ref is None else row.ref[at],
            )
            found.append((sample, own))
        return found


def forests(seed: int, count: int = 6) -> list[Row]:
    """Random forests, some of one path, in groups that share a prompt, then samples without any."""
    draw = np.random.default_rng(seed)
    rows, prompts = [], {}
    for number in range(count):
        forest, _ = grown(100 * seed + number)
        # Of a group the prompts are alike; few words, so that tokens are alike by chance too.
        prompt = prompts.setdefault(forest.prompt, draw.integers(4, 90, forest.prompt))
        size = forest.tokens - forest.prompt
        mask = draw.integers(0, 4, size).clip(max=1).astype(np.uint8)
        mask[forest.before < 0] = 0
        sample = Sample(
            prompt=prompt,
            response=draw.integers(4, 8, size),
            mask=mask,
            advantages=np.full(size, draw.normal(), np.float32),
            ref=np.float32(draw.normal(-4.5, 0.3, size)),
        )
        rows.append(Row(sample=sample, forest=forest))
    return rows


def alone(rows: list[Row]) -> list[Sample]:
    return [sample for row in rows for sample, _ in row.alone()]


def laid_out(rows: list[Row], values: list[np.ndarray]) -> list[np.ndarray]:
    """Numbers of the tokens of each path of each row, in the rows' order of tokens; NaN: of none."""
    each, found = iter(values), []
    for row in rows:
        whole = np.full(len(row.sample.response), np.nan, np.float32)
        for _, own in row.alone():
            whole[own[own >= 0]] = next(each)[own >= 0]
        found.append(whole)
    return found


def with_nodes(folder: Path, batch: BatchRef, rows: list[Row]) -> BatchRef:
    columns: dict[str, object] = {
        "node_lengths": [row.forest.lengths for row in rows],
        "node_parents": [row.forest.parents for row in rows],
    }
    key = next(iter(batch.objects)).replace(".safetensors", "-nodes.safetensors")
    return batch.with_columns(write_batch(Store(str(folder / "store")), key, columns))


def batch_of(folder: Path, rows: list[Row], name: str = "batch") -> BatchRef:
    return with_nodes(folder, stored(folder, [row.sample for row in rows], name), rows)


def chain(row: Sample) -> Forest:
    """Up to two nodes, one after the other."""
    size = len(row.response)
    cuts = sorted({0, size // 2, size})
    parents = len(row.prompt) + np.array(cuts[:-1], np.int64)
    return Forest(prompt=len(row.prompt), lengths=np.diff(cuts), parents=parents)


def test_the_example_is_packed_once() -> None:
    forest = Forest(prompt=2, lengths=np.array([3, 1, 2]), parents=np.array([2, 4, 0]))
    packed = pack([np.array([5, 6])], [np.array([7, 8, 9, 4, 3, 2])], forests=[forest])
    tokens = packed.tokens.tolist()
    assert sorted(tokens) == [3, 5, 6, 7, 8]
    assert packed.labels.tolist() == [7, 8, 9, 4, 3, 2]
    assert [tokens[i] for i in packed.predictors.tolist()] == [6, 7, 8, 8, tokens[0], 3]
    positions = dict(zip(tokens, packed.positions.tolist(), strict=True))
    assert positions == {5: 0, 6: 1, 7: 2, 8: 3, 3: 0}
    assert packed.rows.offsets.tolist() == [0, 6]
    assert (packed.whole, packed.squares) == (4 + 4 + 1, 16 + 16 + 1)


def test_a_forest_of_one_path_is_packed_as_a_row_without() -> None:
    rows = samples(seed=7)
    prompts, responses = ([getattr(row, of) for row in rows] for of in ("prompt", "response"))
    plain = pack(prompts, responses)
    ours = pack(prompts, responses, forests=[chain(row) for row in rows])
    for name in ("tokens", "positions", "predictors", "labels"):
        assert torch.equal(getattr(ours, name), getattr(plain, name)), name
    assert torch.equal(ours.layout.expand, plain.layout.expand)


def test_each_distinct_beginning_of_a_path_is_computed_once() -> None:
    for seed in range(10):
        rows = forests(seed)
        prompts, responses = (
            [getattr(row.sample, of) for row in rows] for of in ("prompt", "response")
        )
        packed = pack(prompts, responses, forests=[row.forest for row in rows])
        read = [tuple(t[:-1].tolist()) for t in _tokens(rows)]
        wanted = {beginning[: end + 1] for beginning in read for end in range(len(beginning))}
        assert packed.tokens.numel() == len(wanted)
        assert packed.whole == sum(map(len, read))
        assert packed.labels.tolist() == np.concatenate(responses).tolist()


def _tokens(rows: list[Row]) -> list[np.ndarray]:
    return Sequences.of(
        [row.sample.prompt for row in rows],
        [row.sample.response for row in rows],
        [row.forest for row in rows],
    ).tokens


@pytest.mark.parametrize(
    "family",
    ["mistral window", "gemma3", "gpt oss", "qwen3.5", "lfm2", "falcon h1", "bloom", "mamba2"],
)
def test_log_probs_and_gradients_are_those_of_each_path_by_transformers(family: str) -> None:
    """Recurrent layers carry the state of the path; windows and positions count along it."""
    rows = forests(1)
    torch.manual_seed(1)
    model = build(config_of(family))
    own_model = copy.deepcopy(model).eval()
    some = [
        (torch.from_numpy(each.prompt), torch.from_numpy(each.response)) for each in alone(rows)
    ]
    own = own_logprobs(own_model, some)
    policy = Policy(model)
    packed = pack(
        [row.sample.prompt for row in rows],
        [row.sample.response for row in rows],
        needs=policy.needs,
        forests=[row.forest for row in rows],
    )
    logprobs, *_ = policy(packed, ALONE, temperature=1.0, chunk=1024, dtype=torch.float32)

    wanted = np.concatenate(laid_out(rows, [each.detach().numpy() for each in own]))
    ours = logprobs.detach().numpy()
    predicted = ~np.isnan(wanted)
    assert not predicted.all(), "some tokens begin a conversation"
    np.testing.assert_allclose(ours[predicted], wanted[predicted], atol=CLOSE)

    mask = torch.from_numpy(np.concatenate([row.sample.mask for row in rows])).bool()
    (logprobs * mask).sum().backward()
    masks = [torch.from_numpy(each.mask).bool() for each in alone(rows)]
    total = sum((each * own_mask).sum() for each, own_mask in zip(own, masks, strict=True))
    assert isinstance(total, Tensor)
    total.backward()
    theirs = {n: p.grad for n, p in own_model.named_parameters() if p.grad is not None}
    largest = max(float(each.abs().max()) for each in theirs.values())
    for name, parameter in policy.model.named_parameters():
        if name in theirs:
            assert parameter.grad is not None, name
            apart = float((parameter.grad - theirs[name]).abs().max())
            assert apart <= GRADIENTS * largest, name


def test_of_a_path_that_is_longer_than_longrope_takes_all_positions_are_others() -> None:
    """32 tokens: the shared beginning is computed for each, and counted in the first path."""
    model = build(config_of("phi3 longrope"))
    prompt, response = np.arange(40, 44), np.arange(50, 90)
    forest = Forest(prompt=4, lengths=np.array([6, 30, 4]), parents=np.array([4, 10, 10]))
    row = Row(
        sample=Sample(
            prompt=prompt,
            response=response,
            mask=np.ones(40, np.uint8),
            advantages=np.ones(40, np.float32),
        ),
        forest=forest,
    )
    some = [(torch.from_numpy(s.prompt), torch.from_numpy(s.response)) for s in alone([row])]
    own = [each.detach().numpy() for each in own_logprobs(copy.deepcopy(model).eval(), some)]
    policy = Policy(model)
    packed = pack([prompt], [response], needs=policy.needs, forests=[forest])
    logprobs, *_ = policy(packed, ALONE, temperature=1.0, chunk=1024, dtype=torch.float32)
    assert packed.tokens.numel() == 39 + 13
    wanted = np.concatenate([own[0][3:], own[1][-4:]])
    np.testing.assert_allclose(logprobs.detach().numpy(), wanted, atol=CLOSE)


def test_a_token_that_begins_a_conversation_is_not_trained(make: Make, tmp_path: Path) -> None:
    row = next(row for row in forests(1) if (row.forest.before < 0).any())
    mask = np.ones_like(row.sample.mask)
    bad = Row(sample=dataclasses.replace(row.sample, mask=mask), forest=row.forest)
    with pytest.raises(ValueError, match="begins a conversation of its own"):
        make().update(update_of(batch_of(tmp_path, [bad]), AlgorithmConfig(), 1))


# --- plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree_training", [False, True])
def test_plans_count_each_token_once_and_each_path_whole(
    tmp_path: Path, tree_training: bool
) -> None:
    store = Store(str(tmp_path / "store"))
    rows = forests(5, 30)
    batch = batch_of(tmp_path, rows)
    lengths = read_lengths(store, batch, tree_training)
    paths = [[len(t) - 1 for t in _tokens([row])] for row in rows]
    assert lengths.slots is not None and lengths.squares is not None
    assert lengths.slots.tolist() == [sum(each) for each in paths]
    assert lengths.squares.tolist() == [sum(n * n for n in each) for each in paths]
    budget = 40
    plan = plan_update(lengths, world=2, budget=budget)
    passes = plan_logprobs(lengths, world=2, budget=budget)
    assert sorted(row for mini in plan for row in mini.rows()) == list(range(30))
    for mini in (*plan, passes):
        for micro in (micro for rank in mini.ranks for micro in rank):
            assert sum(sum(paths[row]) for row in micro) <= WHOLE * budget
            packed = pack(
                [rows[row].sample.prompt for row in micro],
                [rows[row].sample.response for row in micro],
                tree_training=tree_training,
                forests=[rows[row].forest for row in micro],
            )
            assert packed.tokens.numel() <= budget
    request = PlanRequest(
        batch=batch,
        world=2,
        budget=budget,
        mini_batches=1,
        cost=CostModel(),
        tree_training=tree_training,
    )
    assert read_plan(store, write_plan(store, request, "run/plan.safetensors")) == plan


def test_equal_tokens_of_other_forests_are_not_counted_as_shared(tmp_path: Path) -> None:
    """Two rows of the same tokens, one of which branches: after its branch nothing is shared."""
    prompt, response = np.arange(10, 14), np.arange(20, 30)
    trees = [([4, 6], [4, 8]), ([4, 6], [4, 4])]
    rows = [
        Row(
            sample=Sample(
                prompt=prompt,
                response=response,
                mask=np.ones(10, np.uint8),
                advantages=np.ones(10, np.float32),
            ),
            forest=Forest(prompt=4, lengths=np.array(lengths), parents=np.array(parents)),
        )
        for lengths, parents in trees
    ]
    store = Store(str(tmp_path / "store"))
    lengths = read_lengths(store, batch_of(tmp_path, rows), tree_training=True)
    assert lengths.beginnings is not None
    assert lengths.beginnings.common.tolist() == [0, 4 + 4]


def test_paths_that_are_too_much_for_attention_are_refused_in_a_sentence(tmp_path: Path) -> None:
    prompt, count = np.arange(4), 20
    forest = Forest(
        prompt=4, lengths=np.array([10] + [1] * count), parents=np.array([4] + [14] * count)
    )
    size = forest.tokens - 4
    sample = Sample(
        prompt=prompt,
        response=np.arange(size),
        mask=np.ones(size, np.uint8),
        advantages=np.ones(size, np.float32),
    )
    batch = batch_of(tmp_path, [Row(sample=sample, forest=forest)])
    lengths = read_lengths(Store(str(tmp_path / "store")), batch)
    assert plan_update(lengths, world=1, budget=14 * 20 // WHOLE + 1)[0].rows() == [0]
    with pytest.raises(ValueError, match="The paths of row 0 have 280 tokens.*more than 8 times"):
        plan_update(lengths, world=1, budget=14 * 20 // WHOLE - 1)


# --- the engine -----------------------------------------------------------------------------------


def logprobs_of(engine: FSDPEngine, batch: BatchRef) -> BatchRef:
    request = LogprobRequest(
        batch=batch,
        column="old_logprobs",
        out_key="run/logprobs.safetensors",
        temperature=TEMPERATURE,
    )
    found = engine.logprobs(request).batch
    assert found is not None
    return found


def by_hand(folder: Path, rows: list[Row]) -> np.ndarray:
    """[R of all rows] by plain transformers, path by path; NaN where nothing predicts a token."""
    model = naive.load(str(materialize(MODEL, folder / "models")))
    with torch.no_grad():
        found = [naive.logprobs(model, [each], TEMPERATURE)[0].numpy() for each in alone(rows)]
    return np.concatenate(laid_out(rows, found))


@pytest.mark.parametrize("tree_training", [False, True])
@pytest.mark.parametrize("budget", [4096, 48])
def test_a_log_prob_pass_is_transformers_own_of_each_path(
    make: Make, tmp_path: Path, budget: int, tree_training: bool
) -> None:
    rows = forests(2, 12)
    batch = batch_of(tmp_path, rows)
    engine = make(micro_batch_tokens=budget, tree_training=tree_training)
    store = Store(str(tmp_path / "store"))
    ours = logprobs_of(engine, batch).fetch_numpy(store, "old_logprobs")[0]
    wanted = by_hand(tmp_path, rows)
    known = ~np.isnan(wanted)
    np.testing.assert_allclose(ours[known], wanted[known], atol=CLOSE)


def test_a_teacher_reads_each_path(make: Make, tmp_path: Path) -> None:
    rows = forests(2, 12)
    teacher = make(role="teacher", micro_batch_tokens=48)
    request = TeachRequest(
        batch=batch_of(tmp_path, rows),
        out_key="run/taught.safetensors",
        temperature=TEMPERATURE,
        top_k=3,
    )
    found = teacher.teach(request).batch
    assert found is not None
    ours = found.fetch_numpy(Store(str(tmp_path / "store")), "teacher_logprobs")[0]
    wanted = by_hand(tmp_path, rows)
    known = ~np.isnan(wanted)
    np.testing.assert_allclose(ours[known], wanted[known], atol=CLOSE)


@pytest.mark.parametrize("tree_training", [False, True])
def test_an_update_is_that_of_plain_transformers_on_paths(
    make: Make, tmp_path: Path, tree_training: bool
) -> None:
    """Each trained token counts once: in the loss, its normaliser, and the gradient."""
    rows = forests(4, 10)
    batch = batch_of(tmp_path, rows)
    engine = make(micro_batch_tokens=64, max_grad_norm=0.5, tree_training=tree_training)
    model = naive.load(str(materialize(MODEL, tmp_path / "models"))).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
    )
    kept = [each for each in alone(rows) if each.mask.any()]
    loss, norm = naive.grpo_step(
        model, optimizer, kept, temperature=TEMPERATURE, max_grad_norm=0.5, kl=0.2
    )
    found = engine.update(update_of(batch, KL, 1))
    trained = sum(int(row.sample.mask.sum()) for row in rows)
    assert sum(int(each.mask.sum()) for each in kept) == trained
    assert found.metrics["train/loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert found.metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    tokens = sum(len(row.sample.response) for row in rows)
    assert found.metrics["train/response_tokens"] == tokens


def test_nodes_in_a_chain_leave_the_bits_of_a_batch_without(make: Make, tmp_path: Path) -> None:
    rows = [*samples(seed=7)]
    plain = stored(tmp_path, rows)
    chains = [Row(sample=row, forest=chain(row)) for row in rows]
    digests = set()
    for run, batch in (("plain", plain), ("nodes", with_nodes(tmp_path, plain, chains))):
        engine = make(run=run, micro_batch_tokens=64)
        engine.update(update_of(batch, AlgorithmConfig(), 1))
        digests.add(engine.digest())
    assert len(digests) == 1


def test_tokens_are_drawn_from_the_words_that_stand_beside_them(make: Make, tmp_path: Path) -> None:
    """A sampling mask is of each response token, wherever its path goes."""
    rows = forests(2, 8)
    drawn = masks_of([row.sample for row in rows])
    batch = with_masks(tmp_path, batch_of(tmp_path, rows), [row.sample for row in rows])
    engine = make(micro_batch_tokens=64)
    store = Store(str(tmp_path / "store"))
    ours = logprobs_of(engine, batch).fetch_list(store, "old_logprobs")
    model = naive.load(str(materialize(MODEL, tmp_path / "models")))
    compared = 0
    for row, mask, found in zip(rows, drawn, ours, strict=True):
        edges = np.cumsum([0, *mask.counts])
        for sample, own in row.alone():
            ids = torch.from_numpy(np.concatenate([sample.prompt, sample.response]))[None]
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0] / TEMPERATURE
            for place, token in enumerate(own.tolist()):
                if token < 0:
                    continue
                words = mask.words[edges[token] : edges[token + 1]]
                among = logits[place] if not len(words) else logits[place, words]
                wanted = logits[place, sample.response[place]] - among.logsumexp(0)
                assert found[token] == pytest.approx(float(wanted), abs=CLOSE)
                compared += len(words) > 0
    assert compared > 20


def test_experts_are_those_of_the_token_before_on_the_path() -> None:
    """An entry of the column is of the token before its response token, in whatever path that is."""
    for seed in range(5):
        rows = forests(seed)
        # Of each row other numbers; entry e is of the token before laid out token e + 1.
        told = [
            np.arange(row.forest.tokens - 1, dtype=np.uint16)[:, None, None] + 1000 * number
            for number, row in enumerate(rows)
        ]
        packed = pack(
            [row.sample.prompt for row in rows],
            [row.sample.response for row in rows],
            experts=told,
            forests=[row.forest for row in rows],
        )
        assert packed.routed_experts is not None
        found = packed.routed_experts[packed.predictors][:, 0, 0].tolist()
        before = [(row, end) for row in rows for end in row.forest.before.tolist()]
        for (row, end), entry in zip(before, found, strict=True):
            if end < 0:
                continue  # nothing predicts it
            other, place = rows[entry // 1000], entry % 1000
            own = place - other.forest.prompt + 1
            meant = other.forest.before[own] if own >= 0 else place
            assert history(other, meant) == history(row, end)


def history(row: Row, end: int) -> list[int]:
    """The words of the path to a token."""
    laid = np.concatenate([row.sample.prompt, row.sample.response])
    return laid[row.forest.path_to(end + 1)].tolist()


def together(
    rank: int, world: int, ports: list[int], base: TrainSpec, shared: int, batch: BatchRef
) -> tuple[ColumnsResult, dict[str, float]]:
    """A log-prob pass and an update on ranks of which `shared` have a micro-batch together."""
    train = base.train.model_copy(update={"sequence_parallel": shared})
    engine = FSDPEngine(base.model_copy(update={"train": train, "run": f"of-{world}-{shared}"}))
    engine.join(rank, world, "127.0.0.1", ports[shared - 1], 1, 60.0)
    given = engine.logprobs(
        LogprobRequest(
            batch=batch,
            column="ref_logprobs",
            out_key=f"run/{world}-{shared}.safetensors",
            temperature=TEMPERATURE,
        )
    )
    metrics = engine.update(update_of(batch, KL, 1)).metrics
    return given, dict(metrics)


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("shared", [1, 2])
def test_two_ranks_learn_what_one_does(
    tmp_path: Path, join: Callable[[TrainSpec], FSDPEngine], pair: Ranks, shared: int
) -> None:
    base = spec(tmp_path, micro_batch_tokens=48, max_grad_norm=0.5)
    rows = forests(6, 12)
    batch = batch_of(tmp_path, rows)
    alone_metrics = join(base.model_copy(update={"run": "alone"})).update(update_of(batch, KL, 1))
    seen = pair.run(together, base, shared, batch)
    found = ColumnsResult.together([part for part, _ in seen]).batch
    assert found is not None
    ours = found.fetch_numpy(Store(str(tmp_path / "store")), "ref_logprobs")[0]
    wanted = by_hand(tmp_path, rows)
    known = ~np.isnan(wanted)
    np.testing.assert_allclose(ours[known], wanted[known], atol=CLOSE)
    for name in ("loss", "grad_norm", "entropy", "response_tokens"):
        expected = pytest.approx(alone_metrics.metrics[f"train/{name}"], rel=1e-4, abs=1e-6)
        assert seen[0][1][f"train/{name}"] == expected, name
