"""The episodes of a shard, each by itself: it waits for no other one, and is stored once it is over.

An episode, with all its players, is played as a shard of one sample that has the number and the seed
it has in the whole shard; so it is the same as if all were played together. A flow that dies finds
those that were over, and of the others their last turns. At last all are gathered in one batch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from engines.episodes.contract import EnvironmentHost
from engines.rollout.contract import RolloutResult, ShardStats
from storage.batches.columns import GROUP_SIZE
from storage.batches.refs import BatchRef
from storage.objects.documents import key_of
from storage.runs.weights import WeightsRef
from tasks.results import Sampled, Unsampled
from tasks.run.contract import StageView
from tasks.run.roles import ENVIRONMENT
from tasks.run.stage import Stage
from tasks.sampling import SamplingStage, sampled

# Plays episodes: what they are, and the results of their turns by the keys they are stored under.
Player = Callable[
    [StageView, int, BatchRef, SamplingStage, int, BatchRef | None],
    tuple[Sampled | Unsampled, dict[str, BatchRef]],
]


def played_apart(
    run: StageView,
    step: int,
    prompts: BatchRef,
    stage: SamplingStage,
    shard: int,
    begun: BatchRef | None,
    players: int,
    settings: Sequence[object],
    play: Player,
) -> tuple[Sampled | Unsampled, dict[str, BatchRef]]:
    """All episodes of a shard; returns as `play` does, which plays one of them.

    Args:
        run: whose they are.
        step: of the run.
        prompts: [P]; of several players a row each, one behind the other.
        stage: what they are for.
        shard: counted from 1.
        begun: [N] samples to go on with; None: none is begun.
        players: of an episode.
        settings: what a key has to have of the episodes' settings.
        play: for one episode.
    """
    n = stage.sampling.n
    sizes = prompts.group_sizes(run.store, n)
    starts = [0, *itertools.accumulate(sizes)]  # of the samples of each row of prompts
    asked = prompts.drop([name for name in (GROUP_SIZE,) if name in prompts.names])
    episodes = [
        (range(first, first + players), k)
        for first in range(0, len(prompts), players)
        for k in range(sizes[first])
    ]

    def one(number: int) -> tuple[Sampled | Unsampled, str]:
        rows, k = episodes[number - 1]
        own = asked.rows(rows.start, rows.stop)
        first = None if begun is None else begun.take([starts[row] + k for row in rows])
        only = dataclasses.replace(stage, sampling=stage.sampling.only(k))
        before = [] if first is None else [first.to_json()]
        key = key_of("episode", own.to_json(), only.sampling.identity, *settings, *before)
        piece = Stage(run=run, step=step, name="episode", key=key, shard=shard, part=str(number))
        done = piece.finished()
        if done is not None and (found := recorded(run, step, own, done)) is not None:
            return found, piece.out_key
        with run.episodes.held(players):
            episode, turns = play(run, step, own, only, shard, first)
        if isinstance(episode, Sampled):
            piece.finish(record_of(episode))
        discard(run, turns, episode, prompts, begun)
        return episode, piece.out_key

    played = run.episodes.drive(step, f"{stage.name} {shard}", len(episodes), one)
    found = [episode for episode, _ in played]
    places = [
        (starts[row] + k, number, player)
        for number, (rows, k) in enumerate(episodes)
        for player, row in enumerate(rows)
    ]
    samples = [_samples_of(found[number], player) for _, number, player in sorted(places)]
    made = {key: ref for each, key in played if (ref := _ref_of(each)) is not None}
    if not made:
        return Unsampled(begun=None), {}
    key = key_of(
        "gather", prompts.to_json(), [None if ref is None else ref.to_json() for ref in samples]
    )
    piece = Stage(run=run, step=step, name="gather", key=key, shard=shard)
    if (done := piece.finished()) is None:
        ref = piece.call(
            run.engines[ENVIRONMENT],
            EnvironmentHost.gather,
            prompts=prompts,
            n=n,
            samples=samples,
            out_key=piece.out_key,
        )
        done = piece.finish({"ref": ref.to_json()})
    ref = BatchRef.from_json(done["ref"])
    made[piece.out_key] = ref
    over = [episode for episode in found if isinstance(episode, Sampled)]
    if len(over) < len(found):
        return Unsampled(begun=ref), made
    newest = max(over, key=lambda episode: episode.weights.version)
    each = zip(over, episodes, strict=True)
    read = sum(episode.stats.prompt_tokens for episode, (_, k) in each if k == 0)
    seen = [episode.frames for episode in over if episode.frames is not None]
    whole = dataclasses.replace(
        newest,
        prompts=prompts,
        ref=ref,
        stats=together([episode.stats for episode in over], read),
        frames=BatchRef.concat(seen) if seen else None,
    )
    return whole, made


def record_of(episodes: Sampled) -> dict[str, object]:
    """As the mark of episodes that are over has them."""
    record = RolloutResult(ref=episodes.ref, stats=episodes.stats).record()
    frames = None if episodes.frames is None else episodes.frames.to_json()
    return {**record, "frames": frames, "weights": episodes.weights.digest}


def recorded(
    run: StageView, step: int, prompts: BatchRef, record: Mapping[str, Any]
) -> Sampled | None:
    """Episodes by their mark; None where the step may not use the weights that sampled them."""
    usable: dict[str, WeightsRef] = {one.digest: one for one in run.usable_weights(step)}
    weights = usable.get(str(record["weights"]))
    if weights is None:
        return None
    known = sampled(prompts, weights, RolloutResult.of_record(record))
    return dataclasses.replace(known, frames=frames_of(record))


def frames_of(record: Mapping[str, Any]) -> BatchRef | None:
    """The frames that a record names; None where none are kept, as by an older Refrain."""
    found = record.get("frames")
    return None if found is None else BatchRef.from_json(found)


def discard(
    run: StageView,
    results: Mapping[str, BatchRef],
    found: Sampled | Unsampled,
    *besides: BatchRef | None,
) -> None:
    """Remove what was stored on the way and is no part of what was found, nor of others."""
    frames = found.frames if isinstance(found, Sampled) else None
    needed = [ref for ref in (_ref_of(found), frames, *besides) if ref is not None]
    kept = {key for ref in needed for key in ref.objects}
    run.files.discard({key: set(ref.objects) - kept for key, ref in results.items()})


def _ref_of(episode: Sampled | Unsampled) -> BatchRef | None:
    return episode.ref if isinstance(episode, Sampled) else episode.begun


def _samples_of(episode: Sampled | Unsampled, player: int) -> BatchRef | None:
    """A player's sample, as far as it came."""
    ref = _ref_of(episode)
    return None if ref is None else ref.rows(player, player + 1)


def together(episodes: Sequence[ShardStats], prompt_tokens: int) -> ShardStats:
    """What a shard cost whose episodes were played apart; the tokens of each prompt count once."""
    newest = max(episodes, key=lambda one: one.version)
    return dataclasses.replace(
        newest,
        rows=sum(one.rows for one in episodes),
        prompt_tokens=prompt_tokens,
        tokens=sum(one.tokens for one in episodes),
        truncated=sum(one.truncated for one in episodes),
        seconds=max(one.seconds for one in episodes),
        attempt=max(one.attempt for one in episodes),
        oldest=min((one.oldest for one in episodes if one.oldest is not None), default=None),
        read=sum(one.read for one in episodes),
        cached=sum(one.cached for one in episodes),
        cache_use=fullest(episodes),
    )


def fullest(turns: Iterable[ShardStats]) -> float | None:
    """How full an engine's cache was at most, as far as it is known."""
    return max((one.cache_use for one in turns if one.cache_use is not None), default=None)
