"""The settings of an SRPO run: those of GRPO, an encoder of what episodes see, progress rewards."""

from collections.abc import Iterable
from typing import Any, ClassVar

from pydantic import Field, model_validator

from configs.base import Settings
from configs.encoder import NEEDS_IMAGES, EncoderConfig, ProjectionEncoder
from configs.episodes import EpisodesConfig
from configs.grpo import GRPOConfig
from configs.rules.images import KINDS
from configs.rules.rule import Rule, of_each
from configs.rules.tasks import no_tasks


class ProgressConfig(Settings):
    """A failure is worth more the nearer it came to the successes of its task."""

    task_column: str | None = Field(
        None,
        description="Column of the data that names each row's task; episodes of one task are "
        "compared, whatever their prompts. None: all rows are of one task.",
    )
    success: float = Field(
        1.0, description="Reward of the reward functions from which on an episode is a success."
    )
    eps: float = Field(
        0.5,
        gt=0,
        description="Distance within which two successes are neighbours (DBSCAN), in standard "
        "deviations of the task's successes.",
    )
    min_samples: int = Field(
        2, ge=1, description="Successes within that distance, itself included, that make a cluster."
    )
    ceiling: float = Field(0.6, ge=0, lt=1, description="Bound on the reward of a failure.")
    steepness: float = Field(
        10.0, gt=0, description="Of the logistic curve from distance, scaled to 0 … 1, to reward."
    )
    middle: float = Field(
        0.5, ge=0, le=1, description="Scaled distance at which a failure gets half of the ceiling."
    )


def _episodes(config: "SRPOConfig") -> Iterable[EpisodesConfig]:
    return [] if config.episodes is None else [config.episodes]


def _encoder_is_in_turn(config: "SRPOConfig") -> bool:
    """Whether engines that have devices in turn share the encoder's."""
    pool_of = config.cluster.roles.pool_of
    shared = pool_of("encoder") in map(pool_of, config.engine_roles)
    return config.cluster.share_devices and shared and config.encoder.kind == "transformers"


PROGRESS: tuple[Rule["SRPOConfig"], ...] = (
    Rule(
        needs=lambda config: config.episodes is not None,
        says=lambda config: (
            "episodes = null, and this flow compares what episodes had to see. Set "
            "episodes.environment, or run it with refrain grpo."
        ),
    ),
    of_each(
        _episodes,
        needs=lambda config, episodes: episodes.environment.kind in KINDS,
        says=lambda config, episodes: (
            f"episodes.environment.kind = {episodes.environment.kind} gives nothing to see. Set it "
            "to gymnasium, or to class with a method frame()."
        ),
    ),
    of_each(
        _episodes,
        needs=lambda config, episodes: episodes.players == 1,
        says=lambda config, episodes: (
            f"episodes.players = {episodes.players}, and progress is that of one who acts "
            "alone. Set episodes.players = 1, or run it with refrain grpo."
        ),
    ),
    Rule(
        needs=lambda config: not _encoder_is_in_turn(config),
        says=lambda config: (
            "cluster.share_devices = true, but the encoder does not give the devices of pool "
            f"{config.cluster.roles.pool_of('encoder')} back. Set cluster.roles.encoder to another "
            "pool."
        ),
    ),
    Rule(
        needs=lambda config: config.rollout.over_sampling == 1,
        says=lambda config: (
            f"rollout.over_sampling = {config.rollout.over_sampling:g} leaves the slowest groups, "
            "and progress is measured over all episodes of a step. Set rollout.over_sampling = 1."
        ),
    ),
    Rule(
        needs=lambda config: not config.algorithm.needs_baselines,
        says=lambda config: (
            f"algorithm.advantage.kind = {config.algorithm.advantage.kind} compares with greedy "
            "episodes, which this flow does not play. Set algorithm.advantage.kind = grpo, or "
            "run it with refrain grpo."
        ),
    ),
)


class SRPOConfig(GRPOConfig):
    """Self-referential policy optimisation (arXiv:2511.15605): rewards for progress, in episodes."""

    unfit: ClassVar[tuple[str, ...]] = (*GRPOConfig.unfit, "remax")
    rules: ClassVar[tuple[Rule[Any], ...]] = (
        *GRPOConfig.rules,
        no_tasks("SRPO"),
        *PROGRESS,
    )

    encoder: EncoderConfig = Field(
        default_factory=ProjectionEncoder,
        description="What makes an embedding of what an episode had to see.",
    )
    progress: ProgressConfig = Field(
        default_factory=ProgressConfig, description="Rewards of failures, by their embeddings."
    )

    @property
    def keeps_frames(self) -> bool:
        """Always: progress is seen in them."""
        return True

    @property
    def needs_images(self) -> tuple[str, str] | None:
        """The setting for which what episodes see has to be an image, and one without; None: none."""
        if self.sees_frames or self.encoder.kind != "transformers":
            return super().needs_images
        return NEEDS_IMAGES

    @property
    def features(self) -> tuple[str, ...]:
        """Those of GRPO, and progress rewards."""
        return (*super().features, "progress")

    @property
    def sharded_stages(self) -> int:
        """Those of GRPO, and the embeddings."""
        return super().sharded_stages + 1

    @property
    def used_pools(self) -> set[str]:
        """Pools on which some role of the run lives; others are not started."""
        return super().used_pools | {self.cluster.roles.pool_of("encoder")}

    @model_validator(mode="before")
    @classmethod
    def _filtered_by_success(cls, settings: Any) -> Any:
        """Groups of which nearly all fail, or nearly all succeed, are left out by default."""
        if not isinstance(settings, dict) or not isinstance(settings.get("algorithm", {}), dict):
            return settings
        algorithm = {"selection": [{"kind": "success_rate"}], **settings.get("algorithm", {})}
        return {**settings, "algorithm": algorithm}
