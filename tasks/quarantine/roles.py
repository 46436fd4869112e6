"""The engines that keep what became of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engines.rows.contract import RowHistorian
from engines.workers.cluster import Cluster
from engines.workers.engine import EngineSpec
from engines.workers.pool import EnginePool
from tasks.run.contract import EngineRole, pool_of
from tasks.run.roles import store_spec

if TYPE_CHECKING:
    from tasks.run.contract import Caller


def _row_histories(run: Caller, cluster: Cluster) -> EnginePool[RowHistorian]:
    spec = store_spec(run.config, run.store)
    engine = EngineSpec.of("engines.rows.row_history_engine:RowHistoryEngine", spec, RowHistorian)
    return pool_of(run, cluster, "reward", "row_histories", engine, run.config.scoring_deadline)


ROW_HISTORIES = EngineRole(name="row_histories", client=_row_histories)  # on the workers that score
