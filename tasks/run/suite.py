"""A suite as a run asks it: the settings of the run, with the suite's in their place."""

from __future__ import annotations

from dataclasses import dataclass, replace

from configs.evaluation import SuiteConfig
from configs.grpo import GRPOConfig
from engines.meanings import suite_meanings
from engines.rollout.contract import Sampling
from storage.batches.columns import TOKENS
from storage.objects.documents import key_of
from storage.prompts.datasets import open_source
from storage.prompts.source import PromptSource

HOW_FAST = {"processes", "at_once", "python", "memory_gib"}  # episodes.…
# data.…: which rows, in what order
ORDER = {"source", "order", "quarantine", "seed", "epochs", "last_step"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """A benchmark under the settings of a run."""

    name: str
    settings: SuiteConfig
    config: GRPOConfig  # of the run, but for data, rewards, episodes and the longest completion

    @classmethod
    def of(cls, config: GRPOConfig, name: str, settings: SuiteConfig) -> Suite:
        """The suite for a run with these settings."""
        if settings.task is not None:
            return cls(name=name, settings=settings, config=_of_task(config, settings))
        if settings.prompt is None:
            data = config.data.model_copy(update={"source": settings.source})
        else:
            data = settings.prompt.of(settings.source)
        changed = {"max_new_tokens": settings.max_new_tokens} if settings.max_new_tokens else {}
        inherits = settings.rewards is None and settings.episodes is None
        changes = {
            "data": data,
            "rewards": settings.rewards or config.rewards,
            "episodes": config.episodes if inherits else settings.episodes,
            "rollout": config.rollout.model_copy(update=changed),
        }
        return cls(name=name, settings=settings, config=config.model_copy(update=changes))

    @property
    def source(self) -> PromptSource:
        """Its rows."""
        return open_source(self.settings.source)

    @property
    def rows(self) -> list[int]:
        """The numbers of those that are asked."""
        count = len(self.source)
        return list(range(count if self.settings.rows is None else min(self.settings.rows, count)))

    @property
    def sampling(self) -> Sampling:
        """How completions are drawn."""
        settings = self.settings
        sampling = Sampling.of(self.config.rollout, settings.samples, self.config.longest_turn)
        if settings.greedy:
            sampling = sampling.as_greedy
        return replace(
            sampling.of_nothing_trained,
            temperature=settings.temperature or sampling.temperature,
            top_p=settings.top_p or sampling.top_p,
            seed=sampling.seed if settings.seed is None else settings.seed,
        )

    @property
    def prompts_key(self) -> str:
        """What the prompts' tokens are made of."""
        played = self.config.episodes
        return key_of(
            "evaluation prompts",
            TOKENS,
            self.source.digest,
            self.rows[-1:],
            self.config.data.in_keys(ORDER),
            self.config.model.model_dump(mode="json"),
            *([] if played is None else [played.in_keys(HOW_FAST)]),
        )

    def played(self, opponent: str | None) -> list[dict[str, object]]:
        """The settings of its episodes, if it has some; `opponent`: digest of the other player."""
        episodes = self.config.episodes
        if episodes is None:
            return []
        settings = episodes.in_keys(HOW_FAST)
        if opponent is not None:  # whatever it is called
            settings["opponent"]["version"] = opponent
        return [settings]

    def manner(self, opponent: str | None) -> str:
        """What two evaluations must have in common to be compared."""
        return key_of(
            "evaluation",
            self.source.digest,
            len(self.rows) if self.settings.rows is None else self.settings.rows,
            self.sampling.identity | {"seed": None},
            self.config.rewards.model_dump(mode="json"),
            self.config.data.in_keys(ORDER),
            *self.played(opponent),
            *([meanings] if (meanings := self.meanings) else []),
        )

    @property
    def meanings(self) -> dict[str, int]:
        """What its evaluations mean, but for what means what it always did."""
        return suite_meanings(self.config.rewards, self.settings.greedy)

    @property
    def summing(self) -> str:
        """What turns scores into metrics."""
        return key_of("summed", self.settings.pass_at, self.settings.right_from)


def _of_task(config: GRPOConfig, settings: SuiteConfig) -> GRPOConfig:
    """The settings of a suite that is asked, played and scored as one of a run's tasks."""
    name = settings.task
    assert name is not None, "it is one of a task"
    most = settings.max_new_tokens or config.data.limits(config.rollout.max_new_tokens)[name]
    changes = {
        "data": config.data.tasks[name].model_copy(update={"source": settings.source}),
        "rewards": config.rewards_of(name),
        "episodes": config.played.get(name),
        "rollout": config.rollout.model_copy(update={"max_new_tokens": most}),
    }
    return config.model_copy(update=changes)
