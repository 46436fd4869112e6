"""What progress rewards add to a run."""

from __future__ import annotations

from collections.abc import Iterator

from configs.grpo import GRPOConfig
from engines.encoders.memory_plan import encoder_bytes
from engines.models.traced_shape import Shape
from tasks.memory.holders import Holder, WorkerEngine
from tasks.progress_rewards.checks import check_progress
from tasks.progress_rewards.roles import ENCODER, PROGRESS, srpo
from tasks.run.features import Feature


def _holders(config: GRPOConfig, shape: Shape) -> Iterator[Holder]:
    """The encoder, where its files are here."""
    if sizes := encoder_bytes(srpo(config).encoder):
        yield WorkerEngine(
            role="encoder",
            whose="encoder",
            sizes=sizes,
            line="encoder, each worker",
            by_name=False,
            libraries=True,
            remedy=_remedy,
        )


def _remedy(what: str) -> str:
    if what == "encoder's frames":
        return "Set encoder.frames lower."
    return "Set cluster.roles.encoder to a larger pool, or take a smaller encoder."


FEATURE = Feature(roles=(ENCODER, PROGRESS), check=check_progress, holders=_holders)
