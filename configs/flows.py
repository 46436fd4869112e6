"""The flows that train, and the settings that each takes."""

from configs.grpo import GRPOConfig
from configs.ppo import PPOConfig

SETTINGS: dict[str, type[GRPOConfig]] = {"grpo": GRPOConfig, "ppo": PPOConfig}  # flows/NAME.py
