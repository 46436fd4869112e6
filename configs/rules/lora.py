"""Adapters, and how versions of them are stored."""

from configs.rules.experts import for_mixtures
from configs.rules.rule import Rule
from configs.run import RunConfig


def _of_experts(config: RunConfig) -> tuple[str, str]:
    adapted = config.lora is not None and config.lora.target_parameters
    return ("lora.target_parameters", "lora.target_parameters = []") if adapted else ("", "")


LORA: tuple[Rule[RunConfig], ...] = (
    Rule(
        needs=lambda config: config.lora is None or config.store.whole_every <= 1,
        says=lambda config: (
            f"store.whole_every = {config.store.whole_every} stores versions as differences, and "
            "with lora a version is a small adapter already. Set store.whole_every = 1."
        ),
    ),
    for_mixtures(_of_experts),
)
