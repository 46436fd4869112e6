"""Scoring stored samples with another reward: new columns beside the old, and what would change.

Nothing is sampled and nothing is rewritten. The scores of a step are an object of their own below
RUN/rescored/, named by reward code and samples, so a repeated run finds them there.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from configs.grpo import GRPOConfig
from configs.rewards import (
    EngineReward,
    FunctionReward,
    MathReward,
    ReasoningGymReward,
    Reward,
    RewardsConfig,
)
from engines.data.chat_template import prompts_of
from engines.data.scoring import with_episodes
from engines.models.checkpoints import load_tokenizer, materialize
from engines.rewards.comparison import RewardComparison, compare_rewards
from engines.rewards.judge import JudgeAnswers
from engines.rewards.protocol import TrainerState
from engines.rewards.runner import RewardRunner, code_digest
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.documents import Row, key_of
from storage.objects.errors import ObjectMissing
from storage.prompts.cursor import Cursor
from storage.runs.commit_log import Commit, head, read_commit
from storage.runs.run_store import RunStore, committer, numbered, start_of
from tasks.commands.command import Answer, Request, heading, table, text
from tasks.reward import state_at
from tasks.run.roles import MODELS
from tasks.run.run_record import settings_of

if TYPE_CHECKING:
    from rich.console import RenderableType
    from transformers import PreTrainedTokenizerBase

COLUMN = "rescored/"  # prefix of the new columns


def answer(request: Request) -> Answer:
    """Rescore the steps that were named."""
    files, arguments = request.files, request.arguments
    config = settings_of(files)
    reward = reward_of(arguments.reward, config.rewards)
    settings = RewardsConfig(functions=(reward,), timeout=config.rewards.timeout)
    steps = steps_of(files, arguments.steps)
    comparisons: list[tuple[int, RewardComparison]] = []
    refs: dict[int, BatchRef] = {}
    olds, news, groups = [], [], []
    tokenizer = load_tokenizer(materialize(config.model, MODELS.absolute()))
    answers = JudgeAnswers(store=files.store, run=files.run)
    with RewardRunner(settings, config.data, answers) as runner:
        runner.start()
        for step in steps:
            commit = read_commit(files, step)
            try:
                refs[step] = rescore(files, commit, config, runner, tokenizer)
            except ObjectMissing:
                continue  # retention removed the samples
            samples = commit.refs["samples"].of_policy(files.store)
            old = _numbers(files, samples, "reward")
            new = _numbers(files, refs[step], f"{COLUMN}{reward.label}")
            group = samples.own_groups(files.store)
            comparisons.append((step, compare_rewards(old, new, group)))
            olds.append(old)
            news.append(new)
            groups.append(group)
        code = runner.code()
    if not comparisons:
        raise ValueError(
            f"Retention removed the samples of steps {arguments.steps} of {files.run}."
        )
    whole = compare_rewards(np.concatenate(olds), np.concatenate(news), np.concatenate(groups))
    record = {
        "run": files.run,
        "reward": reward.label,
        "reward_code": {code_digest(code): [asdict(function) for function in code]},
        "steps": {step: asdict(comparison) for step, comparison in comparisons},
        "all": asdict(whole),
        "objects": sorted(key for ref in refs.values() for key in ref.objects),
        "removed_by_retention": [step for step in steps if step not in refs],
    }
    lines = _shown(files, reward.label, comparisons, whole, refs)
    if missing := [step for step in steps if step not in refs]:
        lines.append(
            text(
                f"Retention removed the samples of {len(missing)} of these steps, {missing[0]} to "
                f"{missing[-1]}: they are not counted. store.keep_steps says how many a run keeps."
            )
        )
    return Answer(record=record, shown=lines)


def reward_of(word: str, rewards: RewardsConfig) -> Reward:
    """The reward that --reward names: one of the run's own, by its name, or one by its definition.

    The latter is a function, by module or file, math or reasoning_gym.
    """
    for reward in rewards.functions:
        if reward.label == word and isinstance(reward, EngineReward):
            raise ValueError(
                f"--reward {word} is a model, which needs engines, and rescoring starts none. "
                "Its scores are in the run: refrain lineage shows them."
            )
        if reward.label == word:
            return reward
    if word == "math":
        return MathReward()
    if word == "reasoning_gym":
        return ReasoningGymReward()
    try:
        return FunctionReward(path=word)
    except ValueError:
        raise ValueError(
            f"--reward {word} names no function. Write package.module:function, "
            "path/to/file.py:function, math, reasoning_gym, or the name of one of the run's rewards: "
            f"{', '.join(reward.label for reward in rewards.functions)}."
        ) from None


def steps_of(files: RunStore, word: str | None) -> list[int]:
    """The committed steps of A-B, of A alone, or all of them."""
    first, last = start_of(files) + 1, head(files) or 0
    if last < first:
        raise ValueError(f"Run {files.run} has no committed step of its own.")
    a, dash, b = (word or f"{first}-{last}").partition("-")
    if not a.isdigit() or (dash and not b.isdigit()):
        raise ValueError(f"--steps {word} is no range. Write A-B, such as {first}-{last}.")
    low, high = int(a), int(b or a)
    if not first <= low <= high <= last:
        raise ValueError(f"Run {files.run} has no steps {word} of its own. {numbered(first, last)}")
    return list(range(low, high + 1))


def rescore(
    files: RunStore,
    commit: Commit,
    config: GRPOConfig,
    runner: RewardRunner,
    tokenizer: PreTrainedTokenizerBase,
) -> BatchRef:
    """Score a step's samples; the ref has one row per sample, in the order of the commit's.

    Scores are kept; what the function logs as TRL's do is not.
    """
    samples = commit.refs["samples"].of_policy(files.store)
    code = code_digest(runner.code())
    name = f"{commit.step:06d}-{key_of('rescore', samples.to_json(), code)}"
    key = f"{files.run}/rescored/{name}.safetensors"
    if (done := files.finished(key)) is not None:
        return BatchRef.from_json(done["ref"])
    of_group = rows_of_groups(files, commit)
    group = samples.fetch_numpy(files.store, "group_id")[0].tolist()
    rows = [of_group[number] for number in group]
    if "episode" in samples.names:
        rows = with_episodes(files.store, samples, rows)
    ids, offsets = samples.fetch_numpy(files.store, "response_ids")
    assert offsets is not None
    completion_ids = [ids[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    scores = runner.score(
        prompts_of(rows, config.data),
        tokenizer.batch_decode(completion_ids, skip_special_tokens=True),
        rows,
        completion_ids,
        trainer_state(files, commit.step, config.steps),
    )
    label = runner.names[0]
    columns: dict[str, object] = {
        f"{COLUMN}{label}": np.where(scores.failed, np.float32("nan"), scores.rewards),
        "sample_id": samples.fetch_numpy(files.store, "sample_id")[0],
        "reward_code": [code] * len(samples),
    }
    ref = write_batch(files.store, key, columns)
    files.finish(key, {"ref": ref.to_json(), "step": commit.step, "reward": label})
    return ref


def rows_of_groups(files: RunStore, commit: Commit) -> dict[int, Row]:
    """The data row of each group that a step had under way: those carried to it are not its own."""
    refs = [commit.refs["prompts"]]
    if commit.step - 1 > start_of(files):
        before = read_commit(files, commit.step - 1)
        refs += [before.refs["carried"]] if "carried" in before.refs else []
    rows_by_number: dict[int, Row] = {}
    for ref in refs:
        groups = ref.fetch_numpy(files.store, "group_id")[0].tolist()
        rows = cast("list[Row]", ref.fetch_list(files.store, "row"))
        rows_by_number |= dict(zip(groups, rows, strict=True))
    return rows_by_number


def trainer_state(files: RunStore, step: int, steps: int) -> TrainerState:
    """Where the run stood when the step was scored first."""
    if step == 1:
        return TrainerState(max_steps=steps)
    owner, before = committer(files, step - 1)
    return state_at(step, steps, Cursor.from_json(read_commit(owner, before).cursor))


def _numbers(files: RunStore, ref: BatchRef, column: str) -> np.ndarray[Any, Any]:
    return ref.fetch_numpy(files.store, column)[0].astype(np.float64)


def _shown(
    files: RunStore,
    label: str,
    comparisons: list[tuple[int, RewardComparison]],
    whole: RewardComparison,
    refs: dict[int, BatchRef],
) -> list[RenderableType]:
    columns = (
        "step", "samples", "failed", "mean", "new", "spread", "new", "corr.", "groups reordered",
        "new best", "rank change", "sign flips", "to 0", "from 0",
    )  # fmt: skip
    rows = table(*columns, right=columns)
    for name, comparison in [
        *((str(step), comparison) for step, comparison in comparisons),
        ("all", whole),
    ]:
        rows.add_row(name, *_cells(comparison))
    folder = Path(sorted(next(iter(refs.values())).objects)[0]).parent
    return [
        heading(f"{files.run}: its reward -> {label}"),
        rows,
        text(
            "mean, spread: of the run's reward and of the new one. corr.: between the two. rank "
            "change: mean over samples, within their group. sign flips: share of samples whose "
            "advantage, the reward minus its group's mean, changes sign."
        ),
        text(f"Scores are kept in {folder}, column {COLUMN}{label}."),
    ]


def _cells(comparison: RewardComparison) -> list[str]:
    return [
        str(comparison.samples),
        str(comparison.failed),
        *(f"{value:.3f}" for value in (*comparison.mean, *comparison.spread)),
        "none" if comparison.correlation is None else f"{comparison.correlation:+.3f}",
        f"{comparison.reordered} of {comparison.groups}",
        f"{comparison.new_best}",
        f"{comparison.rank_change:.2f}",
        f"{comparison.flipped:.1%}",
        f"{comparison.silenced:.1%}",
        f"{comparison.woken:.1%}",
    ]
