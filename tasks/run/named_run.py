"""A run whose name is given, as by the Job of a Kubernetes cluster: begun once, then gone on with.

Its writer before may have been killed on another machine; tasks/run/opening.py waits for its lease.
"""

from __future__ import annotations

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from storage.objects.store import Store
from storage.runs.commit_log import head
from storage.runs.live import goes_on_as, is_done
from storage.runs.run_lease import RUN_OUT, LeaseWatch
from storage.runs.run_store import RUN_NAME, RunStore


def begun(config: GRPOConfig, name: str) -> bool:
    """Whether the store has the run. ConfigError for what cannot be a run's name."""
    if not RUN_NAME.fullmatch(name):
        raise ConfigError(
            f"--name {name} is no name for a run. Use letters, digits, '.', '_' and '-', first a "
            "letter or a digit."
        )
    return _files(config, name).read_run() is not None


def finished(config: GRPOConfig, name: str) -> str:
    """What to say of a run of which all that is asked for is done; empty for another one."""
    files = goes_on_as(_files(config, name))
    step = head(files) or 0
    if step < config.steps or not is_done(files, step):
        return ""
    return f"Run {name} is finished: {step} of {config.steps} steps are committed."


def wait_for_writer(files: RunStore) -> str:
    """What to say where a process may still write the run, which is waited for; empty else."""
    holder = LeaseWatch(files).look()
    if holder is None:
        return ""
    return (
        f"Run {files.run} may still be written by {holder.owner} on {holder.host}: waiting up to "
        f"{RUN_OUT:.0f} s for it to say so again."
    )


def _files(config: GRPOConfig, name: str) -> RunStore:
    return RunStore(Store(config.store.uri, config.store.options), name)
