"""Before a run: whether its rewards can be had, with their rows, code, sandboxes and judges."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from configs.data import DataConfig, ReasoningGymSource
from configs.rewards import (
    ChoiceReward,
    EnvironmentReward,
    JudgeReward,
    Judging,
    MathReward,
    ReasoningGymReward,
    RewardModelReward,
    RewardsConfig,
    UnitTestsReward,
)
from engines.rewards.judge import check_judge
from engines.rewards.judge_rubric import read_rubric
from engines.rewards.protocol import TRL_HIDDEN_COLUMNS, RewardCall, RewardStart
from engines.rewards.row_tests import tests_of
from engines.rewards.runner import RewardProcess, RewardRunner, score_column
from engines.rewards.unit_tests import NO_JUDGE, UnitTestScorer
from engines.sandboxes.opening import prove
from storage.objects.documents import Row
from storage.prompts.source import PromptSource

TESTED_ROWS = 256  # first rows whose tests are looked at
RUN_ROWS = 4  # of them, those whose tests are run
REFERENCES = 256  # first rows of the data whose references are looked at; of a suite, all of them
REFERENCE_SECONDS = 5.0  # longest time for one
NAMED = 5  # of those that are not read, so many are shown
_UNREAD = {
    "math": "There only the same text is worth 1; where the column is empty, samples get no score.",
    "choice": "Samples of these rows get no score, since the reference is no letter.",
}


def check_rewards(
    rewards: RewardsConfig, data: DataConfig, source: PromptSource, given: Sequence[str] = ()
) -> None:
    """Prove before a run that rows hold prompts and what the rewards need; ValueError, one sentence.

    given: columns that the rows get on the way.

    A sandbox is started once, with a program in it. Users' functions and reasoning-gym are loaded in
    processes of their own, so nothing that they import comes into this one.
    """
    gym_source = isinstance(data.source, ReasoningGymSource)
    for reward in rewards.functions:
        if isinstance(reward, ReasoningGymReward) and not gym_source:
            raise ValueError(
                f"The reward {reward.label} scores reasoning-gym problems, and data.source.kind is "
                f"{data.source.kind}. Set data.source.kind = reasoning_gym, or another reward."
            )
    needed = [data.prompt_column]
    needed += [
        r.answer_column for r in rewards.functions if isinstance(r, MathReward | ChoiceReward)
    ]
    judges = [r for r in rewards.functions if isinstance(r, Judging)]
    named = itertools.chain(*(read_rubric(r.rubric).columns for r in judges))
    needed += [column for column in named if column not in given]
    for reward in rewards.functions:
        if isinstance(reward, UnitTestsReward):
            needed += reward.columns
    source.check_columns(dict.fromkeys(needed))
    for position, reward in enumerate(rewards.functions):
        if isinstance(reward, UnitTestsReward):
            prove(reward.sandbox, f"rewards.functions.{position}.sandbox")
    here = (
        MathReward,
        ChoiceReward,
        EnvironmentReward,
        Judging,
        RewardModelReward,
        UnitTestsReward,
    )
    loaded = [r for r in rewards.functions if not isinstance(r, here)]
    if gym_source and not any(isinstance(r, ReasoningGymReward) for r in loaded):
        loaded.append(ReasoningGymReward())  # its process proves the task and its parameters
    if loaded:
        _check_functions(
            rewards.model_copy(update={"functions": tuple(loaded)}), data, source, given
        )
    for reward in judges:  # last: a request costs something
        if isinstance(reward, JudgeReward):
            check_judge(reward)


def check_tests(rewards: RewardsConfig, source: PromptSource) -> None:
    """Whether the first rows have unit tests, and the first of all, run, judge a program.

    ValueError, one sentence, for the first row that has none. A run that goes on is not asked: its
    rows are fixed, and samples of such a row fail.
    """
    for reward in rewards.functions:
        if isinstance(reward, UnitTestsReward):
            _check_tests(reward, source)


def _check_tests(reward: UnitTestsReward, source: PromptSource) -> None:
    scorer = UnitTestScorer(reward)
    for number, row in enumerate(source.rows(range(min(TESTED_ROWS, len(source))))):
        try:
            if number >= RUN_ROWS:
                tests_of(reward, row)
            else:
                scorer.judges(row)
        except ValueError as error:
            raise ValueError(
                f"Row {number} of {source.name} cannot be scored by the reward {reward.label}: "
                f"{str(error).rstrip('.')}. Leave the row out, or mend the column "
                f"{reward.tests_column} (docs/code.md has the forms of tests)."
            ) from None


def rows_without_verdict(rewards: RewardsConfig, source: PromptSource) -> list[str]:
    """Sentences on the first rows whose tests any program passes, an empty one too."""
    rows = source.rows(range(min(RUN_ROWS, len(source))))
    sentences = []
    for reward in rewards.functions:
        if not isinstance(reward, UnitTestsReward):
            continue
        scorer = UnitTestScorer(reward)
        for number, row in enumerate(rows):
            try:
                reason = None if scorer.judges(row) else NO_JUDGE
            except ValueError as error:  # where a run goes on, such a row is no reason to stop
                reason = str(error).rstrip(".")
            if reason:
                sentences.append(
                    f"Row {number} of {source.name}: {reason}. No sample of it will have a reward "
                    f"of {reward.label}."
                )
    return sentences


def unread_references(
    rewards: RewardsConfig, source: PromptSource, count: int = REFERENCES
) -> list[str]:
    """Have the references of the first rows score themselves: a sentence where some do not.

    They do so in a process of its own, as samples do. One odd row is no reason to refuse the others.
    """
    rows = source.rows(range(min(count, len(source))))
    unread = [
        (reward, _unread(reward, rows))
        for reward in rewards.functions
        if isinstance(reward, MathReward | ChoiceReward)
    ]
    return [
        f"{reward.label}: {len(odd)} of {len(rows)} references of {source.name} (column "
        f"{reward.answer_column}) do not score themselves. {_UNREAD[reward.kind]} "
        + "; ".join(f"Row {n}: {_shortened(rows[n], reward)}" for n in odd[:NAMED])
        + (f"; and {len(odd) - NAMED} more." if len(odd) > NAMED else ".")
        for reward, odd in unread
        if odd
    ]


def _unread(reward: MathReward | ChoiceReward, rows: Sequence[Row]) -> list[int]:
    """Numbers of the rows whose reference is not what the reward takes for one."""
    process = RewardProcess(
        RewardStart(
            name=f"{reward.label}, references",
            path="engines.rewards.builtin:reference_reader",
            built_in=True,
            params={"reward": reward},
            sample_seconds=REFERENCE_SECONDS,
            at_once=None,
            packages=(),
        )
    )
    texts = [""] * len(rows)
    batch = RewardCall(
        prompts=texts, completions=texts, completion_ids=[()] * len(rows), rows=rows,
        global_step=0, max_steps=0, epoch=0.0,
    )  # fmt: skip
    try:
        column = score_column(process, batch, REFERENCE_SECONDS * (1 + len(rows) / 10))
    finally:
        process.close()
    return [number for number in range(len(rows)) if column.values[number] != 1]


def _shortened(row: Row, reward: MathReward | ChoiceReward) -> str:
    text = repr(str(row[reward.answer_column]))
    return text if len(text) <= 60 else f"{text[:28]}…{text[-28:]}"


def _check_functions(
    rewards: RewardsConfig, data: DataConfig, source: PromptSource, given: Sequence[str]
) -> None:
    """Load functions, and look whether the rows have the columns that each needs."""
    with RewardRunner(rewards, data) as runner:
        for reward, columns in zip(rewards.functions, runner.start(), strict=True):
            for column in columns:
                if column in TRL_HIDDEN_COLUMNS:
                    raise ValueError(
                        f"The reward {reward.label} takes {column}, which no function is given, "
                        f"whatever the columns of {source.name}: what was asked comes as prompts, "
                        "what was written as completions, one for each sample. Rename the "
                        "parameter, and a column that is meant by it."
                    )
                if column not in given and not source.has_column(column):
                    raise ValueError(
                        f"The reward {reward.label} needs a column '{column}'; the columns of "
                        f"{source.name} are: {', '.join(source.columns)}. Add the column, or set "
                        f"{column} among the params of this reward."
                    )
