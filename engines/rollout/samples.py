"""From a shard's prompts to its stored samples: the part that is the same for every engine."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from engines.models.grammars import BegunTurn, TurnGrammar, grammar_of
from engines.models.routed_experts import (
    OF_PROMPT,
    OF_RESPONSE,
    RoutedExperts,
    extended,
    merged,
    write_by_prompt,
)
from engines.rollout.contract import RolloutRequest, RolloutResult, Sampling, ShardStats
from storage.batches.columns import (
    EPISODE,
    GRAMMAR,
    IN_PART,
    LIMIT,
    OF_PLAYERS,
    OPPONENTS_TURN,
    PROMPT_COLUMNS,
    REWRITTEN,
    SEGMENT,
    TURN_LIMIT,
    UNFINISHED,
    Author,
    SampleStatus,
    policy_mask,
)
from storage.batches.refs import BatchRef
from storage.batches.sampling_mask import (
    COUNTS,
    NO_TOKENS,
    SamplingMask,
    mask_columns,
    read_masks,
)
from storage.objects.store import Store

POLICY = bytes([Author.POLICY])
OF_TURN = bytes([Author.POLICY, Author.BUDGET])  # authors within a turn of the policy


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptTokens:
    """The prompts of a shard, read."""

    tokens: list[list[int]]  # [P] token ids of each
    numbers: list[int]  # [P] of each in the run
    samples: list[tuple[int, int]]  # [N] prompt of each sample, and number among that prompt's
    branches: list[int] | None = None  # [P] branch_seed of each; None: a prompt has one row
    limits: list[int] | None = (
        None  # [P] longest completion of each, in tokens; None: the request's
    )
    turn_limits: list[int] | None = None  # [P] longest turn of each, likewise; 0: none
    grammars: list[str] | None = None  # [P] JSON of TurnGrammar, empty for any text; None: of none

    @property
    def places(self) -> NDArray[np.int64]:
        """[N] prompt of each sample."""
        return np.array([row for row, _ in self.samples], np.int64)

    def tokens_of(self, number: int) -> list[int]:
        """The prompt of a sample."""
        return self.tokens[self.samples[number][0]]

    def grammar_of(self, number: int) -> TurnGrammar | None:
        """What the text of a sample has to be; None: any."""
        return None if self.grammars is None else grammar_of(self.grammars[self.samples[number][0]])

    def sample_id(self, sampling: Sampling, number: int) -> int:
        """Number in the run of a row of a request's samples."""
        row, k = self.samples[number]
        return self.numbers[row] * (sampling.group or sampling.n) + sampling.first + k

    def sampling(self, request: RolloutRequest, number: int) -> Sampling:
        """How a row of a request's samples is drawn."""
        sampling, (row, _) = request.sampling, self.samples[number]
        if self.limits is not None:
            limit = min(sampling.max_new_tokens, self.limits[row])
            sampling = replace(sampling, max_new_tokens=limit)
        if self.turn_limits is not None and (turn := self.turn_limits[row]):
            sampling = replace(
                sampling, max_turn_tokens=min(sampling.max_turn_tokens or turn, turn)
            )
        return sampling

    def seed(self, request: RolloutRequest, number: int, begun: int) -> int | None:
        """Seed of a row of a request's samples, which has `begun` tokens already (`sample_seed`)."""
        branch = None if self.branches is None else self.branches[self.samples[number][0]]
        sample = self.sample_id(request.sampling, number)
        return sample_seed(request.sampling.seed, request.step, sample, begun, branch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled completion, or the beginning of one.

    In an episode, tokens that the policy did not write are among them: with log-prob 0, and of no
    policy version.
    """

    tokens: list[int]  # [T]
    logprobs: list[float]  # [T] of each token, in the distribution that it was drawn from
    spans: list[tuple[int, int, int]]  # policy version, start, stop; together what it wrote
    finish_reason: str  # stop: an end token or stop string; length: the limit; unfinished
    digest: str = ""  # of the last token's weights, where this engine did not draw it
    authors: bytes = b""  # of the first tokens; the others are the policy's
    read: int = 0  # tokens that the engine was given before those that it drew last
    cached: int | None = None  # of these, whose keys and values it had; None: it does not say
    # [B + T, L, k] of the token before each of the T, and of B tokens before those; fewer where they
    # are not known. None: they are not wanted.
    routed_experts: RoutedExperts | None = None
    # Of the first tokens; the others are not the policy's. None: it is not wanted.
    sampling_mask: SamplingMask | None = None

    @property
    def turn(self) -> int:
        """Where the turn begins that the policy is at: after the last token of another author."""
        return len(self.authors.rstrip(OF_TURN))

    def turn_in(self, grammar: TurnGrammar | None) -> BegunTurn | None:
        """Its turn, where it goes on and its text has a grammar."""
        if grammar is None or self.ended:
            return None
        return BegunTurn.of(grammar, self.tokens[self.turn :], self.authors[self.turn :])

    @property
    def ended(self) -> bool:
        """Whether there is nothing to go on with."""
        return self.finish_reason != UNFINISHED

    def followed_by(self, more: Completion) -> Completion:
        """This beginning and what was drawn after it, as one.

        [(3, 0, 5)] followed by [(3, 0, 1), (4, 1, 2)] has the spans [(3, 0, 6), (4, 6, 7)].
        """
        if not more.tokens:
            return Completion(
                tokens=self.tokens,
                logprobs=self.logprobs,
                spans=self.spans,
                finish_reason=more.finish_reason,
                digest=self.digest,
                authors=self.authors,
                read=more.read,
                cached=more.cached,
                routed_experts=self.routed_experts,
                sampling_mask=self.sampling_mask,
            )
        spans, length = list(self.spans), len(self.tokens)
        for version, start, stop in more.spans:
            if spans and spans[-1][0] == version and spans[-1][2] == length + start:
                spans[-1] = (version, spans[-1][1], length + stop)
            else:
                spans.append((version, length + start, length + stop))
        return Completion(
            tokens=self.tokens + more.tokens,
            logprobs=self.logprobs + more.logprobs,
            spans=spans,
            finish_reason=more.finish_reason,
            digest=more.digest,
            authors=self.authors,
            read=more.read,
            cached=more.cached,
            routed_experts=self._routed_with(more),
            sampling_mask=self._mask_with(more),
        )

    def _mask_with(self, more: Completion) -> SamplingMask | None:
        if self.sampling_mask is None or more.sampling_mask is None:
            return None if self.tokens else more.sampling_mask
        return self.sampling_mask.extended(len(self.tokens)).followed_by(more.sampling_mask)

    def _routed_with(self, more: Completion) -> RoutedExperts | None:
        if self.routed_experts is None or more.routed_experts is None:
            return None if self.tokens else more.routed_experts
        if len(more.routed_experts) > len(more.tokens):  # with all that the engine read before
            return merged(self.routed_experts, more.routed_experts)
        return np.concatenate([self.routed_experts, more.routed_experts])


NOTHING = Completion(tokens=[], logprobs=[], spans=[], finish_reason=UNFINISHED)


def sample_seed(
    seed: int | None, step: int, sample_id: int, begun: int = 0, branch: int | None = None
) -> int | None:
    """Seed of one sample, in [0, 2**63): the same wherever and beside whatever it is drawn.

    `begun`: tokens that it has already, so that it does not meet the noise of its beginning again.
    `branch`: what tells it from others of its prompt that have the same beginning. None where the
    shard has none.
    """
    if seed is None:
        return None
    text = f"{seed}/{step}/{sample_id}{f'/{begun}' if begun else ''}"
    text += "" if branch is None else f"#{branch}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def read_prompts(store: Store, prompts: BatchRef, max_model_len: int, n: int) -> PromptTokens:
    """The token ids of `prompts`; ValueError naming a row that leaves no room for a completion.

    n: completions of each, but of those whose column has fewer (GROUP_SIZE). A row is numbered as its
    group, or, with several players, of whom all have a row here, in the order of groups and players.
    """
    values, offsets = prompts.fetch_numpy(store, "prompt_ids")
    assert offsets is not None
    groups, _ = prompts.fetch_numpy(store, "group_id")
    for row, length in enumerate(np.diff(offsets)):
        if not 0 < length < max_model_len:
            raise ValueError(
                f"The prompt of group {groups[row]} has {length} tokens, the engine takes 1 to "
                f"{max_model_len - 1}. Set data.max_prompt_tokens, or max_model_len of the engine."
            )
    ids = values.tolist()
    rows = [ids[a:b] for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    branches = None
    if "branch_seed" in prompts.names:
        branches = prompts.fetch_numpy(store, "branch_seed")[0].tolist()

    def of_tasks(name: str) -> list[int] | None:
        there = name in prompts.names
        return prompts.fetch_numpy(store, name)[0].tolist() if there else None

    sizes = prompts.group_sizes(store, n)
    return PromptTokens(
        tokens=rows,
        numbers=prompts.own_groups(store).tolist(),
        samples=[(row, k) for row, size in enumerate(sizes) for k in range(size)],
        branches=branches,
        limits=of_tasks(LIMIT),
        turn_limits=of_tasks(TURN_LIMIT),
        grammars=[str(one) for one in prompts.fetch_list(store, GRAMMAR)]
        if GRAMMAR in prompts.names
        else None,
    )


def seen_by(frozen: bool, reason: str) -> str:
    """A stored finish reason as those see it who play: what is theirs to go on with is unfinished.

    It is its own inverse: a frozen player's `opponent's turn` is `unfinished` to the opponent's
    engines, and the policy's unfinished samples are nothing to them.
    """
    if not frozen:
        return reason
    return {UNFINISHED: OPPONENTS_TURN, OPPONENTS_TURN: UNFINISHED}.get(reason, reason)


def read_begun(
    store: Store,
    begun: BatchRef | None,
    rows: int,
    frozen: bool = False,
    no_experts: RoutedExperts | None = None,
    masked: bool | None = None,
) -> list[Completion]:
    """[rows] what `write_samples` stored of them; nothing of each where `begun` is None.

    frozen: whether the turns of frozen players are what is gone on with. no_experts: of no token,
    where those of each are wanted; else they are read where they are stored. masked: whether the
    words that tokens were drawn from are wanted, ValueError where they are not stored; None: where
    they are.
    """
    if begun is None:
        mask = NO_TOKENS if masked else None
        return [replace(NOTHING, routed_experts=no_experts, sampling_mask=mask)] * rows
    if len(begun) != rows:
        raise ValueError(f"{len(begun)} samples are begun, of a shard that has {rows}.")
    ids, offsets = begun.fetch_numpy(store, "response_ids")
    logprobs, _ = begun.fetch_numpy(store, "rollout_logprobs")
    spans, span_offsets = begun.fetch_numpy(store, "weight_spans")
    assert offsets is not None and span_offsets is not None
    flat = spans.tolist()
    triples = [
        list(zip(flat[a:b:3], flat[a + 1 : b : 3], flat[a + 2 : b : 3], strict=True))
        for a, b in pairwise(span_offsets.tolist())
    ]
    reasons = begun.fetch_list(store, "finish_reason")
    digests = begun.fetch_list(store, "weights_digest")
    authors = b""
    if "author" in begun.names:
        authors = begun.fetch_numpy(store, "author")[0].tobytes()
    experts: list[RoutedExperts | None] = [no_experts] * rows
    if OF_RESPONSE in begun.names:
        experts = [
            np.concatenate(parts)
            for parts in zip(
                *(begun.fetch_list(store, name) for name in (OF_PROMPT, OF_RESPONSE)), strict=True
            )
        ]
    masks = _begun_masks(store, begun, masked)
    return [
        Completion(
            tokens=ids[a:b].tolist(),
            logprobs=logprobs[a:b].tolist(),
            spans=triples[row],
            finish_reason=seen_by(frozen, str(reasons[row])),
            digest=str(digests[row]),
            authors=authors[a:b],
            routed_experts=experts[row],
            sampling_mask=masks[row],
        )
        for row, (a, b) in enumerate(pairwise(offsets.tolist()))
    ]


def _begun_masks(store: Store, begun: BatchRef, masked: bool | None) -> list[SamplingMask | None]:
    if COUNTS in begun.names and masked is not False:
        return list(read_masks(store, begun))
    if masked and begun.fetch_numpy(store, "response_ids")[0].size:
        raise ValueError(
            "rollout.sampling_mask = true, and samples that were begun without it are gone on with. "
            "Set it to false."
        )
    return [NO_TOKENS if masked else None] * len(begun)


def token_columns(completions: Sequence[Completion]) -> dict[str, object]:
    """What completions consist of, as columns of N rows."""
    return {
        **_expert_columns(completions),
        **mask_columns(
            [c.sampling_mask for c in completions], [len(c.tokens) for c in completions]
        ),
        "response_ids": [np.array(c.tokens, np.int32) for c in completions],
        "rollout_logprobs": [np.array(c.logprobs, np.float32) for c in completions],
        "weight_spans": [np.array(c.spans, np.int64).reshape(-1) for c in completions],
        "finish_reason": [c.finish_reason for c in completions],
    }


def _expert_columns(completions: Sequence[Completion]) -> dict[str, object]:
    """The experts of prompts and responses; empty where they are not wanted."""
    prompts, responses = [], []
    for completion in completions:
        if completion.routed_experts is None:
            return {}
        first = max(len(completion.routed_experts) - len(completion.tokens), 0)
        prompts.append(completion.routed_experts[:first])
        responses.append(extended(completion.routed_experts[first:], len(completion.tokens)))
    return {OF_PROMPT: prompts, OF_RESPONSE: responses}


def write_samples(
    store: Store,
    request: RolloutRequest,
    prompts: PromptTokens,
    completions: Sequence[Completion],
    *,
    engine: str,
    digests: Mapping[int, str],
    started: float,
    held: int,
    begun: int = 0,
) -> RolloutResult:
    """Store a shard's completions (row i of prompts.samples[i]) under `request.out_key`.

    The ref has the written columns and those of the prompt. `digests` are those of the versions that
    the engine has held; `held` is the one that it holds; `started` is the reading of
    time.monotonic() when the shard began, with `begun` tokens of earlier attempts or steps. The
    statistics are of the samples that the engine plays: not of frozen players among the policy's,
    nor the other way round.
    """
    rows, places = len(completions), prompts.places
    worker = request.worker or engine
    lengths = np.array([len(c.tokens) for c in completions], np.int64)
    last = [c.spans[-1][0] if c.spans else held for c in completions]
    truncated = [c.finish_reason == "length" for c in completions]
    of_policy = np.ones(rows, bool)
    if "frozen" in request.prompts.names:
        frozen = request.prompts.fetch_numpy(store, "frozen")[0].astype(bool)
        of_policy = frozen[places] == request.frozen
    played = np.flatnonzero(of_policy).tolist()
    unfinished = [c.finish_reason in (UNFINISHED, SEGMENT) for c in completions]
    digest_of = {last[i]: completions[i].digest for i in played if completions[i].digest} | {
        **digests
    }
    status = np.where(truncated, SampleStatus.TRUNCATED, SampleStatus.OK).astype(np.int64)
    status[unfinished] = SampleStatus.UNFINISHED
    workers, attempts = [worker] * rows, np.full(rows, request.attempt, np.int64)
    if request.begun is not None:  # what had ended, or waits for others, is as it was
        before = [str(one) for one in request.begun.fetch_list(store, "finish_reason")]
        stands = np.array([seen_by(request.frozen, reason) != UNFINISHED for reason in before])
        status[stands] = request.begun.fetch_numpy(store, "status")[0][stands]
        if "worker" in request.begun.names:
            drew = request.begun.fetch_list(store, "worker")
            workers = [str(drew[i]) if stands[i] else worker for i in range(rows)]
            attempts[stands] = request.begun.fetch_numpy(store, "attempt")[0][stands]
    authors = [np.frombuffer(c.authors.ljust(len(c.tokens), POLICY), np.uint8) for c in completions]
    reasons: list[str] = []
    states: list[str] = []
    unused = np.zeros(rows, np.int64)  # of episodes that have ended
    if request.begun is not None:
        names = (*EPISODE, *OF_PLAYERS, *IN_PART, *REWRITTEN)
        reasons = [name for name in names if name in request.begun.names]
        states = [name for name in ("frame",) if name in request.begun.names]  # not the first ones
        if "unused_tokens" in reasons:
            unused = request.begun.fetch_numpy(store, "unused_tokens")[0].astype(np.int64)
    ref = write_by_prompt(
        store,
        request.out_key,
        {
            **({"author": authors} if reasons or request.sampling.thinking_budget else {}),
            **token_columns(completions),
            "response_mask": [
                policy_mask(each, end) for each, end in zip(authors, unused.tolist(), strict=True)
            ],
            "sample_id": np.array(
                [prompts.sample_id(request.sampling, i) for i in range(rows)], np.int64
            ),
            "status": status,
            "finish_reason": [seen_by(request.frozen, c.finish_reason) for c in completions],
            "weights_digest": [
                c.digest or (digest_of[version] if plays else "")
                for c, version, plays in zip(completions, last, of_policy, strict=True)
            ],
            "worker": workers,
            "attempt": attempts,
        },
        places,
    )
    present = [name for name in PROMPT_COLUMNS if name in request.prompts.names]
    repeated = request.prompts[present].take(places)
    version = max(last[i] for i in played)
    stats = ShardStats(
        rows=rows,
        prompt_tokens=sum(len(tokens) for tokens in prompts.tokens),
        tokens=int(lengths.sum()) - begun,
        truncated=sum(truncated[i] for i in played),
        seconds=time.monotonic() - started,
        worker=worker,
        attempt=request.attempt,
        version=version,
        digest=digest_of[version],
        unfinished=sum(unfinished),
        oldest=min(
            (completions[i].spans[0][0] for i in played if completions[i].spans), default=None
        ),
        read=sum(c.read for c in completions if c.cached is not None),
        cached=sum(c.cached for c in completions if c.cached is not None),
    )
    if request.begun is not None and (held_on := [*reasons, *states]):
        repeated = repeated.with_columns(request.begun[held_on])
    return RolloutResult(ref=repeated.with_columns(ref), stats=stats)
