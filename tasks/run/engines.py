"""The engines of a run: which roles it needs, on which pools, and how they are started."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from configs.cluster.cluster import Role
from configs.cluster.kinds import TemporaryTls
from configs.srpo import SRPOConfig
from engines.data.contract import EnvironmentHost, PromptMaker, RewardModels, Scorer
from engines.encoders.contract import EpisodeEncoder, ProgressScorer
from engines.processes.certificates import Certificates
from engines.rollout.rollout_pool import RolloutPool
from engines.teachers.client import TeacherClient
from engines.teachers.pool import TeacherPool
from engines.train.batching.planner import Planner
from engines.train.trainer import Trainer
from engines.trees.contract import TreeGrower
from engines.workers.cluster import Cluster
from engines.workers.pool import Assignment, EnginePool
from engines.workers.spent import SpentOfPool, SpentSince
from storage.objects.usage import COUNTER, Usage
from storage.runs import snapshots
from storage.runs.origins import parent_of
from tasks.results import Metrics
from tasks.run.engine_specs import (
    TrainRole,
)
from tasks.run.forking import parent_config
from tasks.run.handles import Handles, open_engines, trainer_of
from tasks.run.teachers import teachers_of

if TYPE_CHECKING:
    from tasks.reporting.run_view import RunView


class StoreUsage:
    """Requests and bytes that the flow and every worker asked of the store, since the last look.

    A worker tells its count with the result of each call. What one that died counted after its last
    call is lost.
    """

    def __init__(self) -> None:
        self._before: dict[str, Usage] = {"": COUNTER.total()}

    def since_last(self, told: Mapping[str, Usage]) -> Metrics:
        """Metrics of a step; `told`: what each worker process has asked since it began."""
        now = {"": COUNTER.total(), **told}
        total = Usage()
        for process, count in now.items():
            total += count - self._before.get(process, Usage())
        self._before = now
        return {
            "store/requests": float(total.requests),
            "store/bytes_read": float(total.bytes_read),
            "store/bytes_written": float(total.bytes_written),
        }


class Engines:
    """Builds every role's engines in the background, and closes them with the cluster."""

    def __init__(self, run: RunView) -> None:
        self._run = run
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="engines")
        self._handles: Future[Handles] | None = None
        self._started: dict[str, Future[None]] = {}
        self._usage, self._spent = StoreUsage(), SpentSince()
        self.launched = 0.0  # when workers were asked for, in seconds since 1970
        self.ended: float | None = None  # when they were told to end
        self.roles: list[str] = ["reward", *run.config.engine_roles]
        self.roles += [] if run.config.episodes is None else ["environment"]
        self.roles += ["reward_model"] if run.config.rewards.on_engines else []
        self.roles += ["evaluation"] if run.config.evaluates_aside else []
        self.roles += ["encoder"] if isinstance(run.config, SRPOConfig) else []
        self._services = [one for one in teachers_of(run.config).values() if one.service]
        self.roles += ["teacher_service"] if self._services else []

    def launch(self, cluster: Cluster | None = None) -> None:
        """Begin to start engines, on the workers of a cluster or on new ones; returns at once.

        All roles start at once, but for those that share devices: they start in the order of `roles`.
        So do the opponent's engines, which may be beside others on their devices.
        """
        self._run.terminal.doing("starting workers")
        self.launched, self.ended = time.time(), None
        self._handles = self._threads.submit(open_engines, self._run, cluster)
        settings = self._run.config.cluster
        before: dict[str, Future[None]] = {}  # by pool, the start of the role before
        for role in self._run.config.engine_roles:
            pool = settings.roles.pool_of(role)
            in_order = settings.share_devices or role == "opponent"
            after = before.get(pool) if in_order else None
            before[pool] = self._started[role] = self._threads.submit(self._start, role, after)
        for name in self.roles:
            if name not in self._started:
                self._started[name] = self._threads.submit(self._start, name)

    def workers(self) -> dict[str, list[str]]:
        """Pool -> names of its live workers; waits for them."""
        cluster = self._made().cluster
        return {pool: sorted(cluster.workers(pool)) for pool in sorted(self._run.config.used_pools)}

    def drawn_tokens(self) -> dict[str, int]:
        """Rollout worker -> tokens drawn since its engine was built; empty while workers start."""
        handles = self._handles
        if handles is None or not handles.done() or handles.exception() is not None:
            return {}
        return handles.result().rollouts.tokens()

    def wait(self, role: str) -> None:
        """Return when the role's engines stand; a failed start is tried again."""
        started = self._started[role]
        if started.done() and started.exception() is not None:
            started = self._started[role] = self._threads.submit(self._start, role)
        started.result()

    def _made(self) -> Handles:
        assert self._handles is not None, "the engines were not launched"
        return self._handles.result()

    def _start(self, role: str, after: Future[None] | None = None) -> None:
        """Start a role's engines; `after`: another start that ends first, well or badly."""
        handles = self._made()
        if after is not None:
            after.exception()
        start: dict[str, Callable[[], object]] = {
            "reward": handles.scorers.start,
            "environment": lambda: self.environments.start(),
            "reward_model": lambda: self.reward_models.start(),
            "encoder": lambda: self.encoders.start(),
            "actor": lambda: self._start_trained("actor", handles.actor),
            "critic": lambda: self._start_trained("critic", self.critic),
            "rollout": handles.rollouts.start,
            "opponent": lambda: self.opponents.start(),
            "evaluation": lambda: self.evaluations.start(),
            "ref": lambda: self.ref.at(0),
            "teacher": self._start_teachers,
            "teacher_service": self._attach,
        }
        start[role]()
        waiting = [name for name, future in self._started.items() if not future.done()]
        self._run.terminal.doing(f"starting engines: {', '.join(sorted(waiting)) or 'ready'}")

    def _start_trained(self, role: TrainRole, trainer: Trainer) -> None:
        """Bring a trainer to the run's head; a fork between its parent's snapshots replays first.

        The parent's settings made those steps, so they repeat them. The state is kept as the
        fork's own snapshot, since its settings may be others.
        """
        run, origin = self._run, self._run.origin
        if origin is not None and not snapshots.has_base(replace(run.files, role=role), run.head):
            files = parent_of(run.files, origin)
            settings = parent_config(run.files, origin)
            settings = settings.model_copy(update={"cluster": run.config.cluster})
            parent = trainer_of(run, self._made().cluster, role, files, settings)
            parent.snapshot(origin.step, run.name, origin.at)
        trainer.at(run.head)
        if role == "actor" and run.head == run.start:
            _check_computed(trainer, run.head, "model")

    def _start_teachers(self) -> None:
        for name, teacher in self._made().teachers.items():
            teacher.at(0)
            if isinstance(teacher, Trainer) and self._run.head == self._run.start:
                _check_computed(teacher, 0, f"teachers.{name}.model")

    def _attach(self) -> None:
        """Take the run's places at services, once the student is there whose tokens they compare."""
        self.wait("actor")
        student = self.actor.tokens(self._run.head)
        for service in self._made().services.values():
            service.attach(student)

    def store_usage(self) -> Metrics:
        """Requests and bytes that the flow and the workers asked of the store since the last look."""
        return self._usage.since_last(self.cluster.usage)

    def spent(self) -> dict[str, SpentOfPool]:
        """What each pool's processes and GPUs have used since the last look."""
        return self._spent.since_last(self.cluster.spent)

    @contextlib.contextmanager
    def holding(self, assignment: Assignment, *roles: Role) -> Iterator[None]:
        """During the body an attempt has all workers of the roles' pools, as calls of gangs do."""
        cluster = self._run.config.cluster
        with contextlib.ExitStack() as stack:
            for pool in {cluster.roles.pool_of(role) for role in roles}:
                known = self.cluster.known_workers(pool)
                names = known or [f"{pool}-{n}" for n in range(cluster.pools[pool].workers)]
                stack.enter_context(assignment.time.held(pool, names, assignment.held))
            yield

    def asked(self) -> Metrics:
        """What services have done for the run since the last look; of a teacher each."""
        if not self._services:
            return {}
        return {
            f"teacher_service/{name}/{what}": number
            for name, service in self._made().services.items()
            for what, number in service.used().items()
        }

    def turns(self) -> Metrics:
        """Seconds and bytes of the turns on shared devices since the last look, by role."""
        return self.cluster.devices.metrics()

    @property
    def cluster(self) -> Cluster:
        """The workers."""
        return self._made().cluster

    @property
    def scheduler(self) -> str:
        """Address of the Dask scheduler."""
        return self._made().cluster.scheduler

    @property
    def worker_logs(self) -> str | None:
        """Folder of the workers' own log files, where they have such."""
        logs = self._made().cluster.logs
        return None if logs is None else str(logs.absolute())

    @property
    def temporary_certificates(self) -> Certificates | None:
        """Files of the certificates that were made for this cluster alone, if any were."""
        cluster = self._made().cluster
        made = isinstance(cluster.config.encryption, TemporaryTls)
        return cluster.certificate_files if made else None

    @property
    def actor(self) -> Trainer:
        """The policy that is trained."""
        return self._made().actor

    @property
    def rollouts(self) -> RolloutPool:
        """The engines that sample."""
        return self._made().rollouts

    @property
    def opponents(self) -> RolloutPool:
        """The engines of the frozen version that plays against the policy."""
        found = self._made().opponents
        assert found is not None, "the recipe has no opponent"
        return found

    @property
    def scorers(self) -> EnginePool[Scorer]:
        """The workers that make prompts, rewards and advantages."""
        return self._made().scorers

    @property
    def evaluations(self) -> RolloutPool:
        """The engines that sample for evaluations alone."""
        found = self._made().evaluations
        assert found is not None, "evaluations have the engines of rollout"
        return found

    @property
    def environments(self) -> EnginePool[EnvironmentHost]:
        """The workers that have the environments of episodes."""
        found = self._made().environments
        assert found is not None, "the run plays no episodes"
        return found

    @property
    def reward_models(self) -> EnginePool[RewardModels]:
        """The workers that hold the reward models."""
        found = self._made().reward_models
        assert found is not None, "the recipe has no reward model"
        return found

    @property
    def encoders(self) -> EnginePool[EpisodeEncoder]:
        """The workers that hold the encoder of what episodes see."""
        found = self._made().encoders
        assert found is not None, "the flow measures no progress"
        return found

    @property
    def progress(self) -> EnginePool[ProgressScorer]:
        """The workers that score, as those that measure progress; built when the first call comes."""
        found = self._made().progress
        assert found is not None, "the flow measures no progress"
        return found

    @property
    def trees(self) -> EnginePool[TreeGrower]:
        """The same workers, as those that have trees grow; built when the first call comes."""
        found = self._made().trees
        assert found is not None, "the flow grows no trees"
        return found

    @property
    def prompters(self) -> EnginePool[PromptMaker]:
        """The workers that make prompts of rows."""
        return self.scorers if self._run.config.episodes is None else self.environments

    @property
    def planners(self) -> EnginePool[Planner]:
        """The same workers, as those that plan large updates; built when the first one comes."""
        return self._made().planners

    @property
    def ref(self) -> Trainer:
        """The frozen reference."""
        found = self._made().ref
        assert found is not None, "no engines hold a reference"
        return found

    @property
    def critic(self) -> Trainer:
        """The critic, which is trained beside the policy."""
        found = self._made().critic
        assert found is not None, "the algorithm trains no critic"
        return found

    @property
    def teachers(self) -> Mapping[str, Trainer | TeacherPool | TeacherClient]:
        """The teachers of a distillation by name, which are frozen."""
        return {**self._made().teachers, **self._made().services}

    @property
    def trained(self) -> list[Trainer]:
        """What has a state to store; the policy last."""
        return [self.critic, self.actor] if self._run.config.has_critic else [self.actor]

    def hand_over(self) -> Cluster:
        """The workers with their engines, for another run; this one has none from now on.

        Only while no call is under way.
        """
        handles, self._handles = self._made(), None
        self._threads.shutdown(wait=True)
        for service in handles.services.values():
            service.close()
        return handles.cluster

    def close(self) -> None:
        """End every engine and worker."""
        self.ended = self.ended or time.time()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._handles is not None:
            # Not cancelled by now means opening or open: wait for it, so that nothing is left.
            with contextlib.suppress(Exception, CancelledError):
                handles = self._handles.result()
                handles.cluster.close()
                for service in handles.services.values():
                    service.close()


def _check_computed(trainer: Trainer, version: int, where: str) -> None:
    """ValueError where a trainer computes something else than its model is; for new runs alone."""
    mismatch = trainer.mismatch(version)
    if mismatch is not None:
        raise ValueError(f"{where}: {mismatch}. Set {where}.path to another model.")
