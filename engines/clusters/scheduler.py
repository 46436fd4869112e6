"""Dask's scheduler in a pod of its own: `dask scheduler` with our settings.

python -m engines.clusters.scheduler [OPTIONS OF dask scheduler]
"""

from __future__ import annotations

import sys

from engines.processes import dask_settings

dask_settings.apply()  # before Dask reads them

from distributed.cli.dask_scheduler import main as dask_scheduler  # noqa: E402

if __name__ == "__main__":
    dask_scheduler(sys.argv[1:])
