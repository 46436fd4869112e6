"""The log-probs that an update compares: before it, of older policies, of the engine that samples."""

from configs.algorithm.algorithm import AlgorithmConfig
from configs.rollout import RolloutConfig
from configs.rules.rule import Rule, where
from configs.run import RunConfig

WHOLE = "rollout.top_p = 1, rollout.top_k = 0 and rollout.min_p = 0"
MASK = "rollout.sampling_mask"
LOGLINEAR = "algorithm.proximal = loglinear"

STALE_SAMPLES: tuple[Rule[RunConfig], ...] = (
    Rule(
        needs=lambda config: config.max_staleness == 0 or config.algorithm.corrects_for_behavior,
        says=lambda config: (
            f"max_staleness = {config.max_staleness} trains on samples of older policies, and "
            f"algorithm.loss.kind = {config.algorithm.loss.kind} with algorithm.ratio_against = "
            f"{config.algorithm.ratio_against} and no algorithm.correction takes no account of them. "
            "Set algorithm.correction = [{kind: truncate}], algorithm.loss.kind = decoupled, or "
            "algorithm.ratio_against = rollout_logprobs with a loss that bounds the ratio, such "
            "as clipped."
        ),
    ),
)


def cut_by(rollout: RolloutConfig) -> str:
    """The settings by which tokens are drawn from a part of the distribution; empty: none."""
    cuts = [f"rollout.top_p = {rollout.top_p:g}"] if rollout.top_p < 1 else []
    cuts += [f"rollout.top_k = {rollout.top_k}"] if rollout.top_k else []
    cuts += [f"rollout.min_p = {rollout.min_p:g}"] if rollout.min_p else []
    return " and ".join(cuts)


def user_of_rollout_logprobs(algorithm: AlgorithmConfig) -> tuple[str, str]:
    """The setting by which the update uses the rollout engine's log-probs, and one that does not.

    Both empty where it uses none of them.
    """
    if algorithm.correction:
        return "algorithm.correction", "algorithm.correction = []"
    if algorithm.ratio_against == "rollout_logprobs":
        return "algorithm.ratio_against = rollout_logprobs", "ratio_against = old_logprobs"
    if algorithm.loss.kind == "decoupled":
        return "algorithm.loss.kind = decoupled", "algorithm.loss.kind = clipped"
    if algorithm.proximal == "loglinear":
        return LOGLINEAR, "algorithm.proximal = recompute"
    return "", ""


def _compares_a_part(config: RunConfig) -> str:
    cut = cut_by(config.rollout)
    setting, instead = user_of_rollout_logprobs(config.algorithm)
    return (
        f"{cut} draws from a part of the policy's distribution, and {setting} compares the "
        "log-probs of that part with the trainer's, which are of the whole: weights would be "
        f"wrong for every token. Set {MASK} = true, by which both are of that part, or {WHOLE}, or "
        f"{instead}."
    )


LOGPROBS: tuple[Rule[RunConfig], ...] = (
    Rule(
        needs=lambda config: (
            config.train.recompute_old_logprobs is not False
            or not config.algorithm.needs_stored_logprobs
        ),
        says=lambda config: (
            "train.recompute_old_logprobs = false, but the token baselines, a KL in the reward "
            "or of a teacher as an advantage, and normalised corrections need the policy's "
            "log-probs before the update. "
            "Set train.recompute_old_logprobs = auto."
        ),
    ),
    *where(
        lambda config: config.algorithm.proximal == "loglinear",
        Rule[RunConfig](
            needs=lambda config: config.max_staleness > 0,
            says=lambda config: (
                f"{LOGLINEAR} interpolates between policy versions, and with max_staleness = 0 every "
                "token is of the version before the update, so it would be the behaviour policy "
                "itself. Set max_staleness higher, algorithm.proximal = recompute, or "
                "algorithm.ratio_against = rollout_logprobs."
            ),
        ),
        Rule[RunConfig](
            needs=lambda config: config.train.recompute_old_logprobs is not True,
            says=lambda config: (
                f"{LOGLINEAR} takes the place of the log-prob pass that train.recompute_old_logprobs "
                "= true asks for. Set train.recompute_old_logprobs = auto, or algorithm.proximal = "
                "recompute."
            ),
        ),
        Rule[RunConfig](
            needs=lambda config: config.train.epochs * config.train.mini_batches > 1,
            says=lambda config: (
                f"{LOGLINEAR} spares the log-prob pass before an update of several optimizer steps; "
                "with train.epochs x train.mini_batches = 1 there is none, since the update's first "
                "pass has the exact log-probs. Set algorithm.proximal = recompute, or "
                "train.mini_batches higher."
            ),
        ),
    ),
    Rule(
        needs=lambda config: (
            not cut_by(config.rollout)
            or config.rollout.sampling_mask
            or not any(user_of_rollout_logprobs(config.algorithm))
        ),
        says=_compares_a_part,
        new_runs_only=True,
    ),
)
