"""The settings of a run: the parts put together, and what follows from them."""

import math
from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from configs.algorithm.algorithm import AlgorithmConfig
from configs.base import Settings
from configs.cluster import ClusterConfig, Role
from configs.data import DataConfig, TasksSource
from configs.episodes import EpisodesConfig, OpponentConfig
from configs.evaluation import EvaluationConfig, SuiteConfig
from configs.guards import GuardConfig
from configs.lora import LoraConfig
from configs.model import Model
from configs.promotion import PromotionConfig
from configs.rewards import RewardsConfig
from configs.rollout import RolloutConfig
from configs.storage import CONTINUE_FROM, ContinueData, ContinueState, StoreConfig, TrackingConfig
from configs.train import TrainConfig


class RunConfig(Settings):
    """The settings of a run that trains a policy."""

    form_first: ClassVar[tuple[str, ...]] = ("model", "data", "rewards", "steps", "train")

    name: str = Field(
        "grpo",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Family of the run: names its runs, its MLflow model and its deployment.",
    )
    seed: int = Field(0, ge=0, description="Seed of everything that has no seed of its own.")
    steps: int = Field(100, ge=1, description="RL steps of the run.")
    prompts_per_step: int = Field(8, ge=1, description="Prompts drawn for each step.")
    group_size: int = Field(
        8,
        ge=1,
        description="Completions sampled for each prompt; episodes with several players. Of several "
        "tasks, of those that have no number of their own.",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description="Policy versions by which a sample's oldest token may lag behind the version "
        "that trains on it. With n, n + 1 steps are under way at once; 0 is synchronous.",
    )
    guards: list[GuardConfig] = Field(
        default_factory=list,
        description="Metrics that are watched step by step, and what is done where one leaves its "
        "bound: warn, stop, or go back.",
    )
    max_rollbacks: int = Field(
        3,
        ge=0,
        description="Times that guards may take the run back to an earlier step; then a guard that "
        "would stops it.",
    )
    model: Model = Field(description="The language model that is trained.")
    data: DataConfig = Field(description="Prompts.")
    rewards: RewardsConfig = Field(description="Scoring.")
    episodes: EpisodesConfig | None = Field(
        None, description="Answers of several turns, with an environment; none: of one turn."
    )
    algorithm: AlgorithmConfig = Field(
        default_factory=AlgorithmConfig, description="Advantages, loss, KL, entropy, selection."
    )
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="Sampling.")
    train: TrainConfig = Field(default_factory=TrainConfig, description="The update.")
    lora: LoraConfig | None = Field(
        None,
        description="Train an adapter on the frozen model, which is then the reference too; none: "
        "train all weights. A critic always has all its weights trained.",
    )
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="Workers.")
    store: StoreConfig = Field(default_factory=StoreConfig, description="Batches and weights.")
    tracking: TrackingConfig = Field(default_factory=TrackingConfig, description="MLflow.")

    continue_from: str | None = Field(
        None,
        pattern=CONTINUE_FROM,
        description="Begin with the weights of models:/NAME@ALIAS, of RUN, or of RUN@STEP.",
    )
    continue_state: ContinueState = Field(
        "weights",
        description="Taken over from there: the policy's weights alone (a critic begins anew), or "
        "the trainer's whole state.",
    )
    continue_data: ContinueData = Field(
        "unseen",
        description="Rows drawn: unseen ones first, and none is a skipped run; on from the place "
        "reached there; or from the beginning.",
    )
    evaluation: EvaluationConfig | None = Field(
        None, description="Suites that test policy versions, and when."
    )
    promotion: PromotionConfig | None = Field(
        None, description="When the last policy version becomes the champion."
    )

    @property
    def rollback_steps(self) -> int:
        """Steps that guards may go back, whose trainer state retention keeps; 0: none does."""
        back = [guard.rollback.steps for guard in self.guards if guard.action == "rollback"]
        return max(back, default=0) if self.max_rollbacks else 0

    @property
    def samples_per_step(self) -> int:
        """Completions of one step, at most; of several players each has its own."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def samples_per_prompt(self) -> int:
        """Completions of one prompt, at most: group_size, of each player of an episode."""
        return self.group_size * (1 if self.episodes is None else self.episodes.players)

    @property
    def smallest_group(self) -> tuple[str, int]:
        """The setting by which some prompt has the fewest completions, and how many."""
        sizes = self.data.group_sizes(self.group_size)
        names = {f"data.source.tasks.{name}.group_size": size for name, size in sizes.items()}
        return min((names or {"group_size": self.group_size}).items(), key=lambda item: item[1])

    @property
    def same_sizes(self) -> bool:
        """Whether all groups have as many completions."""
        return self.smallest_group[1] == self.group_size

    @property
    def trained_per_step(self) -> int:
        """Completions of one step that can train, at most: an opponent's do not."""
        alone = self.prompts_per_step * self.group_size
        return self.samples_per_step if self.opponent is None else alone

    @property
    def played(self) -> dict[str, EpisodesConfig]:
        """The episodes of each task, by name, or of all under no name; nothing of one turn."""
        return {} if self.episodes is None else self.data.played(self.episodes)

    @property
    def suites(self) -> Mapping[str, SuiteConfig]:
        """By name, those that test policy versions."""
        return {} if self.evaluation is None else self.evaluation.suites

    @property
    def all_rewards(self) -> list[RewardsConfig]:
        """Of the samples that train, then of the suites that have their own."""
        of_suites = [suite.rewards for suite in self.suites.values()]
        return [self.rewards, *(rewards for rewards in of_suites if rewards is not None)]

    def rewards_of(self, task: str) -> RewardsConfig:
        """The functions that score one of several tasks, with its sandbox."""
        assert isinstance(self.data.source, TasksSource)
        config = self.data.source.tasks[task]
        return self.rewards.named(config.rewards, config.sandbox)

    @property
    def longest_turn(self) -> int:
        """The longest turn of an episode, in tokens; 0: no limit."""
        limits = [episodes.max_turn_tokens for episodes in self.played.values()]
        return max((limit or 0 for limit in limits), default=0) if all(limits) else 0

    @property
    def opponent(self) -> OpponentConfig | None:
        """Who plays the seats of episodes that the policy does not; None where it plays all."""
        return None if self.episodes is None else self.episodes.opponent

    @property
    def groups_at_once(self) -> int:
        """Groups that a step has under way; it trains on prompts_per_step of them."""
        return math.ceil(self.rollout.over_sampling * self.prompts_per_step - 1e-9)

    @property
    def groups_numbered(self) -> int:
        """Numbers that a step has for its groups; no two of a run's are the same."""
        return self.groups_at_once

    @property
    def sharded_stages(self) -> int:
        """Stages of a step that go shard by shard: sampling, rewards, and greedy completions."""
        return 3 if self.algorithm.needs_baselines else 2

    @property
    def most_rounds(self) -> int:
        """How many times a step draws and samples, at most."""
        return 1

    @property
    def over_samples(self) -> bool:
        """Whether more groups are under way than a step waits for."""
        return self.groups_at_once > self.prompts_per_step

    @property
    def shards_at_once(self) -> int:
        """Shards that a step has under way; of a single group each where it over-samples."""
        return self.groups_at_once if self.over_samples else self.rollout.shards

    @property
    def carries(self) -> bool:
        """Whether groups that a step does not wait for go on in the next."""
        return self.over_samples and self.rollout.partial_rollout == "carry"

    @property
    def saves_tokens_every(self) -> float | None:
        """Seconds between saves of the tokens of answers in progress; None: they are not saved."""
        return self.rollout.save_every if self.rollout.partial_rollout == "carry" else None

    @property
    def reserved_versions(self) -> int:
        """Versions of max_staleness in which no step begins to sample.

        One where groups are carried: each may then be carried once at least.
        """
        return 1 if self.carries else 0

    @property
    def scoring_deadline(self) -> float:
        """Seconds after which a call of the workers that score counts as hung.

        Judges and unit tests keep deadlines of their own, and the calls of a worker's slots wait for
        each other there: at a judge each for its own, at unit tests all for those of the step.
        """
        judges = [reward.deadline for reward in self.rewards.functions if reward.kind == "judge"]
        slots = self.cluster.pools[self.cluster.roles.reward].slots
        samples = self.groups_at_once * self.samples_per_prompt
        tests = [
            reward.seconds(samples, self.data.sandboxes(reward.label).values())
            for reward in self.rewards.functions
            if reward.kind == "unit_tests"
        ]
        waits = slots * max(judges, default=0.0) + max(tests, default=0.0)
        return self.rollout.deadline + waits

    @property
    def model_scoring_deadline(self) -> float:
        """The same of the workers of reward models and of the run's own judges, which take turns."""
        return self.rollout.deadline + sum(judge.deadline for judge in self.rewards.judges)

    @property
    def keeps_frames(self) -> bool:
        """Whether what episodes see is stored."""
        return self.sees_frames

    @property
    def sees_frames(self) -> bool:
        """Whether the policy looks at what episodes see."""
        return self.episodes is not None and self.episodes.sees == "frames"

    @property
    def plays_requests(self) -> bool:
        """Whether episodes, of one task at least, are answers to requests."""
        return any(one.of_requests for one in self.played.values())

    @property
    def plays_apart(self) -> bool:
        """Whether each episode goes on by itself."""
        return self.episodes is not None and self.episodes.drive == "apart"

    @property
    def episodes_at_once(self) -> int:
        """Episodes that a step plays at once, at most."""
        count = self.groups_at_once * self.group_size
        limit = None if self.episodes is None else self.episodes.at_once
        return count if limit is None else min(count, limit)

    @property
    def environment_deadline(self) -> float:
        """Seconds after which a call of the workers that have environments counts as hung.

        Of episodes that are played apart it is the answer to one, which waits in its process for
        others, and where the episode was lost it is played again first.
        """
        if self.episodes is None or not self.plays_apart:
            return self.rollout.deadline
        before = math.ceil(self.episodes_at_once / self.episodes.processes)
        waits = [before * one.turn_timeout + one.timeout for one in self.played.values()]
        return self.rollout.deadline + max(waits)

    @property
    def needs_images(self) -> tuple[str, str] | None:
        """The setting for which what episodes see has to be an image, and one without; None: none."""
        return ("episodes.sees = frames", "episodes.sees = text") if self.sees_frames else None

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features that a run uses; tasks/run/features.py has their records."""
        used = {
            "elastic": self.train.engine == "elastic",
            "over_sampling": self.over_samples,
            "tasks": bool(self.data.tasks),
            "coding": any(one.workspaces is not None for one in self.played.values()),
            "quarantine": self.data.keeps_history,
            "guards": bool(self.guards),
            "promotion": self.promotion is not None,
            "reward_models": any(rewards.on_engines for rewards in self.all_rewards),
        }
        return tuple(name for name, uses in used.items() if uses)

    @property
    def needs_rewards(self) -> bool:
        """Whether a run has to have reward functions."""
        return True

    @property
    def fewest_prompts(self) -> int:
        """Prompts with which a step is made; fewer are left only where data.epochs end."""
        return self.prompts_per_step if self.data.last_step == "drop" else 1

    @property
    def trained_roles(self) -> list[Role]:
        """Roles with an optimizer."""
        return ["actor"]

    @property
    def engine_roles(self) -> list[Role]:
        """Roles whose engines hold a model, in the order in which those of a shared pool start.

        What samples is first: vLLM looks how much memory is free. The actor, which publishes the
        first weights, is last.
        """
        sampling: list[Role] = ["rollout"]
        sampling += [] if self.opponent is None else ["opponent"]
        return [*sampling, *self.frozen_roles, *reversed(self.trained_roles)]

    @property
    def frozen_roles(self) -> list[Role]:
        """Roles of the train engine without an optimizer."""
        return ["ref"] if self.has_reference_engine else []

    @property
    def sampling_roles(self) -> list[Role]:
        """Roles of the engines that sample: of the policy, of an opponent, of evaluations."""
        sampling: tuple[Role, ...] = ("rollout", "opponent")
        roles = [role for role in self.engine_roles if role in sampling]
        return [*roles, "evaluation"] if self.evaluates_aside else roles

    @property
    def evaluates_aside(self) -> bool:
        """Whether evaluations have engines of their own, beside those of the steps."""
        return self.evaluation is not None and self.cluster.roles.evaluation is not None

    @property
    def longest_sequence(self) -> int:
        """The longest that an engine samples, prompt and completion together, in tokens."""
        longest = self.data.max_prompt_tokens + self.rollout.max_new_tokens
        return max(longest, *self.longest_of_suites.values(), 0)

    @property
    def most_paths(self) -> int:
        """Paths of a sample that trains: more than one only where episodes may branch."""
        forests = [one.max_turns for one in self.played.values() if one.are_forests]
        return max(forests, default=1)

    @property
    def longest_response(self) -> int:
        """Response tokens of the longest sample that trains, over all branches of an episode."""
        most = None if self.episodes is None else self.episodes.max_tokens
        return most or self.rollout.max_new_tokens

    @property
    def longest_of_suites(self) -> dict[str, int]:
        """The same of each suite, by its name."""
        data, longest = self.data.max_prompt_tokens, self.rollout.max_new_tokens
        lengths = {}
        for name, suite in self.suites.items():
            prompt = data if suite.prompt is None else suite.prompt.max_prompt_tokens
            lengths[name] = prompt + (suite.max_new_tokens or longest)
        return lengths

    @property
    def used_pools(self) -> set[str]:
        """Pools on which some role of the run lives; others are not started."""
        roles: list[Role] = [*self.engine_roles, "reward"]
        roles += ["aggregator"] if self.train.engine == "elastic" else []
        roles += [] if self.episodes is None else ["environment"]
        if any(suite.episodes is not None for suite in self.suites.values()):
            roles.append("environment")
        if any(rewards.on_engines for rewards in self.all_rewards):
            roles.append("reward_model")
        roles += ["evaluation"] if self.evaluates_aside else []
        return {self.cluster.roles.pool_of(role) for role in roles}

    @property
    def has_reference_engine(self) -> bool:
        """Whether engines hold the frozen reference; that of an adapter is the base below it."""
        return self.algorithm.needs_reference and self.lora is None

    def train_of(self, role: Role) -> TrainConfig:
        """The settings with which a role is trained."""
        return self.train
