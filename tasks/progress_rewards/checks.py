"""The checks of progress rewards before anything starts."""

from __future__ import annotations

from importlib.util import find_spec

from configs.encoder import VisionEncoder
from configs.environment import pip_install
from configs.grpo import GRPOConfig
from engines.encoders.vision import check_encoder
from storage.prompts.datasets import open_source
from tasks.progress_rewards.roles import srpo
from tasks.run.features import Finding


def check_progress(config: GRPOConfig) -> list[Finding]:
    """Whether what measures progress is here, and the rows name their tasks; what the encoder is.

    ValueError, one sentence, for a fault.
    """
    own = srpo(config)
    if own.progress.task_column is not None:
        open_source(config.data.source).check_columns([own.progress.task_column])
    if find_spec("sklearn") is None:
        raise ValueError(
            "Progress is measured by clusters of scikit-learn, which is not installed. Install it: "
            f"{pip_install('scikit-learn')}."
        )
    found = "a fixed projection"
    if isinstance(own.encoder, VisionEncoder):
        found = check_encoder(own.encoder)
    return [Finding(check="encoder", found=found)]
