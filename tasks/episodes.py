"""Episodes: the rollout engines write a turn, the environments answer, until all of a shard are over.

All of a shard go on together here, or each by itself (tasks/episodes_apart.py).

With several players each has samples of its own, and the engines write for those whose turn it is:
those that hold the policy, or those of the opponent, a frozen version, for the players that it has.

Each turn is a batch in the store, of the engine's tokens or with the environments' answers, and so
the log of the episode: an attempt after a failure, or a flow after a crash, goes on from the last.
Once all are over, the last batch has everything and the others are removed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import asdict

from configs.episodes import EpisodesConfig
from engines.episodes.contract import AnswerRequest, AnswerResult, EnvironmentHost, OpponentSeats
from engines.episodes.frames import frames_by_turn
from engines.rollout.contract import ShardStats
from storage.batches.columns import OPPONENTS_TURN, UNFINISHED
from storage.batches.refs import BatchRef
from storage.objects.documents import key_of
from tasks import request_rounds
from tasks.episodes_apart import discard, played_apart, record_of, recorded
from tasks.results import Sampled, Unsampled
from tasks.run.contract import StageView
from tasks.run.roles import ENVIRONMENT, OPPONENT
from tasks.run.stage import Stage
from tasks.sampling import (
    SamplingStage,
    opponents_turn,
    sample_or_leave,
    together,
)


def play(
    run: StageView,
    step: int,
    prompts: BatchRef,
    stage: SamplingStage,
    shard: int,
    begun: BatchRef | None,
) -> Sampled | Unsampled:
    """The episodes of a shard, or find them over."""
    settings: list[object] = [played(run).in_keys()]
    settings += [] if played(run).opponent is None else [run.engines[OPPONENT].weights.digest]
    given: list[object] = [] if begun is None else [begun.to_json()]
    own, *opponent = settings
    identity = stage.sampling.identity
    key = key_of("episodes", prompts.to_json(), identity, own, *given, *opponent)
    whole = Stage(run=run, step=step, name="episodes", key=key, shard=shard)
    done = whole.finished()
    if done is not None and (known := recorded(run, step, prompts, done)) is not None:
        return known
    asked, first = prompts, begun
    if played(run).players > 1:
        asked, unplayed = dealt(run, step, prompts, stage, shard)
        first = unplayed if begun is None else begun
    if played(run).drive == "apart":
        found, turns = played_apart(
            run,
            *(step, asked, stage, shard, first),
            players=played(run).players,
            settings=settings,
            play=played_out,
        )
    else:
        with run.episodes.held(sum(prompts.group_sizes(run.store, stage.sampling.n))):
            found, turns = played_out(run, step, asked, stage, shard, first)
    if isinstance(found, Sampled):
        if run.config.sees_frames:
            by_turn = frames_by_turn(run.store, prompts, found.ref, found.frames)
            found = dataclasses.replace(found, ref=found.ref.with_columns(by_turn))
        whole.finish(record_of(found))
    discard(run, turns, found, first, asked)
    return dataclasses.replace(found, prompts=prompts) if isinstance(found, Sampled) else found


def dealt(
    run: StageView, step: int, prompts: BatchRef, stage: SamplingStage, shard: int
) -> tuple[BatchRef, BatchRef]:
    """A shard's prompts as rows of their players, and the samples before their first turns."""
    n, players, settings = stage.sampling.n, played(run).players, played(run).opponent
    opponent = None
    if settings is not None:
        digest = run.engines[OPPONENT].weights.digest
        opponent = OpponentSeats(digest=digest, policy_plays=settings.policy_plays)
    given = [] if opponent is None else [asdict(opponent)]
    key = key_of("deal", prompts.to_json(), n, players, *given)
    piece = Stage(run=run, step=step, name="deal", key=key, shard=shard)
    if (record := piece.finished()) is None:
        asked, begun = piece.call(
            run.engines[ENVIRONMENT],
            EnvironmentHost.deal,
            prompts=prompts,
            n=n,
            out_key=piece.out_key,
            opponent=opponent,
        )
        record = piece.finish({"prompts": asked.to_json(), "samples": begun.to_json()})
    return BatchRef.from_json(record["prompts"]), BatchRef.from_json(record["samples"])


def played_out(
    run: StageView,
    step: int,
    prompts: BatchRef,
    stage: SamplingStage,
    shard: int,
    begun: BatchRef | None,
) -> tuple[Sampled | Unsampled, dict[str, BatchRef]]:
    """The same turn by turn, with the results of the turns by the keys that they are stored under.

    Of a round of turns the policy's come first, then the opponent's; nobody is asked who has none.
    """
    if run.config.plays_requests:
        return request_rounds.played_out(run, step, prompts, stage, shard, begun, played(run))
    own: Sampled | None = None  # the policy's last turn
    stats: ShardStats | None = None
    engine = other = environment = ""  # that had the last turn: they hold what the next one can use
    turns: dict[str, BatchRef] = {}
    frames: list[BatchRef] = []
    policys, opponents = first_turns(run, begun)
    while policys or opponents or own is None:
        if policys or not opponents:
            found = sample_or_leave(run, step, prompts, stage, shard, begun, rather=engine)
            if isinstance(found, Unsampled):
                return found, turns
            own, begun = found, found.ref
            turns[found.key] = found.ref
            stats, engine = together(stats, found.stats), found.stats.worker
        if opponents:
            assert begun is not None, "whose turn it is was read from it"
            against = opponents_turn(run, step, prompts, stage, shard, begun, rather=other)
            begun, other = against.ref, against.stats.worker
            turns[against.key] = against.ref
        assert begun is not None, "one of them had a turn"
        seconds = 0.0 if stats is None else stats.seconds
        answered, key, environment = answer(run, step, stage, shard, begun, environment, seconds)
        begun = turns[key] = answered.ref
        frames += [] if answered.frames is None else [answered.frames]
        opponents = answered.opponents
        policys = answered.unfinished // played(run).players - opponents
    assert begun is not None and stats is not None
    seen = BatchRef.concat(frames) if frames else None
    return dataclasses.replace(own, ref=begun, stats=stats, frames=seen), turns


def first_turns(run: StageView, begun: BatchRef | None) -> tuple[int, int]:
    """Samples of which the policy's turn is next, and the opponent's; 1 and 0 without an opponent."""
    if played(run).opponent is None or begun is None:
        return 1, 0
    reasons = Counter(begun.fetch_list(run.store, "finish_reason"))
    return reasons[UNFINISHED], reasons[OPPONENTS_TURN]


def played(run: StageView) -> EpisodesConfig:
    """The settings of the run's episodes."""
    assert run.config.episodes is not None, "the run plays no episodes"
    return run.config.episodes


def answer(
    run: StageView,
    step: int,
    stage: SamplingStage,
    shard: int,
    turn: BatchRef,
    last: str,
    sampled_seconds: float,
) -> tuple[AnswerResult, str, str]:
    """The environments' answers to the turns of a shard, their key, and the worker that had them.

    last: the worker that answered the turn before, which has the environments. sampled_seconds: that
    sampling the policy's turns took so far.
    """
    key = key_of("answer", turn.to_json(), played(run).in_keys())
    piece = Stage(run=run, step=step, name="environment", key=key, shard=shard)
    return request_rounds.answered(
        piece,
        last,
        lambda attempt: piece.ask(
            attempt,
            run.engines[ENVIRONMENT],
            EnvironmentHost.answer,
            request=AnswerRequest(
                samples=turn,
                stage=stage.name,
                source=stage.source,
                frames=run.config.keeps_frames and (stage.trains or run.config.sees_frames),
                sampled_seconds=sampled_seconds,
            ),
            out_key=piece.out_key,
        ),
    )
