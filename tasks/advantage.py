"""The advantage task: rewards of all shards become token advantages of the groups that train."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

from prefect import task

from configs.grpo import GRPOConfig
from engines.data.contract import (
    AdvantagePartRequest,
    AdvantageParts,
    AdvantagesRequest,
    AdvantagesResult,
    NothingToTrain,
    PartResult,
    RewardsFailed,
    Scorer,
    TooFewGroups,
    join_parts,
)
from engines.rewards.runner import NO_FUNCTION
from engines.train.batching.packing import WHOLE
from storage.batches.columns import TASK, SampleStatus
from storage.batches.refs import BatchRef
from storage.objects.documents import key_of
from storage.objects.store import Store
from tasks.results import LeftOver, Scored, TrainBatch
from tasks.reward import samples_of
from tasks.run.roles import SCORER
from tasks.run.run import Run
from tasks.run.stage import OPTIONS, Part, Stage, discard, slices, spread

PART_TOKENS = 4_000_000  # response tokens of a part: some hundred MB in its worker
MOST_PARTS = 256
ADDED = ("old_logprobs", "sum_pi_squared", "ref_logprobs", "values")  # by the train engines


@task(name="advantage", task_run_name="advantage", **OPTIONS)
def advantage(
    run: Run,
    step: int,
    scored: list[Scored],
    logprobs: BatchRef | None,
    values: BatchRef | None = None,
    greedy: Sequence[Scored] = (),
    taught: Sequence[BatchRef] = (),
) -> TrainBatch:
    """Estimate advantages and choose the samples that train; `taught`: their teachers' columns.

    A group with a failed sample follows rewards.on_failure; a group that algorithm.selection
    leaves out is counted as filtered, one beyond prompts_per_step dropped as surplus. None of them
    reaches the update, and nor do an opponent's samples.

    logprobs: of all samples, or of those alone that train.
    """
    run.gate.check_turn(step)
    samples = samples_of(run, step, scored)
    if taught:
        samples = samples.with_columns(BatchRef.concat(taught))
    samples = samples.of_policy(run.store)
    selected = None
    if logprobs is not None and len(logprobs) != len(samples):
        selected, logprobs = logprobs, None
    for columns in (logprobs, values):
        if columns is not None:
            samples = samples.with_columns(columns[[n for n in ADDED if n in columns.names]])
    baselines = samples_of(run, step, greedy) if greedy else None
    key = key_of(
        "advantage",
        samples.to_json(),
        None if baselines is None else baselines.to_json(),
        run.algorithm.model_dump(mode="json"),
        *([] if selected is None else [selected.to_json()]),
    )
    stage = Stage(run=run, step=step, name="advantage", key=key)
    with repetitions(run, step, samples, key) as repetition:
        request = AdvantagesRequest(
            samples=samples,
            algorithm=run.algorithm,
            version=step - 1,
            baselines=baselines,
            left_out=left_out(run, step),
            repetition=repetition,
            most_groups=run.config.prompts_per_step,
            kept=selected,
            part_tokens=PART_TOKENS,
        )
        with telling_causes(run, samples, scored):
            result = stage.call(
                run.engines[SCORER], Scorer.advantages, request=request, out_key=stage.out_key
            )
        if isinstance(result, AdvantageParts):
            result = in_parts(run, step, result, key, stage.out_key)
    return TrainBatch(
        ref=result.ref,
        trained=result.trained,
        filtered_by=result.filtered_by,
        dropped=result.dropped,
        metrics=result.metrics,
        baselines=baselines,
        taught=BatchRef.concat(taught) if taught else None,
    )


@contextlib.contextmanager
def telling_causes(run: Run, samples: BatchRef, scored: Sequence[Scored]) -> Iterator[None]:
    """Where too few samples were scored, say what kept them from a reward."""
    try:
        yield
    except (NothingToTrain, RewardsFailed, TooFewGroups) as error:
        causes = causes_of(run.config, run.store, samples, scored)
        raise type(error)(" ".join(filter(None, (str(error), causes)))) from error


def left_out(run: Run, step: int) -> BatchRef | None:
    """The policy's samples of groups that the step dropped without waiting for them."""
    samples = run.clock.left_over.get(step, LeftOver()).samples
    return None if samples is None else samples.of_policy(run.store)


def in_parts(
    run: Run, step: int, parts: AdvantageParts, key: str, out_key: str
) -> AdvantagesResult:
    """Have the parts of a large step written, each by a call of its own.

    Where the estimator compares over the whole batch, or corrections are made here, each part's
    share in that comes first.
    out_key: of what was decided of each sample.
    """
    numbers = range(len(parts))
    measured = [
        Part.of(
            run.engines[SCORER],
            Scorer.advantage_statistics,
            samples=parts.part(number)[0],
            rows=parts.part(number)[1],
            algorithm=run.algorithm,
            out_key=run.files.stage_key(step, "advantage", f"{number + 1}-statistics", key),
        )
        for number in (numbers if parts.measured else ())
    ]
    statistics = spread(run, step, "advantage", measured, BatchRef)
    calls = [
        Part.of(
            run.engines[SCORER],
            Scorer.advantage_part,
            request=AdvantagePartRequest(
                parts=parts,
                number=number,
                algorithm=run.algorithm,
                version=step - 1,
                statistics=BatchRef.concat(statistics) if statistics else None,
            ),
            out_key=run.files.stage_key(step, "advantage", f"{number + 1}-part", key),
        )
        for number in numbers
    ]
    results = spread(run, step, "advantage", calls, PartResult)
    discard(run, measured, statistics)
    run.files.discard({out_key: parts.rows.objects})
    return join_parts(parts, results)


@contextlib.contextmanager
def repetitions(run: Run, step: int, samples: BatchRef, key: str) -> Iterator[BatchRef | None]:
    """The repetition penalties of a large step's samples, which are made of token ids, in parts.

    None where the recipe has no such penalty, or the step is small enough for one worker. They are
    removed once the advantages are there.
    """
    rows = max(1, PART_TOKENS // run.config.longest_response)
    cuts = slices(len(samples), rows, MOST_PARTS)
    if run.algorithm.shaping.repetition is None or len(cuts) == 1:
        yield None
        return
    parts = [
        Part.of(
            run.engines[SCORER],
            Scorer.repetition,
            samples=samples.rows(start, stop),
            algorithm=run.algorithm,
            out_key=run.files.stage_key(step, "advantage", f"{number}-repetition", key),
        )
        for number, (start, stop) in enumerate(cuts, 1)
    ]
    refs = spread(run, step, "advantage", parts, BatchRef)
    yield BatchRef.concat(refs)
    discard(run, parts, refs)


MOST = 3  # causes that are told, those of the most samples


def causes_of(config: GRPOConfig, store: Store, samples: BatchRef, scored: Sequence[Scored]) -> str:
    """Sentences on what kept samples from a reward, by number; empty where nothing is known.

    samples: [N] of the step, scored; scored: the same by shards.
    """
    counts: Counter[str] = Counter()
    unrewarded = 0
    for shard in scored:
        for cause in shard.causes:
            if cause.error == NO_FUNCTION:
                unrewarded += cause.samples
            else:
                counts[f"{cause.function}: {cause.error}"] += cause.samples
    total = len(samples)
    sentences = [
        f"{count} of {total} samples: {cause}" for cause, count in counts.most_common(MOST)
    ]
    if unrewarded and "episode" in samples.names:
        sentences += episode_causes(config, store, samples)
    elif unrewarded:
        sentences.append(f"{unrewarded} of {total} samples: {NO_FUNCTION}")
    failed = sum(shard.failures for shard in scored)
    if config.rewards.on_failure == "drop" and failed < total:
        sentences.append(
            "rewards.on_failure = drop leaves out a whole group for one such sample; in a new run "
            f"complete trains on its others ({total - failed} were scored here)"
        )
    return " ".join(f"{sentence.rstrip('.')}." for sentence in sentences)


def episode_causes(config: GRPOConfig, store: Store, samples: BatchRef) -> list[str]:
    """How episodes ended that have no reward, with the limit that ended them."""
    ends = list(map(str, samples.fetch_list(store, "episode")))
    errors = list(map(str, samples.fetch_list(store, "episode_error")))
    status, _ = samples.fetch_numpy(store, "status")
    tasks = [""] * len(samples)
    if TASK in samples.names:
        tasks = list(map(str, samples.fetch_list(store, TASK)))
    counts: Counter[str] = Counter()
    for end, error, state, task_name in zip(ends, errors, status.tolist(), tasks, strict=True):
        if state == SampleStatus.FAILED:
            why = limit_of(config, end, task_name)
            counts[why + (f": {error.splitlines()[0]}" if error else "")] += 1
    return [
        f"{count} of {len(ends)} episodes ended by {why} before the environment gave a reward"
        for why, count in counts.most_common(MOST)
    ]


def limit_of(config: GRPOConfig, end: str, task: str = "") -> str:
    """What ended an episode, with the setting and its value; `task`: of several, its own."""
    # A run without episodes needs none of these.
    from engines.episodes.contract import DEADLINE, FAILED, PATHS, TOKENS, TURN_TOKENS, TURNS

    episodes = config.played[task]
    longest = config.data.limits(config.rollout.max_new_tokens)
    settings = {
        TURNS: f"episodes.max_turns = {episodes.max_turns}",
        TURN_TOKENS: f"episodes.max_turn_tokens = {episodes.max_turn_tokens}",
        TOKENS: f"rollout.max_new_tokens = {longest.get(task, config.rollout.max_new_tokens)}"
        + (f", episodes.max_tokens = {episodes.max_tokens}" if episodes.max_tokens else ""),
        PATHS: f"{WHOLE} times train.micro_batch_tokens = {config.train.micro_batch_tokens}",
        "turn_seconds": f"episodes.turn_timeout = {episodes.turn_timeout:g}",
        "seconds": f"episodes.timeout = {episodes.timeout:g}",
        DEADLINE: f"episodes.deadline = {episodes.deadline}",
        FAILED: "",
    }
    whose = f" of the task {task}" if task else ""
    return f"{end} ({settings[end]}{whose})" if settings.get(end) else (end or "nothing")
