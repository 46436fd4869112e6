"""The settings of a PPO run: those of GRPO and a critic."""

from typing import Any, ClassVar, get_args

from pydantic import Field, model_validator

from configs.algorithm.advantages import Advantage
from configs.base import Settings
from configs.cluster import Role
from configs.grpo import OF_EVERY_FLOW, GRPOConfig
from configs.rules.every_run import BATCHES, mini_batches
from configs.rules.rule import Rule
from configs.train import TrainConfig

ADVANTAGE_KINDS: tuple[str, ...] = tuple(
    choice.model_fields["kind"].default for choice in get_args(get_args(Advantage)[0])
)


class CriticTraining(Settings):
    """How the critic is updated; what is not here is as in `train`, its loss in algorithm.critic."""

    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate of AdamW.")
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay.")
    max_grad_norm: float = Field(
        1.0, gt=0, description="Global gradient norm above which gradients are scaled down."
    )
    epochs: int = Field(1, ge=1, description="Passes over a step's batch.")
    mini_batches: int = Field(
        1, ge=1, description="Optimizer steps into which one pass over a step's batch is split."
    )


ESTIMATOR: tuple[Rule[GRPOConfig], ...] = (
    Rule(
        needs=lambda config: config.algorithm.advantage.kind not in config.unfit,
        says=lambda config: (
            f"algorithm.advantage.kind = {config.algorithm.advantage.kind} uses no critic, and this "
            "flow trains one. "
            "Run it with refrain grpo, or set algorithm.advantage.kind = gae."
        ),
    ),
)


# Of the policy beside it.
POLICIES: tuple[Rule[GRPOConfig], ...] = (
    Rule(
        needs=lambda config: not config.sees_frames,
        says=lambda config: (
            "episodes.sees = frames does not go with a critic. Run it with refrain grpo."
        ),
    ),
    Rule(
        needs=lambda config: config.train.engine != "elastic",
        says=lambda config: (
            "train.engine = elastic trains no critic. Set train.engine = fsdp, or run flows.grpo."
        ),
    ),
)


class PPOConfig(GRPOConfig):
    """Proximal policy optimisation (arXiv:1707.06347): advantages by GAE with a trained critic."""

    unfit: ClassVar[tuple[str, ...]] = tuple({*ADVANTAGE_KINDS} - {"gae", "function"})
    rules: ClassVar[tuple[Rule[Any], ...]] = (
        *BATCHES,
        *ESTIMATOR,
        *POLICIES,
        *OF_EVERY_FLOW,
        *mini_batches("critic", "critic"),
    )

    critic: CriticTraining = Field(
        default_factory=CriticTraining, description="The critic's optimizer."
    )

    @property
    def features(self) -> tuple[str, ...]:
        """Those of GRPO, and the critic."""
        return (*super().features, "critic")

    @property
    def trained_roles(self) -> list[Role]:
        """Roles with an optimizer."""
        return [*super().trained_roles, "critic"]

    def train_of(self, role: Role) -> TrainConfig:
        """The settings with which a role is trained."""
        return self.train.model_copy(update=dict(self.critic)) if role == "critic" else self.train

    @model_validator(mode="before")
    @classmethod
    def _gae_by_default(cls, settings: Any) -> Any:
        if not isinstance(settings, dict) or not isinstance(settings.get("algorithm", {}), dict):
            return settings
        algorithm = settings.get("algorithm", {})
        advantage = algorithm.get("advantage", {})
        if isinstance(advantage, dict):
            advantage = {"kind": "gae", **advantage}
        return {**settings, "algorithm": {**algorithm, "advantage": advantage}}
