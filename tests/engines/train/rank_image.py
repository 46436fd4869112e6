"""What the processes of `Ranks` are forked from: the engine's libraries, imported once.

Their fork server imports this module. No look for reference cycles goes through the libraries after
that, in the ranks either.
"""

import gc

gc.disable()

import engines.train.fsdp_engine  # noqa: E402, F401
import tests.engines.train.train_ranks  # noqa: E402, F401

gc.freeze()
gc.enable()
