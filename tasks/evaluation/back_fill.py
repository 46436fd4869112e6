"""Suites on versions of the past: engines of their own, for runs that are over or go on elsewhere.

The run's lease is left alone: only evaluations are written, under keys of their content, and a pin
that has retention keep a version meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from configs.cluster import ClusterConfig
from configs.evaluation import BackFillConfig
from configs.grpo import GRPOConfig
from configs.overrides import ConfigError, change
from configs.resolving import resolve, this_machine
from engines.clusters.opening import check_cluster, open_cluster
from engines.failures import InfrastructureError
from engines.workers.cluster import Cluster
from engines.workers.devices import DeviceTime
from storage.evaluations.results import EvaluationResult
from storage.objects.errors import ObjectMissing, StoreError
from storage.objects.store import Store
from storage.runs.commit_log import head, version_weights
from storage.runs.opponents import opponent_of
from storage.runs.retention import pin_version, unpin_version
from storage.runs.run_store import RunStore, numbered, start_of
from storage.runs.weights import WeightsRef, open_chain
from tasks.evaluation.evaluate import EvaluationPlace, Evaluator, evaluation
from tasks.evaluation.summary import Compared, tested
from tasks.run.attempts import AttemptLog
from tasks.run.engines import ENGINE_MODULES
from tasks.run.events import BackFillBegan, BackFillEnded, Listeners, Note
from tasks.run.flow_run import flow_run_id
from tasks.run.life_cycle import dashboard_ends, set_closes, signals_end
from tasks.run.preflight import check_lengths, check_packages
from tasks.run.preflight_data import check_suites, odd_suites
from tasks.run.roles import rollouts_of, variables_of
from tasks.run.run_record import settings_of
from tasks.run.suite import Suite


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A run whose versions are evaluated, checked; nothing is started."""

    files: RunStore
    config: GRPOConfig  # of the run, with the suites that are asked for and no others
    versions: Mapping[int, WeightsRef]  # by the run's number, ascending


@dataclass(frozen=True, kw_only=True, slots=True)
class BackFilled:
    """What was asked for, whether it was made now or before."""

    run: str
    results: dict[tuple[str, int], EvaluationResult]  # by suite and version
    began: float  # results made before were there already
    against: str | None = None
    compared: Sequence[Compared] = field(default_factory=list)


# Who is told, by the name of the back-fill, the run's files and its settings.
ListenersOf: TypeAlias = Callable[[str, RunStore, GRPOConfig], Listeners]


class BackFill:
    """On whose behalf engines are started and called (tasks/run/contract.py:Caller)."""

    __slots__ = (
        "attempts", "cancelled", "config", "device_time", "epoch", "files", "name", "store", "tell",
    )  # fmt: skip

    def __init__(
        self, subject: Subject, listeners_of: ListenersOf, cancelled: threading.Event
    ) -> None:
        self.files, self.store, self.config = subject.files, subject.files.store, subject.config
        # Not the run's name: a worker answers a call that it knows from its record.
        self.name = f"{self.files.run}-evaluation-{uuid.uuid4().hex[:8]}"
        self.epoch, self.cancelled = 1, cancelled
        self.tell = listeners_of(self.name, self.files, self.config).tell
        self.attempts = AttemptLog()
        self.device_time = DeviceTime()  # of no step


def subjects_of(config: BackFillConfig) -> list[Subject]:
    """The runs that are to be evaluated. ConfigError, one sentence, for what cannot be."""
    store = Store(config.store.uri, config.store.options, cache_bytes=config.store.cache_mib << 20)
    first = subject_of(RunStore(store, config.run), config, config.versions)
    if config.against is None:
        return [first]
    name, _, version = config.against.partition("@")
    versions = version or ",".join(map(str, first.versions))
    second = subject_of(RunStore(store, name), config, versions)
    for suite in config.suites:
        if _manner(first, suite) != _manner(second, suite):
            raise ConfigError(
                f"{suite} is asked otherwise of {name} than of {config.run}, so the two cannot be "
                f"compared. Give evaluation.suites.{suite} its own prompt, rewards, max_new_tokens "
                "and, unless it is greedy, temperature and top_p."
            )
    return [first, second]


def subject_of(files: RunStore, settings: BackFillConfig, versions: str) -> Subject:
    """A run with the suites and versions that are asked for."""
    before = settings_of(files)
    raw = before.model_dump(mode="json")
    suites = {
        name: before.suites[name].model_dump(mode="json") if name in before.suites else {}
        for name in settings.suites
    }
    raw |= {"evaluation": {"suites": suites}, "promotion": None}
    raw["store"] |= settings.store.model_dump(mode="json", include={"uri", "options"})
    try:
        config = change(type(before), raw, settings.settings)
        config = resolve(config, this_machine()).settings  # of pools that these have added
        check_packages(config)
        check_lengths(config, resumed=True)
        check_suites(config)
        check_cluster(_cluster_config(config))
        return Subject(files=files, config=config, versions=versions_of(files, versions))
    except (ValueError, StoreError, InfrastructureError) as error:
        raise ConfigError(str(error)) from error


def versions_of(files: RunStore, words: str) -> dict[int, WeightsRef]:
    """Number -> weights of the versions asked for, ascending. ValueError for missing ones."""
    start, last = start_of(files), head(files)
    if last is None:
        raise ValueError(f"Run {files.run} has no committed step, so no version to evaluate.")
    everything = range(start, last + 1)
    if words == "last":
        numbers = [last]
    elif words == "all":
        numbers = [number for number in everything if _is_there(files, number)]
    else:
        edges = [part.partition("-") for part in words.split(",")]
        numbers = sorted({n for a, _, b in edges for n in range(int(a), int(b or a) + 1)})
    for number in numbers:
        if number not in everything:
            raise ValueError(f"Run {files.run} has no version {number}. {numbered(start, last)}")
        if words != "all" and not _is_there(files, number):
            raise ValueError(
                f"The weights of version {number} of {files.run} are no longer in the store: "
                "retention removed them. Name versions that are there, or --versions all; "
                "store.keep_versions and store.snapshot_every of a run say what it keeps."
            )
    return {number: version_weights(files, number) for number in numbers}


def _is_there(files: RunStore, version: int) -> bool:
    try:
        open_chain(files.store, version_weights(files, version))
    except ObjectMissing:
        return False
    return True


def _manner(subject: Subject, name: str) -> str:
    evaluation = subject.config.evaluation
    assert evaluation is not None
    return Suite.of(subject.config, name, evaluation.suites[name]).manner(None)


def _cluster_config(config: GRPOConfig) -> ClusterConfig:
    """The workers that are started: those that sample and score; no trainer's."""
    roles, aside = config.cluster.roles, config.evaluates_aside
    names = {roles.pool_of("evaluation")}
    names |= set() if aside else {roles.pool_of("reward")}
    evaluation = config.evaluation
    assert evaluation is not None
    for name, settings in evaluation.suites.items():
        suite = Suite.of(config, name, settings).config
        names |= {roles.pool_of("environment")} if suite.episodes and not aside else set()
        names |= {roles.pool_of("opponent")} if suite.opponent else set()
        names |= {roles.pool_of("reward_model")} if suite.rewards.on_engines else set()
    pools = {name: pool for name, pool in config.cluster.pools.items() if name in names}
    # Trainers are none here, so nobody takes turns.
    return config.cluster.model_copy(update={"pools": pools, "share_devices": False})


def back_fill(subjects: Sequence[Subject], began: float, listeners_of: ListenersOf) -> BackFilled:
    """Evaluate each run's versions, one after the other, and compare the second with the first.

    `listeners_of`: who is told of a run's evaluations.
    """
    results = [_one_run(subject, listeners_of) for subject in subjects]
    first = subjects[0]
    if len(subjects) == 1:
        return BackFilled(run=first.files.run, results=results[0], began=began)
    return BackFilled(
        run=first.files.run,
        results=results[0],
        began=began,
        against=subjects[1].files.run,
        compared=compared(first.files.store, *results),
    )


def compared(
    store: Store,
    ours: Mapping[tuple[str, int], EvaluationResult],
    theirs: Mapping[tuple[str, int], EvaluationResult],
) -> list[Compared]:
    """Each version with the other run's of the same number, or with its only one."""
    comparisons = []
    for (suite, version), result in ours.items():
        numbers = [number for name, number in theirs if name == suite]
        other = numbers[0] if len(numbers) == 1 else version
        test = tested(store, result, theirs[suite, other])
        if test is not None:
            comparisons.append(Compared(suite=suite, version=version, against=other, found=test))
    return comparisons


def _one_run(
    subject: Subject, listeners_of: ListenersOf
) -> dict[tuple[str, int], EvaluationResult]:
    cancelled = threading.Event()
    caller = BackFill(subject, listeners_of, cancelled)
    for sentence in odd_suites(subject.config):
        caller.tell(Note(text=sentence, warning=True))

    def last_words() -> None:
        caller.tell(Note(text="Stopped.", warning=True))

    with contextlib.ExitStack() as stack:
        stack.enter_context(signals_end(cancelled, last_words))
        stack.enter_context(dashboard_ends(cancelled, flow_run_id()))
        stack.callback(caller.tell, BackFillEnded())
        config = subject.config
        cluster = stack.enter_context(
            open_cluster(_cluster_config(config), variables_of(config), cancelled, ENGINE_MODULES)
        )
        stack.enter_context(set_closes(cancelled, cluster.close))
        stack.callback(cancelled.set)
        evaluator = _evaluator(caller, cluster)
        results: dict[tuple[str, int], EvaluationResult] = {}
        for version, weights in subject.versions.items():
            with _kept(caller, weights):
                evaluator.place.rollouts.use(weights)
                version_results = evaluation(evaluator, version, weights)
            results |= {(name, version): result for name, result in version_results.items()}
    return results


def _evaluator(caller: BackFill, cluster: Cluster) -> Evaluator:
    config, evaluation = caller.config, caller.config.evaluation
    assert evaluation is not None
    suites = {name: Suite.of(config, name, suite) for name, suite in evaluation.suites.items()}
    aside = config.evaluates_aside
    opponents = None
    if any(suite.config.opponent is not None for suite in suites.values()):
        opponents = rollouts_of(caller, cluster, "opponent")
        opponents.use(opponent_of(caller.files).weights)
    place = EvaluationPlace(
        cluster=cluster,
        rollouts=rollouts_of(caller, cluster, "evaluation" if aside else "rollout"),
        opponents=opponents,
        aside=aside,
    )
    caller.tell(BackFillBegan())
    return Evaluator(caller, place, suites, back_fill=True)


@contextlib.contextmanager
def _kept(caller: BackFill, weights: WeightsRef) -> Iterator[None]:
    """Have retention keep a version for the body, for an hour at most where this process dies."""
    child = RunStore(caller.store, caller.name)
    owner = RunStore(caller.store, weights.key.partition("/")[0])
    pin_version(child, owner, weights.version, "evaluation")
    try:
        yield
    finally:
        unpin_version(child, owner, "evaluation")
