"""The words that tokens were drawn from, as samples carry them (`rollout.sampling_mask`)."""

from configs.rules.logprobs import MASK, cut_by
from configs.rules.rule import Rule, where
from configs.run import RunConfig

SAMPLING_MASK: tuple[Rule[RunConfig], ...] = where(
    lambda config: config.rollout.sampling_mask,
    Rule[RunConfig](
        needs=lambda config: bool(cut_by(config.rollout)),
        says=lambda config: (
            f"{MASK} = true keeps the words that rollout.top_p, top_k and min_p leave, and these "
            f"leave all. Set one of them, or {MASK} = false."
        ),
    ),
    Rule[RunConfig](
        needs=lambda config: config.rollout.top_k != 1,
        says=lambda config: (
            f"rollout.top_k = 1 leaves one word, whose probability is 1: with {MASK} = true no token "
            f"would train. Set rollout.top_k higher, or {MASK} = false."
        ),
    ),
    Rule[RunConfig](
        needs=lambda config: config.rollout.engine != "vllm" or config.rollout.top_k > 0,
        says=lambda config: (
            f"{MASK} = true, and vLLM gives words with top_k alone. Set rollout.top_k to more than a "
            f"token has likely words, such as 1000, or {MASK} = false."
        ),
    ),
    Rule[RunConfig](
        needs=lambda config: not config.sees_frames,
        says=lambda config: (
            f"{MASK} = true does not go with episodes.sees = frames. Set {MASK} = false."
        ),
    ),
)
