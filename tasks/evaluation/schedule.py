"""When a run evaluates its versions: before its first step, every so many, and the last one.

Between steps it has the engines of the steps. On a pool of their own (cluster.roles.evaluation)
evaluations go on beside the steps, one after the other, and retention keeps the versions that wait.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from configs.evaluation import EvaluationConfig
from storage.evaluations.results import EvaluationResult, evaluations_of, notes_of
from storage.runs.commit_log import version_weights
from storage.runs.weights import MANIFEST, WeightsRef
from tasks.evaluation.engines import EvaluationPlace
from tasks.evaluation.evaluate import Evaluator, evaluation
from tasks.evaluation.summary import evaluation_metrics
from tasks.run.roles import EVALUATION, OPPONENT, ROLLOUT
from tasks.run.run import Run
from tasks.run.suite import Suite

Results = dict[str, EvaluationResult]  # by suite


class Evaluations:
    """The evaluations of a run that has some."""

    def __init__(self, run: Run, config: EvaluationConfig) -> None:
        self._run, self._config = run, config
        self._aside = run.config.evaluates_aside
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evaluation")
        self._waiting: list[Future[Results]] = []
        self._done: dict[int, Results] = {}  # by version
        suites = {name: Suite.of(run.config, name, one) for name, one in config.suites.items()}
        self._evaluator = Evaluator(run, _place(run), suites, keep=self._keep)

    def begin(self) -> None:
        """Evaluate the version that the run begins with, if asked for, and what a dead flow left."""
        run = self._run
        if self._aside:
            noted = {(suite, version) for suite, version, _ in notes_of(run.files).values()}
            for version in sorted(run.to_be_evaluated()):
                if all((suite, version) in noted for suite in self._config.suites):
                    self._recall(version)
                elif version == run.head:
                    self._add(version, run.engines[ROLLOUT].weights)
                else:
                    self._add_if_there(version)
        elif self._config.due(run.head, run.start):
            self._add(run.head, run.engines[ROLLOUT].weights)

    def after(self, step: int) -> None:
        """A step is committed: evaluate the version that it made, if it is due.

        Raises what an evaluation beside the steps has failed of.
        """
        self._raise_failure()
        if self._config.due(step, self._run.start):
            self._add(step, version_weights(self._run.files, step))

    def end(self) -> Results | None:
        """Wait for those that are under way; the results of the last version, if it is evaluated."""
        head = self._run.head
        if self._config.at_end and head not in self._done:
            self._add(head, self._run.engines[ROLLOUT].weights)
        for one in self._waiting:
            one.result()
        return self._done.get(head)

    def close(self) -> None:
        """Begin no further one; what is under way ends with the engines."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _recall(self, version: int) -> None:
        """A dead flow has evaluated a version: what no commit has judged is judged with the next."""
        run = self._run
        run.evaluated.add(version)
        judged = any(feature.judge for feature in run.features)
        for result in evaluations_of(run.files, version=version) if judged else ():
            before = run.last is not None and result.made_at < run.last.committed_at
            if not before and not result.back_fill:
                run.measured |= evaluation_metrics(result)

    def _add_if_there(self, version: int) -> None:
        weights = version_weights(self._run.files, version)
        if self._run.store.exists(f"{weights.key}/{MANIFEST}"):
            self._add(version, weights)
        else:
            self._run.evaluated.add(version)  # an earlier retention has removed it

    def _add(self, version: int, weights: WeightsRef) -> None:
        if not self._aside:
            self._evaluate(version, weights)
            return
        here = contextvars.copy_context()  # the flow run that it is a part of
        self._waiting.append(self._thread.submit(here.run, self._evaluate, version, weights))

    def _evaluate(self, version: int, weights: WeightsRef) -> Results:
        if version in self._done:
            return self._done[version]
        if self._aside:
            self._run.engines[EVALUATION].use(weights)
        self._done[version] = evaluation(self._evaluator, version, weights)
        self._run.evaluated.add(version)
        return self._done[version]

    def _raise_failure(self) -> None:
        for one in self._waiting:
            if one.done() and not one.cancelled():
                one.result()
        self._waiting = [one for one in self._waiting if not one.done()]

    def _keep(self, result: EvaluationResult) -> None:
        self._run.measured |= evaluation_metrics(result)


def _place(run: Run) -> EvaluationPlace:
    """The engines of the run that evaluate."""
    engines, aside = run.engines, run.config.evaluates_aside
    return EvaluationPlace(
        cluster=engines.cluster,
        rollouts=engines[EVALUATION if aside else ROLLOUT],
        opponents=engines.get(OPPONENT),
        aside=aside,
        shared=None if aside else engines,
    )


@contextlib.contextmanager
def evaluations(run: Run) -> Iterator[Evaluations | None]:
    """The evaluations of a run for the body; None where it has none."""
    if run.config.evaluation is None:
        yield None
        return
    found = Evaluations(run, run.config.evaluation)
    try:
        yield found
    finally:
        found.close()
