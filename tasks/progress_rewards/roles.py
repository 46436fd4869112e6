"""The engines of flows.srpo: the encoder of what episodes see, and the measure of their progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from configs.grpo import GRPOConfig
from configs.srpo import SRPOConfig
from engines.encoders.contract import EpisodeEncoder, ProgressScorer
from engines.encoders.embedding import EncoderSpec
from engines.workers.cluster import Cluster
from engines.workers.engine import EngineSpec
from engines.workers.pool import EnginePool
from tasks.run.contract import EngineRole, pool_of, start_pool
from tasks.run.roles import MODELS, store_spec

if TYPE_CHECKING:
    from tasks.run.contract import Caller


def srpo(config: GRPOConfig) -> SRPOConfig:
    """The settings of a run that measures progress."""
    assert isinstance(config, SRPOConfig), "the run measures no progress"
    return config


def _encoders(run: Caller, cluster: Cluster) -> EnginePool[EpisodeEncoder]:
    spec = EncoderSpec(
        encoder=srpo(run.config).encoder,
        model_cache=str(MODELS.absolute()),
        **store_spec(run.config, run.store).model_dump(),
    )
    engine = EngineSpec.of("engines.encoders.embedding:EncoderEngine", spec, EpisodeEncoder)
    return pool_of(run, cluster, "encoder", "encoder", engine)


def _progress(run: Caller, cluster: Cluster) -> EnginePool[ProgressScorer]:
    spec = store_spec(run.config, run.store)
    engine = EngineSpec.of("engines.encoders.progress:ProgressEngine", spec, ProgressScorer)
    return pool_of(run, cluster, "reward", "progress", engine, run.config.scoring_deadline)


ENCODER = EngineRole(name="encoder", client=_encoders, start=start_pool)
PROGRESS = EngineRole(name="progress", client=_progress)  # on the workers that score
