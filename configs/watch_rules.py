"""The rules of what watches and judges a run: guards, quarantine, evaluations, promotion.

Each check raises ValueError, in one sentence, where the settings ask for what cannot be.
"""

from configs.run import RunConfig


def check_what_watches(config: RunConfig) -> None:
    """All of them."""
    check_guards(config)
    check_quarantine(config)
    check_evaluation(config)
    check_promotion(config)


def check_guards(config: RunConfig) -> None:
    """Guards that are told apart, with metrics that the run has."""
    labels = [guard.label for guard in config.guards]
    for guard in config.guards:
        if labels.count(guard.label) > 1:
            raise ValueError(
                f"guards: two are called {guard.label}, and commits tell them apart by that. "
                "Give one another name."
            )
        if guard.action == "synchronous" and config.max_staleness == 0:
            raise ValueError(
                f"guards: the action of {guard.label} is synchronous, which ends the overlap of "
                "steps, and with max_staleness = 0 none do. Set max_staleness higher, or its "
                "action to stop or rollback."
            )
        if "correction" in guard.metric and not config.algorithm.correction:
            raise ValueError(
                f"guards: the metric of {guard.label}, {guard.metric}, is of "
                "algorithm.correction, which is empty. Set it to "
                "train/rollout_effective_sample_size."
            )
        kl = config.algorithm.kl
        if guard.metric == "train/kl_ref" and kl.coefficient == 0:
            raise ValueError(
                f"guards: the metric of {guard.label}, train/kl_ref, is the KL from a reference, "
                "and the recipe has none. Set algorithm.kl.coefficient above 0, or remove the "
                "guard."
            )
        if guard.metric == "train/kl_ref" and kl.placement == "reward":
            raise ValueError(
                f"guards: the metric of {guard.label}, train/kl_ref, is of a KL in the loss, and "
                "algorithm.kl.placement = reward. Set its metric to advantage/kl_ref."
            )


def check_quarantine(config: RunConfig) -> None:
    """Bounds that can be measured."""
    quarantine = config.data.quarantine
    if quarantine is None:
        return
    if quarantine.seconds is not None and config.episodes is None:
        raise ValueError(
            f"data.quarantine.seconds = {quarantine.seconds:g} is about the environments of "
            "episodes, and episodes = null has none. Set data.quarantine.tokens instead."
        )
    if quarantine.no_variance is not None and config.group_size == 1:
        raise ValueError(
            f"data.quarantine.no_variance = {quarantine.no_variance} compares the samples of a "
            "prompt, and group_size = 1 has one, which never varies. Set group_size higher, or "
            "data.quarantine.no_variance = null."
        )


def check_evaluation(config: RunConfig) -> None:
    """Other rows than those trained on, and engines that hold one version meanwhile."""
    evaluation = config.evaluation
    if evaluation is None:
        return
    for name, suite in evaluation.suites.items():
        if suite.source == config.data.source:
            raise ValueError(
                f"evaluation.suites.{name}.source is the same as data.source, so the test would "
                "be on rows that are trained on. Set it to other rows."
            )
    own = config.cluster.roles.evaluation
    if evaluation.every is not None and config.max_staleness > 0 and own is None:
        raise ValueError(
            f"evaluation.every = {evaluation.every} tests versions between steps, and with "
            f"max_staleness = {config.max_staleness} steps overlap, so the engines of rollout "
            "never hold one version. Set cluster.roles.evaluation to a pool of its own, or "
            "evaluation.every = null."
        )
    taken = [role for role in config.engine_roles if config.cluster.roles.pool_of(role) == own]
    if taken:
        raise ValueError(
            f"cluster.roles.evaluation = {own} is the pool of the role {taken[0]} too. Set it to "
            "a pool that no other engine has, or to null: evaluations then come between steps."
        )


def check_promotion(config: RunConfig) -> None:
    """One suite to go by, on the last version."""
    if config.promotion is None or config.evaluation is None:
        return
    suites, chosen = config.evaluation.suites, config.promotion.suite
    if chosen is None and len(suites) > 1:
        raise ValueError(
            f"promotion goes by one suite, and evaluation.suites has {', '.join(suites)}. Set "
            "promotion.suite to one of them."
        )
    if chosen is not None and chosen not in suites:
        raise ValueError(
            f"promotion.suite = {chosen} is no suite of the run. Set it to one of "
            f"{', '.join(suites)}."
        )
    if not config.evaluation.at_end:
        raise ValueError(
            "promotion judges the last version, and evaluation.at_end = false does not test it. "
            "Set evaluation.at_end = true, or promotion = null."
        )
