"""Dynamic sampling: a step draws and samples in rounds until enough groups can teach something.

A round draws dynamic_sampling.over_sampling times the groups that are still missing; which of those
sampled so far would train is asked of a cpu worker, which chooses as `advantages` does later. The
rounds end when prompts_per_step would, after max_rounds, or with the data's epochs. Then the first
prompts_per_step of them train. The others are in the step's samples too, and in the ledger as
filtered, by rule, or as dropped: `surplus`, or `reward_failed`. DAPO, arXiv:2503.14476.

Surplus groups are not carried to the next step. What carries groups (tasks/over_sampling) hands on
answers in progress, one group to a shard, before they are scored; these are finished and scored, so
only their sampling would be spared, which over_sampling = 1 spares altogether, and they would be one
version staler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from prefect import task
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger

from configs.dapo import DAPOConfig
from engines.data.contract import AdvantagesRequest, Scorer, TooFewGroups
from storage.batches.refs import BatchRef
from storage.objects.documents import key_of
from storage.prompts.cursor import Exhausted
from tasks.advantage import repetitions, telling_causes
from tasks.draw import check_enough, draw_groups
from tasks.results import Carried, Prompts, Scored
from tasks.reward import samples_of
from tasks.run.events import RoundBegan
from tasks.run.flow_options import result_of
from tasks.run.roles import SCORER
from tasks.run.run import Run
from tasks.run.stage import OPTIONS, Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """What a step has drawn and sampled so far.

    Of a step that wants 4 groups, after rounds of 6 and 3 prompts: drawn has two, groups is 4 or 5.
    """

    drawn: tuple[Prompts, ...] = ()  # of each round
    scored: tuple[Scored, ...] = ()  # shards of all rounds, in order
    groups: int = 0  # that would train, also beyond those that the step wants
    kept: BatchRef | None = None  # samples of the groups that train, the first ones
    over: bool = False  # whether the step samples no more

    @property
    def prompts(self) -> Prompts:
        """The prompts of all rounds, as those of one step."""
        groups = sum(len(prompts.ref) for prompts in self.drawn)
        dropped: dict[str, list[int]] = {}
        for round_prompts in self.drawn:
            for reason, rows in round_prompts.dropped.items():
                dropped[reason] = dropped.get(reason, []) + rows
        return Prompts(
            ref=BatchRef.concat([prompts.ref for prompts in self.drawn if len(prompts.ref)]),
            cursor=self.drawn[-1].cursor,
            drawn=sum(prompts.drawn for prompts in self.drawn),
            dropped=dropped,
            passed_over=sum(prompts.passed_over for prompts in self.drawn),
            readmissions=self.drawn[0].readmissions,
            metrics={
                "sampling/rounds": float(len(self.drawn)),
                "sampling/groups": float(groups),
                "sampling/informative": self.groups / groups,
            },
        )


@task(name="draw", task_run_name="draw", **OPTIONS)
def draw_round(run: Run, step: int, rounds: Rounds) -> Prompts:
    """Draw the prompts of the next round; their groups are numbered on from those before.

    Where the data's epochs end there may be fewer, or none. In the first round, Exhausted is raised
    as in `tasks.draw.draw`.
    """
    config, first = settings(run), not rounds.drawn
    cursor = run.clock.drawn[step] if first else rounds.drawn[-1].cursor
    number = run.clock.first_group(step) + sum(len(prompts.ref) for prompts in rounds.drawn)
    groups = draw_groups(run, step, cursor, number, round_size(config, rounds.groups))
    if first:
        check_enough(config, step, groups.groups)
    shards = sum(len(part.sampled) for part in rounds.scored)
    if not first:
        run.tell(RoundBegan(step=step, shards=min(config.rollout.shards, groups.groups)))
    return Prompts(
        ref=BatchRef.concat(groups.parts) if groups.parts else rounds.drawn[0].ref.rows(0, 0),
        cursor=groups.cursor,
        drawn=groups.drawn,
        dropped=groups.dropped,
        shards_before=shards,
        passed_over=groups.passed_over,
        readmissions=groups.readmissions,
    )


def round_size(config: DAPOConfig, groups: int) -> int:
    """Prompts of a round, where so many groups would train already."""
    missing = config.prompts_per_step - groups
    return math.ceil(config.dynamic_sampling.over_sampling * missing - 1e-9)


def with_round(
    run: Run,
    step: int,
    rounds: Rounds,
    prompts: PrefectFuture[Prompts],
    scored: Sequence[PrefectFuture[Scored]],
) -> Rounds:
    """The rounds with one more, once that is scored. Raises what a task of it raised that failed."""
    return result_of(choose_groups.submit(run, step, rounds, prompts, scored))  # type: ignore[call-overload]


@task(name="selection", task_run_name="selection", **OPTIONS)
def choose_groups(
    run: Run, step: int, rounds: Rounds, prompts: Prompts, scored: list[Scored]
) -> Rounds:
    """See which groups of all rounds would train, and whether the step needs another round.

    After the last one the next step may draw. Raises TooFewGroups where that is to end the run, and
    Exhausted where the data's epochs left too few, by data.last_step.
    """
    rounds_prompts, every = (*rounds.drawn, prompts), (*rounds.scored, *scored)
    samples = samples_of(run, step, every).of_policy(run.store)
    algorithm, target = run.algorithm, run.config.prompts_per_step
    key = key_of("selection", samples.to_json(), algorithm.model_dump(mode="json"), target)
    with (
        repetitions(run, step, samples, key) as repetition,
        telling_causes(run, samples, every),
    ):
        selection = Stage(run=run, step=step, name="selection", key=key).call(
            run.engines[SCORER],
            Scorer.informative,
            request=AdvantagesRequest(
                samples=samples,
                algorithm=algorithm,
                version=step - 1,
                repetition=repetition,
                most_groups=target,
            ),
        )
    with telling_causes(run, samples, every):
        over = is_over(settings(run), step, rounds_prompts, selection.groups)
    if over:
        run.clock.has_drawn(step, prompts.cursor, Carried())
        if selection.groups < target:
            get_run_logger().warning(
                "Step %d trains on %d groups instead of %d: no more could be found in %d rounds.",
                step,
                selection.groups,
                target,
                len(rounds_prompts),
            )
    return Rounds(
        drawn=rounds_prompts, scored=every, groups=selection.groups, kept=selection.kept, over=over
    )


def is_over(config: DAPOConfig, step: int, rounds_prompts: Sequence[Prompts], groups: int) -> bool:
    """Whether a step samples no more, where so many groups would train. Raises as choose_groups."""
    limits, target, epochs = config.dynamic_sampling, config.prompts_per_step, config.data.epochs
    if groups >= target:
        return True
    count = sum(len(prompts.ref) for prompts in rounds_prompts)
    if rounds_prompts[-1].cursor.remaining(epochs) == 0:
        if groups < config.fewest_prompts:
            raise Exhausted(
                f"data.epochs = {epochs} left {count} prompts for step {step}, of which {groups} "
                f"have answers whose rewards differ, and a step takes {config.fewest_prompts}."
            )
        return True
    if len(rounds_prompts) < limits.max_rounds:
        return False
    if limits.on_shortage == "stop":
        raise TooFewGroups(
            f"Step {step} wants {target} groups whose rewards differ, and "
            f"dynamic_sampling.max_rounds = {limits.max_rounds} rounds gave {groups}, out of {count} "
            "prompts. Go on with dynamic_sampling.max_rounds higher, or with "
            "dynamic_sampling.on_shortage = train; what was sampled is used again."
        )
    return True


def settings(run: Run) -> DAPOConfig:
    """The run's settings, which have those of dynamic sampling."""
    return cast("DAPOConfig", run.config)
