"""The settings of a GRPO run: the parts put together, and the rules that span several parts."""

from pydantic import Field, model_validator

from configs.algorithm import AlgorithmConfig
from configs.base import Settings
from configs.cluster import ClusterConfig
from configs.data import DataConfig, ReasoningGymSource
from configs.model import Model
from configs.retraining import (
    CONTINUE_FROM,
    ContinueData,
    ContinueState,
    EvaluationConfig,
    PromotionConfig,
)
from configs.rewards import RewardsConfig
from configs.rollout import RolloutConfig
from configs.storage import StoreConfig, TrackingConfig
from configs.train import TrainConfig

# What estimators of the catalogue need beyond rewards and log-probs.
NEEDS_MORE = {
    "gae": "a critic's values",
    "remax": "the reward of each prompt's greedy completion",
    "gigpo": "the states of an agent's turns",
    "optimal_token_baseline": "sums of squared probabilities",
    "multi_turn_optimal_token_baseline": "sums of squared probabilities",
}


class GRPOConfig(Settings):
    """Group relative policy optimisation (arXiv:2402.03300) and its relatives."""

    name: str = Field(
        "grpo",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Family of the run: names its runs, its MLflow model and its deployment.",
    )
    seed: int = Field(0, ge=0, description="Seed of everything that has no seed of its own.")
    steps: int = Field(100, ge=1, description="RL steps of the run.")
    prompts_per_step: int = Field(8, ge=1, description="Prompts drawn for each step.")
    group_size: int = Field(8, ge=1, description="Completions sampled for each prompt.")
    model: Model = Field(description="The language model that is trained.")
    data: DataConfig = Field(description="Prompts.")
    rewards: RewardsConfig = Field(description="Scoring.")
    algorithm: AlgorithmConfig = Field(
        default_factory=AlgorithmConfig, description="Advantages, loss, KL, entropy, filters."
    )
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="Sampling.")
    train: TrainConfig = Field(default_factory=TrainConfig, description="The update.")
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
        description="Taken over from there: the weights alone, or the trainer's whole state.",
    )
    continue_data: ContinueData = Field(
        "unseen",
        description="Rows drawn: unseen ones first, and none is a skipped run; on from the place "
        "reached there; or from the beginning.",
    )
    evaluation: EvaluationConfig | None = Field(
        None, description="Test of the last policy version on held-out rows."
    )
    promotion: PromotionConfig | None = Field(
        None, description="When the last policy version becomes the champion."
    )

    @property
    def samples_per_step(self) -> int:
        """Completions of one step."""
        return self.prompts_per_step * self.group_size

    @model_validator(mode="after")
    def _batches_divide(self) -> "GRPOConfig":
        if self.samples_per_step % self.train.mini_batches:
            raise ValueError(
                f"prompts_per_step x group_size = {self.samples_per_step} samples cannot be split "
                f"into train.mini_batches = {self.train.mini_batches} equal parts. "
                f"Set train.mini_batches to a divisor of {self.samples_per_step}."
            )
        ranks = self.cluster.pools[self.cluster.roles.actor].workers
        if self.samples_per_step // self.train.mini_batches < ranks:
            raise ValueError(
                f"A mini-batch of {self.samples_per_step // self.train.mini_batches} samples has "
                f"fewer rows than cluster.pools.{self.cluster.roles.actor}.workers = {ranks} ranks. "
                "Set prompts_per_step or group_size higher, or train.mini_batches lower."
            )
        if self.rollout.shards > self.prompts_per_step:
            raise ValueError(
                f"rollout.shards = {self.rollout.shards} is more than prompts_per_step = "
                f"{self.prompts_per_step}. Set rollout.shards to at most {self.prompts_per_step}."
            )
        return self

    @model_validator(mode="after")
    def _estimator_has_its_inputs(self) -> "GRPOConfig":
        kind = self.algorithm.advantage.kind
        if kind in NEEDS_MORE:
            raise ValueError(
                f"algorithm.advantage.kind = {kind} needs {NEEDS_MORE[kind]}, which this flow does "
                "not make. Set it to grpo, rloo or another estimator that works on rewards alone."
            )
        return self

    @model_validator(mode="after")
    def _rewards_fit_data(self) -> "GRPOConfig":
        made = isinstance(self.data.source, ReasoningGymSource)
        for position, function in enumerate(self.rewards.functions):
            if function.kind == "reasoning_gym" and not made:
                raise ValueError(
                    f"rewards.functions.{position}.kind = reasoning_gym scores only reasoning-gym "
                    f"problems, but data.source.kind = {self.data.source.kind}. "
                    "Set it to math or function."
                )
        return self

    @model_validator(mode="after")
    def _store_is_shared(self) -> "GRPOConfig":
        if self.store.uri.startswith("memory:"):
            raise ValueError(
                f"store.uri = {self.store.uri} lives in one process, and workers are others. "
                "Set store.uri to a file:// or s3:// address."
            )
        relative = "://" not in self.store.uri or (
            self.store.uri.startswith("file://") and not self.store.uri.startswith("file:///")
        )
        if self.cluster.kind == "address" and relative:
            raise ValueError(
                f"store.uri = {self.store.uri} is relative to this process, and the workers of "
                f"cluster.address = {self.cluster.address} run elsewhere. Set store.uri to "
                "s3://BUCKET/PREFIX, or to file:///PATH on a file system that all nodes share."
            )
        return self

    @model_validator(mode="after")
    def _retraining_fits(self) -> "GRPOConfig":
        if self.promotion is not None and self.evaluation is None:
            raise ValueError(
                f"promotion.alias = {self.promotion.alias} needs a held-out evaluation to go by. "
                "Set evaluation.source."
            )
        if self.evaluation is not None and self.evaluation.source == self.data.source:
            raise ValueError(
                "evaluation.source is the same as data.source, so the test would be on rows that "
                "are trained on. Set evaluation.source to other rows."
            )
        goes_on = self.continue_from is not None and self.continue_state == "trainer"
        if goes_on and self.train.schedule != "constant":
            raise ValueError(
                f"continue_state = trainer takes over a train.schedule = {self.train.schedule} "
                "that has come to its end. Set train.schedule = constant, or "
                "continue_state = weights."
            )
        return self
