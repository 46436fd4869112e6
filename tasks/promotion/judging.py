"""What is told of a policy version that was judged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from prefect import pause_flow_run, task
from prefect.exceptions import FlowPauseTimeout
from prefect.input import RunInput
from pydantic import Field

from configs.promotion import PromotionConfig
from engines.algorithms.evaluation import PairedTest
from storage.evaluations.results import EvaluationResult, evaluations_of
from storage.objects.errors import ObjectMissing
from storage.runs.commit_log import version_weights
from storage.runs.live import workers_ended
from storage.runs.run_store import RunStore
from storage.tracking.registry import (
    EVALUATED_ON_TAG,
    EVALUATION_TAG,
    PROMOTION_TAG,
    Registered,
    Registry,
)
from tasks.evaluation.summary import tested
from tasks.markdown import code, escaped
from tasks.run.contract import FeatureView
from tasks.run.events import Event
from tasks.run.stage import OPTIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyJudged(Event):
    """A policy version became the one that has an alias in the registry, or did not."""

    version: int
    promoted: bool
    reason: str
    alias: str
    model: str  # name in the registry
    number: str  # the version's in the registry
    reward: float  # mean over the prompts of the suite that decides
    error: float  # standard error of that mean
    samples: int
    failed: int
    truncated: int


class Approval(RunInput):
    """What a person is asked before the alias moves."""

    approve: bool = Field(False, description="Move the alias to the new policy version.")
    note: str = Field("", description="Why; kept with the version.")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromotionDecision:
    """What became of a policy version, and why."""

    promote: bool
    reason: str
    given: bool = False  # the version has the alias: the run died right after it had moved it


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """How a policy version did in the suite that decides."""

    version: int
    reward: float  # mean over prompts; not a number where no sample was scored
    error: float  # standard error of that mean
    samples: int
    failed: int  # samples that could not be scored; they are not in the mean
    truncated: int
    on: str  # digest of rows and manner: only evaluations with the same one can be compared

    @classmethod
    def of(cls, result: EvaluationResult, version: int) -> Evaluation:
        """By the stored result; `version`: its number in the run."""
        metrics = result.metrics
        return cls(
            version=version,
            reward=metrics.get("reward", math.nan),
            error=metrics.get("error", math.nan),
            samples=int(metrics["samples"]),
            failed=result.failed,
            truncated=int(metrics["truncated"]),
            on=result.on,
        )


def judge_policy(
    run: FeatureView, results: Mapping[str, EvaluationResult] | None
) -> PromotionDecision | None:
    """Promote the last policy version by its results in the suites; None: it has none, or was judged.

    It was where the run had come so far already when it died, and was resumed for what was left.
    """
    rule, evaluation = run.config.promotion, run.config.evaluation
    if rule is None or evaluation is None or results is None or judged_before(run):
        return None
    return promote(run, results[rule.suite or next(iter(evaluation.suites))], rule)


def judged_before(run: FeatureView) -> bool:
    """Whether the last policy version has been judged."""
    model = run.tracking.model_name  # of a resumed run the versions are known from here on
    number = run.tracking.registered.get(run.head)
    return number is not None and PROMOTION_TAG in Registry(run.config.tracking).tags(model, number)


def promote(run: FeatureView, result: EvaluationResult, rule: PromotionConfig) -> PromotionDecision:
    """Decide by the rule, ask a person if that is wished, and move the alias or say why not."""
    run.listeners.drain()  # the version gets into the registry there
    evaluated = Evaluation.of(result, run.head)
    decision = decide.submit(run, result, rule).result()
    if decision.promote and rule.approval and not decision.given:
        workers_ended(run.files)
        run.engines.close()  # nobody's devices wait for a person
        refused = asked(run, evaluated, rule, decision)
        # The champion may have changed while a person was thinking.
        decision = refused or decide.submit(run, result, rule).result()
    conclude.submit(run, evaluated, rule, decision).result()
    return decision


def judge(
    evaluated: Evaluation,
    champion: Registered | None,
    rule: PromotionConfig,
    test: PairedTest | None = None,
) -> PromotionDecision:
    """The rule: better than the champion's evaluation by at least the margin, and not by chance.

    test: prompt by prompt against the champion's stored evaluation, where rule.significance asks for
    it; None: there is no such evaluation.
    """
    candidate = f"version {evaluated.version} has a held-out reward of {evaluated.reward:.4f}"
    if evaluated.failed or math.isnan(evaluated.reward):
        return PromotionDecision(
            promote=False,
            reason=f"{evaluated.failed} of {evaluated.samples} held-out samples could not be scored.",
        )
    if champion is None:
        return PromotionDecision(promote=True, reason=f"There is no {rule.alias} yet; {candidate}.")
    name = f"the {rule.alias} {champion.run}@{champion.step}"
    if rule.significance is not None:
        return _tested(candidate, name, rule, test)
    if champion.evaluation is None or champion.evaluated_on != evaluated.on:
        evidence = (
            "none" if champion.evaluation is None else "one on other rows or in another manner"
        )
        return PromotionDecision(
            promote=False,
            reason=f"It cannot be compared: of {name} there is {evidence}, and {candidate}. Move the "
            "alias by hand, or remove it.",
        )
    gain = evaluated.reward - champion.evaluation
    better = gain > 0 and gain >= rule.margin
    relation = "at least" if better else "not more than 0, or less than"
    return PromotionDecision(
        promote=better,
        reason=f"{candidate[0].upper()}{candidate[1:]}, {name} {champion.evaluation:.4f}: "
        f"a gain of {gain:+.4f}, {relation} the margin of {rule.margin:g}.",
    )


def _tested(
    candidate: str, name: str, rule: PromotionConfig, test: PairedTest | None
) -> PromotionDecision:
    """Where a gain has to be significant. candidate, name: what to say of the two versions."""
    assert rule.significance is not None
    if test is None:
        return PromotionDecision(
            promote=False,
            reason=f"It cannot be compared: of {name} no evaluation on the same rows and in the "
            f"same manner is stored, and {candidate}. Set evaluation.before = true in runs that go "
            "on from it, or make one with flows.evaluate.",
        )
    enough = test.difference > 0 and test.difference >= rule.margin
    sure = test.p_value <= rule.significance
    return PromotionDecision(
        promote=enough and sure,
        reason=f"{candidate[0].upper()}{candidate[1:]}; over {test.prompts} prompts that is "
        f"{test.difference:+.4f} ({test.low:+.4f} to {test.high:+.4f}) against {name}, "
        f"{'at least' if enough else 'not more than 0, or less than'} the margin of {rule.margin:g}, "
        f"and p = {test.p_value:.4g} is {'at most' if sure else 'above'} the significance of "
        f"{rule.significance:g}.",
    )


@task(name="decide", task_run_name="decide", **OPTIONS)
def decide(run: FeatureView, result: EvaluationResult, rule: PromotionConfig) -> PromotionDecision:
    """Compare with the version that has the alias now."""
    champion = Registry(run.config.tracking).by_alias(run.tracking.model_name, rule.alias)
    if champion is not None and (champion.run, champion.step) == (run.name, run.head):
        reason = f"It became the {rule.alias} before the run was broken and resumed."
        return PromotionDecision(promote=True, reason=reason, given=True)
    test = None
    if champion is not None and rule.significance is not None:
        against = evaluation_of(champion, run.files, result.on)
        test = None if against is None else tested(run.store, result, against)
    return judge(Evaluation.of(result, run.head), champion, rule, test)


def evaluation_of(champion: Registered, run: RunStore, on: str) -> EvaluationResult | None:
    """The newest stored evaluation of a version on the same rows and in the same manner.

    Of the run that made the version, a back-fill's too, or of `run`, which may have begun with it.
    None too where some sample could not be scored, and for a version of another store.
    """
    if champion.store_uri != run.store.uri:
        return None
    owner = RunStore(run.store, champion.run)
    try:
        digest = version_weights(owner, champion.step).digest
    except ObjectMissing:
        return None
    results = [*evaluations_of(owner, version=champion.step), *evaluations_of(run)]
    comparable = [
        result
        for result in results
        if result.on == on and result.weights.digest == digest and not result.failed
    ]
    return max(comparable, key=lambda result: result.made_at, default=None)


def asked(
    run: FeatureView, evaluated: Evaluation, rule: PromotionConfig, decision: PromotionDecision
) -> PromotionDecision | None:
    """Pause the flow run until a person answers; the refusal, or None for a yes."""
    question = (
        f"**Shall version {evaluated.version} of {escaped(run.name)} become the {rule.alias}?**\n\n"
        f"{escaped(decision.reason)}\n\nWeights: {code(run.last_weights)}"
    )
    try:
        answer = pause_flow_run(
            wait_for_input=Approval.with_initial_data(description=question, approve=False),
            timeout=int(rule.approval_hours * 3600),
            poll_interval=5,
            key=f"promotion-{evaluated.version}",
        )
    except FlowPauseTimeout:
        waited = f"Nobody answered within {rule.approval_hours:g} hours."
        return PromotionDecision(promote=False, reason=f"{waited} {decision.reason}")
    if answer.approve:
        return None
    return PromotionDecision(promote=False, reason=f"A person said no. {answer.note}".strip())


@task(name="promote", task_run_name="promote", **OPTIONS)
def conclude(
    run: FeatureView, evaluated: Evaluation, rule: PromotionConfig, decision: PromotionDecision
) -> None:
    """Record evaluation and decision with the version, and move the alias if that was decided."""
    registry, model = Registry(run.config.tracking), run.tracking.model_name
    number = run.tracking.registered.get(evaluated.version)
    if number is None:
        assert run.last is not None and run.last.version_out.version == evaluated.version
        number = run.tracking.register(run.last)
    tags = {EVALUATED_ON_TAG: evaluated.on, PROMOTION_TAG: decision.reason}
    if not math.isnan(evaluated.reward):
        tags[EVALUATION_TAG] = repr(evaluated.reward)
    if decision.promote:
        registry.give(model, rule.alias, number)
    registry.tag(model, number, tags)  # last, for it says that all of this is done
    run.tell(
        PolicyJudged(
            version=evaluated.version,
            promoted=decision.promote,
            reason=decision.reason,
            alias=rule.alias,
            model=model,
            number=number,
            reward=evaluated.reward,
            error=evaluated.error,
            samples=evaluated.samples,
            failed=evaluated.failed,
            truncated=evaluated.truncated,
        )
    )
