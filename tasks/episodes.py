"""Episodes: the rollout engines write a turn, the environments answer, until all of a shard are over.

All of a shard go on together (`play_turns`), or each by itself (`play_apart`): then it waits for no
other one, and is stored once it is over. It is played as a shard of one sample that has the number
and the seed it has in the whole shard; so it is the same as if all were played together.

With several players each has samples of its own, and the engines write for those whose turn it is:
those that hold the policy, or those of the opponent, a frozen version, for the players that it has.

Where turns are answers to requests (`play_rounds`), an engine knows nothing of episodes: it is given
what requests are after as prompts, a row each, and the environments get its answers.

Each turn is a batch in the store, of the engine's tokens or with the environments' answers, and so
the log of the episode: an attempt after a failure, or a flow after a crash, goes on from the last.
Once all are over, the last batch has everything and the others are removed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prefect.logging import get_run_logger

from configs.episodes import EpisodesConfig
from engines.episodes.contract import (
    AnswerRequest,
    AnswerResult,
    EnvironmentHost,
    OpponentSeats,
    RoundRequest,
)
from engines.episodes.frames import frames_by_turn
from engines.rollout.contract import RolloutResult, ShardStats
from storage.batches.columns import GROUP_SIZE, OPPONENTS_TURN, UNFINISHED, SampleStatus
from storage.batches.refs import BatchRef
from storage.objects.documents import key_of
from storage.runs.weights import WeightsRef
from tasks.results import Sampled, Unsampled
from tasks.reward import by_cause
from tasks.run.attempts import Attempt
from tasks.run.contract import StageView
from tasks.run.roles import ENVIRONMENT, OPPONENT
from tasks.run.stage import Stage
from tasks.sampling import SamplingStage, opponents_turn, sample_or_leave, sampled, together


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeShard:
    """A shard of a step's episodes, or one of these."""

    run: StageView
    step: int
    stage: SamplingStage
    number: int  # of the shard, counted from 1

    @property
    def settings(self) -> EpisodesConfig:
        """Of the run's episodes."""
        assert self.run.config.episodes is not None, "the run plays no episodes"
        return self.run.config.episodes

    @property
    def in_keys(self) -> list[object]:
        """What a key has to have of the settings, and of the opponent."""
        opponent = self.settings.opponent
        digests = [] if opponent is None else [self.run.engines[OPPONENT].weights.digest]
        return [self.settings.in_keys(), *digests]

    def piece(self, name: str, key: str, part: str = "") -> Stage:
        """A piece of its work, by its key."""
        return Stage(run=self.run, step=self.step, name=name, key=key, shard=self.number, part=part)


def play(
    run: StageView,
    step: int,
    prompts: BatchRef,
    stage: SamplingStage,
    shard: int,
    begun: BatchRef | None,
) -> Sampled | Unsampled:
    """The episodes of a shard (counted from 1), or find them over."""
    episodes = EpisodeShard(run=run, step=step, stage=stage, number=shard)
    settings, (own, *opponent) = episodes.settings, episodes.in_keys
    carried = [] if begun is None else [begun.to_json()]
    identity = stage.sampling.identity
    key = key_of("episodes", prompts.to_json(), identity, own, *carried, *opponent)
    whole = episodes.piece("episodes", key)
    record = whole.finished()
    if record is not None and (known := of_record(run, step, prompts, record)) is not None:
        return known
    asked, first = prompts, begun
    if settings.players > 1:
        asked, unplayed = deal(episodes, prompts)
        first = unplayed if begun is None else begun
    if settings.drive == "apart":
        samples, turns = play_apart(episodes, asked, first)
    else:
        with run.episodes.held(sum(prompts.group_sizes(run.store, stage.sampling.n))):
            samples, turns = play_turns(episodes, asked, first)
    if isinstance(samples, Sampled):
        if run.config.sees_frames:
            by_turn = frames_by_turn(run.store, prompts, samples.ref, samples.frames)
            samples = dataclasses.replace(samples, ref=samples.ref.with_columns(by_turn))
        whole.finish(record_of(samples))
        samples = dataclasses.replace(samples, prompts=prompts)
    discard(run, turns, samples, first, asked)
    return samples


def deal(shard: EpisodeShard, prompts: BatchRef) -> tuple[BatchRef, BatchRef]:
    """A shard's prompts as rows of their players, and the samples before their first turns."""
    n, settings = shard.stage.sampling.n, shard.settings
    opponent = None
    if settings.opponent is not None:
        digest = shard.run.engines[OPPONENT].weights.digest
        opponent = OpponentSeats(digest=digest, policy_plays=settings.opponent.policy_plays)
    opponents = [] if opponent is None else [asdict(opponent)]
    key = key_of("deal", prompts.to_json(), n, settings.players, *opponents)
    piece = shard.piece("deal", key)
    if (record := piece.finished()) is None:
        asked, begun = piece.call(
            shard.run.engines[ENVIRONMENT],
            EnvironmentHost.deal,
            prompts=prompts,
            n=n,
            out_key=piece.out_key,
            opponent=opponent,
        )
        record = piece.finish({"prompts": asked.to_json(), "samples": begun.to_json()})
    return BatchRef.from_json(record["prompts"]), BatchRef.from_json(record["samples"])


def play_turns(
    shard: EpisodeShard, prompts: BatchRef, begun: BatchRef | None
) -> tuple[Sampled | Unsampled, dict[str, BatchRef]]:
    """The same turn by turn, with the results of the turns by the keys that they are stored under.

    begun: samples to go on with; None: none is begun. Of a round of turns the policy's come first,
    then the opponent's; nobody is asked who has none.
    """
    run, step, stage = shard.run, shard.step, shard.stage
    if run.config.plays_requests:
        return play_rounds(shard, prompts, begun)
    own: Sampled | None = None  # the policy's last turn
    stats: ShardStats | None = None
    engine = other = environment = ""  # that had the last turn: they hold what the next one can use
    turns: dict[str, BatchRef] = {}
    frames: list[BatchRef] = []
    policys, opponents = first_turns(shard, begun)
    while policys or opponents or own is None:
        if policys or not opponents:
            turn = sample_or_leave(run, step, prompts, stage, shard.number, begun, rather=engine)
            if isinstance(turn, Unsampled):
                return turn, turns
            own, begun = turn, turn.ref
            turns[turn.key] = turn.ref
            stats, engine = together(stats, turn.stats), turn.stats.worker
        if opponents:
            assert begun is not None, "whose turn it is was read from it"
            against = opponents_turn(run, step, prompts, stage, shard.number, begun, rather=other)
            begun, other = against.ref, against.stats.worker
            turns[against.key] = against.ref
        assert begun is not None, "one of them had a turn"
        seconds = 0.0 if stats is None else stats.seconds
        answers, key, environment = answer(shard, begun, environment, seconds)
        begun = turns[key] = answers.ref
        frames += [] if answers.frames is None else [answers.frames]
        opponents = answers.opponents
        policys = answers.unfinished // shard.settings.players - opponents
    assert begun is not None and stats is not None
    shown = BatchRef.concat(frames) if frames else None
    return dataclasses.replace(own, ref=begun, stats=stats, frames=shown), turns


def first_turns(shard: EpisodeShard, begun: BatchRef | None) -> tuple[int, int]:
    """Samples of which the policy's turn is next, and the opponent's; 1 and 0 without an opponent."""
    if shard.settings.opponent is None or begun is None:
        return 1, 0
    reasons = Counter(begun.fetch_list(shard.run.store, "finish_reason"))
    return reasons[UNFINISHED], reasons[OPPONENTS_TURN]


def answer(
    shard: EpisodeShard, turn: BatchRef, last: str, sampled_seconds: float
) -> tuple[AnswerResult, str, str]:
    """The environments' answers to the turns of a shard, their key, and the worker that had them.

    last: the worker that answered the turn before, which has the environments. sampled_seconds: that
    sampling the policy's turns took so far.
    """
    config, stage = shard.run.config, shard.stage
    piece = shard.piece("environment", key_of("answer", turn.to_json(), shard.settings.in_keys()))
    request = AnswerRequest(
        samples=turn,
        stage=stage.name,
        source=stage.source,
        frames=config.keeps_frames and (stage.trains or config.sees_frames),
        sampled_seconds=sampled_seconds,
    )
    pool, method = shard.run.engines[ENVIRONMENT], EnvironmentHost.answer
    return ask_environments(
        piece,
        last,
        lambda attempt: piece.ask(attempt, pool, method, request=request, out_key=piece.out_key),
    )


def play_rounds(
    shard: EpisodeShard, prompts: BatchRef, begun: BatchRef | None
) -> tuple[Sampled | Unsampled, dict[str, BatchRef]]:
    """The episodes of a shard, with the results of the rounds by the keys they are stored under.

    begun: as an earlier step left them; a turn that it cut off is asked for again.
    """
    run, step = shard.run, shard.step
    single = dataclasses.replace(shard.stage, sampling=shard.stage.sampling.of_one)
    last: Sampled | None = None
    first: ShardStats | None = None
    stats: ShardStats | None = None
    environment = ""  # that had the last round: it holds what the next one can use
    results: dict[str, BatchRef] = {}
    turns: BatchRef | None = None
    if begun is not None and "requests" not in begun.names:
        begun = None  # of an older Refrain
    while True:
        seconds = 0.0 if stats is None else stats.seconds
        answers, key, environment = go_on(shard, prompts, begun, turns, environment, seconds)
        begun = results[key] = answers.ref
        if answers.pending is None:
            break
        results[f"{key} requests"] = answers.pending
        worker = "" if last is None else last.stats.worker
        turn = sample_or_leave(run, step, answers.pending, single, shard.number, rather=worker)
        if isinstance(turn, Unsampled):
            return Unsampled(begun=begun), results
        last, turns = turn, turn.ref
        results[last.key] = turns
        first, stats = first or last.stats, together(stats, last.stats)
    weights = run.usable_weights(step)[0] if last is None else last.weights
    if first is None or stats is None:  # all ended before they had asked anything
        first = stats = ShardStats(
            rows=0,
            prompt_tokens=0,
            tokens=0,
            truncated=0,
            seconds=0.0,
            worker="",
            attempt=0,
            version=weights.version,
            digest=weights.digest,
        )
    status = Counter(begun.fetch_numpy(run.store, "status")[0].tolist())
    stats = dataclasses.replace(
        stats,
        rows=len(begun),
        prompt_tokens=first.prompt_tokens * len(prompts) // max(1, len(begun)),
        truncated=status[SampleStatus.TRUNCATED],
        unfinished=0,
    )
    return Sampled(prompts=prompts, weights=weights, ref=begun, stats=stats), results


def go_on(
    shard: EpisodeShard,
    prompts: BatchRef,
    begun: BatchRef | None,
    turns: BatchRef | None,
    last: str,
    sampled_seconds: float,
) -> tuple[AnswerResult, str, str]:
    """What the environments do after the turns of a round, its key, and the worker that had them."""
    stage, sampling = shard.stage, shard.stage.sampling
    before = [None if ref is None else ref.to_json() for ref in (begun, turns)]
    settings = shard.settings.in_keys()
    key = key_of("requests", prompts.to_json(), stage.name, sampling.identity, *before, settings)
    request = RoundRequest(
        prompts=prompts,
        n=sampling.n,
        begun=begun,
        turns=turns,
        stage=stage.name,
        source=stage.source,
        sampled_seconds=sampled_seconds,
        group=sampling.group,
        first=sampling.first,
    )
    piece = shard.piece("environment", key)
    pool, method = shard.run.engines[ENVIRONMENT], EnvironmentHost.go_on
    return ask_environments(
        piece,
        last,
        lambda attempt: piece.ask(attempt, pool, method, request=request, out_key=piece.out_key),
    )


def ask_environments(
    piece: Stage, last: str, ask: Callable[[Attempt], AnswerResult]
) -> tuple[AnswerResult, str, str]:
    """What environments answer in a piece of a shard, or find that done; its key; their worker.

    last: the worker that answered before, which has the environments; it is asked first. ask: calls
    an engine in a try. Of two tries the answers that stand are those that were marked first.
    """
    if (record := piece.finished()) is not None:
        return AnswerResult.of_record(record), piece.out_key, last
    with piece.attempted() as attempt:
        attempt.assignment.worker = last
        result = ask(attempt)
    for (_, error), samples in by_cause(result.failures).items():
        numbers = ", ".join(map(str, samples))
        get_run_logger().error("The environment of episode %s failed: %s", numbers, error)
    record = piece.finish(result.record())
    return AnswerResult.of_record(record), piece.out_key, attempt.assignment.worker


def play_apart(
    shard: EpisodeShard, prompts: BatchRef, begun: BatchRef | None
) -> tuple[Sampled | Unsampled, dict[str, BatchRef]]:
    """All episodes of a shard, each by itself; returns as `play_turns` does, which plays one of them.

    Args:
        shard: whose they are.
        prompts: [P]; of several players a row each, one behind the other.
        begun: [N] samples to go on with; None: none is begun.
    """
    run, step, stage, players = shard.run, shard.step, shard.stage, shard.settings.players
    n = stage.sampling.n
    sizes = prompts.group_sizes(run.store, n)
    starts = [0, *itertools.accumulate(sizes)]  # of the samples of each row of prompts
    asked = prompts.drop([name for name in (GROUP_SIZE,) if name in prompts.names])
    episodes = [
        (range(first, first + players), k)
        for first in range(0, len(prompts), players)
        for k in range(sizes[first])
    ]

    def play_episode(number: int) -> tuple[Sampled | Unsampled, str]:
        rows, k = episodes[number - 1]
        own = asked.rows(rows.start, rows.stop)
        first = None if begun is None else begun.take([starts[row] + k for row in rows])
        only = dataclasses.replace(stage, sampling=stage.sampling.only(k))
        before = [] if first is None else [first.to_json()]
        identity = only.sampling.identity
        key = key_of("episode", own.to_json(), identity, *shard.in_keys, *before)
        piece = shard.piece("episode", key, str(number))
        record = piece.finished()
        if record is not None and (known := of_record(run, step, own, record)) is not None:
            return known, piece.out_key
        with run.episodes.held(players):
            episode, turns = play_turns(dataclasses.replace(shard, stage=only), own, first)
        if isinstance(episode, Sampled):
            piece.finish(record_of(episode))
        discard(run, turns, episode, prompts, begun)
        return episode, piece.out_key

    outcomes = run.episodes.drive(step, f"{stage.name} {shard.number}", len(episodes), play_episode)
    played = [episode for episode, _ in outcomes]
    places = [
        (starts[row] + k, number, player)
        for number, (rows, k) in enumerate(episodes)
        for player, row in enumerate(rows)
    ]
    samples = [_samples_of(played[number], player) for _, number, player in sorted(places)]
    results = {key: ref for episode, key in outcomes if (ref := _ref_of(episode)) is not None}
    if not results:
        return Unsampled(begun=None), {}
    key = key_of(
        "gather", prompts.to_json(), [None if ref is None else ref.to_json() for ref in samples]
    )
    piece = shard.piece("gather", key)
    if (record := piece.finished()) is None:
        ref = piece.call(
            run.engines[ENVIRONMENT],
            EnvironmentHost.gather,
            prompts=prompts,
            n=n,
            samples=samples,
            out_key=piece.out_key,
        )
        record = piece.finish({"ref": ref.to_json()})
    ref = BatchRef.from_json(record["ref"])
    results[piece.out_key] = ref
    over = [episode for episode in played if isinstance(episode, Sampled)]
    if len(over) < len(played):
        return Unsampled(begun=ref), results
    newest = max(over, key=lambda episode: episode.weights.version)
    firsts = [episode for episode, (_, k) in zip(over, episodes, strict=True) if k == 0]
    prompt_tokens = sum(episode.stats.prompt_tokens for episode in firsts)
    frames = [episode.frames for episode in over if episode.frames is not None]
    whole = dataclasses.replace(
        newest,
        prompts=prompts,
        ref=ref,
        stats=join_stats([episode.stats for episode in over], prompt_tokens),
        frames=BatchRef.concat(frames) if frames else None,
    )
    return whole, results


def record_of(episodes: Sampled) -> dict[str, object]:
    """As the mark of episodes that are over has them."""
    record = RolloutResult(ref=episodes.ref, stats=episodes.stats).record()
    frames = None if episodes.frames is None else episodes.frames.to_json()
    return {**record, "frames": frames, "weights": episodes.weights.digest}


def of_record(
    run: StageView, step: int, prompts: BatchRef, record: Mapping[str, Any]
) -> Sampled | None:
    """Episodes by their mark; None where the step may not use the weights that sampled them."""
    usable: dict[str, WeightsRef] = {ref.digest: ref for ref in run.usable_weights(step)}
    weights = usable.get(str(record["weights"]))
    if weights is None:
        return None
    episodes = sampled(prompts, weights, RolloutResult.of_record(record))
    frames = record.get("frames")  # of an older Refrain there is no such field
    return dataclasses.replace(episodes, frames=frames and BatchRef.from_json(frames))


def discard(
    run: StageView,
    results: Mapping[str, BatchRef],
    samples: Sampled | Unsampled,
    *others: BatchRef | None,
) -> None:
    """Remove what was stored on the way and is no part of the samples, nor of others."""
    frames = samples.frames if isinstance(samples, Sampled) else None
    needed = [ref for ref in (_ref_of(samples), frames, *others) if ref is not None]
    objects = {key for ref in needed for key in ref.objects}
    run.files.discard({key: set(ref.objects) - objects for key, ref in results.items()})


def _ref_of(episode: Sampled | Unsampled) -> BatchRef | None:
    return episode.ref if isinstance(episode, Sampled) else episode.begun


def _samples_of(episode: Sampled | Unsampled, player: int) -> BatchRef | None:
    """A player's sample, as far as it came."""
    ref = _ref_of(episode)
    return None if ref is None else ref.rows(player, player + 1)


def join_stats(episodes: Sequence[ShardStats], prompt_tokens: int) -> ShardStats:
    """What a shard cost whose episodes were played apart; the tokens of each prompt count once."""
    newest = max(episodes, key=lambda episode: episode.version)
    uses = [episode.cache_use for episode in episodes]
    return dataclasses.replace(
        newest,
        rows=sum(episode.rows for episode in episodes),
        prompt_tokens=prompt_tokens,
        tokens=sum(episode.tokens for episode in episodes),
        truncated=sum(episode.truncated for episode in episodes),
        seconds=max(episode.seconds for episode in episodes),
        attempt=max(episode.attempt for episode in episodes),
        oldest=min(
            (episode.oldest for episode in episodes if episode.oldest is not None), default=None
        ),
        read=sum(episode.read for episode in episodes),
        cached=sum(episode.cached for episode in episodes),
        cache_use=max((use for use in uses if use is not None), default=None),
    )
