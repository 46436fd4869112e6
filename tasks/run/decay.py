"""Where a decaying learning rate ends: fixed when the run begins, however many steps it makes."""

from __future__ import annotations

from configs.grpo import GRPOConfig
from configs.overrides import ConfigError
from storage.runs.commit_log import head, read_outline
from storage.runs.run_store import RunStore


def decay_steps(config: GRPOConfig, files: RunStore) -> int:
    """The RL step after which train.schedule has a learning rate of 0; `steps` where it has none.

    It is that of the run's last commit or, before the first, of the settings with which it began. An
    update that is made again has then the learning rate that it had.
    """
    if config.train.schedule == "constant":
        return config.steps
    last, record = head(files), files.read_run()
    if last is not None:
        steps = read_outline(files, last).update.get("steps")
        if isinstance(steps, int):
            return steps
    recorded = {} if record is None else record["config"]
    assert isinstance(recorded, dict)
    return int(recorded.get("steps", config.steps))


def check_decay(config: GRPOConfig, files: RunStore) -> None:
    """ConfigError where a run that goes on is asked for steps that would train with a rate of 0."""
    ends = decay_steps(config, files)
    if config.steps > ends:
        raise ConfigError(
            f"steps = {config.steps}, but train.schedule = {config.train.schedule} of run "
            f"{files.run} ends at a learning rate of 0 after step {ends}, so later steps would train "
            f"nothing. Set steps = {ends}, or go on in a fork (--fork {files.run}), whose schedule "
            "ends at its own steps."
        )
