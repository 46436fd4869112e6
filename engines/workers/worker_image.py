"""What a forked worker starts from. Only the fork server of engines/processes/node.py imports this
module.

Importing it has an effect, on purpose: the fork server runs no code of ours but imports. It arms
the parent-death signal, since the server would otherwise outlive a killed node process.
"""

from engines.processes import dask_settings

dask_settings.apply()  # before Dask reads them

import distributed.nanny  # noqa: E402
import distributed.worker  # noqa: E402, F401

import engines.workers.on_worker  # noqa: E402, F401
from engines.processes.parent_death import die_with_parent  # noqa: E402

die_with_parent()
