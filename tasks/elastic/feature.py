"""What workers that come and go while they train add to a run."""

from __future__ import annotations

from collections.abc import Iterator

from configs.grpo import GRPOConfig
from engines.models.traced_shape import Shape
from storage.runs.gradients import remove_gradients
from tasks.memory.holders import Holder, Ranks
from tasks.run.features import Feature


def _holders(config: GRPOConfig, shape: Shape) -> Iterator[Holder]:
    """The aggregator: any worker of its pool may be it."""
    yield Ranks(role="aggregator", name="aggregator", shape=shape)


# Gradients of the step after `head` serve its next try.
FEATURE = Feature(holders=_holders, tidy=remove_gradients)
