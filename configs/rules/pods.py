"""What patches of pods' specs may say."""

from configs.cluster.pod_patch import patch_sentence
from configs.rules.rule import Rule
from configs.run import RunConfig

PATCHES: tuple[Rule[RunConfig], ...] = (
    Rule(
        needs=lambda config: not patch_sentence(config.cluster.kubernetes),
        says=lambda config: patch_sentence(config.cluster.kubernetes),
        new_runs_only=True,
    ),
)
