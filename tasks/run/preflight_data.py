"""The checks of rows and reward functions before a run: what training reads, and suites."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from shutil import which

from configs.data import DataConfig, ReasoningGymSource
from configs.episodes import EpisodesConfig
from configs.grpo import GRPOConfig
from configs.model import Model
from configs.rewards import (
    ChoiceReward,
    Judging,
    MathReward,
    ReasoningGymReward,
    RewardsConfig,
    UnitTestsReward,
)
from engines.data.chat_template import Prompt, fits_template, prompt_of, template_variables
from engines.data.contract import PROBE_TOKENS
from engines.data.scoring import PLAYER
from engines.data.template_check import chat_template, rendered
from engines.models.checkpoints import present
from engines.models.facts import model_facts, token_ids
from engines.rewards.checks import (
    check_rewards,
    check_tests,
    rows_without_verdict,
    unread_references,
)
from engines.rewards.judge_rubric import read_rubric
from engines.rewards.protocol import EPISODE_COLUMNS
from storage.batches.columns import TASK
from storage.objects.documents import JsonValue, Row
from storage.prompts.datasets import open_source
from storage.prompts.source import PromptSource
from tasks.run.features import features_of
from tasks.run.suite import Suite

ROWS = 1024  # first rows whose prompts are looked at one by one
DEEPEST = 200  # lists and objects within each other; pickle ends at some hundreds
TOKENIZED = 64  # of them, whose tokens are looked at


def check_data(config: GRPOConfig, resumed: bool = False) -> tuple[str, str]:
    """Check rows and rewards; what was found of each. ValueError, one sentence, for a fault.

    resumed: the rows are those of steps that are made, so what they hold is not asked again.
    """
    source = open_source(config.data.source)
    parts = parts_of(config, source)
    summaries = []
    for name, part in parts.items():
        with naming(name):
            summaries.append(f"{name} {check_rows(config.model, part.data, part.source, resumed)}")
    data = "; ".join(summaries).strip()
    frames, images = config.keeps_frames, config.needs_images
    for name, episodes in config.played.items():
        if episodes.environment.kind != "none":
            (row,) = parts[name].source.rows([0])
            with naming(name):
                summary = check_environment(
                    episodes, {**row, TASK: name} if name else row, frames, images
                )
            data += f"; environment{f' of {name}' if name else ''}: {summary}"
    columns: tuple[str, ...] = () if config.episodes is None else EPISODE_COLUMNS
    if config.episodes is not None and config.episodes.players > 1:
        columns = (*columns, PLAYER)
    for feature in features_of(config):
        feature.check_rewards(config.rewards)
    for name, part in parts.items():
        with naming(name):
            given = (*columns, TASK) if name else columns
            check_rewards(part.rewards, part.data, part.source, given)
            if not resumed:
                check_tests(part.rewards, part.source)
    if config.evaluation is not None:
        data += f"; evaluation: {check_suites(config, resumed)}"
    return data, ", ".join(reward.label for reward in config.rewards.functions) or "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPart:
    """Rows that are asked and scored in one way: all of a run's, or those of one of its tasks."""

    data: DataConfig
    rewards: RewardsConfig  # the functions that score them
    source: PromptSource


def parts_of(config: GRPOConfig, source: PromptSource) -> dict[str, DataPart]:
    """The tasks' rows by name, or all under no name. source: the run's."""
    if not config.data.tasks:
        return {"": DataPart(data=config.data, rewards=config.rewards, source=source)}
    return {
        name: DataPart(
            data=data,
            rewards=config.rewards_of(name),
            source=open_source(data.source),
        )
        for name, data in config.data.tasks.items()
    }


@contextmanager
def naming(task: str) -> Iterator[None]:
    """Say of which task a fault is."""
    try:
        yield
    except ValueError as error:
        raise (ValueError(f"data.source.tasks.{task}: {error}") if task else error) from error


def check_rows(model: Model, data: DataConfig, source: PromptSource, resumed: bool = False) -> str:
    """Whether rows have the columns that the settings name, and prompts that fit the template.

    The first prompts must not all be longer than data.max_prompt_tokens or empty, since some are
    needed to compare the engines.
    """
    source.check_columns([name for name in (data.prompt_column, data.state_column) if name])
    summary = f"{source.name}: {len(source)} rows; columns {', '.join(source.columns)}"
    if isinstance(data.source, ReasoningGymSource):  # loading the library takes seconds
        if not resumed:
            row: Row = {data.prompt_column: "1"}
            check_prompts(model, data, source.name, [prompt_of(row, data)], [row])
        return f"{summary}; template {data.template}"
    prompts = []
    rows = source.rows(range(min(ROWS, len(source))))
    for number, row in enumerate(rows):
        try:
            prompts.append(prompt_of(row, data))
            fits_template(prompts[-1], data)
            template_variables(row, data)
            if not resumed:
                _check_depth(row)
        except ValueError as error:
            raise ValueError(f"Row {number} of {source.name}: {error}") from None
    if not resumed:
        check_prompts(model, data, source.name, prompts, rows)
    return f"{summary}; template {data.template} fits the first {len(prompts)}"


def _check_depth(row: Row) -> None:
    """ValueError for a value too deep to be handed from process to process."""
    for column, value in row.items():
        level: list[JsonValue] = [value]
        depth = 0
        while level and depth <= DEEPEST:
            inner = [container for container in level if isinstance(container, (list, dict))]
            level = [
                item
                for container in inner
                for item in (container.values() if isinstance(container, dict) else container)
                if isinstance(item, (list, dict))
            ]
            depth += 1
        if level:
            raise ValueError(
                f"Column '{column}' has lists or objects within each other more than {DEEPEST} deep. "
                "Write such a value as a text."
            )


def check_prompts(
    model: Model, data: DataConfig, source: str, prompts: Sequence[Prompt], rows: Sequence[Row]
) -> None:
    """Whether the model's template and tokens fit the first rows' prompts. ValueError names the row.

    Of a model that was not downloaded or drawn yet nothing is known.
    """
    directory = present(model)
    template = None
    if data.template == "chat" and directory is not None:
        template = chat_template(directory)
    if template is None:
        texts = [_text(prompt) for prompt in prompts]
    else:
        variables = [template_variables(row, data) for row in rows]
        texts = rendered(template, prompts, variables, data, source)
    texts = [f"{text}{data.prefill}" for text in texts]
    plain = [_text(prompt) for prompt in prompts[: len(PROBE_TOKENS)]]
    encoded = token_ids(model, [*plain, *texts[:TOKENIZED]])
    if encoded is None:
        return
    shortest = min(map(len, encoded[: len(plain)]))
    if shortest > data.max_prompt_tokens:
        raise ValueError(
            f"data.max_prompt_tokens = {data.max_prompt_tokens}, but the shortest of the first "
            f"{len(plain)} prompts of {source} has {shortest} tokens. Set it higher."
        )
    generated = isinstance(data.source, ReasoningGymSource)  # then a text stands for its prompts
    if not generated and all(len(ids) < 2 for ids in encoded[len(plain) :][: len(plain)]):
        raise ValueError(
            f"None of the first {len(plain)} prompts of {source} has more than one token; column "
            f"'{data.prompt_column}' is empty there. Set data.prompt_column to the one that holds "
            "the prompts."
        )
    facts = model_facts(model)
    tokens = None if facts is None else facts.rows
    for number, ids in enumerate(encoded[len(plain) :]):
        if tokens is not None and ids and max(ids) >= tokens:
            raise ValueError(
                f"Row {number} of {source}: its prompt has the token {max(ids)}, and the model's "
                f"embedding ends at {tokens - 1} (vocab_size of its config.json). Set model.path to "
                "a model whose embedding has a row for every token of its tokenizer."
            )


def answers_not_begun(config: GRPOConfig) -> str | None:
    """What to know of a chat template that leaves out where the model's answer begins."""
    directory = present(config.model)
    if config.data.template != "chat" or directory is None:
        return None
    template = chat_template(directory)
    if template is None or template.begins_answers:
        return None
    return (
        f"the chat template of {directory} writes nothing where an answer begins "
        "(add_generation_prompt), so the model goes on after the user's message as it is"
    )


def check_environment(
    episodes: EpisodesConfig,
    row: Row,
    frames: bool = False,
    images: tuple[str, str] | None = None,
) -> str:
    """Whether the environment loads here, and can be reset for a row, the first. ValueError.

    frames: whether it has to give something to see. images: the setting for which that has to be an
    image, and another one.
    """
    if episodes.python is not None and which(episodes.python) is None:
        raise ValueError(
            f"episodes.python = {episodes.python} is no program on {os.uname().nodename}. Set it to "
            "an interpreter, such as bin/python of a virtual environment, or to null."
        )
    # A run without episodes needs none of these.
    from engines.environments.sessions import Environments
    from engines.episodes.episode_rows import seed_of
    from engines.episodes.frames import check_first_frames, check_images

    single = episodes.model_copy(update={"processes": 1})
    with Environments(single, frames=frames) as environments:
        try:
            ready = environments.start()
        except ValueError as error:
            if episodes.python is None:
                raise
            raise ValueError(
                f"{error} Its interpreter is episodes.python = {episodes.python}."
            ) from error
        (first,) = environments.opening([row], [seed_of(episodes.seed, 0)])
    if frames:
        (first,) = check_first_frames([first])
    if first.failed is not None:
        raise ValueError(
            "episodes.environment cannot be reset for the first row: "
            f"{first.failed.splitlines()[0]}"
        )
    names = ", ".join(str(tool["function"]["name"]) for tool in ready.tools)
    takes = "asks by itself" if ready.chats else "takes text"
    frame_text = ""
    if first.frame is not None:
        if images is not None:
            check_images(first.frame["dtype"], first.frame["shape"], *images)
        shape = " x ".join(map(str, first.frame["shape"]))
        frame_text = f"; frames of {shape}, {first.frame['dtype']}"
    return f"loads; {f'tools {names}' if names else takes}{frame_text}"


def _text(prompt: Prompt) -> str:
    """What a prompt says, without its template."""
    if isinstance(prompt, str):
        return prompt
    return "".join(message["content"] for message in prompt)


def check_suites(config: GRPOConfig, resumed: bool = False) -> str:
    """Whether every suite's rows can be asked and scored. ValueError, one sentence, for a fault."""
    summaries = []
    for name, settings in config.suites.items():
        try:
            suite = Suite.of(config, name, settings)
            summaries.append(f"{name}: {check_suite(config, suite, resumed)}")
            if not resumed:
                check_tests(suite.config.rewards, suite.source)
        except ValueError as error:
            raise ValueError(f"evaluation.suites.{name}: {error}") from error
    return "; ".join(summaries)


def odd_references(config: GRPOConfig) -> list[str]:
    """Sentences on references, and tests, that say nothing: of the run's data, and of its suites."""
    parts = parts_of(config, open_source(config.data.source)).values()
    return [
        *(sentence for part in parts for sentence in unread_references(part.rewards, part.source)),
        *(
            sentence
            for part in parts
            for sentence in rows_without_verdict(part.rewards, part.source)
        ),
        *odd_suites(config),
    ]


def odd_suites(config: GRPOConfig) -> list[str]:
    """The same of the suites alone, all of whose rows are asked."""
    suites = [Suite.of(config, name, suite) for name, suite in config.suites.items()]
    return [
        f"evaluation.suites.{suite.name}, {sentence}"
        for suite in suites
        for sentence in unread_references(suite.config.rewards, suite.source, len(suite.rows))
    ]


def check_suite(config: GRPOConfig, suite: Suite, resumed: bool = False) -> str:
    """The same of one of them."""
    source = suite.source
    summary = check_rows(config.model, suite.config.data, source, resumed)
    if suite.settings.rewards is None:
        _check_rewards_of_run(config, suite, source)
        return summary
    columns: tuple[str, ...] = () if suite.config.episodes is None else EPISODE_COLUMNS
    for feature in features_of(suite.config):
        feature.check_rewards(suite.config.rewards)
    check_rewards(suite.config.rewards, suite.config.data, source, columns)
    if suite.settings.episodes is not None:
        (row,) = source.rows([0])
        summary += f"; environment: {check_environment(suite.settings.episodes, row)}"
    return summary


def _check_rewards_of_run(config: GRPOConfig, suite: Suite, source: PromptSource) -> None:
    """Whether rows have what the run's rewards need, which are loaded by now."""
    task = suite.settings.task
    trained = config.data.source if task is None else config.data.tasks[task].source
    held_out = suite.settings.source
    for reward in suite.config.rewards.functions:
        if isinstance(reward, MathReward | ChoiceReward):
            source.check_columns([reward.answer_column])
        elif isinstance(reward, Judging):
            source.check_columns(read_rubric(reward.rubric).columns)
        elif isinstance(reward, UnitTestsReward):
            source.check_columns(reward.columns)
        elif isinstance(reward, ReasoningGymReward):
            same = isinstance(held_out, ReasoningGymSource) and (
                isinstance(trained, ReasoningGymSource) and held_out.task == trained.task
            )
            if not same:
                raise ValueError(
                    f"its source is {source.name}, and the reward {reward.label} scores only "
                    "problems of data.source. Set its source to the same task with another seed, or "
                    "give it rewards."
                )
