"""The flows that train, the settings that each takes, and the commands on their runs."""

import shlex

from configs.grpo import GRPOConfig
from configs.ppo import PPOConfig
from configs.storage import StoreConfig

SETTINGS: dict[str, type[GRPOConfig]] = {"grpo": GRPOConfig, "ppo": PPOConfig}  # flows/NAME.py


def command(flow: str, store: StoreConfig, *words: str | int) -> str:
    """`python -m flows.FLOW WORDS`, for a shell, with where the store is if not the default."""
    return shlex.join(["python", "-m", f"flows.{flow}", *map(str, words), *store.words()])


def resume_command(config: GRPOConfig, run: str) -> str:
    """The command that goes on with a run."""
    flow = next(name for name, model in SETTINGS.items() if type(config) is model)
    return command(flow, config.store, "--resume", run)
