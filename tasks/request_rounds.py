"""Rounds of episodes whose turns are answers to requests: what waits is sampled, and what then comes.

An engine knows nothing of episodes here: it is given what requests are after as prompts, a row each,
and the environments get its answers. What an episode is between two rounds is a batch in the store,
and so the log from which an attempt after a failure, or a flow after a crash, goes on.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

from prefect.logging import get_run_logger

from configs.episodes import EpisodesConfig
from engines.episodes.contract import AnswerResult, EnvironmentHost, RoundRequest
from engines.rollout.contract import ShardStats
from storage.batches.columns import SampleStatus
from storage.batches.refs import BatchRef
from storage.objects.documents import key_of
from tasks.results import Sampled, Unsampled
from tasks.reward import by_cause
from tasks.run.attempts import Attempt
from tasks.run.contract import StageView
from tasks.run.roles import ENVIRONMENT
from tasks.run.stage import Stage
from tasks.sampling import SamplingStage, sample_or_leave, together


def played_out(
    run: StageView,
    step: int,
    prompts: BatchRef,
    stage: SamplingStage,
    shard: int,
    begun: BatchRef | None,
    config: EpisodesConfig,
) -> tuple[Sampled | Unsampled, dict[str, BatchRef]]:
    """The episodes of a shard, with the results of the rounds by the keys they are stored under.

    begun: as an earlier step left them; a turn that it cut off is asked for again. config: of the
    episodes. Otherwise as tasks/episodes.py:played_out.
    """
    one = dataclasses.replace(stage, sampling=stage.sampling.of_one)
    found: Sampled | None = None
    first: ShardStats | None = None
    stats: ShardStats | None = None
    environment = ""  # that had the last round: it holds what the next one can use
    results: dict[str, BatchRef] = {}
    turns: BatchRef | None = None
    if begun is not None and "requests" not in begun.names:
        begun = None  # of an older Refrain
    while True:
        answer, key, environment = _gone_on(
            run,
            *(step, prompts, stage, shard, begun, turns, config, environment),
            0.0 if stats is None else stats.seconds,
        )
        begun = results[key] = answer.ref
        if answer.pending is None:
            break
        results[f"{key} requests"] = answer.pending
        rather = "" if found is None else found.stats.worker
        sampled = sample_or_leave(run, step, answer.pending, one, shard, rather=rather)
        if isinstance(sampled, Unsampled):
            return Unsampled(begun=begun), results
        found, turns = sampled, sampled.ref
        results[found.key] = turns
        first, stats = first or found.stats, together(stats, found.stats)
    weights = run.usable_weights(step)[0] if found is None else found.weights
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


def _gone_on(
    run: StageView,
    step: int,
    prompts: BatchRef,
    stage: SamplingStage,
    shard: int,
    begun: BatchRef | None,
    turns: BatchRef | None,
    config: EpisodesConfig,
    last: str,
    sampled_seconds: float,
) -> tuple[AnswerResult, str, str]:
    """What the environments do after the turns of a round, its key, and the worker that had them."""
    before = [None if ref is None else ref.to_json() for ref in (begun, turns)]
    identity = stage.sampling.identity
    key = key_of("requests", prompts.to_json(), stage.name, identity, *before, config.in_keys())
    piece = Stage(run=run, step=step, name="environment", key=key, shard=shard)
    return answered(
        piece,
        last,
        lambda attempt: piece.ask(
            attempt,
            run.engines[ENVIRONMENT],
            EnvironmentHost.go_on,
            request=RoundRequest(
                prompts=prompts,
                n=stage.sampling.n,
                begun=begun,
                turns=turns,
                stage=stage.name,
                source=stage.source,
                sampled_seconds=sampled_seconds,
                group=stage.sampling.group,
                first=stage.sampling.first,
            ),
            out_key=piece.out_key,
        ),
    )


def answered(
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
