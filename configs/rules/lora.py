"""Adapters, and how versions of them are stored."""

from configs.rules.every_run import for_mixtures
from configs.rules.rule import Rule, where
from configs.run import RunConfig


def _of_experts(config: RunConfig) -> tuple[str, str]:
    adapted = config.lora is not None and config.lora.target_parameters
    return ("lora.target_parameters", "lora.target_parameters = []") if adapted else ("", "")


MOST_RANK = 512  # of an adapter that vLLM 0.32 loads


def _beside_its_base(config: RunConfig) -> bool:
    return config.lora is not None and config.lora.serving == "adapter"


def _rank(config: RunConfig) -> int:
    return 0 if config.lora is None else config.lora.rank


LORA: tuple[Rule[RunConfig], ...] = (
    Rule(
        needs=lambda config: config.lora is None or config.store.whole_every <= 1,
        says=lambda config: (
            f"store.whole_every = {config.store.whole_every} stores versions as differences, and "
            "with lora a version is a small adapter already. Set store.whole_every = 1."
        ),
    ),
    for_mixtures(_of_experts),
    *where(
        _beside_its_base,
        Rule(
            needs=lambda config: config.rollout.engine == "vllm",
            says=lambda config: (
                f"lora.serving = adapter, and rollout.engine = {config.rollout.engine} merges "
                "adapters into their base. Set rollout.engine = vllm, or lora.serving = merged."
            ),
        ),
        Rule(
            needs=lambda config: not _of_experts(config)[0],
            says=lambda config: (
                "lora.serving = adapter is for adapters of linear layers, and "
                "lora.target_parameters has experts. Set lora.serving = merged, or "
                "lora.target_parameters = []."
            ),
        ),
        Rule(
            needs=lambda config: _rank(config) <= MOST_RANK,
            says=lambda config: (
                f"lora.rank = {_rank(config)}, and vLLM loads adapters of rank {MOST_RANK} at most. "
                f"Set lora.rank to {MOST_RANK} or less, or lora.serving = merged."
            ),
        ),
        Rule(
            needs=lambda config: not config.cluster.share_devices,
            says=lambda config: (
                "lora.serving = adapter keeps the base loaded between versions, and with "
                "cluster.share_devices = true engines give its memory back. Set lora.serving = "
                "merged, or cluster.share_devices = false."
            ),
        ),
    ),
)
