"""What a forked worker starts from. Only the fork server of engines/processes/node.py imports this
module.

Importing it has an effect, on purpose: the fork server runs no code of ours but imports. It arms
the parent-death signal, since the server would otherwise outlive a killed node process, and ends
looks for reference cycles, as engines/processes/process_setup.py:imports_uncollected does.
"""

import gc
import os
import sys

gc.disable()  # also while the engines' libraries are imported, after this module

from engines.processes import dask_settings  # noqa: E402

dask_settings.apply()  # before Dask reads them

import distributed.nanny  # noqa: E402
import distributed.worker  # noqa: E402

import engines.workers.host  # noqa: E402, F401
from engines.processes.parent_death import die_with_parent  # noqa: E402
from engines.processes.process_setup import name_in_ps  # noqa: E402

die_with_parent()


def dask_setup(worker: distributed.worker.Worker) -> None:
    """Give a forked worker what torch would have read from its environment when imported.

    Dask calls it in each worker, which has its variables then, before the worker takes a call.
    """
    gc.freeze()
    gc.enable()
    name_in_ps(f"refrain {worker.name}")
    if "torch" not in sys.modules:  # then it reads them itself
        return
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
