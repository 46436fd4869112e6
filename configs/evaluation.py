"""Suites, which test policy versions, and when a run is tested by them.

A suite that comes with Refrain is a YAML file in configs/suites, by its name; rg_TASK is the task of
reasoning-gym. A run's settings name it, and change what they give beside the name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, GetJsonSchemaHandler, JsonValue, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from configs.base import Settings
from configs.data import DataConfig, Source
from configs.episodes import EpisodesConfig
from configs.rewards import RewardsConfig
from configs.storage import StoreConfig

FOLDER = Path(__file__).parent / "suites"
SUITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
GYM = "rg_"  # how the name of a suite begins that is a task of reasoning-gym
# What such a suite has besides: problems of a seed that no recipe here trains on.
GYM_SUITE: Mapping[str, Any] = {
    "source": {"kind": "reasoning_gym", "size": 100, "seed": 1_000_003},
    "prompt": {"prompt_suffix": "\nPut your final answer between <answer> and </answer>."},
    "rewards": {"functions": [{"kind": "reasoning_gym", "extract": "answer_tag"}]},
    "max_new_tokens": 1024,
}
HELD_OUT = "held_out"  # the suite that evaluation.source means
# Settings of that suite which stand in `evaluation` itself, as runs before there were suites have it.
SHORT = {"source": None, "rows": 64, "samples": 1, "greedy": True}


class SuitePrompt(Settings):
    """How a row of a suite is asked."""

    prompt_column: str = Field(
        "question",
        description="Column with the prompt: a string, or a list of chat messages (role, content).",
    )
    template: Literal["chat", "plain"] = Field(
        "chat", description="chat: the tokenizer's chat template; plain: the text as it is."
    )
    system_prompt: str | None = Field(
        None, description="System message put before each prompt (template = chat only)."
    )
    prompt_suffix: str = Field("", description="Text appended to each prompt string.")
    chat_template_kwargs: dict[str, JsonValue] = Field(
        default_factory=dict, description="As data.chat_template_kwargs."
    )
    prefill: str = Field("", description="As data.prefill.")
    max_prompt_tokens: int = Field(
        1024, ge=1, description="Longest prompt, in tokens; a longer one is dropped and counted."
    )

    @model_validator(mode="after")
    def _template_fits(self) -> SuitePrompt:
        if self.system_prompt is not None and self.template != "chat":
            raise ValueError(
                "A suite's prompt.system_prompt needs the chat template. Set its prompt.template = "
                "chat, or prompt.system_prompt = null with prompt.prompt_suffix."
            )
        return self

    def of(self, source: Source) -> DataConfig:
        """The settings by which rows of the source become prompts."""
        return DataConfig(source=source, **self.model_dump())


class SuiteConfig(Settings):
    """A benchmark: rows, prompts, sampling, scoring."""

    source: Source = Field(description="Where the rows come from.")
    rows: int | None = Field(
        None, ge=1, description="Rows taken from the beginning of the source; none: all."
    )
    task: str | None = Field(
        None,
        description="Which of a run's several tasks it is: then rows are asked, played and scored as "
        "that has it, and prompt, rewards and episodes are none.",
    )
    prompt: SuitePrompt | None = Field(
        None, description="How a row is asked; none: as data says for the rows of the run."
    )
    rewards: RewardsConfig | None = Field(
        None, description="Scoring; none: the run's, in its episodes where it has some."
    )
    episodes: EpisodesConfig | None = Field(
        None,
        description="Episodes of the suite's own; none: the run's if its rewards are, or none.",
    )
    samples: int = Field(1, ge=1, description="Completions of each row.")
    greedy: bool = Field(
        True, description="Always the likeliest token, which needs samples = 1; else it is drawn."
    )
    temperature: float | None = Field(
        None, gt=0, description="Sampling temperature (greedy = false); none: rollout.temperature."
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="Nucleus sampling (greedy = false); none: rollout.top_p."
    )
    max_new_tokens: int | None = Field(
        None, ge=1, description="Longest completion, in tokens; none: rollout.max_new_tokens."
    )
    seed: int | None = Field(None, ge=0, description="Seed of sampling; none: rollout.seed.")
    pass_at: tuple[int, ...] = Field(
        (), description="Numbers k, of which pass@k is estimated; each at most samples."
    )
    right_from: float = Field(
        1.0, description="Reward from which on a sample is right, for mean@n and pass@k."
    )
    rows_per_shard: int = Field(
        32,
        ge=1,
        description="Rows that an engine is given at once; what a killed evaluation keeps.",
    )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """In the form a suite that comes with Refrain stands by its name, so without its source."""
        schema = super().__get_pydantic_json_schema__(core_schema, handler)
        schema.pop("required", None)
        return schema

    @model_validator(mode="after")
    def _sampling_fits(self) -> SuiteConfig:
        if self.greedy and self.samples > 1:
            raise ValueError(
                f"A suite's samples = {self.samples} greedy completions would all be the same. "
                "Set its greedy = false, or samples = 1."
            )
        if self.greedy and (self.temperature is not None or self.top_p is not None):
            raise ValueError(
                f"A suite's temperature = {self.temperature} and top_p = {self.top_p} mean nothing "
                "where the likeliest token is taken. Set its greedy = false, or remove them."
            )
        wrong = [k for k in self.pass_at if not 1 <= k <= self.samples]
        if wrong:
            raise ValueError(
                f"A suite's pass_at has {wrong[0]}, and pass@k is estimated from k samples or more: "
                f"samples = {self.samples}. Set samples to {max(self.pass_at)} or more, with "
                "greedy = false."
            )
        return self

    @model_validator(mode="after")
    def _plays_without_an_opponent(self) -> SuiteConfig:
        if self.episodes is not None and self.episodes.opponent is not None:
            raise ValueError(
                "A suite's episodes.opponent has no engines. Leave the suite's episodes and rewards "
                "out: it then plays as the run does, against the run's opponent."
            )
        return self

    @property
    def as_run(self) -> bool:
        """Whether rows are asked and scored in all as those of the run are."""
        return not self.own and self.task is None

    @property
    def own(self) -> list[str]:
        """What it has of its own of how rows are asked, played and scored."""
        names = ("prompt", "rewards", "episodes")
        return [name for name in names if getattr(self, name) is not None]


class EvaluationConfig(Settings):
    """When policy versions are tested, and by which suites."""

    suites: dict[str, SuiteConfig] = Field(
        min_length=1,
        description="Suites by name. Names that come with Refrain may stand alone, as in [gsm8k, "
        'aime24, rg_chain_sum] (in the form {"gsm8k": {}}), or with what is other than there.',
    )
    before: bool = Field(False, description="Test the version that the run begins with.")
    every: int | None = Field(
        None, ge=1, description="Test every so many versions; none: not between first and last."
    )
    at_end: bool = Field(True, description="Test the last version.")

    @model_validator(mode="before")
    @classmethod
    def _suites_by_name(cls, raw: Any) -> Any:
        """Names become suites; source, rows, samples and greedy are those of the suite held_out."""
        if not isinstance(raw, Mapping):
            return raw
        settings = dict(raw)
        suites = settings.get("suites", {})
        if isinstance(suites, str):
            suites = [suites]
        if isinstance(suites, list | tuple):
            suites = {str(name): {} for name in suites}
        if not isinstance(suites, Mapping):
            return raw
        short = {name: settings.pop(name) for name in SHORT if name in settings}
        if short:
            before = suites.get(HELD_OUT) or {"rows": SHORT["rows"]}
            suites = {**suites, HELD_OUT: {**before, **short}}
        return {
            **settings,
            "suites": {name: completed(name, suite) for name, suite in suites.items()},
        }

    @model_validator(mode="after")
    def _names_fit_keys(self) -> EvaluationConfig:
        for name in self.suites:
            if not SUITE_NAME.fullmatch(name):
                raise ValueError(
                    f"evaluation.suites has a suite named {name!r}, which becomes part of names in "
                    "the store. Use letters, digits, '_' and '-'."
                )
        if not (self.before or self.every or self.at_end):
            raise ValueError(
                "evaluation.before, every and at_end are all off, so nothing would be tested. Set "
                "one of them, or evaluation = null."
            )
        return self

    def due(self, version: int, start: int) -> bool:
        """Whether a version is tested before the run's end; `start`: the one that it begins with."""
        if version == start:
            return self.before
        return self.every is not None and version % self.every == 0


def suite_names() -> list[str]:
    """Names of the suites that come with Refrain, but for those of reasoning-gym."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def completed(name: str, raw: Any) -> Any:
    """The settings of a suite that comes with Refrain, with those that are given in their place.

    What is no suite of ours is returned as it is given. ValueError for a name alone that is none.
    """
    changes = {} if raw is None else raw
    if not isinstance(changes, Mapping):
        return raw
    defaults = _known(name)
    if defaults is None:
        if not changes:
            raise ValueError(
                f"There is no suite {name}. Name one of {', '.join(suite_names())} or rg_TASK, or "
                f"give evaluation.suites.{name}.source and rewards."
            )
        return raw
    return _merged(defaults, changes)


def _known(name: str) -> dict[str, Any] | None:
    if name.startswith(GYM):
        source = {**GYM_SUITE["source"], "task": name.removeprefix(GYM)}
        return {**GYM_SUITE, "source": source}
    if name not in suite_names():
        return None
    suite: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return suite


def _merged(defaults: Any, changes: Any) -> Any:
    """Groups are merged setting by setting, but for one of another kind; all else is replaced.

    A file in place of the hub's data has the same columns, so what is done with those stays.
    """
    if not (isinstance(defaults, Mapping) and isinstance(changes, Mapping)):
        return changes
    if "kind" in changes and changes["kind"] != defaults.get("kind"):
        stays = ("where", "choices") if changes["kind"] == "file" else ()
        return {name: defaults[name] for name in stays if name in defaults} | dict(changes)
    both = {name: _merged(defaults[name], changes[name]) for name in changes if name in defaults}
    return {**defaults, **changes, **both}


class BackFillConfig(Settings):
    """Suites of today on versions of a run in the store."""

    run: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the run in the store."
    )
    suites: tuple[str, ...] = Field(
        min_length=1,
        description="Suites by name: those of the run, and those that come with Refrain.",
    )
    versions: str = Field(
        "all",
        pattern=r"^(all|last|\d+(-\d+)?(,\d+(-\d+)?)*)$",
        description="Versions, as 0,10,20-25; last; or all that are in the store.",
    )
    against: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(@\d+)?$",
        description="A second run, whose versions of the same numbers are evaluated and compared "
        "prompt by prompt; with @VERSION each is compared with that one.",
    )
    settings: tuple[str, ...] = Field(
        (),
        description="Settings of the run that are others now, as key=value: cluster.… for other "
        "workers, evaluation.suites.NAME.… of a suite.",
    )
    store: StoreConfig = Field(default_factory=StoreConfig, description="Where the runs are.")
