"""How many groups a step draws that has more under way than it trains on, or goes on with some."""

from __future__ import annotations

from configs.grpo import GRPOConfig
from storage.batches.refs import BatchRef
from storage.prompts.cursor import Cursor
from storage.runs.commit_log import CarriedGroup
from tasks.results import Carried
from tasks.run.contract import StepView
from tasks.run.features import ToDraw


def to_draw(run: StepView, step: int) -> ToDraw:
    """The groups that a step goes on with, and how many it draws to them."""
    config, clock, carried = run.config, run.clock, going_on(run, step)
    # None is handed on once a guard made the run synchronous.
    carries = config.carries and clock.gate.max_staleness > 0
    count = new_groups(config, step, clock.drawn[step], len(carried), carries)
    return ToDraw(count=count, carried=carried)


def new_groups(config: GRPOConfig, step: int, cursor: Cursor, carried: int, carries: bool) -> int:
    """How many groups a step draws, to which so many are carried.

    As many as make up groups_at_once. Where groups are carried, the last step, of the run or of the
    data's epochs, draws as many as it trains on, and so does one that may hand none on (`carries`).
    """
    wanted, left = config.prompts_per_step, cursor.remaining(config.data.epochs)
    over = left is not None and carried + left - wanted < config.fewest_prompts
    if config.carries and (over or step == config.steps or not carries):
        return max(0, wanted - carried)
    return max(0, config.groups_at_once - carried)


def going_on(run: StepView, step: int) -> Carried:
    """The groups that are carried to a step; one whose tokens do not fit any more begins anew.

    That is so where the settings were changed between two flows of the run, or in a fork.
    """
    config, carried = run.config, run.clock.carried[step]
    fits = carried.begun is None or _sizes_fit(run, carried)
    stale = [
        group.oldest is not None and step - 1 - group.oldest > config.max_staleness
        for group in carried.groups
    ]
    if fits and not any(stale):
        return carried
    kept = [
        carried.begun_of(number) if fits and not stale[number] else None
        for number in range(len(carried))
    ]
    there = [ref for ref in kept if ref is not None]
    return Carried(
        prompts=carried.prompts,
        begun=BatchRef.concat(there) if there else None,
        groups=tuple(
            group if ref is not None else CarriedGroup(since=step, begun=False)
            for group, ref in zip(carried.groups, kept, strict=True)
        ),
    )


def _sizes_fit(run: StepView, carried: Carried) -> bool:
    """Whether each group that is begun has as many samples as its prompt is to get."""
    assert carried.prompts is not None and carried.begun is not None
    sizes = carried.prompts.group_sizes(run.store, run.config.samples_per_prompt)
    pairs = zip(carried.groups, sizes, strict=True)
    begun = [(group.samples or size, size) for group, size in pairs if group.begun]
    return all(own == size for own, size in begun) and len(carried.begun) == sum(
        size for _, size in begun
    )
