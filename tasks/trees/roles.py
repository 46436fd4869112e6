"""The engines of flows.tree, which have trees grow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from configs.grpo import GRPOConfig
from engines.trees.contract import TreeGrower, TreeSpec
from engines.workers.cluster import Cluster
from engines.workers.engine import EngineSpec
from engines.workers.pool import EnginePool
from storage.objects.store import Store
from tasks.run.contract import EngineRole, pool_of
from tasks.run.roles import common

if TYPE_CHECKING:
    from tasks.run.contract import Caller


def tree_spec(config: GRPOConfig, store: Store) -> TreeSpec:
    """From what the engines are built that have trees grow."""
    return TreeSpec(**common(config, store))


def _trees(run: Caller, cluster: Cluster) -> EnginePool[TreeGrower]:
    spec = tree_spec(run.config, run.store)
    engine = EngineSpec.of("engines.trees.tree_engine:TreeEngine", spec, TreeGrower)
    return pool_of(run, cluster, "reward", "trees", engine, run.config.scoring_deadline)


TREES = EngineRole(name="trees", client=_trees)  # on the workers that score
