"""Steps that have more groups under way than they train on, and do not wait for the longest answers.

A step has its samples once prompts_per_step groups are finished. The others are dropped, or carried:
the next step goes on from their tokens (rollout.partial_rollout). A carried group counts once, in the
step that trains it. Where a step must wait for groups that can be carried no longer, the others are
handed on before that, so that the engines are busy meanwhile.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping
from typing import TypeGuard, cast

import numpy as np
from prefect.futures import PrefectFuture

from configs.grpo import GRPOConfig
from storage.batches.columns import GROUP_SIZE, SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.documents import key_of
from storage.runs.commit_log import CarriedGroup
from tasks.results import (
    Carried,
    LeftOver,
    Prompts,
    Sampled,
    SampledShards,
    Unsampled,
    WholeShards,
)
from tasks.run.contract import StepView
from tasks.run.roles import ROLLOUT
from tasks.run.shard_driver import ShardRange, shard_ranges

OVERDUE = "overdue"  # reasons for which groups are dropped, in the ledger
OVER_SAMPLED = "over_sampled"
CUT = "cut"  # finish reason of an answer that ended as it was


def finished_groups(
    run: StepView,
    step: int,
    prompts: Prompts,
    submit: Callable[[ShardRange], PrefectFuture[SampledShards]],
) -> list[WholeShards | PrefectFuture[WholeShards]] | None:
    """The groups that the step trains on, once it is known which; the others are settled.

    None where neither the settings nor the step before leave groups over.

    submit: starts a rollout task for some groups, each of which is a shard. Groups that the step
    waits for, since they are due, come as futures: the next step may begin meanwhile. Raises what
    the first task raised that failed.
    """
    config = run.config
    if not (config.over_samples or prompts.carried):
        return None
    count = len(prompts.ref)
    wanted = min(config.prompts_per_step, count)
    due = overdue_groups(config, step, prompts.carried)
    awaited = due if config.rollout.overdue == "wait" else frozenset[int]()
    tasks = {
        shards: submit(shards) for shards in ranges_apart(count, awaited, run.shards.task_runs)
    }
    others = {shards: task for shards, task in tasks.items() if shards.first - 1 not in awaited}
    numbers = frozenset(number for shards in others for number in shards)
    run.shards.wait_for(step, wanted - len(awaited), numbers, list(tasks.values()))
    if count > wanted:
        run.engines[ROLLOUT].cut(step, keep=[number + 1 for number in awaited])
    found = {
        number - 1: shard
        for shards, task in others.items()
        for number, shard in zip(shards, task.result(), strict=True)
    }
    if config.rollout.overdue == "cut":
        found |= {number: ended(run, step, number, found[number]) for number in due}
    finished = {number: shard for number, shard in found.items() if is_finished(shard)}
    ages = {number: shard.stats.oldest or 0 for number, shard in finished.items()}
    chosen = choose(ages, due, wanted - len(awaited))
    rest = {number: shard for number, shard in found.items() if number not in chosen}
    run.clock.leave(step, prompts.cursor, settled(run, step, prompts, rest, due))
    # One that is awaited is not cut, so it comes whole.
    members = {
        shards.first - 1: cast("PrefectFuture[WholeShards]", task)
        for shards, task in tasks.items()
        if shards not in others
    } | {
        chosen[places.first - 1]: tuple(finished[chosen[place - 1]] for place in places)
        for places in run.shards.ranges(len(chosen))
    }
    return [members[first] for first in sorted(members)]


def ranges_apart(count: int, awaited: Collection[int], task_runs: int) -> list[ShardRange]:
    """So many groups, those that are awaited in tasks of their own: the others' are cut first."""
    found: list[ShardRange] = []
    for _, run_of in itertools.groupby(range(count), lambda number: number in awaited):
        numbers = list(run_of)
        most = math.ceil(task_runs * len(numbers) / count)
        found += shard_ranges(numbers[0] + 1, numbers[-1] + 1, count, max(1, most))
    return found


def overdue_groups(config: GRPOConfig, step: int, carried: Carried) -> frozenset[int]:
    """Numbers of the carried groups that the step after this one could not train.

    Step k + 1 trains version k, and so no token of a version before k - max_staleness.
    """
    return frozenset(
        number
        for number, group in enumerate(carried.groups)
        if is_overdue(config, step, group.since, group.oldest)
    )


def is_overdue(config: GRPOConfig, step: int, since: int, oldest: int | None) -> bool:
    """Whether the step after this one could not train a group begun in step `since`.

    oldest: the policy version of its oldest token; None without a token.
    """
    most = config.rollout.max_carried_steps
    too_stale = oldest is not None and step - oldest > config.max_staleness
    return too_stale or (most is not None and step - since >= most)


def choose(ages: Mapping[int, int], due: frozenset[int], wanted: int) -> list[int]:
    """Numbers of the finished groups to train on, ascending: those that are due, then the oldest.

    ages: policy version of the oldest token of each finished group, by its number.
    """
    ready = sorted(ages, key=lambda number: (number not in due, ages[number], number))
    return sorted(ready[:wanted])


def is_finished(shard: Sampled | Unsampled) -> TypeGuard[Sampled]:
    """Whether every answer of a group is there."""
    return isinstance(shard, Sampled) and shard.stats.unfinished == 0


def ended(run: StepView, step: int, number: int, shard: Sampled | Unsampled) -> Sampled | Unsampled:
    """A group whose answers end as they are, truncated; as it is where one of them has no token."""
    if isinstance(shard, Unsampled) or is_finished(shard):
        return shard
    if not shard.ref.lengths(run.store, "response_ids").all():
        return shard
    status = shard.ref.fetch_numpy(run.store, "status")[0]
    reasons = shard.ref.fetch_list(run.store, "finish_reason")
    cut = status == SampleStatus.UNFINISHED
    columns: dict[str, object] = {
        "status": np.where(cut, np.int64(SampleStatus.TRUNCATED), status),
        "finish_reason": [CUT if now else reason for now, reason in zip(cut, reasons, strict=True)],
    }
    key = run.files.stage_key(step, "rollout", f"{number + 1}-cut", key_of(shard.ref.to_json()))
    count = int(cut.sum())
    return dataclasses.replace(
        shard,
        ref=shard.ref.with_columns(write_batch(run.store, key, columns)),
        stats=dataclasses.replace(
            shard.stats, unfinished=0, truncated=shard.stats.truncated + count
        ),
    )


def settled(
    run: StepView,
    step: int,
    prompts: Prompts,
    rest: Mapping[int, Sampled | Unsampled],
    due: frozenset[int],
) -> LeftOver:
    """What becomes of the groups, by number, that the step does not train on."""
    late = [number for number in rest if number in due]
    others = [number for number in rest if number not in due]
    carried = others if run.config.carries else []
    dropped = {OVERDUE: len(late), OVER_SAMPLED: len(others) - len(carried)}
    left_out = [samples_of(rest[number]) for number in rest if number not in carried]
    there = [ref for ref in left_out if ref is not None]
    return LeftOver(
        carried=_carried(run, step, prompts, {number: rest[number] for number in carried}),
        dropped={reason: count for reason, count in dropped.items() if count},
        samples=BatchRef.concat(there) if there else None,
    )


def _carried(
    run: StepView, step: int, prompts: Prompts, shards: Mapping[int, Sampled | Unsampled]
) -> Carried:
    if not shards:
        return Carried()
    before = prompts.carried.groups
    oldest = {number: _oldest(run, shard) for number, shard in shards.items()}
    since = {number: before[number].since if number < len(before) else step for number in shards}
    groups = handed_on(run.config, step + 1, since, oldest)
    there = {number: samples_of(shards[number]) for number, one in groups.items() if one.begun}
    begun = {number: ref for number, ref in there.items() if ref is not None}
    if GROUP_SIZE in prompts.ref.names:
        own = {number: {"samples": len(ref)} for number, ref in begun.items()}
        groups = {n: one.model_copy(update=own.get(n, {})) for n, one in groups.items()}
    return Carried(
        prompts=prompts.ref.take(list(groups)),
        begun=BatchRef.concat(list(begun.values())) if begun else None,
        groups=tuple(groups.values()),
    )


def handed_on(
    config: GRPOConfig, step: int, since: Mapping[int, int], oldest: Mapping[int, int | None]
) -> dict[int, CarriedGroup]:
    """The groups that `step` goes on with, by number, in the order in which it gets them.

    Those that it must train come first: it waits for them in task runs of their own, and so they are
    one range. since: the step that began each group; oldest: policy version of its oldest token.
    """
    order = sorted(since, key=lambda n: (not is_overdue(config, step, since[n], oldest[n]), n))
    return {
        n: CarriedGroup(since=since[n], begun=oldest[n] is not None, oldest=oldest[n])
        for n in order
    }


def samples_of(shard: Sampled | Unsampled) -> BatchRef | None:
    """The samples of a group, as far as they came."""
    return shard.ref if isinstance(shard, Sampled) else shard.begun


def _oldest(run: StepView, shard: Sampled | Unsampled) -> int | None:
    """Policy version of a group's oldest token; None without a token."""
    if isinstance(shard, Sampled):
        return shard.stats.oldest
    if shard.begun is None:
        return None
    spans, _ = shard.begun.of_policy(run.store).fetch_numpy(run.store, "weight_spans")
    return int(spans[0::3].min()) if len(spans) else None
